// Products with panels of bfloat16 by AMX: a tile of weights is 16 lines of a panel, a tile of rows 32 of their elements.
#include <algorithm>

#include "product_bf16.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include "tiles.h"

namespace npuc {

namespace {

// Bytes of arranged rows that stay in the L2 cache beside the panels.
constexpr int64_t CACHED = 1 << 20;

constexpr int64_t TILE = LINES * 32;

// The sums of a tile of rows with one of channels, stored as bfloat16.
WITH_TILES void put(const float* sums, int64_t rows, int64_t channels, bf16* y, int64_t ld) {
    const __mmask16 some = __mmask16((1u << std::min(CHANNELS, channels)) - 1);
    for (int64_t r = 0; r < rows; r++)
        _mm256_mask_storeu_epi16(y + r * ld, some, (__m256i)_mm512_cvtneps_pbh(_mm512_load_ps(sums + r * CHANNELS)));
}

WITH_TILES INLINE void prefetch(const uint16_t* next, int64_t lines) {
    for (int64_t i = 0; i < lines; i++) _mm_prefetch(reinterpret_cast<const char*>(next) + i * LINE, _MM_HINT_T1);
}

// One block of up to 16 rows with P panels side by side, whose successors are prefetched.
template <int P>
WITH_TILES void few_rows(const Blocks& blocks, const uint16_t* x, const uint16_t* weights, int64_t channels, bf16* y, int64_t ld) {
    alignas(64) float sums[P][TILE / 2];
    const int64_t step = blocks.rows * 32, panel = blocks.wide * CHANNELS;
    const uint16_t* next = weights + P * panel;
    _tile_zero(0);
    if (P > 1) _tile_zero(1);
    if (P > 2) _tile_zero(2);
    if (P > 3) _tile_zero(3);
    for (int64_t k = 0; k < panel; k += TILE, x += step) {
        _tile_loadd(4, x, LINE);
        _tile_loadd(5, weights + k, LINE);
        prefetch(next + k, LINES);
        _tile_dpbf16ps(0, 4, 5);
        if (P > 1) {
            _tile_loadd(6, weights + panel + k, LINE);
            prefetch(next + panel + k, LINES);
            _tile_dpbf16ps(1, 4, 6);
        }
        if (P > 2) {
            _tile_loadd(7, weights + 2 * panel + k, LINE);
            prefetch(next + 2 * panel + k, LINES);
            _tile_dpbf16ps(2, 4, 7);
        }
        if (P > 3) {
            _tile_loadd(5, weights + 3 * panel + k, LINE);
            prefetch(next + 3 * panel + k, LINES);
            _tile_dpbf16ps(3, 4, 5);
        }
    }
    _tile_stored(0, sums[0], LINE);
    if (P > 1) _tile_stored(1, sums[1 % P], LINE);
    if (P > 2) _tile_stored(2, sums[2 % P], LINE);
    if (P > 3) _tile_stored(3, sums[3 % P], LINE);
    for (int p = 0; p < P; p++) put(sums[p], blocks.M, channels - p * CHANNELS, y + p * CHANNELS, ld);
}

// Two blocks of 16 rows with P panels, 1 or 2. Prefetches `ahead` lines from `next` on for every tile of a panel.
template <int P>
WITH_TILES void two_blocks(const uint16_t* x, const uint16_t* weights, int64_t panel, const uint16_t* next, int64_t ahead,
                           float (*sums)[TILE / 2]) {
    const uint16_t* other = x + panel;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = 0; k < panel; k += TILE, next += ahead * 32) {
        _tile_loadd(4, x + k, LINE);
        _tile_loadd(6, weights + k, LINE);
        _tile_loadd(5, other + k, LINE);
        if (P > 1) _tile_loadd(7, weights + panel + k, LINE);
        prefetch(next, ahead);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 5, 6);
        if (P > 1) {
            _tile_dpbf16ps(2, 4, 7);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums[0], LINE);
    _tile_stored(1, sums[1], LINE);
    _tile_stored(2, sums[2], LINE);
    _tile_stored(3, sums[3], LINE);
}

// The blocks [begin, end), an even number, with P panels from channel `n` on.
template <int P>
WITH_TILES void many_rows(const Blocks& blocks, const uint16_t* data, int64_t begin, int64_t end, const uint16_t* weights, int64_t n, int64_t N,
                          bf16* y, int64_t ld) {
    alignas(64) float sums[4][TILE / 2];
    const int64_t panel = blocks.wide * CHANNELS, tiles = panel / TILE, whole = P * tiles * LINES;
    // The next panels come from memory spread over all blocks that these are multiplied with.
    const int64_t ahead = (P * LINES * 2 + (end - begin) - 1) / (end - begin);
    int64_t done = 0;
    for (int64_t block = begin; block < end; block += 2) {
        const int64_t now = done < whole ? ahead : 0;
        two_blocks<P>(data + block * panel, weights, panel, weights + P * panel + done * 32, now, sums);
        done += now * tiles;
        for (int64_t i = 0; i < 2 * P; i++) {
            const int64_t m = (block + i % 2) * LINES, c = n + i / 2 * CHANNELS;
            if (m < blocks.M) put(sums[i], std::min(LINES, blocks.M - m), N - c, y + m * ld + c, ld);
        }
    }
}

}  // namespace

WITH_TILES void multiply_tiles(const Blocks& blocks, const uint16_t* data, const uint16_t* weights, int64_t first, int64_t last, int64_t N,
                               bf16* y, int64_t ld) {
    const int64_t panel = blocks.wide * CHANNELS;
    const auto at = [&](int64_t p) { return weights + p * panel; };
    if (blocks.count == 1) {
        configure_tiles(blocks.rows, 5);
        int64_t p = first;
        for (; p + 4 <= last; p += 4) few_rows<4>(blocks, data, at(p), N - p * CHANNELS, y + p * CHANNELS, ld);
        if (last - p == 3) few_rows<3>(blocks, data, at(p), N - p * CHANNELS, y + p * CHANNELS, ld);
        if (last - p == 2) few_rows<2>(blocks, data, at(p), N - p * CHANNELS, y + p * CHANNELS, ld);
        if (last - p == 1) few_rows<1>(blocks, data, at(p), N - p * CHANNELS, y + p * CHANNELS, ld);
    } else {
        configure_tiles(LINES, 8);
        const int64_t chunk = std::max<int64_t>(2, CACHED / (panel * 2) / 2 * 2);
        for (int64_t begin = 0; begin < blocks.count; begin += chunk) {
            const int64_t end = std::min(blocks.count, begin + chunk);
            int64_t p = first;
            for (; p + 2 <= last; p += 2) many_rows<2>(blocks, data, begin, end, at(p), p * CHANNELS, N, y, ld);
            if (p < last) many_rows<1>(blocks, data, begin, end, at(p), p * CHANNELS, N, y, ld);
        }
    }
    _tile_release();
}

}  // namespace npuc
#endif
