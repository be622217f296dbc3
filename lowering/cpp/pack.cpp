// Panels (panels.h) of matrices as checkpoints have them. Compiled into a library of its own, too, which loads weights.
#include "pack.h"

#include <algorithm>
#include <cstring>

#include "panels.h"

using namespace npuc;

namespace {

// Transposes [16][width] words of rows that are `ld` apart, of which `rows` exist, to [width][16].
void transpose(const uint16_t* from, int64_t rows, int64_t K, int64_t pairs, uint32_t* to) {
    constexpr int64_t STEP = 16;
    for (int64_t k0 = 0; k0 < pairs; k0 += STEP) {
        uint32_t square[CHANNELS][STEP] = {};
        for (int64_t r = 0; r < rows; r++) {
            const int64_t left = std::min(2 * STEP, K - 2 * k0);
            if (left == 2 * STEP)
                std::memcpy(square[r], from + r * K + 2 * k0, sizeof square[r]);
            else if (left > 0)
                std::memcpy(square[r], from + r * K + 2 * k0, left * 2);
        }
        for (int64_t k = 0; k < STEP; k++)
            for (int64_t r = 0; r < CHANNELS; r++) to[(k0 + k) * CHANNELS + r] = square[r][k];
    }
}

}  // namespace

int64_t npuc_packed_bf16(int64_t N, int64_t K) { return panels(N) * lines(K, 2) * LINE; }

void npuc_pack_bf16(const void* weights, int64_t matrices, int64_t N, int64_t K, void* out) {
    const int64_t each = panels(N), pairs = lines(K, 2);
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < matrices * each; i++) {
        const int64_t first = i % each * CHANNELS;
        transpose(static_cast<const uint16_t*>(weights) + (i / each * N + first) * K, std::min(CHANNELS, N - first), K, pairs,
                  static_cast<uint32_t*>(out) + i * pairs * CHANNELS);
    }
}

int64_t npuc_packed_int8(int64_t K, int64_t N) { return panels(N) * (lines(K, 1) + 1) * LINE; }

void npuc_pack_int8(const void* weights, int64_t matrices, int64_t K, int64_t N, void* out) {
    const int64_t each = panels(N), panel = (lines(K, 1) + 1) * LINE;
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < matrices * each; i++) {
        const int64_t first = i % each * CHANNELS, channels = std::min(CHANNELS, N - first);
        const auto* from = static_cast<const int8_t*>(weights) + i / each * K * N + first;
        auto* to = static_cast<int8_t*>(out) + i * panel;
        int32_t sums[CHANNELS] = {};
        for (int64_t k = 0; k < lines(K, 1); k++) {
            int8_t four[4][CHANNELS] = {};
            for (int64_t j = 0; j < 4 && 4 * k + j < K; j++) std::memcpy(four[j], from + (4 * k + j) * N, channels);
            for (int64_t c = 0; c < CHANNELS; c++)
                for (int64_t j = 0; j < 4; j++) to[k * LINE + 4 * c + j] = four[j][c], sums[c] += four[j][c];
        }
        std::memcpy(to + panel - LINE, sums, LINE);
    }
}

int64_t npuc_packed_int4(int64_t K, int64_t words) { return panels(8 * words) * nibbles(K); }

void npuc_pack_int4(const void* weights, int64_t matrices, int64_t K, int64_t words, void* out) {
    const int64_t each = panels(8 * words), panel = nibbles(K);
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < matrices * each; i++) {
        const int64_t first = i % each * 2;
        const auto* from = static_cast<const uint32_t*>(weights) + i / each * K * words + first;
        auto* to = static_cast<char*>(out) + i * panel;
        for (int64_t quad = 0; quad < panel / LINE; quad++) {
            uint32_t line[CHANNELS] = {};
            for (int64_t j = 0; j < 8 && 8 * quad + j < K; j++) {
                const uint32_t* row = from + (8 * quad + j) * words;
                const uint32_t own[2] = {row[0], first + 1 < words ? row[1] : 0};
                for (int64_t c = 0; c < CHANNELS; c++) line[c] |= (own[c / 8] >> (4 * (c % 8)) & 15) << (4 * (j / 2) + 16 * (j % 2));
            }
            std::memcpy(to + quad * LINE, line, LINE);
        }
    }
}
