// Products with panels of bfloat16: the blocks of rows, and the variant that widens in registers, which runs everywhere.
#include "product_bf16.h"

#include <algorithm>

namespace npuc {

namespace {

// Rows of a block of each variant: what its registers hold of sums.
constexpr int64_t MOST[] = {4, 12, 16};

// One block of R rows and one panel; `x` are pairs [K / 2][R].
template <int R>
void one_panel(const int32_t* x, const uint16_t* weights, int64_t pairs, float (*out)[CHANNELS]) {
    constexpr int V = CHANNELS / L;
    vec acc[R][V] = {};
    const ints high = ints{} + int32_t(0xffff0000);
    for (int64_t k = 0; k < pairs; k++) {
        vec even[V], odd[V];
        UNROLL for (int v = 0; v < V; v++) {
            ints line;
            std::memcpy(&line, weights + k * 32 + v * 2 * L, sizeof line);
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

template <int R>
void multiply_wide(const Blocks& blocks, const int32_t* data, const uint16_t* weights, int64_t first, int64_t last, int64_t N, bf16* y,
                   int64_t ld) {
    float out[R][CHANNELS];
    const int64_t pairs = blocks.wide / 2;
    for (int64_t p = first; p < last; p++)
        for (int64_t block = 0; block < blocks.count; block++) {
            one_panel<R>(data + block * R * pairs, weights + p * pairs * 32, pairs, out);
            const int64_t m0 = block * R, channels = std::min(CHANNELS, N - p * CHANNELS);
            for (int64_t r = 0; r < std::min<int64_t>(R, blocks.M - m0); r++)
                for (int64_t c = 0; c < channels; c++) narrow(y[(m0 + r) * ld + p * CHANNELS + c], out[r][c]);
        }
}

}  // namespace

Blocks::Blocks(int64_t M, int64_t K) : isa(npuc::isa()), M(M), K(K), wide(lines(K, 2) * 2) {
    const int64_t most = MOST[int(isa)];
    count = (M + most - 1) / most;
    // Rows are shared evenly, but tiles of several blocks are read in pairs and whole.
    rows = count > 0 ? (M + count - 1) / count : 0;
    if (isa == Isa::TILES && count > 1) count = up(count, 2), rows = most;
}

void arrange(const Blocks& blocks, const bf16* const* x, uint16_t* data, int64_t first, int64_t last) {
    const int64_t R = blocks.rows, wide = blocks.wide, K = blocks.K;
    // Pieces of a row that stay together: of tiles their width, else a pair.
    const int64_t piece = blocks.isa == Isa::TILES ? 2 * LINES : 2;
    for (int64_t block = first; block < last; block++)
        for (int64_t r = 0; r < R; r++) {
            const int64_t m = block * R + r;
            uint16_t* to = data + block * R * wide + r * piece;
            const bf16* from = m < blocks.M ? x[m] : nullptr;
            const int64_t whole = from ? K / piece * piece : 0;
            if (piece == 2)
                for (int64_t k = 0; k < whole; k += 2) std::memcpy(to + k * R, from + k, 4);
            else
                for (int64_t k = 0; k < whole; k += 2 * LINES) std::memcpy(to + k * R, from + k, 4 * LINES);
            for (int64_t k = whole; k < wide; k++) to[k / piece * piece * R + k % piece] = from && k < K ? from[k].bits : 0;
        }
}

void multiply(const Blocks& blocks, const uint16_t* data, const uint16_t* weights, int64_t first, int64_t last, int64_t N, bf16* y, int64_t ld) {
    // `arrange` wrote pairs where a variant reads them; the memory is aligned.
    const auto* pairs = reinterpret_cast<const int32_t*>(data);
#if defined(__x86_64__)
    if (blocks.isa == Isa::TILES) return multiply_tiles(blocks, data, weights, first, last, N, y, ld);
    if (blocks.isa == Isa::DOTS) return multiply_dots(blocks, pairs, weights, first, last, N, y, ld);
#endif
    switch (blocks.rows) {
        case 1: return multiply_wide<1>(blocks, pairs, weights, first, last, N, y, ld);
        case 2: return multiply_wide<2>(blocks, pairs, weights, first, last, N, y, ld);
        case 3: return multiply_wide<3>(blocks, pairs, weights, first, last, N, y, ld);
        default: return multiply_wide<4>(blocks, pairs, weights, first, last, N, y, ld);
    }
}

}  // namespace npuc
