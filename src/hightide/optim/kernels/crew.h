/* Threads that share updates wait and work here, so that nobody needs Python's lock between two of them.
 *
 * One thread brings a job, works on it like the others, and waits until they have left it. Others serve: they join what
 * is there, as many as are wanted, and sleep in between, until they are dismissed. What is under way is finished first. */

#include <pthread.h>
#include <stdint.h>
#include <time.h>

#ifdef __APPLE__ /* it has one clock for conditions */
#define CREW_CLOCK CLOCK_REALTIME
#define SET_CLOCK(attributes) 0
#else
#define CREW_CLOCK CLOCK_MONOTONIC
#define SET_CLOCK(attributes) pthread_condattr_setclock(attributes, CREW_CLOCK)
#endif

typedef struct {
    void (*work)(void *);
    void *on;
    int64_t num_wanted; /* threads that may still join */
    int64_t num_busy;
} Job;

typedef struct {
    pthread_mutex_t lock;
    pthread_cond_t offered, left;
    Job *job;
    int dismissed;
} Crew;

int64_t hightide_crew_bytes(void) { return sizeof(Crew); }

/* Never destroyed: it holds nothing but its own bytes. Not 0: it cannot be made. */
int hightide_crew_make(Crew *crew) {
    pthread_condattr_t clock;
    crew->job = 0;
    crew->dismissed = 0;
    if (pthread_condattr_init(&clock)) return 1;
    int failed = SET_CLOCK(&clock) || pthread_mutex_init(&crew->lock, 0) ||
                 pthread_cond_init(&crew->offered, &clock) || pthread_cond_init(&crew->left, &clock);
    pthread_condattr_destroy(&clock);
    return failed;
}

void hightide_crew_serve(Crew *crew) {
    pthread_mutex_lock(&crew->lock);
    for (;;) {
        Job *job = crew->job;
        if (job && job->num_wanted) {
            job->num_wanted--;
            job->num_busy++;
            pthread_mutex_unlock(&crew->lock);
            job->work(job->on);
            pthread_mutex_lock(&crew->lock);
            if (--job->num_busy == 0) pthread_cond_signal(&crew->left);
        } else if (crew->dismissed) {
            break;
        } else {
            pthread_cond_wait(&crew->offered, &crew->lock); /* idle: nobody waits for this thread */
        }
    }
    pthread_mutex_unlock(&crew->lock);
}

/* Returns the number of threads that are still busy after `timeout_s`: they still use the job and what it is about. */
int64_t hightide_crew_share(Crew *crew, Job *job, int64_t num_wanted, double timeout_s) {
    pthread_mutex_lock(&crew->lock);
    job->num_wanted = num_wanted;
    job->num_busy = 0;
    crew->job = job;
    for (int64_t i = 0; i < num_wanted; i++) pthread_cond_signal(&crew->offered);
    pthread_mutex_unlock(&crew->lock);

    job->work(job->on);

    struct timespec until;
    clock_gettime(CREW_CLOCK, &until);
    double whole_s = timeout_s < 1e9 ? (double)(int64_t)timeout_s : 1e9;
    until.tv_sec += (time_t)whole_s;
    until.tv_nsec += timeout_s < 1e9 ? (long)((timeout_s - whole_s) * 1e9) : 0;
    if (until.tv_nsec >= 1000000000) {
        until.tv_sec += 1;
        until.tv_nsec -= 1000000000;
    }
    pthread_mutex_lock(&crew->lock);
    crew->job = 0; /* nobody joins any more */
    while (job->num_busy && pthread_cond_timedwait(&crew->left, &crew->lock, &until) == 0) {
    }
    int64_t num_busy = job->num_busy;
    pthread_mutex_unlock(&crew->lock);
    return num_busy;
}

void hightide_crew_dismiss(Crew *crew) {
    pthread_mutex_lock(&crew->lock);
    crew->dismissed = 1;
    pthread_cond_broadcast(&crew->offered);
    pthread_mutex_unlock(&crew->lock);
}
