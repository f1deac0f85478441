/* AdamW in one pass over memory: reads gradient, moments and master, writes moments, master and parameter.
 *
 * The order of operations, and which of them are fused, is that of torch's own kernel (FusedAdamKernel.cpp), so that
 * results are the same bits where torch has fused multiply-add too. Compile with -ffp-contract=off: every fusion is
 * written out, so a vector's body and its tail round alike, and a range may be cut anywhere.
 *
 * Threads share a range: each calls with the same arguments and takes tiles from `next` until none are left. */

#include <stdint.h>
#include <string.h>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

#ifdef __FP_FAST_FMAF
#define FMA(a, b, c) __builtin_fmaf((a), (b), (c))
#else /* in software it would be a hundred times slower */
#define FMA(a, b, c) ((a) * (b) + (c))
#endif

enum { NONE = 0, FLOAT32 = 1, BFLOAT16 = 2, FLOAT16 = 3 };

typedef struct {
    float decay;     /* 1 - lr * weight_decay */
    float lerp;      /* 1 - beta1; or -beta1 where that is from 0.5 on */
    float from_grad; /* not 0: the lerp starts from the gradient */
    float beta2;
    float square; /* 1 - beta2 */
    float correction; /* sqrt(1 - beta2^step) */
    float eps;
    float step_size; /* -lr / (1 - beta1^step) */
    float scale;     /* of the gradient; negative to maximize */
} Hyper;

static inline uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

static inline float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

/* Conversions in integers, for any compiler, and so that loops over them become vectors. Rounding is to nearest, ties
 * to even, as in torch. */

static inline float from_half(uint16_t half) {
    uint32_t magnitude = (uint32_t)(half & 0x7fff) << 13;
    float finite = float_of(magnitude) * 0x1p112f; /* the exponent's new bias; exact, subnormal numbers too */
    uint32_t bits = magnitude >= 0x0f800000 ? magnitude | 0x7f800000 : bits_of(finite);
    return float_of(bits | (uint32_t)(half & 0x8000) << 16);
}

static inline uint16_t to_half(float value) {
    uint32_t bits = bits_of(value), sign = bits & 0x80000000, magnitude = bits ^ sign;
    uint32_t special = magnitude > 0x7f800000 ? 0x7e00 : 0x7c00;
    uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000;
    uint32_t normal = (magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13;
    uint32_t half = magnitude >= 0x47800000 ? special : magnitude < 0x38800000 ? subnormal : normal;
    return (uint16_t)(half | sign >> 16);
}

static inline uint16_t to_bfloat16(float value) {
    uint32_t bits = bits_of(value);
    return (uint16_t)(value != value ? 0x7fc0 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

static inline __attribute__((always_inline)) float load(const void *from, int64_t i, int type) {
    switch (type) {
        case FLOAT32: return ((const float *)from)[i];
        case BFLOAT16: return float_of((uint32_t)((const uint16_t *)from)[i] << 16);
        case FLOAT16: return from_half(((const uint16_t *)from)[i]);
        default: return 0.0f;
    }
}

static inline __attribute__((always_inline)) void store(void *to, int64_t i, float value, int type) {
    if (type == BFLOAT16) ((uint16_t *)to)[i] = to_bfloat16(value);
    if (type == FLOAT16) ((uint16_t *)to)[i] = to_half(value);
}

static inline __attribute__((always_inline)) void tile(int64_t n, float *restrict master, const void *restrict grad,
                                                       float *restrict first, float *restrict second,
                                                       void *restrict param, Hyper h, int grad_type, int param_type) {
    for (int64_t i = 0; i < n; i++) {
        float g = load(grad, i, grad_type) * h.scale;
        float m = FMA(h.lerp, g - first[i], h.from_grad != 0.0f ? g : first[i]);
        float v = FMA(h.square * g, g, second[i] * h.beta2);
        float denominator = __builtin_sqrtf(v) / h.correction + h.eps;
        float p = master[i] * h.decay + h.step_size * m / denominator;
        first[i] = m;
        second[i] = v;
        master[i] = p;
        store(param, i, p, param_type);
    }
}

/* The parameter is written and not read: an ordinary store would first fetch its line from memory, one byte in fifteen.
 * So it is made in strips that stay in the cache, and streamed past it where the processor can. */

enum { STRIP = 512 };

static inline __attribute__((always_inline)) void stream(uint16_t *restrict to, const uint16_t *restrict strip, int64_t n) {
#ifdef __AVX512F__
    if (n == STRIP && ((uintptr_t)to & 63) == 0) {
        for (int64_t i = 0; i < STRIP; i += 32) _mm512_stream_si512((void *)(to + i), _mm512_load_si512(strip + i));
        return;
    }
#endif
    memcpy(to, strip, (size_t)n * 2);
}

static inline __attribute__((always_inline)) void strips(int64_t n, float *restrict master, const char *restrict grad,
                                                         float *restrict first, float *restrict second,
                                                         uint16_t *restrict param, Hyper h, int grad_type,
                                                         int grad_size, int param_type) {
    if (param_type == NONE) {
        tile(n, master, grad, first, second, 0, h, grad_type, NONE);
        return;
    }
    uint16_t strip[STRIP] __attribute__((aligned(64)));
    for (int64_t at = 0; at < n; at += STRIP) {
        int64_t count = n - at < STRIP ? n - at : STRIP;
        tile(count, master + at, grad + at * grad_size, first + at, second + at, strip, h, grad_type, param_type);
        stream(param + at, strip, count);
    }
#ifdef __AVX512F__
    _mm_sfence(); /* whoever is told that the update is done finds it in memory */
#endif
}

#define SIZE(type) ((type) == NONE ? 0 : (type) == FLOAT32 ? 4 : 2)
#define CASE(g, p)                                                                                              \
    case 4 * (g) + (p):                                                                                         \
        strips(n, master + at, (const char *)grad + at * SIZE(g), first + at, second + at,                      \
               (uint16_t *)param + (param ? at : 0), *hyper, g, SIZE(g), p);                                    \
        break;

void hightide_adamw(int64_t *next, int64_t tile_numel, int64_t numel, float *master, const void *grad, float *first,
                    float *second, void *param, int grad_type, int param_type, const Hyper *hyper) {
    for (;;) {
        int64_t at = __atomic_fetch_add(next, tile_numel, __ATOMIC_RELAXED);
        if (at >= numel) return;
        int64_t n = numel - at < tile_numel ? numel - at : tile_numel;
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
