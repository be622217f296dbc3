// Products with panels by vectors of floats and, for int8, of 16-bit integers: the variant that runs everywhere, and the only one of float32.
#include <algorithm>

#include <utility>

#include "product.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace npuc {

namespace {

// sum += a * b, rounded once. Not left to the compiler, since GCC 12 multiplies into the register of a factor and keeps copies of sums on
// the stack.
INLINE void add_product(vec& sum, vec a, vec b) {
#if defined(__FMA__)
    asm("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
#else
    sum += a * b;
#endif
}

// Sums of R rows with panels, each by `Products::add`, and in memory [panel][row][channel]. Indices are constants from the start: in a loop
// that is unrolled later, GCC 12 loads and stores all sums with every line.
template <typename Products, typename Rows, typename Panels>
struct Sums;

template <typename Products, int... RV, int... P>
struct Sums<Products, std::integer_sequence<int, RV...>, std::integer_sequence<int, P...>> {
    static constexpr int R = sizeof...(RV) / Products::V;
    typename Products::Sum all[sizeof...(P)][sizeof...(RV)];

    template <int p>
    INLINE void add(const typename Products::Word* x, const typename Products::Line (&line)[Products::V]) {
        (Products::add(all[p][RV], line[RV % Products::V], x[RV / Products::V]), ...);
    }
    template <int p>
    INLINE void line(const typename Products::Word* x, const char* from) {
        UNROLL for (int half = 0; half < 2; half++) {
            typename Products::Line own[Products::V];
            UNROLL for (int v = 0; v < Products::V; v++) own[v] = Products::half(from + v * sizeof(own[v]), half);
            add<p>(x + half * R, own);
        }
    }
    template <int p>
    INLINE void put(typename Products::Word (*out)[R][CHANNELS], bool more) const {
        (Products::put(&out[p][0][0] + RV * (sizeof(all[p][RV]) / 4), all[p][RV], more), ...);
    }
    template <int p>
    INLINE void clear() {
        ((all[p][RV] = typename Products::Sum{}), ...);
    }

    // One block of R rows, `x` being words [2 lines][R], with panels side by side. Prefetches AHEAD lines from `next` on for every line of a
    // panel, or AHEAD twos of lines for every two: the next panels come from memory while these are multiplied.
    template <int AHEAD>
    static void multiply(const typename Products::Word* x, const char* weights, int64_t panel, int64_t lines, const char* next,
                         typename Products::Word (*out)[R][CHANNELS]) {
        for (int64_t k = 0, first = 0; k < lines; first = k) {
            Sums sums;
            (sums.template clear<P>(), ...);
            for (const int64_t last = k + std::min(lines - k, Products::PIECE); k < last; k++, x += 2 * R) {
                UNROLL for (int i = 0; i < AHEAD * Products::LINES; i++, next += LINE) __builtin_prefetch(next, 0, 2);
                (sums.template line<P>(x, weights + P * panel + k * Products::LINES * LINE), ...);
            }
            (sums.template put<P>(out, first > 0), ...);
        }
    }
};

// Of float32, lines by twos: LINES that have two words of each channel, and `half` gives those that a word of each row is multiplied with.
// Sums of PIECE times as many are added up apart, which of 1,000 to 4,000 rounds a fourth to a tenth as much as one sum.
struct Singles {
    using Word = float;
    using Sum = vec;
    using Line = vec;
    static constexpr int V = CHANNELS / L, LINES = 2;
    static constexpr int64_t PIECE = 64;

    static INLINE void put(float* to, vec sum, bool more) { store(to, more ? load(to) + sum : sum); }
    static INLINE vec half(const char* from, int second) { return load(reinterpret_cast<const float*>(from + second * LINE)); }
    static INLINE void add(vec& sum, vec line, float x) { add_product(sum, line, fill(x)); }
};

// Of bfloat16: the even or the odd numbers of a line.
struct Floats : Singles {
    static constexpr int LINES = 1;
    static constexpr int64_t PIECE = INT64_MAX;

    static INLINE vec half(const char* from, int odd) {
        ints line;
        std::memcpy(&line, from, sizeof line);
        line = odd ? line & (ints{} + int32_t(0xffff0000)) : line << 16;
        vec own;
        std::memcpy(&own, &line, sizeof own);
        return own;
    }
};

// The same of int8, words being pairs of int16: no sum of two products overflows, so that all are exact.
#if defined(__AVX2__)
struct Integers {
    using Word = int32_t;
    using Sum = __m256i;
    using Line = __m256i;
    static constexpr int V = 2, LINES = 1;
    static constexpr int64_t PIECE = INT64_MAX;

    static INLINE void put(int32_t* to, __m256i sum, bool) { std::memcpy(to, &sum, sizeof sum); }
    static INLINE __m256i half(const char* from, int odd) {
        const __m256i line = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
        return _mm256_srai_epi16(odd ? line : _mm256_slli_epi16(line, 8), 8);
    }
    static INLINE void add(__m256i& sum, __m256i line, int32_t x) {
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(line, _mm256_set1_epi32(x)));
    }
};
#else
template <int R, int P>
void integers(const int32_t* x, const char* weights, int64_t panel, int64_t lines, int32_t (*out)[R][CHANNELS]) {
    const auto* rows = reinterpret_cast<const int16_t*>(x);
    for (int i = 0; i < P; i++) {
        const auto* columns = reinterpret_cast<const int8_t*>(weights + i * panel);
        for (int r = 0; r < R; r++)
            for (int64_t c = 0; c < CHANNELS; c++) {
                int32_t sum = 0;
                for (int64_t k = 0; k < lines; k++)
                    for (int j = 0; j < 4; j++) sum += rows[((2 * k + j % 2) * R + r) * 2 + j / 2] * columns[(k * CHANNELS + c) * 4 + j];
                out[i][r][c] = sum;
            }
    }
}
#endif

template <typename Products, int R, int P>
using Side = Sums<Products, std::make_integer_sequence<int, R * Products::V>, std::make_integer_sequence<int, P>>;

template <Kind K, int R, int P, int AHEAD>
void side_by_side(const Blocks& blocks, const char* data, const char* weights, const char* next, int64_t m, int64_t p, const Sink& sink) {
    union {
        float of_floats[P][R][CHANNELS];
        int32_t of_integers[P][R][CHANNELS];
    } sums;
    // `arrange` wrote words where this reads them; the memory is aligned.
    if constexpr (K == Kind::F32)
        Side<Singles, R, P>::template multiply<AHEAD>(reinterpret_cast<const float*>(data), weights, blocks.panel(), blocks.lines, next,
                                                      sums.of_floats);
    else if constexpr (K == Kind::BF16)
        Side<Floats, R, P>::template multiply<AHEAD>(reinterpret_cast<const float*>(data), weights, blocks.panel(), blocks.lines, next,
                                                     sums.of_floats);
    else
#if defined(__AVX2__)
        Side<Integers, R, P>::template multiply<AHEAD>(reinterpret_cast<const int32_t*>(data), weights, blocks.panel(), blocks.lines, next,
                                                       sums.of_integers);
#else
        integers<R, P>(reinterpret_cast<const int32_t*>(data), weights, blocks.panel(), blocks.lines, sums.of_integers);
#endif
    for (int i = 0; i < P; i++) sink.put(&sums.of_floats[i], m, std::min<int64_t>(R, blocks.M - m), p + i);
}

template <Kind K, int R, int P>
void group(const Blocks& blocks, const char* data, const char* weights, int64_t p, int64_t last, const Sink& sink, const char* then) {
    const char *own = weights + p * blocks.panel(), *next = p + P < last ? own + P * blocks.panel() : then ? then : own;
    for (int64_t block = 0; block < blocks.count; block++) {
        const char* x = data + block * blocks.block();
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
    // Enough sums at a time that none waits for the one before it, and no more than there are registers. One row of float32 waits for memory,
    // which is faster where panels are read one by one.
    constexpr int P = R == 1 ? (K == Kind::F32 ? 1 : 4) : R <= (L == CHANNELS ? 3 : 2) ? 2 : 1;
    int64_t p = first;
    for (; p + P <= last; p += P) group<K, R, P>(blocks, data, weights, p, last, sink, then);
    for (; p < last; p++) group<K, R, 1>(blocks, data, weights, p, last, sink, then);
}

using All = void (*)(const Blocks&, const char*, const char*, int64_t, int64_t, const Sink&, const char*);

#if defined(__AVX512F__)
template <Kind K>
constexpr All by_rows[] = {all<K, 1>, all<K, 2>, all<K, 3>, all<K, 4>,  all<K, 5>,  all<K, 6>,
                           all<K, 7>, all<K, 8>, all<K, 9>, all<K, 10>, all<K, 11>, all<K, 12>};
#else
template <Kind K>
constexpr All by_rows[] = {all<K, 1>, all<K, 2>, all<K, 3>, all<K, 4>, all<K, 5>, all<K, 6>};
#endif

}  // namespace

void multiply_wide(const Blocks& blocks, const char* data, const char* weights, int64_t first, int64_t last, const Sink& sink, const char* then) {
    if (blocks.count == 0) return;
    const auto& all = blocks.kind == Kind::F32 ? by_rows<Kind::F32> : blocks.kind == Kind::BF16 ? by_rows<Kind::BF16> : by_rows<Kind::INT8>;
    all[blocks.rows - 1](blocks, data, weights, first, last, sink, then);
}

}  // namespace npuc
