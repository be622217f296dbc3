// Products with panels of int4 by AMX: weights are widened to tiles of bfloat16 in the cache.
#include <algorithm>

#include "product_int4.h"
#include "scratch.h"

#if defined(WITH_DOTS)
#include <immintrin.h>

#include "tiles.h"
#include "widen_int4.h"

namespace npuc {

namespace {

constexpr int64_t TILE = LINES * LINE;

// Bytes of int4 that are a tile.
constexpr int64_t PACKED = TILE / QUAD;

// Bytes of arranged rows that stay in the L2 cache beside the widened panels.
constexpr int64_t CACHED = 1 << 20;

// Tiles of a panel that are widened before they are loaded: a tile's load waits for stores that are on their way to the cache.
constexpr int64_t AHEAD = 3, KEPT = 4;

// Sums of a tile.
using Sums = float[LINES][CHANNELS];

WITH_TILES INLINE void widen(const char* from, __m512i values, char* to) {
    UNROLL for (int i = 0; i < int(LINES / QUAD); i++) {
        const __m512i line = _mm512_loadu_si512(from + i * LINE);
        char* at = to + i * QUAD * LINE;
        _mm512_store_si512(at, widened<0>(line, values));
        _mm512_store_si512(at + LINE, widened<1>(line, values));
        _mm512_store_si512(at + 2 * LINE, widened<2>(line, values));
        _mm512_store_si512(at + 3 * LINE, widened<3>(line, values));
    }
}

WITH_TILES INLINE void add_scaled(const Sums& group, const float* scale, int64_t rows, Sums& to) {
    const __m512 by = _mm512_loadu_ps(scale);
    for (int64_t r = 0; r < rows; r++) _mm512_store_ps(to[r], _mm512_fmadd_ps(_mm512_load_ps(group[r]), by, _mm512_load_ps(to[r])));
}

// One block of up to 16 rows with P panels side by side. The next panels are not prefetched, which was no faster.
template <int P>
WITH_TILES void few_rows(const Blocks& blocks, const char* x, const Int4& matrix, int64_t p, const Sink& sink) {
    alignas(64) char wide[KEPT][P][TILE];
    alignas(64) Sums group[4], totals[P] = {};
    const int64_t step = blocks.rows * LINE, panel = matrix.panel(), tiles = blocks.lines / LINES, each = tiles / matrix.groups;
    const char* own = matrix.weights + p * panel;
    const float* scale = scales_of(matrix, p, P);
    const __m512i values = nibble_values();
    for (int64_t k = 0; k < std::min(AHEAD, tiles); k++) {
        UNROLL for (int i = 0; i < P; i++) widen(own + i * panel + k * PACKED, values, wide[k % KEPT][i]);
    }
    int64_t k = 0;
    for (int64_t g = 0; g < matrix.groups; g++) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (const int64_t last = k + each; k < last; k++, x += step) {
            if (const int64_t later = k + AHEAD; later < tiles) {
                UNROLL for (int i = 0; i < P; i++) widen(own + i * panel + later * PACKED, values, wide[later % KEPT][i]);
            }
            const char(*now)[TILE] = wide[k % KEPT];
            _tile_loadd(4, x, LINE);
            _tile_loadd(5, now[0], LINE);
            _tile_dpbf16ps(0, 4, 5);
            if (P > 1) {
                _tile_loadd(6, now[P > 1 ? 1 : 0], LINE);
                _tile_dpbf16ps(1, 4, 6);
            }
            if (P > 2) {
                _tile_loadd(7, now[P > 2 ? 2 : 0], LINE);
                _tile_dpbf16ps(2, 4, 7);
            }
            if (P > 3) {
                _tile_loadd(5, now[P > 3 ? 3 : 0], LINE);
                _tile_dpbf16ps(3, 4, 5);
            }
        }
        _tile_stored(0, group[0], LINE);
        _tile_stored(1, group[1], LINE);
        _tile_stored(2, group[2], LINE);
        _tile_stored(3, group[3], LINE);
        UNROLL for (int i = 0; i < P; i++) add_scaled(group[i], scale + (i * matrix.groups + g) * CHANNELS, blocks.rows, totals[i]);
    }
    for (int i = 0; i < P; i++) sink.put(totals[i], 0, blocks.M, p + i);
}

// Two blocks of 16 rows with P panels, 1 or 2, which lie widened one behind the other.
template <int P>
WITH_TILES void two_blocks(const Int4& matrix, int64_t tiles, const char* x, const char* wide, const float* scale, Sums* totals) {
    alignas(64) Sums group[4];
    const int64_t end = tiles * TILE, each = end / matrix.groups;
    std::fill(totals[0][0], totals[0][0] + 4 * LINES * CHANNELS, 0.0f);
    for (int64_t g = 0, k = 0; g < matrix.groups; g++, scale += CHANNELS) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (const int64_t last = k + each; k < last; k += TILE) {
            _tile_loadd(4, x + k, LINE);
            _tile_loadd(6, wide + k, LINE);
            _tile_loadd(5, x + end + k, LINE);
            if (P > 1) _tile_loadd(7, wide + end + k, LINE);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 5, 6);
            if (P > 1) {
                _tile_dpbf16ps(2, 4, 7);
                _tile_dpbf16ps(3, 5, 7);
            }
        }
        _tile_stored(0, group[0], LINE);
        _tile_stored(1, group[1], LINE);
        _tile_stored(2, group[2], LINE);
        _tile_stored(3, group[3], LINE);
        UNROLL for (int i = 0; i < 2 * P; i++) add_scaled(group[i], scale + i / 2 * matrix.groups * CHANNELS, LINES, totals[i]);
    }
}

// The blocks [begin, end), an even number, with P panels.
template <int P>
WITH_TILES void many_rows(const Blocks& blocks, const char* data, int64_t begin, int64_t end, const Int4& matrix, int64_t p, const Sink& sink) {
    static thread_local Scratch kept;
    alignas(64) Sums totals[4];
    const int64_t tiles = blocks.lines / LINES, panel = matrix.panel();
    auto* wide = static_cast<char*>(kept.get(P * tiles * TILE));
    const char* own = matrix.weights + p * panel;
    const __m512i values = nibble_values();
    for (int64_t k = 0; k < P * tiles; k++) widen(own + k * PACKED, values, wide + k * TILE);
    const float* scale = scales_of(matrix, p, P);
    for (int64_t block = begin; block < end; block += 2) {
        two_blocks<P>(matrix, tiles, data + block * blocks.block(), wide, scale, totals);
        for (int64_t i = 0; i < 2 * P; i++) {
            const int64_t m = (block + i % 2) * LINES;
            if (m < blocks.M) sink.put(totals[i], m, std::min(LINES, blocks.M - m), p + i / 2);
        }
    }
}

}  // namespace

WITH_TILES void multiply_int4_tiles(const Blocks& blocks, const char* data, const Int4& matrix, int64_t first, int64_t last, const Sink& sink) {
    if (blocks.count == 1) {
        // Sums and rows have the rows of the block, weights 16 lines.
        configure_tiles(blocks.rows, 5);
        int64_t p = first;
        for (; p + 4 <= last; p += 4) few_rows<4>(blocks, data, matrix, p, sink);
        if (last - p == 3) few_rows<3>(blocks, data, matrix, p, sink);
        if (last - p == 2) few_rows<2>(blocks, data, matrix, p, sink);
        if (last - p == 1) few_rows<1>(blocks, data, matrix, p, sink);
    } else {
        configure_tiles(LINES, 8);
        const int64_t chunk = std::max<int64_t>(2, CACHED / blocks.block() / 2 * 2);
        for (int64_t begin = 0; begin < blocks.count; begin += chunk) {
            const int64_t end = std::min(blocks.count, begin + chunk);
            int64_t p = first;
            for (; p + 2 <= last; p += 2) many_rows<2>(blocks, data, begin, end, matrix, p, sink);
            if (p < last) many_rows<1>(blocks, data, begin, end, matrix, p, sink);
        }
    }
    _tile_release();
}

}  // namespace npuc
#endif
