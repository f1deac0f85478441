/* SGD in one pass over memory, with or without momentum; rounded as in torch's own kernel (FusedSGDKernel.cpp). */

#include "elements.h"

typedef struct {
    float scale; /* of the gradient; negative to maximize */
    float decay;
    float momentum;
    float damped; /* 1 - dampening */
    float rate;   /* -lr */
    float is_first;
    float nesterov;
} Hyper;

static inline __attribute__((always_inline)) void tile(int64_t n, float *restrict master, const void *restrict grad,
                                                       float *restrict buffer, float *restrict unused,
                                                       void *restrict param, Hyper h, int grad_type, int param_type,
                                                       int part) {
    (void)unused, (void)part;
    if (h.momentum == 0.0f) {
        for (int64_t i = 0; i < n; i++) {
            float g = load(grad, i, grad_type) * h.scale;
            if (h.decay != 0.0f) g = FMA(master[i], h.decay, g);
            float p = FMA(g, h.rate, master[i]);
            master[i] = p;
            store(param, i, p, param_type);
        }
        return;
    }
    for (int64_t i = 0; i < n; i++) {
        float g = load(grad, i, grad_type) * h.scale;
        if (h.decay != 0.0f) g = FMA(master[i], h.decay, g);
        float m = h.is_first != 0.0f ? g : FMA(g, h.damped, buffer[i] * h.momentum);
        float p = FMA(h.nesterov != 0.0f ? FMA(m, h.momentum, g) : m, h.rate, master[i]);
        buffer[i] = m;
        master[i] = p;
        store(param, i, p, param_type);
    }
}

#define NAME hightide_sgd
#include "ranges.h"
