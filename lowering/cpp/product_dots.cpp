// Products with panels by AVX-512's dot products: of pairs of bfloat16, and of fours of int8.
#include <algorithm>
#include <utility>

#include "product.h"

#if defined(WITH_DOTS)
#include <immintrin.h>

#include "scratch.h"

namespace npuc {

namespace {

// Lines of a panel that many rows take at a time: a block's words of them stay in the L1 cache while panels pass.
constexpr int64_t PART = 512;

// acc += x . w. Not the intrinsics, for which GCC 12 moves sums between registers. The instruction for int8 multiplies unsigned by signed, so
// `arrange` shifted rows by 128, which `corrected` takes out again.
template <Kind K>
WITH_DOTS INLINE void dot(__m512i& acc, __m512i x, __m512i w) {
    if (K == Kind::BF16)
        asm("vdpbf16ps %2, %1, %0" : "+v"(acc) : "v"(w), "v"(x));
    else
        asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(x), "v"(w));
}

template <Kind K>
WITH_DOTS INLINE __m512i corrected(__m512i acc, const char* panel, int64_t lines) {
    if (K == Kind::BF16) return acc;
    return _mm512_sub_epi32(acc, _mm512_slli_epi32(_mm512_loadu_si512(panel + lines * LINE), 7));
}

// The sums of one block of R rows and P panels: number I is of row I / P and panel I % P, and stands in memory behind those of panels before.
// Indices are constants from the start: in a loop that is unrolled later, GCC 12 loads and stores all sums with every line.
template <Kind K, int P, int... I>
struct Sums {
    static constexpr int R = sizeof...(I) / P;
    __m512i all[R * P];

    WITH_DOTS INLINE void clear() { ((all[I] = _mm512_setzero_si512()), ...); }
    WITH_DOTS INLINE void add(const int32_t* x, const __m512i (&line)[P]) { (dot<K>(all[I], _mm512_set1_epi32(x[I / P]), line[I % P]), ...); }
    WITH_DOTS INLINE void load(const __m512i* from) { ((all[I] = from[I % P * R + I / P]), ...); }
    WITH_DOTS INLINE void store(__m512i* to) const { ((to[I % P * R + I / P] = all[I]), ...); }
    WITH_DOTS INLINE void correct(const Blocks& blocks, const char* weights) {
        ((all[I] = corrected<K>(all[I], weights + I % P * blocks.panel(), blocks.lines)), ...);
    }
};

template <Kind K, int P, int... I>
Sums<K, P, I...> sums_of(std::integer_sequence<int, I...>);

// Lines [first, last) of one block of R rows, `x` being words [lines][R], and P panels side by side; `sums` [P][R] are those of the lines
// before, and then with these. Prefetches AHEAD lines from `next` on for every line of a panel: the next panels come from memory while these
// are multiplied.
template <Kind K, int R, int P, int AHEAD>
WITH_DOTS void side_by_side(const Blocks& blocks, const int32_t* x, const char* weights, int64_t first, int64_t last, const char* next,
                            __m512i* sums) {
    decltype(sums_of<K, P>(std::make_integer_sequence<int, R * P>())) acc;
    const int64_t panel = blocks.panel();
    first ? acc.load(sums) : acc.clear();
    for (int64_t k = first; k < last; k++) {
        __m512i line[P];
        UNROLL for (int i = 0; i < P; i++) line[i] = _mm512_loadu_si512(weights + i * panel + k * LINE);
        UNROLL for (int i = 0; i < AHEAD; i++, next += LINE) _mm_prefetch(next, _MM_HINT_T1);
        acc.add(x + k * R, line);
    }
    if (last == blocks.lines) acc.correct(blocks, weights);
    acc.store(sums);
}

template <Kind K, int R, int P>
WITH_DOTS void group(const Blocks& blocks, const char* data, const char* weights, int64_t p, int64_t last, const Sink& sink, const char* then) {
    static thread_local Scratch kept;
    auto* sums = static_cast<__m512i*>(kept.get(blocks.count * R * P * LINE));
    const char *own = weights + p * blocks.panel(), *next = p + P < last ? own + P * blocks.panel() : then ? then : own;
    const int64_t part = blocks.count > 1 ? PART : blocks.lines;
    for (int64_t k = 0; k < blocks.lines; k += part) {
        const int64_t end = std::min(k + part, blocks.lines);
        for (int64_t block = 0; block < blocks.count; block++) {
            const auto* x = reinterpret_cast<const int32_t*>(data + block * blocks.block());
            __m512i* to = sums + block * R * P;
            // The first blocks prefetch what the next panels are; further ones find it in the cache.
            if (blocks.count == 1)
                side_by_side<K, R, P, P>(blocks, x, own, k, end, next, to);
            else if (block < P)
                side_by_side<K, R, P, 1>(blocks, x, own, k, end, next + block * blocks.panel() + k * LINE, to);
            else
                side_by_side<K, R, P, 0>(blocks, x, own, k, end, next, to);
        }
    }
    for (int64_t block = 0; block < blocks.count; block++) {
        const __m512i* from = sums + block * R * P;
        const int64_t rows = std::min<int64_t>(R, blocks.M - block * R);
        P == 2 ? sink.put_two(from, from + R, block * R, rows, p) : sink.put(from, block * R, rows, p);
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
