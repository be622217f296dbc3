// Products with panels by AVX-512's dot products: of pairs of bfloat16, and of fours of int8.
#include <algorithm>

#include "product.h"

#if defined(__x86_64__)
#include <immintrin.h>

namespace npuc {

namespace {

// acc += x . w. The instruction for int8 multiplies unsigned by signed, so rows are shifted by 128, which `corrected` takes out again.
template <Kind K>
WITH_DOTS INLINE void dot(__m512i& acc, int32_t x, __m512i w) {
    if (K == Kind::BF16)
        acc = _mm512_castps_si512(_mm512_dpbf16_ps(_mm512_castsi512_ps(acc), (__m512bh)w, (__m512bh)_mm512_set1_epi32(x)));
    else
        // Not the intrinsic, for which GCC 12 keeps copies of the sums on the stack.
        asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(_mm512_set1_epi32(x ^ int32_t(0x80808080))), "v"(w));
}

template <Kind K>
WITH_DOTS INLINE __m512i corrected(__m512i acc, const char* panel, int64_t lines) {
    if (K == Kind::BF16) return acc;
    return _mm512_sub_epi32(acc, _mm512_slli_epi32(_mm512_loadu_si512(panel + lines * LINE), 7));
}

// One block of R rows, `x` being words [lines][R], and P panels side by side. Prefetches AHEAD lines from `next` on for every line of a
// panel: the next panels come from memory while these are multiplied.
template <Kind K, int R, int P, int AHEAD>
WITH_DOTS void side_by_side(const Blocks& blocks, const int32_t* x, const char* weights, const char* next, int64_t m, int64_t p,
                            const Sink& sink) {
    __m512i acc[R][P];
    const int64_t panel = blocks.panel();
    UNROLL for (int r = 0; r < R; r++) {
        UNROLL for (int i = 0; i < P; i++) acc[r][i] = _mm512_setzero_si512();
    }
    for (int64_t k = 0; k < blocks.lines; k++) {
        __m512i line[P];
        UNROLL for (int i = 0; i < P; i++) line[i] = _mm512_loadu_si512(weights + i * panel + k * LINE);
        UNROLL for (int i = 0; i < AHEAD; i++, next += LINE) _mm_prefetch(next, _MM_HINT_T1);
        UNROLL for (int r = 0; r < R; r++) {
            UNROLL for (int i = 0; i < P; i++) dot<K>(acc[r][i], x[k * R + r], line[i]);
        }
    }
    alignas(64) __m512i sums[R];
    for (int i = 0; i < P; i++) {
        UNROLL for (int r = 0; r < R; r++) sums[r] = corrected<K>(acc[r][i], weights + i * panel, blocks.lines);
        sink.put(sums, m, std::min<int64_t>(R, blocks.M - m), p + i);
    }
}

template <Kind K, int R, int P>
WITH_DOTS void group(const Blocks& blocks, const char* data, const char* weights, int64_t p, int64_t last, const Sink& sink, const char* then) {
    const char *own = weights + p * blocks.panel(), *next = p + P < last ? own + P * blocks.panel() : then ? then : own;
    for (int64_t block = 0; block < blocks.count; block++) {
        const auto* x = reinterpret_cast<const int32_t*>(data + block * blocks.block());
        // The first blocks prefetch what the next panels are; further ones find it in the cache.
        if (blocks.count == 1)
            side_by_side<K, R, P, P>(blocks, x, own, next, block * R, p, sink);
        else if (block < P)
            side_by_side<K, R, P, 1>(blocks, x, own, next + block * blocks.panel(), block * R, p, sink);
        else
            side_by_side<K, R, P, 0>(blocks, x, own, next, block * R, p, sink);
    }
}

template <Kind K, int R>
void all(const Blocks& blocks, const char* data, const char* weights, int64_t first, int64_t last, const Sink& sink, const char* then) {
    // As few as keep the units busy: the fewer places are read side by side, the faster is memory.
    constexpr int P = R <= 3 ? 2 : R <= 6 ? 1 : 2;
    int64_t p = first;
    for (; p + P <= last; p += P) group<K, R, P>(blocks, data, weights, p, last, sink, then);
    for (; p < last; p++) group<K, R, 1>(blocks, data, weights, p, last, sink, then);
}

using All = void (*)(const Blocks&, const char*, const char*, int64_t, int64_t, const Sink&, const char*);

template <Kind K>
constexpr All by_rows[] = {all<K, 1>, all<K, 2>, all<K, 3>, all<K, 4>,  all<K, 5>,  all<K, 6>,
                           all<K, 7>, all<K, 8>, all<K, 9>, all<K, 10>, all<K, 11>, all<K, 12>};

}  // namespace

void multiply_dots(const Blocks& blocks, const char* data, const char* weights, int64_t first, int64_t last, const Sink& sink, const char* then) {
    (blocks.kind == Kind::BF16 ? by_rows<Kind::BF16> : by_rows<Kind::INT8>)[blocks.rows - 1](blocks, data, weights, first, last, sink, then);
}

}  // namespace npuc
#endif
