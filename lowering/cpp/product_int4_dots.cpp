// Products with panels of int4 by AVX-512's dot products of pairs of bfloat16.
#include <algorithm>

#include "product_int4.h"

#if defined(WITH_DOTS)
#include <immintrin.h>

#include "widen_int4.h"

namespace npuc {

namespace {

// Line i of four of P panels, with R rows; `x` are the pairs [R] of that line.
template <int i, int R, int P>
WITH_DOTS INLINE void step(__m512 (&acc)[R][P], const int32_t* x, const __m512i (&words)[P], __m512i values) {
    __m512i line[P];
    UNROLL for (int p = 0; p < P; p++) line[p] = widened<i>(words[p], values);
    UNROLL for (int r = 0; r < R; r++) {
        UNROLL for (int p = 0; p < P; p++)
            acc[r][p] = _mm512_dpbf16_ps(acc[r][p], (__m512bh)line[p], (__m512bh)_mm512_set1_epi32(x[i * R + r]));
    }
}

// One block of R rows, `x` being pairs [lines][R], and P panels side by side, the next of which are prefetched if `ahead`.
template <int R, int P>
WITH_DOTS void side_by_side(const Int4& matrix, const int32_t* x, const char* weights, bool ahead, const float* scale,
                            float (*out)[R][CHANNELS]) {
    const int64_t panel = matrix.panel(), quads = panel / LINE / matrix.groups;
    const char* next = ahead ? weights + P * panel : weights;
    const __m512i values = nibble_values();
    UNROLL for (int p = 0; p < P; p++) {
        UNROLL for (int r = 0; r < R; r++) _mm512_store_ps(out[p][r], _mm512_setzero_ps());
    }
    for (int64_t g = 0; g < matrix.groups; g++) {
        __m512 acc[R][P];
        UNROLL for (int r = 0; r < R; r++) {
            UNROLL for (int p = 0; p < P; p++) acc[r][p] = _mm512_setzero_ps();
        }
        for (int64_t quad = 0; quad < quads; quad++, x += QUAD * R, weights += LINE, next += LINE) {
            __m512i words[P];
            UNROLL for (int p = 0; p < P; p++) {
                words[p] = _mm512_loadu_si512(weights + p * panel);
                _mm_prefetch(next + p * panel, _MM_HINT_T1);
            }
            step<0>(acc, x, words, values);
            step<1>(acc, x, words, values);
            step<2>(acc, x, words, values);
            step<3>(acc, x, words, values);
        }
        UNROLL for (int p = 0; p < P; p++) {
            const __m512 by = _mm512_loadu_ps(scale + (p * matrix.groups + g) * CHANNELS);
            UNROLL for (int r = 0; r < R; r++) _mm512_store_ps(out[p][r], _mm512_fmadd_ps(acc[r][p], by, _mm512_load_ps(out[p][r])));
        }
    }
}

template <int R, int P>
void group(const Blocks& blocks, const char* data, const Int4& matrix, int64_t p, int64_t last, const Sink& sink) {
    alignas(64) float sums[P][R][CHANNELS];
    const float* scale = scales_of(matrix, p, P);
    for (int64_t block = 0; block < blocks.count; block++) {
        const auto* x = reinterpret_cast<const int32_t*>(data + block * blocks.block());
        side_by_side<R, P>(matrix, x, matrix.weights + p * matrix.panel(), block == 0 && p + P < last, scale, sums);
        for (int i = 0; i < P; i++) sink.put(sums[i], block * R, std::min<int64_t>(R, blocks.M - block * R), p + i);
    }
}

template <int R>
void all(const Blocks& blocks, const char* data, const Int4& matrix, int64_t first, int64_t last, const Sink& sink) {
    constexpr int P = R <= 5 ? 4 : 2;
    int64_t p = first;
    for (; p + P <= last; p += P) group<R, P>(blocks, data, matrix, p, last, sink);
    for (; p < last; p++) group<R, 1>(blocks, data, matrix, p, last, sink);
}

using All = void (*)(const Blocks&, const char*, const Int4&, int64_t, int64_t, const Sink&);

constexpr All by_rows[] = {all<1>, all<2>, all<3>, all<4>, all<5>, all<6>, all<7>, all<8>, all<9>, all<10>, all<11>, all<12>};

}  // namespace

void multiply_int4_dots(const Blocks& blocks, const char* data, const Int4& matrix, int64_t first, int64_t last, const Sink& sink) {
    by_rows[blocks.rows - 1](blocks, data, matrix, first, last, sink);
}

}  // namespace npuc
#endif
