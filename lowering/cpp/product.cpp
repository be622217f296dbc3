// Products with panels: the blocks of rows, and the variant that widens in registers, which runs everywhere.
#include "product.h"

#include <algorithm>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace npuc {

namespace {

// Rows of a block of each variant, and of one of float32: what its registers hold of sums.
constexpr int64_t MOST[] = {4, 12, 16}, MOST_FLOATS = L == 16 ? 12 : 4;

// One block of R rows and one panel; `x` are pairs [lines][R].
template <int R>
void floats(const int32_t* x, const char* weights, int64_t lines, float (*out)[CHANNELS]) {
    constexpr int V = CHANNELS / L;
    vec acc[R][V] = {};
    const ints high = ints{} + int32_t(0xffff0000);
    for (int64_t k = 0; k < lines; k++) {
        vec even[V], odd[V];
        UNROLL for (int v = 0; v < V; v++) {
            ints line;
            std::memcpy(&line, weights + k * LINE + v * 4 * L, sizeof line);
            const ints low = line << 16, top = line & high;
            std::memcpy(&even[v], &low, sizeof low);
            std::memcpy(&odd[v], &top, sizeof top);
        }
        UNROLL for (int r = 0; r < R; r++) {
            const bf16 first{uint16_t(x[k * R + r])}, second{uint16_t(uint32_t(x[k * R + r]) >> 16)};
            const float a = widen(first), b = widen(second);
            UNROLL for (int v = 0; v < V; v++) {
                acc[r][v] += even[v] * a;
                acc[r][v] += odd[v] * b;
            }
        }
    }
    UNROLL for (int r = 0; r < R; r++) {
        UNROLL for (int v = 0; v < V; v++) store(&out[r][v * L], acc[r][v]);
    }
}

#if defined(__AVX2__)
// The same of int8: each half of 16 bits of a line's words is widened, so that pairs are multiplied and added without overflow.
template <int R>
void integers(const int32_t* x, const char* weights, int64_t lines, int32_t (*out)[CHANNELS]) {
    __m256i acc[R][2];
    UNROLL for (int r = 0; r < R; r++) acc[r][0] = acc[r][1] = _mm256_setzero_si256();
    const auto even = [](__m256i v) { return _mm256_srai_epi16(_mm256_slli_epi16(v, 8), 8); };
    const auto odd = [](__m256i v) { return _mm256_srai_epi16(v, 8); };
    for (int64_t k = 0; k < lines; k++) {
        __m256i half[2];
        UNROLL for (int i = 0; i < 2; i++) half[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(weights + k * LINE + i * 32));
        UNROLL for (int r = 0; r < R; r++) {
            const __m256i own = _mm256_set1_epi32(x[k * R + r]);
            UNROLL for (int i = 0; i < 2; i++) {
                acc[r][i] = _mm256_add_epi32(acc[r][i], _mm256_madd_epi16(even(half[i]), even(own)));
                acc[r][i] = _mm256_add_epi32(acc[r][i], _mm256_madd_epi16(odd(half[i]), odd(own)));
            }
        }
    }
    UNROLL for (int r = 0; r < R; r++) {
        UNROLL for (int i = 0; i < 2; i++) _mm256_storeu_si256(reinterpret_cast<__m256i*>(&out[r][i * 8]), acc[r][i]);
    }
}
#else
template <int R>
void integers(const int32_t* x, const char* weights, int64_t lines, int32_t (*out)[CHANNELS]) {
    const auto* rows = reinterpret_cast<const int8_t*>(x);
    const auto* columns = reinterpret_cast<const int8_t*>(weights);
    for (int r = 0; r < R; r++)
        for (int64_t c = 0; c < CHANNELS; c++) {
            int32_t sum = 0;
            for (int64_t k = 0; k < lines * 4; k++) sum += rows[(k / 4 * R + r) * 4 + k % 4] * columns[(k / 4 * CHANNELS + c) * 4 + k % 4];
            out[r][c] = sum;
        }
}
#endif

template <int R>
void multiply_wide(const Blocks& blocks, const char* data, const char* weights, int64_t first, int64_t last, const Sink& sink) {
    union {
        float floats[R][CHANNELS];
        int32_t integers[R][CHANNELS];
    } sums;
    for (int64_t p = first; p < last; p++)
        for (int64_t block = 0; block < blocks.count; block++) {
            // `arrange` wrote words where this reads them; the memory is aligned.
            const auto* x = reinterpret_cast<const int32_t*>(data + block * blocks.block());
            const char* own = weights + p * blocks.panel();
            blocks.kind == Kind::BF16 ? floats<R>(x, own, blocks.lines, sums.floats) : integers<R>(x, own, blocks.lines, sums.integers);
            sink.put(&sums, block * R, std::min<int64_t>(R, blocks.M - block * R), p);
        }
}

}  // namespace

Blocks::Blocks(Kind kind, int64_t M, int64_t K) : kind(kind), isa(kind == Kind::F32 ? Isa::WIDE : npuc::isa()), M(M) {
    const int64_t size = bytes_of(kind), most = kind == Kind::F32 ? MOST_FLOATS : MOST[int(isa)];
    // A word of float32 is one element, of which panels of int4 have as many as those of bfloat16.
    width = K * size, lines = kind == Kind::F32 ? 2 * npuc::lines(K, 2) : npuc::lines(K, size);
    count = (M + most - 1) / most;
    // Rows are shared evenly, but tiles of several blocks are read in pairs and whole.
    rows = count > 0 ? (M + count - 1) / count : 0;
    if (isa == Isa::TILES && count > 1) count = up(count, 2), rows = most;
}

void arrange(const Blocks& blocks, const void* const* x, char* data, int64_t first, int64_t last) {
    // Bytes of a row that stay together: a line of a tile, else a word.
    const int64_t R = blocks.rows, all = blocks.lines * 4, piece = blocks.isa == Isa::TILES ? LINE : 4;
    for (int64_t block = first; block < last; block++)
        for (int64_t r = 0; r < R; r++) {
            const int64_t m = block * R + r, present = m < blocks.M ? blocks.width : 0, whole = present / piece * piece;
            char* to = data + block * blocks.block() + r * piece;
            const char* from = present ? static_cast<const char*>(x[m]) : nullptr;
            if (piece == 4)
                for (int64_t k = 0; k < whole; k += 4) std::memcpy(to + k * R, from + k, 4);
            else
                for (int64_t k = 0; k < whole; k += LINE) std::memcpy(to + k * R, from + k, LINE);
            for (int64_t k = whole; k < all; k++) to[k / piece * piece * R + k % piece] = k < present ? from[k] : char(0);
        }
}

void multiply(const Blocks& blocks, const char* data, const char* weights, int64_t first, int64_t last, const Sink& sink) {
#if defined(__x86_64__)
    if (blocks.isa == Isa::TILES) return multiply_tiles(blocks, data, weights, first, last, sink);
    if (blocks.isa == Isa::DOTS) return multiply_dots(blocks, data, weights, first, last, sink);
#endif
    switch (blocks.rows) {
        case 1: return multiply_wide<1>(blocks, data, weights, first, last, sink);
        case 2: return multiply_wide<2>(blocks, data, weights, first, last, sink);
        case 3: return multiply_wide<3>(blocks, data, weights, first, last, sink);
        default: return multiply_wide<4>(blocks, data, weights, first, last, sink);
    }
}

}  // namespace npuc
