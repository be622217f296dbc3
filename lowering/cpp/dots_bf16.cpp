// Products with panels of bfloat16 by AVX-512's dot products of pairs.
#include <algorithm>

#include "product_bf16.h"

#if defined(__x86_64__)
#include <immintrin.h>

namespace npuc {

namespace {

// y of one block of R rows, `x` being pairs [K / 2][R], and P panels side by side, of which the last ends at channel N. Prefetches AHEAD
// lines from `next` on for every line of a panel: the next panels come from memory while these are multiplied.
template <int R, int P, int AHEAD>
WITH_DOTS void side_by_side(const int32_t* x, const uint16_t* weights, int64_t pairs, int64_t rows, int64_t channels, bf16* y, int64_t ld,
                            const char* next) {
    __m512 acc[R][P];
    UNROLL for (int r = 0; r < R; r++) {
        UNROLL for (int p = 0; p < P; p++) acc[r][p] = _mm512_setzero_ps();
    }
    for (int64_t k = 0; k < pairs; k++) {
        __m512bh line[P];
        UNROLL for (int p = 0; p < P; p++) line[p] = (__m512bh)_mm512_loadu_si512(weights + (p * pairs + k) * 32);
        UNROLL for (int i = 0; i < AHEAD; i++, next += LINE) _mm_prefetch(next, _MM_HINT_T1);
        UNROLL for (int r = 0; r < R; r++) {
            const __m512bh own = (__m512bh)_mm512_set1_epi32(x[k * R + r]);
            UNROLL for (int p = 0; p < P; p++) acc[r][p] = _mm512_dpbf16_ps(acc[r][p], line[p], own);
        }
    }
    for (int r = 0; r < R && r < rows; r++)
        for (int p = 0; p < P; p++) {
            const int64_t left = std::min(CHANNELS, channels - p * CHANNELS);
            _mm256_mask_storeu_epi16(y + r * ld + p * CHANNELS, __mmask16((1u << left) - 1), (__m256i)_mm512_cvtneps_pbh(acc[r][p]));
        }
}

template <int R, int P>
WITH_DOTS void panel_group(const Blocks& blocks, const int32_t* data, const uint16_t* weights, int64_t p, int64_t N, bf16* y, int64_t ld) {
    const int64_t pairs = blocks.wide / 2, channels = N - p * CHANNELS, total = P * pairs * LINE;
    const uint16_t* own = weights + p * pairs * 32;
    const char* next = reinterpret_cast<const char*>(own) + total;
    for (int64_t block = 0; block < blocks.count; block++) {
        const int32_t* x = data + block * R * pairs;
        const int64_t m0 = block * R, rows = blocks.M - m0;
        bf16* to = y + m0 * ld + p * CHANNELS;
        // The first blocks prefetch what the next panels are; further ones find it in the cache.
        if (blocks.count == 1)
            side_by_side<R, P, P>(x, own, pairs, rows, channels, to, ld, next);
        else if (block < P)
            side_by_side<R, P, 1>(x, own, pairs, rows, channels, to, ld, next + block * pairs * LINE);
        else
            side_by_side<R, P, 0>(x, own, pairs, rows, channels, to, ld, next);
    }
}

template <int R>
void all(const Blocks& blocks, const int32_t* data, const uint16_t* weights, int64_t first, int64_t last, int64_t N, bf16* y, int64_t ld) {
    constexpr int P = R <= 6 ? 4 : 2;
    int64_t p = first;
    for (; p + P <= last; p += P) panel_group<R, P>(blocks, data, weights, p, N, y, ld);
    for (; p < last; p++) panel_group<R, 1>(blocks, data, weights, p, N, y, ld);
}

}  // namespace

void multiply_dots(const Blocks& blocks, const int32_t* data, const uint16_t* weights, int64_t first, int64_t last, int64_t N, bf16* y,
                   int64_t ld) {
    using All = void (*)(const Blocks&, const int32_t*, const uint16_t*, int64_t, int64_t, int64_t, bf16*, int64_t);
    constexpr All by_rows[] = {all<1>, all<2>, all<3>, all<4>, all<5>, all<6>, all<7>, all<8>, all<9>, all<10>, all<11>, all<12>};
    by_rows[blocks.rows - 1](blocks, data, weights, first, last, N, y, ld);
}

}  // namespace npuc
#endif
