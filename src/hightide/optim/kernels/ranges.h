/* The entry of a kernel, NAME, around its `Hyper` and its `tile`. Threads share a range: each calls with the same
 * `Update` and takes tiles from `next` until none are left. A moment that the rule does not have is NULL. Where there
 * is a remainder there is no master: it is put together in strips that stay in the cache. A kernel that HAS_PARTS can
 * leave the moments for later: `part` says what of the update is to be done. */

#include "crew.h"

typedef struct {
    int64_t next;
    int64_t tile_numel, numel;
    float *master;
    const void *grad;
    float *first, *second;
    void *param;
    int16_t *remainder;
    const Hyper *hyper;
    int grad_type, param_type, part;
} Update;

#define AT(array, at) ((array) ? (array) + (at) : (array))

static inline __attribute__((always_inline)) void strips(int64_t n, float *restrict master, const char *restrict grad,
                                                         float *restrict first, float *restrict second,
                                                         uint16_t *restrict param, Hyper h, int grad_type,
                                                         int grad_size, int param_type, int part) {
    if (param_type == NONE || part == STATES) {
        tile(n, master, grad, first, second, 0, h, grad_type, NONE, part);
        return;
    }
    uint16_t strip[STRIP] __attribute__((aligned(64)));
    for (int64_t at = 0; at < n; at += STRIP) {
        int64_t count = n - at < STRIP ? n - at : STRIP;
        tile(count, master + at, grad + at * grad_size, AT(first, at), AT(second, at), strip, h, grad_type, param_type,
             part);
        stream(param + at, strip, count);
    }
#ifdef __AVX512F__
    _mm_sfence(); /* whoever is told that the update is done finds it in memory */
#endif
}

static inline __attribute__((always_inline)) void strips_in_parts(int64_t n, const char *restrict grad,
                                                                  float *restrict first, float *restrict second,
                                                                  uint16_t *restrict param, int16_t *restrict remainder,
                                                                  Hyper h, int grad_type, int grad_size, int part) {
    if (part == STATES) {
        tile(n, 0, grad, first, second, 0, h, grad_type, NONE, part);
        return;
    }
    float master[STRIP] __attribute__((aligned(64)));
    for (int64_t at = 0; at < n; at += STRIP) {
        int64_t count = n - at < STRIP ? n - at : STRIP;
        join(master, param + at, remainder + at, count);
        tile(count, master, grad + at * grad_size, AT(first, at), AT(second, at), 0, h, grad_type, NONE, part);
        split(master, param + at, remainder + at, count);
    }
}

#define SIZE(type) ((type) == NONE ? 0 : (type) == FLOAT32 ? 4 : 2)
#define CASE(g, p)                                                                                              \
    case 4 * (g) + (p):                                                                                         \
        strips(n, master + at, (const char *)grad + at * SIZE(g), AT(first, at), AT(second, at),                \
               AT((uint16_t *)param, at), *hyper, g, SIZE(g), p, part);                                         \
        break;
#define CASE_IN_PARTS(g)                                                                                        \
    case g:                                                                                                     \
        strips_in_parts(n, (const char *)grad + at * SIZE(g), AT(first, at), AT(second, at),                    \
                        (uint16_t *)param + at, remainder + at, *hyper, g, SIZE(g), part);                      \
        break;

static inline __attribute__((always_inline)) void tiles(Update *update, const int part) {
    const int64_t tile_numel = update->tile_numel, numel = update->numel;
    float *master = update->master, *first = update->first, *second = update->second;
    const void *grad = update->grad;
    void *param = update->param;
    int16_t *remainder = update->remainder;
    const Hyper *hyper = update->hyper;
    const int grad_type = update->grad_type, param_type = update->param_type;
    for (;;) {
        int64_t at = __atomic_fetch_add(&update->next, tile_numel, __ATOMIC_RELAXED);
        if (at >= numel) return;
        int64_t n = numel - at < tile_numel ? numel - at : tile_numel;
        if (remainder) {
            switch (grad_type) {
                CASE_IN_PARTS(NONE)
                CASE_IN_PARTS(FLOAT32)
                CASE_IN_PARTS(BFLOAT16)
            }
            continue;
        }
        switch (4 * grad_type + param_type) {
            CASE(NONE, NONE)
            CASE(NONE, BFLOAT16)
            CASE(FLOAT32, NONE)
            CASE(FLOAT32, BFLOAT16)
            CASE(BFLOAT16, BFLOAT16)
            CASE(NONE, FLOAT16)
            CASE(FLOAT32, FLOAT16)
            CASE(FLOAT16, FLOAT16)
        }
    }
}

void NAME(Update *update) {
#ifdef HAS_PARTS
    if (update->part == PARAMS) {
        tiles(update, PARAMS);
        return;
    }
    if (update->part == STATES) {
        tiles(update, STATES);
        return;
    }
#endif
    tiles(update, WHOLE);
}
