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

// Half to even, as torch.round; for numbers up to 2^22.
INLINE int8_t rounded(float x) { return int8_t(apart(x + 12582912.0f) - 12582912.0f); }

// amax / 127 of a row, 0 for zeros, by which it is divided.
template <typename T>
float round_row(const T* x, int64_t K, int8_t* to) {
    float most = 0.0f;
    for (int64_t k = 0; k < K; k++) most = std::max(most, std::fabs(widen(x[k])));
    const float scale = most / 127, divisor = scale > 0 ? scale : 1.0f;
    for (int64_t k = 0; k < K; k++) to[k] = rounded(widen(x[k]) / divisor);
    return scale;
}

}  // namespace npuc
