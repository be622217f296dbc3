// Products of a few rows of bfloat16 on a machine with tiles, by vectors of floats: lines that are read one after the other come from memory
// faster than tiles of panels side by side, by 9 to 12 % for one row and 3 to 5 % for three. Sums have the order of tiles, so that a row is the same bits in any company.
#include <algorithm>

#include "product.h"

#if defined(WITH_DOTS)
#include <immintrin.h>

namespace npuc {

namespace {

// Lines that a tile holds, and that a row's sums take together: the products with even elements and with odd ones each have a sum of their
// own, which are then added, and these to the sum of the tiles before (Intel SDM, TDPBF16PS).
constexpr int TOGETHER = 16;

// R rows, `x` being floats [2 lines][R], with a panel, while the panel at `next` is prefetched.
template <int R>
WITH_DOTS void one_panel(const float* x, const char* own, int64_t lines, const char* next, float (*out)[CHANNELS]) {
    const __m512i high = _mm512_set1_epi32(int32_t(0xffff0000));
    __m512 sums[R];
    UNROLL for (int r = 0; r < R; r++) sums[r] = _mm512_setzero_ps();
    for (int64_t k = 0; k < lines; k += TOGETHER) {
        __m512 even[R], odd[R];
        UNROLL for (int r = 0; r < R; r++) even[r] = odd[r] = _mm512_setzero_ps();
        // Unrolled by GCC 12, loads and prefetches come in clumps, and 7 % slower.
#pragma GCC unroll 1
        for (int i = 0; i < TOGETHER; i++, x += 2 * R, own += LINE, next += LINE) {
            const __m512i line = _mm512_loadu_si512(own);
            _mm_prefetch(next, _MM_HINT_T1);
            const __m512 first = _mm512_castsi512_ps(_mm512_slli_epi32(line, 16)), second = _mm512_castsi512_ps(_mm512_and_si512(line, high));
            UNROLL for (int r = 0; r < R; r++) even[r] = _mm512_fmadd_ps(first, _mm512_set1_ps(x[r]), even[r]);
            UNROLL for (int r = 0; r < R; r++) odd[r] = _mm512_fmadd_ps(second, _mm512_set1_ps(x[R + r]), odd[r]);
        }
        UNROLL for (int r = 0; r < R; r++) sums[r] = _mm512_add_ps(sums[r], _mm512_add_ps(even[r], odd[r]));
    }
    UNROLL for (int r = 0; r < R; r++) _mm512_storeu_ps(out[r], sums[r]);
}

template <int R>
WITH_DOTS void all(const Blocks& blocks, const char* data, const char* weights, int64_t first, int64_t last, const Sink& sink, const char* then) {
    float sums[R][CHANNELS];
    for (int64_t p = first; p < last; p++) {
        const char *own = weights + p * blocks.panel(), *next = p + 1 < last ? own + blocks.panel() : then ? then : own;
        // `arrange` wrote floats; the memory is aligned.
        one_panel<R>(reinterpret_cast<const float*>(data), own, blocks.lines, next, sums);
        sink.put(sums, 0, R, p);
    }
}

using All = void (*)(const Blocks&, const char*, const char*, int64_t, int64_t, const Sink&, const char*);

constexpr All by_rows[FEW] = {all<1>, all<2>, all<3>};

}  // namespace

void multiply_few(const Blocks& blocks, const char* data, const char* weights, int64_t first, int64_t last, const Sink& sink, const char* then) {
    by_rows[blocks.rows - 1](blocks, data, weights, first, last, sink, then);
}

}  // namespace npuc
#endif
