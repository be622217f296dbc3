// Products with panels by vectors of floats and, for int8, of 16-bit integers: the variant that runs everywhere.
#include <algorithm>

#include "product.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace npuc {

namespace {

constexpr int V = CHANNELS / L;

// sum += a * b, rounded once. Not left to the compiler, since GCC 12 multiplies into the register of a factor and keeps copies of sums on
// the stack.
INLINE void add_product(vec& sum, vec a, vec b) {
#if defined(__FMA__)
    asm("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
#else
    sum += a * b;
#endif
}

// One block of R rows, `x` being floats [2 lines][R], and P panels side by side. Prefetches AHEAD lines from `next` on for every line of a
// panel: the next panels come from memory while these are multiplied.
template <int R, int P, int AHEAD>
void floats(const float* x, const char* weights, int64_t panel, int64_t lines, const char* next, float (*out)[R][CHANNELS]) {
    vec acc[P][R][V] = {};
    const ints high = ints{} + int32_t(0xffff0000);
    for (int64_t k = 0; k < lines; k++, x += 2 * R) {
        UNROLL for (int i = 0; i < AHEAD; i++, next += LINE) __builtin_prefetch(next, 0, 2);
        UNROLL for (int odd = 0; odd < 2; odd++) {
            UNROLL for (int i = 0; i < P; i++) {
                vec own[V];
                UNROLL for (int v = 0; v < V; v++) {
                    ints line;
                    std::memcpy(&line, weights + i * panel + k * LINE + v * 4 * L, sizeof line);
                    line = odd ? line & high : line << 16;
                    std::memcpy(&own[v], &line, sizeof line);
                }
                UNROLL for (int r = 0; r < R; r++) {
                    const vec by = fill(x[odd * R + r]);
                    UNROLL for (int v = 0; v < V; v++) add_product(acc[i][r][v], own[v], by);
                }
            }
        }
    }
    UNROLL for (int i = 0; i < P; i++) {
        UNROLL for (int r = 0; r < R; r++) {
            UNROLL for (int v = 0; v < V; v++) store(&out[i][r][v * L], acc[i][r][v]);
        }
    }
}

// The same of int8, `x` being pairs of int16 [2 lines][R]: no sum of two products overflows, so that all are exact.
#if defined(__AVX2__)
template <int R, int P, int AHEAD>
void integers(const int32_t* x, const char* weights, int64_t panel, int64_t lines, const char* next, int32_t (*out)[R][CHANNELS]) {
    __m256i acc[P][R][2];
    UNROLL for (int i = 0; i < P; i++) {
        UNROLL for (int r = 0; r < R; r++) acc[i][r][0] = acc[i][r][1] = _mm256_setzero_si256();
    }
    for (int64_t k = 0; k < lines; k++, x += 2 * R) {
        UNROLL for (int i = 0; i < AHEAD; i++, next += LINE) __builtin_prefetch(next, 0, 2);
        UNROLL for (int i = 0; i < P; i++) {
            UNROLL for (int v = 0; v < 2; v++) {
                const __m256i line = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(weights + i * panel + k * LINE + v * 32));
                const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(line, 8), 8), odd = _mm256_srai_epi16(line, 8);
                UNROLL for (int r = 0; r < R; r++) {
                    acc[i][r][v] = _mm256_add_epi32(acc[i][r][v], _mm256_madd_epi16(even, _mm256_set1_epi32(x[r])));
                    acc[i][r][v] = _mm256_add_epi32(acc[i][r][v], _mm256_madd_epi16(odd, _mm256_set1_epi32(x[R + r])));
                }
            }
        }
    }
    UNROLL for (int i = 0; i < P; i++) {
        UNROLL for (int r = 0; r < R; r++) {
            UNROLL for (int v = 0; v < 2; v++) _mm256_storeu_si256(reinterpret_cast<__m256i*>(&out[i][r][v * 8]), acc[i][r][v]);
        }
    }
}
#else
template <int R, int P, int AHEAD>
void integers(const int32_t* x, const char* weights, int64_t panel, int64_t lines, const char*, int32_t (*out)[R][CHANNELS]) {
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

template <int R, int P, int AHEAD>
void side_by_side(const Blocks& blocks, const char* data, const char* weights, const char* next, int64_t m, int64_t p, const Sink& sink) {
    union {
        float of_floats[P][R][CHANNELS];
        int32_t of_integers[P][R][CHANNELS];
    } sums;
    // `arrange` wrote words where this reads them; the memory is aligned.
    if (blocks.kind == Kind::BF16)
        floats<R, P, AHEAD>(reinterpret_cast<const float*>(data), weights, blocks.panel(), blocks.lines, next, sums.of_floats);
    else
        integers<R, P, AHEAD>(reinterpret_cast<const int32_t*>(data), weights, blocks.panel(), blocks.lines, next, sums.of_integers);
    for (int i = 0; i < P; i++) sink.put(&sums.of_floats[i], m, std::min<int64_t>(R, blocks.M - m), p + i);
}

template <int R, int P>
void group(const Blocks& blocks, const char* data, const char* weights, int64_t p, int64_t last, const Sink& sink, const char* then) {
    const char *own = weights + p * blocks.panel(), *next = p + P < last ? own + P * blocks.panel() : then ? then : own;
    for (int64_t block = 0; block < blocks.count; block++) {
        const char* x = data + block * blocks.block();
        // The first blocks prefetch what the next panels are; further ones find it in the cache.
        if (blocks.count == 1)
            side_by_side<R, P, P>(blocks, x, own, next, block * R, p, sink);
        else if (block < P)
            side_by_side<R, P, 1>(blocks, x, own, next + block * blocks.panel(), block * R, p, sink);
        else
            side_by_side<R, P, 0>(blocks, x, own, next, block * R, p, sink);
    }
}

template <int R>
void all(const Blocks& blocks, const char* data, const char* weights, int64_t first, int64_t last, const Sink& sink, const char* then) {
    // Enough sums at a time that none waits for the one before it, and no more than there are registers.
    constexpr int P = R == 1 ? 4 : R <= 3 ? 2 : 1;
    int64_t p = first;
    for (; p + P <= last; p += P) group<R, P>(blocks, data, weights, p, last, sink, then);
    for (; p < last; p++) group<R, 1>(blocks, data, weights, p, last, sink, then);
}

using All = void (*)(const Blocks&, const char*, const char*, int64_t, int64_t, const Sink&, const char*);

#if defined(__AVX512F__)
constexpr All by_rows[] = {all<1>, all<2>, all<3>, all<4>, all<5>, all<6>, all<7>, all<8>, all<9>, all<10>, all<11>, all<12>};
#else
constexpr All by_rows[] = {all<1>, all<2>, all<3>, all<4>, all<5>, all<6>};
#endif

}  // namespace

void multiply_wide(const Blocks& blocks, const char* data, const char* weights, int64_t first, int64_t last, const Sink& sink, const char* then) {
    if (blocks.count > 0) by_rows[blocks.rows - 1](blocks, data, weights, first, last, sink, then);
}

}  // namespace npuc
