// Panels (panels.h) of matrices as checkpoints have them. Compiled into a library of its own, too, which loads weights.
#include "pack.h"

#include <algorithm>
#include <cstring>

#include "panels.h"

using namespace npuc;

namespace {

// Transposes rows of `width` bytes, of which `rows` exist, to words [words][16].
void transpose(const char* from, int64_t rows, int64_t width, int64_t words, uint32_t* to) {
    constexpr int64_t STEP = 16;
    for (int64_t k0 = 0; k0 < words; k0 += STEP) {
        uint32_t square[CHANNELS][STEP] = {};
        for (int64_t r = 0; r < rows; r++) {
            const int64_t left = std::min(4 * STEP, width - 4 * k0);
            if (left == 4 * STEP)
                std::memcpy(square[r], from + r * width + 4 * k0, sizeof square[r]);
            else if (left > 0)
                std::memcpy(square[r], from + r * width + 4 * k0, left);
        }
        for (int64_t k = 0; k < STEP; k++)
            for (int64_t r = 0; r < CHANNELS; r++) to[(k0 + k) * CHANNELS + r] = square[r][k];
    }
}

// Packs matrices whose N channels are `width` bytes, and in panels `words` of 32 bits.
void pack_words(const void* weights, int64_t matrices, int64_t N, int64_t width, int64_t words, void* out) {
    const int64_t each = panels(N);
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < matrices * each; i++) {
        const int64_t first = i % each * CHANNELS;
        transpose(static_cast<const char*>(weights) + (i / each * N + first) * width, std::min(CHANNELS, N - first), width, words,
                  static_cast<uint32_t*>(out) + i * words * CHANNELS);
    }
}

typedef uint32_t Lanes __attribute__((vector_size(LINE)));

// The nibbles of 16 channels in row j of eight, of panel p, where a line has them.
template <int j>
inline Lanes gathered(const uint32_t (&rows)[8][16], int64_t p) {
    const Lanes shifts = {0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28};
    const Lanes first = {~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, 0, 0, 0, 0, 0, 0, 0, 0};
    const Lanes own = (first & rows[j][2 * p]) | (~first & rows[j][2 * p + 1]);
    return ((own >> shifts) & 15) << (4 * (j / 2) + 16 * (j % 2));
}

}  // namespace

int64_t npuc_packed_bf16(int64_t N, int64_t K) { return panels(N) * lines(K, 2) * LINE; }

void npuc_pack_bf16(const void* weights, int64_t matrices, int64_t N, int64_t K, void* out) {
    pack_words(weights, matrices, N, 2 * K, lines(K, 2), out);
}

int64_t npuc_packed_f32(int64_t N, int64_t K) { return 2 * npuc_packed_bf16(N, K); }

void npuc_pack_f32(const void* weights, int64_t matrices, int64_t N, int64_t K, void* out) {
    pack_words(weights, matrices, N, 4 * K, 2 * lines(K, 2), out);
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
    // The panels that are made side by side: their words in a row of the matrix are a line of the cache.
    constexpr int64_t SIDE = LINE / 8, WORDS = 2 * SIDE;
    const int64_t each = panels(8 * words), panel = nibbles(K), sides = (each + SIDE - 1) / SIDE;
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < matrices * sides; i++) {
        const int64_t side = i % sides, matrix = i / sides, first = side * WORDS, present = std::min(WORDS, words - first);
        const auto* from = static_cast<const uint32_t*>(weights) + matrix * K * words + first;
        auto* to = static_cast<char*>(out) + (matrix * each + side * SIDE) * panel;
        for (int64_t quad = 0; quad < panel / LINE; quad++) {
            uint32_t rows[8][WORDS] = {};
            for (int64_t j = 0; j < 8 && 8 * quad + j < K; j++) {
                if (present == WORDS)
                    std::memcpy(rows[j], from + (8 * quad + j) * words, sizeof rows[j]);
                else
                    std::memcpy(rows[j], from + (8 * quad + j) * words, present * 4);
            }
            for (int64_t p = 0; p < std::min(SIDE, each - side * SIDE); p++) {
                const Lanes line = gathered<0>(rows, p) | gathered<1>(rows, p) | gathered<2>(rows, p) | gathered<3>(rows, p) |
                                   gathered<4>(rows, p) | gathered<5>(rows, p) | gathered<6>(rows, p) | gathered<7>(rows, p);
                std::memcpy(to + p * panel + quad * LINE, &line, LINE);
            }
        }
    }
}
