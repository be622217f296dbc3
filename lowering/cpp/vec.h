// Vectors of floats for every instruction set, as GCC vector extensions, and sums in a fixed order.
//
// The order of all arithmetic is fixed here, so that a row's result is the same bits whatever rows are computed beside it and however
// many threads there are.
#pragma once

#include <cstdint>
#include <cstring>

#define UNROLL _Pragma("GCC unroll 16")
#define INLINE inline __attribute__((always_inline))
#define INLINED __attribute__((always_inline))

namespace npuc {

#if defined(__AVX512F__)
constexpr int L = 16;
#else
constexpr int L = 8;
#endif

typedef float vec __attribute__((vector_size(4 * L)));
typedef int32_t ints __attribute__((vector_size(4 * L)));

struct bf16 {
    uint16_t bits;
};

INLINE vec load(const float* p) {
    vec v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

// L numbers of bfloat16, widened.
INLINE vec load(const bf16* p) {
    typedef uint16_t halves __attribute__((vector_size(2 * L)));
    typedef uint32_t words __attribute__((vector_size(4 * L)));
    halves narrow;
    std::memcpy(&narrow, p, sizeof narrow);
    const words bits = __builtin_convertvector(narrow, words) << 16;
    vec v;
    std::memcpy(&v, &bits, sizeof v);
    return v;
}

INLINE void store(float* p, vec v) { std::memcpy(p, &v, sizeof v); }

INLINE vec fill(float x) { return x - vec{}; }

INLINE float widen(float x) { return x; }

INLINE float widen(bf16 x) {
    const uint32_t bits = uint32_t(x.bits) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE void narrow(float& to, float x) { to = x; }

INLINE void narrow(bf16& to, float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    to.bits = x != x ? 0x7fc0 : uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// `narrow` of 16 numbers at once.
typedef uint16_t halves __attribute__((vector_size(32)));

INLINE halves narrowed16(const float* from) {
    typedef uint32_t words __attribute__((vector_size(64)));
    words bits;
    std::memcpy(&bits, from, sizeof bits);
    const words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const words nan = words((bits & 0x7fffffff) > 0x7f800000);
    return __builtin_convertvector((nan & 0x7fc0) | (~nan & rounded), halves);
}

INLINE void narrow16(bf16* to, const float* from) {
    const halves narrowed = narrowed16(from);
    std::memcpy(to, &narrowed, sizeof narrowed);
}

// Keeps a loaded vector in a register; the compiler would load it again for each row, and the load ports would limit the speed.
INLINE void hold(vec& v) {
#if defined(__AVX512F__)
    asm("" : "+v"(v));
#else
    (void)v;
#endif
}

// The sums of L vectors: lane i of the result is the sum of a[i], added as a tree of halves.
#if defined(__AVX512F__)
INLINE vec sums(const vec (&a)[16]) {
    vec b[8], c[4], d[2];
    UNROLL for (int i = 0; i < 8; i++)
        b[i] = __builtin_shufflevector(a[i], a[i + 8], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
               __builtin_shufflevector(a[i], a[i + 8], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    UNROLL for (int i = 0; i < 4; i++)
        c[i] = __builtin_shufflevector(b[i], b[i + 4], 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) +
               __builtin_shufflevector(b[i], b[i + 4], 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
    UNROLL for (int i = 0; i < 2; i++)
        d[i] = __builtin_shufflevector(c[i], c[i + 2], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
               __builtin_shufflevector(c[i], c[i + 2], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    return __builtin_shufflevector(d[0], d[1], 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) +
           __builtin_shufflevector(d[0], d[1], 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
}
#else
INLINE vec sums(const vec (&a)[8]) {
    vec b[4], c[2];
    UNROLL for (int i = 0; i < 4; i++)
        b[i] = __builtin_shufflevector(a[i], a[i + 4], 0, 1, 2, 3, 8, 9, 10, 11) +
               __builtin_shufflevector(a[i], a[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    UNROLL for (int i = 0; i < 2; i++)
        c[i] = __builtin_shufflevector(b[i], b[i + 2], 0, 1, 8, 9, 4, 5, 12, 13) +
               __builtin_shufflevector(b[i], b[i + 2], 2, 3, 10, 11, 6, 7, 14, 15);
    return __builtin_shufflevector(c[0], c[1], 0, 8, 2, 10, 4, 12, 6, 14) +
           __builtin_shufflevector(c[0], c[1], 1, 9, 3, 11, 5, 13, 7, 15);
}
#endif

// e^x to 2 units in the last place, 0 for very small and about 2e38 for very large x; NaN stays NaN. As in Cephes expf: 2^n times a
// polynomial of the remainder of x.
INLINE vec exponential(vec x) {
    const vec low = fill(-87.0f), high = fill(88.0f), magic = fill(12582912.0f);
    const ints under = x < low;
    x = x > high ? high : x;
    x = x < low ? low : x;
    const vec shifted = x * 1.44269504f + magic, n = shifted - magic;
    const vec r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    ints bits;
    std::memcpy(&bits, &shifted, sizeof bits);
    bits = (bits + 127) << 23;
    vec power;
    std::memcpy(&power, &bits, sizeof power);
    return under ? vec{} : p * power;
}

INLINE vec silu(vec x) { return x / (exponential(-x) + 1.0f); }

}  // namespace npuc
