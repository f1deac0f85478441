/* What every update is made of: types of elements, their conversions, and the way out of a strip.
 *
 * Compile with -ffp-contract=off: every fusion is written out, so a vector's body and its tail round alike, and a range
 * may be cut anywhere. */

#include <stdint.h>
#include <string.h>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

#if defined(__FP_FAST_FMAF) || defined(__FMA__) || defined(__ARM_FEATURE_FMA) /* clang says it in other words */
#define HAS_FMA
#define FMA(a, b, c) __builtin_fmaf((a), (b), (c))
#else /* in software it would be a hundred times slower */
#define FMA(a, b, c) ((a) * (b) + (c))
#endif

enum { NONE = 0, FLOAT32 = 1, BFLOAT16 = 2, FLOAT16 = 3 };

/* x / by, rounded as a division is, of a number that many are divided by: a processor has one unit for divisions and
 * square roots, which would be the limit, and multiplies in others. `inverse` is 1 / by, rounded. Two corrections by
 * exact remainders make it the nearest number; only infinities have none. */
static inline float over(float x, float by, float inverse) {
#ifdef HAS_FMA
    float guess = x * inverse;
    float once = FMA(FMA(-guess, by, x), inverse, guess);
    float twice = FMA(FMA(-once, by, x), inverse, once);
    return twice == twice ? twice : guess;
#else
    (void)inverse;
    return x / by;
#endif
}

enum { WHOLE = 0, PARAMS = 1, STATES = 2 }; /* what of an update is to be done */

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

/* A master in two parts, as in runtime/chunks/remainder.py: a bf16 parameter, and 16 bits that it lacks. */

static inline __attribute__((always_inline)) void join(float *restrict master, const uint16_t *restrict param,
                                                       const int16_t *restrict remainder, int64_t n) {
    for (int64_t i = 0; i < n; i++) master[i] = float_of(((uint32_t)param[i] << 16) + (uint32_t)(int32_t)remainder[i]);
}

static inline __attribute__((always_inline)) void split(const float *restrict master, uint16_t *restrict param,
                                                        int16_t *restrict remainder, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        uint16_t rounded = to_bfloat16(master[i]);
        int32_t rest = (int32_t)(bits_of(master[i]) - ((uint32_t)rounded << 16));
        param[i] = rounded;
        remainder[i] = (int16_t)(rest > INT16_MAX ? INT16_MAX : rest < INT16_MIN ? INT16_MIN : rest);
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
