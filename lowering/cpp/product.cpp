// The blocks of rows of products with panels, and the choice of the variant that multiplies them.
#include "product.h"

#include <algorithm>

namespace npuc {

namespace {

// Rows of a block of each variant: what its registers hold of sums.
constexpr int64_t MOST[] = {L == 16 ? 12 : 6, 12, 16};

// Copies `count` elements to words that are R apart: pairs of bfloat16 become two floats, and fours of int8 two pairs of int16, of those at
// even places and of those at odd ones, which is what lines of weights are widened to.
template <typename T>
void widen_pairs(const T* from, int64_t count, int64_t words, int64_t R, char* to);

template <>
void widen_pairs(const bf16* from, int64_t count, int64_t words, int64_t R, char* to) {
    for (int64_t k = 0; k < words; k++) {
        const float value = k < count ? widen(from[k]) : 0.0f;
        std::memcpy(to + k * R * 4, &value, 4);
    }
}

template <>
void widen_pairs(const int8_t* from, int64_t count, int64_t words, int64_t R, char* to) {
    const auto at = [=](int64_t k) { return k < count ? int16_t(from[k]) : int16_t(0); };
    for (int64_t k = 0; k < words; k++) {
        const int64_t first = k / 2 * 4 + k % 2;
        const int16_t pair[] = {at(first), at(first + 2)};
        std::memcpy(to + k * R * 4, pair, 4);
    }
}

// The number of rows of a block, of those that keep an AVX2 processor busy, which fills up the last block the least.
int64_t fewest_added(int64_t M, int64_t most) {
    int64_t best = most;
    for (int64_t rows = most - 1; rows >= 4; rows--)
        if (up(M, rows) < up(M, best)) best = rows;
    return best;
}

}  // namespace

Blocks::Blocks(Kind kind, int64_t M, int64_t K, int64_t few) : kind(kind), isa(kind == Kind::F32 ? Isa::WIDE : npuc::isa()), M(M) {
    in_order_of_tiles = isa == Isa::TILES && M <= few;
    if (in_order_of_tiles) isa = Isa::WIDE;
    const int64_t size = bytes_of(kind), most = MOST[int(isa)];
    // Panels that float32 is multiplied with, its own and those of int4, have as many elements as those of bfloat16.
    width = K * size, lines = npuc::lines(K, std::min<int64_t>(size, 2)), words = isa == Isa::WIDE ? 2 * lines : lines;
    count = (M + most - 1) / most;
    // Rows are shared evenly, but tiles of several blocks are read in pairs and whole.
    rows = count > 0 ? (M + count - 1) / count : 0;
    if (isa == Isa::WIDE && count > 1) rows = fewest_added(M, most), count = (M + rows - 1) / rows;
    if (isa == Isa::TILES && count > 1) count = up(count, 2), rows = most;
}

void arrange(const Blocks& blocks, const void* const* x, char* data, int64_t first, int64_t last) {
    // Bytes of a row that stay together: a line of a tile, else a word.
    const int64_t R = blocks.rows, all = blocks.words * 4, piece = blocks.isa == Isa::TILES ? LINE : 4;
    for (int64_t block = first; block < last; block++)
        for (int64_t r = 0; r < R; r++) {
            const int64_t m = block * R + r, present = m < blocks.M ? blocks.width : 0, whole = present / piece * piece;
            char* to = data + block * blocks.block() + r * piece;
            const char* from = present ? static_cast<const char*>(x[m]) : nullptr;
            if (blocks.isa == Isa::WIDE && blocks.kind != Kind::F32) {
                if (blocks.kind == Kind::BF16)
                    widen_pairs(reinterpret_cast<const bf16*>(from), present / 2, blocks.words, R, to);
                else
                    widen_pairs(reinterpret_cast<const int8_t*>(from), present, blocks.words, R, to);
                continue;
            }
            // AVX-512 multiplies unsigned int8 (product_dots.cpp).
            const uint32_t shift = blocks.isa == Isa::DOTS && blocks.kind == Kind::INT8 ? 0x80808080 : 0;
            if (piece == 4)
                for (int64_t k = 0; k < whole; k += 4) {
                    uint32_t word;
                    std::memcpy(&word, from + k, 4);
                    word ^= shift;
                    std::memcpy(to + k * R, &word, 4);
                }
            else
                for (int64_t k = 0; k < whole; k += LINE) std::memcpy(to + k * R, from + k, LINE);
            for (int64_t k = whole; k < all; k++) to[k / piece * piece * R + k % piece] = (k < present ? from[k] : char(0)) ^ char(shift);
        }
}

void multiply(const Blocks& blocks, const char* data, const char* weights, int64_t first, int64_t last, const Sink& sink,
              const char* then) {
#if defined(WITH_DOTS)
    if (blocks.in_order_of_tiles) return blocks.count > 0 ? multiply_few(blocks, data, weights, first, last, sink, then) : void();
    if (blocks.isa == Isa::TILES) return multiply_tiles(blocks, data, weights, first, last, sink, then);
    if (blocks.isa == Isa::DOTS) return multiply_dots(blocks, data, weights, first, last, sink, then);
#endif
    multiply_wide(blocks, data, weights, first, last, sink, then);
}

}  // namespace npuc
