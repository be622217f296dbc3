// What the variants of attention by AMX and by AVX-512's dot products share: where tokens are, queries as columns of a product, and scores that become weights.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <initializer_list>

#include "attention.h"
#include "panels.h"

namespace npuc {

// Tokens whose weighted values attention by dot products adds up alone: their panels stay in the L1 cache while rows pass.
constexpr int64_t SEGMENT = 128;

struct Pointers {
    const HeadBf16& h;
    int64_t last, end;  // tokens that a query attends to, and those whose values exist

    const bf16* token(const bf16* pool, int64_t j) const { return pool + ((int64_t(h.table[j / h.P]) * h.P + j % h.P) * h.G + h.g) * h.D; }

    // Asks for all lines of a token that some later step reads.
    void prefetch(const bf16* pool, int64_t j) const {
        if (j >= end) return;
        const auto* from = reinterpret_cast<const char*>(token(pool, j));
        for (int64_t at = 0; at < h.D * 2; at += 64) __builtin_prefetch(from + at);
    }
};

// Turns 16 vectors of 16: number i of the result has element i of each.
WITH_DOTS INLINE void turn(__m512 (&a)[16]) {
    __m512 b[16];
    UNROLL for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_ps(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_ps(a[i], a[i + 1]);
    }
    UNROLL for (int i = 0; i < 16; i += 4) {
        const auto pairs = [](__m512 x) __attribute__((always_inline, target("avx512f"))) { return _mm512_castps_pd(x); };
        a[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(pairs(b[i]), pairs(b[i + 2])));
        a[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(pairs(b[i]), pairs(b[i + 2])));
        a[i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(pairs(b[i + 1]), pairs(b[i + 3])));
        a[i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(pairs(b[i + 1]), pairs(b[i + 3])));
    }
    // Now a[4 t + c] has column c of each quarter, for vectors 4 t on.
    UNROLL for (int c = 0; c < 4; c++) {
        const __m512 low = _mm512_shuffle_f32x4(a[c], a[4 + c], 0x88), high = _mm512_shuffle_f32x4(a[c], a[4 + c], 0xdd);
        const __m512 low2 = _mm512_shuffle_f32x4(a[8 + c], a[12 + c], 0x88), high2 = _mm512_shuffle_f32x4(a[8 + c], a[12 + c], 0xdd);
        b[c] = _mm512_shuffle_f32x4(low, low2, 0x88);
        b[8 + c] = _mm512_shuffle_f32x4(low, low2, 0xdd);
        b[4 + c] = _mm512_shuffle_f32x4(high, high2, 0x88);
        b[12 + c] = _mm512_shuffle_f32x4(high, high2, 0xdd);
    }
    UNROLL for (int i = 0; i < 16; i++) a[i] = b[i];
}

// [16 tokens][16 queries] to [query][token], rows of the result being `ld` apart; only the first `queries` are stored.
WITH_DOTS inline void turn(const float* from, int64_t queries, float* to, int64_t ld) {
    __m512 a[16];
    UNROLL for (int i = 0; i < 16; i++) a[i] = _mm512_load_ps(from + i * 16);
    turn(a);
    UNROLL for (int i = 0; i < 16; i++) {
        if (i < queries) _mm512_storeu_ps(to + i * ld, a[i]);
    }
}

// Two lines of bfloat16 as pairs, which dot products take: of the first 16 elements of both, and of the others.
struct Interleaved {
    __m512i low, high;

    WITH_DOTS INLINED Interleaved() {
        const __m512i ramp = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
        low = _mm512_or_si512(ramp, _mm512_slli_epi32(_mm512_add_epi32(ramp, _mm512_set1_epi32(32)), 16));
        high = _mm512_add_epi32(low, _mm512_set1_epi32(0x100010));
    }
    WITH_DOTS INLINED __m512i first(__m512i a, __m512i b) const { return _mm512_permutex2var_epi16(a, low, b); }
    WITH_DOTS INLINED __m512i second(__m512i a, __m512i b) const { return _mm512_permutex2var_epi16(a, high, b); }
};

// Queries as columns: [D / 2][16][2], zeros for those that do not exist; D is a multiple of 32.
WITH_DOTS inline void lay_out(const HeadBf16& h, int64_t first, int64_t queries, uint16_t* to) {
    alignas(64) float words[16 * 16] = {};
    for (int64_t d = 0; d < h.D; d += 32) {
        for (int64_t r = 0; r < queries; r++) std::memcpy(words + r * 16, h.query(first + r) + d, 64);
        // A pair of bfloat16 is moved as a word.
        turn(words, 16, reinterpret_cast<float*>(to + d * 16), 16);
    }
}

// e^x of numbers that are at most 0, as `exponential` of vec.h.
WITH_DOTS INLINE __m512 exponential16(__m512 x) {
    const __mmask16 some = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.0f), _CMP_NLT_UQ);
    const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 8);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fmadd_ps(n, _mm512_set1_ps(2.12194440e-4f), r);
    __m512 y = _mm512_set1_ps(1.9875691500e-4f);
    for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
        y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(c));
    y = _mm512_add_ps(_mm512_fmadd_ps(y, _mm512_mul_ps(r, r), r), _mm512_set1_ps(1.0f));
    return _mm512_maskz_scalef_ps(some, y, n);
}

// Scores [count] become weights [all], zeros from `count` on, `all` being a multiple of 16; `keep(j, weights)` stores 16 of them. Returns the
// reciprocal of their sum.
template <typename Keep>
WITH_DOTS INLINE float weigh(const float* scores, int64_t count, int64_t all, float scale, const Keep& keep) {
    __m512 most = _mm512_set1_ps(-INFINITY);
    const auto some = [count](int64_t j) { return count - j >= 16 ? __mmask16(0xffff) : __mmask16((1u << std::max<int64_t>(0, count - j)) - 1); };
    // A score that is no number is no maximum, but makes the sum none.
    for (int64_t j = 0; j < count; j += 16) most = _mm512_mask_max_ps(most, some(j), _mm512_loadu_ps(scores + j), most);
    const float largest = _mm512_reduce_max_ps(most) * scale;
    __m512 sum = _mm512_setzero_ps();
    for (int64_t j = 0; j < all; j += 16) {
        __m512 weight = _mm512_setzero_ps();
        if (j < count) {
            const __m512 at = _mm512_sub_ps(_mm512_mul_ps(_mm512_loadu_ps(scores + j), _mm512_set1_ps(scale)), _mm512_set1_ps(largest));
            weight = _mm512_maskz_mov_ps(some(j), exponential16(at));
        }
        sum = _mm512_add_ps(sum, weight);
        keep(j, weight);
    }
    return 1.0f / _mm512_reduce_add_ps(sum);
}

}  // namespace npuc
