// Weights as products read them: in panels of 16 channels, made once when weights are loaded (pack.cpp).
//
// A matrix [N, K] of bfloat16 becomes [N / 16][K / 2][16][2]: a line of 64 bytes has a pair of each channel, which is what AVX-512's dot
// products take, and 16 lines are a tile of AMX. N is filled up with zeros to whole panels and K to whole tiles. One of float32
// becomes [N / 16][K][16], N and K filled up as for bfloat16. One of int8 becomes [N / 16][K / 4][16][4], and behind each panel stand the
// 16 sums of its channels, int32. One of int4 becomes [N / 16][K / 8][16] words of 32 bits: nibble i of a half is the weight of pair i of
// four, so that a line, shifted by 4 i, has a line of bfloat16's pairs as indices.
#pragma once

#include <cstdint>

namespace npuc {

constexpr int64_t CHANNELS = 16;

// Bytes of a line, and lines of a tile.
constexpr int64_t LINE = 64, LINES = 16;

constexpr int64_t up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

// Lines of a panel whose matrix has K elements of `size` bytes a channel.
constexpr int64_t lines(int64_t K, int64_t size) { return up(K, LINES * 4 / size) * size / 4; }

// Lines of bfloat16 that a line of int4 is.
constexpr int64_t QUAD = 4;

// Bytes of a panel of int4 whose matrix has K elements a channel: whole tiles once it is widened.
constexpr int64_t nibbles(int64_t K) { return lines(K, 2) / QUAD * LINE; }

// Panels of N channels.
constexpr int64_t panels(int64_t N) { return (N + CHANNELS - 1) / CHANNELS; }

}  // namespace npuc
