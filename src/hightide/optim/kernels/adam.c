/* Adam and AdamW in one pass over memory: reads gradient, moments and master, writes moments, master and parameter. Or
 * in two, of which the first leaves the moments as they are, and the second computes and writes these alone.
 *
 * The order of operations, and which of them are fused, is that of torch's own kernel (FusedAdamKernel.cpp), so that
 * results are the same bits where torch has fused multiply-add too. */

#include "elements.h"

typedef struct {
    float decay;     /* 1 - lr * weight_decay; 1 if the decay is not decoupled */
    float lerp;      /* 1 - beta1; or -beta1 where that is from 0.5 on */
    float from_grad; /* not 0: the lerp starts from the gradient */
    float beta2;
    float square; /* 1 - beta2 */
    float correction; /* sqrt(1 - beta2^step) */
    float inverse; /* 1 / correction */
    float eps;
    float step_size; /* -lr / (1 - beta1^step) */
    float scale;     /* of the gradient; negative to maximize */
    float coupled;   /* weight_decay that is added to the gradient */
} Hyper;

static inline __attribute__((always_inline)) void tile(int64_t n, float *restrict master, const void *restrict grad,
                                                       float *restrict first, float *restrict second,
                                                       void *restrict param, Hyper h, int grad_type, int param_type,
                                                       int part) {
    for (int64_t i = 0; i < n; i++) {
        float g = load(grad, i, grad_type) * h.scale;
        if (part == WHOLE && h.coupled != 0.0f) g = FMA(master[i], h.coupled, g);
        float m = FMA(h.lerp, g - first[i], h.from_grad != 0.0f ? g : first[i]);
        float v = FMA(h.square * g, g, second[i] * h.beta2);
        if (part != PARAMS) {
            first[i] = m;
            second[i] = v;
        }
        if (part == STATES) continue;
        float denominator = over(__builtin_sqrtf(v), h.correction, h.inverse) + h.eps;
        float p = master[i] * h.decay + h.step_size * m / denominator;
        master[i] = p;
        store(param, i, p, param_type);
    }
}

#define NAME hightide_adam
#define HAS_PARTS
#include "ranges.h"
