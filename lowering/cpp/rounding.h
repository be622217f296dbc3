// Rounding of rows to int8 by scales of their own, as `quantise_rows` of graphs/quantise.py does it, bit for bit.
#pragma once

#include <algorithm>
#include <cmath>

#include "vec.h"

namespace npuc {

// Keeps a product apart from the sum that it goes into, which the compiler would otherwise round once instead of twice.
INLINE float apart(float x) {
#if defined(__x86_64__)
    asm("" : "+x"(x));
#endif
    return x;
}

INLINE vec apart(vec x) {
#if defined(__AVX512F__)
    asm("" : "+v"(x));
#elif defined(__x86_64__)
    asm("" : "+x"(x));
#endif
    return x;
}

// Half to even, as torch.round; for numbers up to 2^22.
INLINE int8_t rounded(float x) { return int8_t(apart(x + 12582912.0f) - 12582912.0f); }

// What int8 holds; -128 of what is no number.
INLINE float within(float x) { return std::min(127.0f, std::max(-128.0f, x)); }
INLINE vec within(vec x) {
    x = x > -128.0f ? x : fill(-128.0f);
    return x < 127.0f ? x : fill(127.0f);
}

INLINE void round_to(int8_t* to, vec x) {
    typedef int8_t bytes __attribute__((vector_size(L)));
    const bytes whole = __builtin_convertvector(__builtin_convertvector((x + 12582912.0f) - 12582912.0f, ints), bytes);
    std::memcpy(to, &whole, sizeof whole);
}

INLINE void round_to(int8_t* to, float x) { *to = rounded(x); }

// `change` of every number, rounded: a vector at a time, and then one by one.
template <typename T, typename Change>
INLINE void round_all(const T* x, int64_t K, int8_t* to, const Change& change) {
    int64_t k = 0;
    for (; k + L <= K; k += L) round_to(to + k, change(load(x + k)));
    for (; k < K; k++) round_to(to + k, change(widen(x[k])));
}

// The largest magnitude; what is no number is passed over.
template <typename T>
float largest(const T* x, int64_t K) {
    int64_t k = 0;
    vec most = {};
    for (; k + L <= K; k += L) {
        const vec next = load(x + k), size = next < 0.0f ? -next : next;
        most = size > most ? size : most;
    }
    float lanes[L], all = 0.0f;
    store(lanes, most);
    for (float lane : lanes) all = std::max(all, lane);
    for (; k < K; k++) all = std::max(all, std::fabs(widen(x[k])));
    return all;
}

// amax / 127 of a row, 0 for zeros, by which it is divided.
template <typename T>
float round_row(const T* x, int64_t K, int8_t* to) {
    const float scale = largest(x, K) / 127, divisor = scale > 0 ? scale : 1.0f;
    round_all(x, K, to, [=](auto value) INLINED { return value / divisor; });
    return scale;
}

}  // namespace npuc
