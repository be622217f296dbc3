// Products with panels by AMX: a tile of weights is 16 lines of a panel, a tile of rows 64 bytes of each.
#include <algorithm>

#include "product.h"

#if defined(WITH_DOTS)
#include <immintrin.h>

#include "scratch.h"
#include "tiles.h"

namespace npuc {

namespace {

// Bytes of arranged rows that stay in the L2 cache beside the panels.
constexpr int64_t CACHED = 3 << 19;

constexpr int64_t TILE = LINES * LINE;

// Bytes of a panel from which few rows take it alone: memory gives lines faster that are read one after the other, but each end of a panel waits
// for a product.
constexpr int64_t LONG = 1 << 16;

// Bytes of a panel that many rows take at a time: two of them stay in the L1 cache while all blocks pass, where there are so many pairs of blocks
// that this is worth writing sums and reading them again. Two tiles of L2 for every two products are more than it gives.
constexpr int64_t PART = 8 * TILE, SPLIT = 4;

// Registers are named by literals.
#define DOT(sum, rows, weights)               \
    do {                                      \
        if (K == Kind::BF16)                  \
            _tile_dpbf16ps(sum, rows, weights); \
        else                                  \
            _tile_dpbssd(sum, rows, weights); \
    } while (false)

WITH_TILES INLINE void prefetch(const char* next, int64_t lines) {
    for (int64_t i = 0; i < lines; i++) _mm_prefetch(next + i * LINE, _MM_HINT_T1);
}

// One block of up to 16 rows with P panels side by side, whose successors are prefetched: those before `last`, else `then`.
template <Kind K, int P>
WITH_TILES void few_rows(const Blocks& blocks, const char* x, const char* weights, int64_t p, int64_t last, const Sink& sink, const char* then) {
    alignas(64) char sums[4][TILE];
    const int64_t step = blocks.rows * LINE, panel = blocks.panel(), end = blocks.lines * LINE;
    const char *own = weights + p * panel, *next = p + P < last ? own + P * panel : then ? then : own;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = 0; k < end; k += TILE, x += step) {
        _tile_loadd(4, x, LINE);
        _tile_loadd(5, own + k, LINE);
        prefetch(next + k, LINES);
        DOT(0, 4, 5);
        if (P > 1) {
            _tile_loadd(6, own + panel + k, LINE);
            prefetch(next + panel + k, LINES);
            DOT(1, 4, 6);
        }
        if (P > 2) {
            _tile_loadd(7, own + 2 * panel + k, LINE);
            prefetch(next + 2 * panel + k, LINES);
            DOT(2, 4, 7);
        }
        if (P > 3) {
            _tile_loadd(5, own + 3 * panel + k, LINE);
            prefetch(next + 3 * panel + k, LINES);
            DOT(3, 4, 5);
        }
    }
    _tile_stored(0, sums[0], LINE);
    _tile_stored(1, sums[1], LINE);
    _tile_stored(2, sums[2], LINE);
    _tile_stored(3, sums[3], LINE);
    for (int i = 0; i < P; i++) sink.put(sums[i], 0, blocks.M, p + i);
}

// Two blocks of 16 rows with P panels, 1 or 2, for `bytes` of each; `sums` are those of what is in front of it. Prefetches `ahead` lines from
// `next` on for every tile of a panel.
template <Kind K, int P>
WITH_TILES void two_blocks(const Blocks& blocks, const char* x, const char* weights, int64_t bytes, bool first, const char* next, int64_t ahead,
                           char (*sums)[TILE]) {
    const int64_t panel = blocks.panel();
    const char* other = x + blocks.lines * LINE;
    if (first) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    } else {
        _tile_loadd(0, sums[0], LINE);
        _tile_loadd(1, sums[1], LINE);
        if (P > 1) {
            _tile_loadd(2, sums[2], LINE);
            _tile_loadd(3, sums[3], LINE);
        }
    }
    for (int64_t k = 0; k < bytes; k += TILE, next += ahead * LINE) {
        _tile_loadd(4, x + k, LINE);
        _tile_loadd(6, weights + k, LINE);
        _tile_loadd(5, other + k, LINE);
        if (P > 1) _tile_loadd(7, weights + panel + k, LINE);
        prefetch(next, ahead);
        DOT(0, 4, 6);
        DOT(1, 5, 6);
        if (P > 1) {
            DOT(2, 4, 7);
            DOT(3, 5, 7);
        }
    }
    _tile_stored(0, sums[0], LINE);
    _tile_stored(1, sums[1], LINE);
    if (P > 1) {
        _tile_stored(2, sums[2], LINE);
        _tile_stored(3, sums[3], LINE);
    }
}

// The blocks [begin, end), an even number, with P panels.
template <Kind K, int P>
WITH_TILES void many_rows(const Blocks& blocks, const char* data, int64_t begin, int64_t end, const char* weights, int64_t p, const Sink& sink) {
    static thread_local Scratch kept;
    const int64_t pairs = (end - begin) / 2, all = blocks.lines * LINE, part = pairs < SPLIT ? all : PART;
    auto* sums = static_cast<char(*)[TILE]>(kept.get((part < all ? pairs : 1) * 4 * TILE));
    const char *own = weights + p * blocks.panel(), *next = own + P * blocks.panel();
    // The next panels come from memory spread over all blocks that these are multiplied with.
    const int64_t ahead = (P * LINES + pairs - 1) / pairs;
    int64_t done = 0;
    for (int64_t k = 0; k < all; k += part) {
        const int64_t bytes = std::min(part, all - k);
        for (int64_t pair = 0; pair < pairs; pair++) {
            const int64_t block = begin + 2 * pair, now = done < P * blocks.panel() ? ahead : 0;
            auto* found = part < all ? sums + 4 * pair : sums;
            two_blocks<K, P>(blocks, data + block * blocks.block() + k, own + k, bytes, k == 0, next + done, now, found);
            done += now * bytes / LINES;
            if (k + bytes < all) continue;
            for (int64_t i = 0; i < 2; i++) {
                const int64_t m = (block + i) * LINES;
                if (m >= blocks.M) break;
                if (P > 1)
                    sink.put_two(found[i], found[2 + i], m, std::min(LINES, blocks.M - m), p);
                else
                    sink.put(found[i], m, std::min(LINES, blocks.M - m), p);
            }
        }
    }
}

template <Kind K>
WITH_TILES void all(const Blocks& blocks, const char* data, const char* weights, int64_t first, int64_t last, const Sink& sink, const char* then) {
    if (blocks.count == 1) {
        configure_tiles(blocks.rows, 5);
        int64_t p = first;
        if (blocks.panel() < LONG) {
            for (; p + 4 <= last; p += 4) few_rows<K, 4>(blocks, data, weights, p, last, sink, then);
            if (last - p == 3) few_rows<K, 3>(blocks, data, weights, p, last, sink, then), p += 3;
            if (last - p == 2) few_rows<K, 2>(blocks, data, weights, p, last, sink, then), p += 2;
        }
        for (; p < last; p++) few_rows<K, 1>(blocks, data, weights, p, last, sink, then);
    } else {
        configure_tiles(LINES, 8);
        const int64_t most = std::max<int64_t>(2, CACHED / blocks.block() / 2 * 2), passes = (blocks.count + most - 1) / most;
        const int64_t chunk = up((blocks.count + passes - 1) / passes, 2);
        for (int64_t begin = 0; begin < blocks.count; begin += chunk) {
            const int64_t end = std::min(blocks.count, begin + chunk);
            int64_t p = first;
            for (; p + 2 <= last; p += 2) many_rows<K, 2>(blocks, data, begin, end, weights, p, sink);
            if (p < last) many_rows<K, 1>(blocks, data, begin, end, weights, p, sink);
        }
    }
    _tile_release();
    // Results may have gone past the caches, which nobody else waits for.
    _mm_sfence();
}

}  // namespace

void multiply_tiles(const Blocks& blocks, const char* data, const char* weights, int64_t first, int64_t last, const Sink& sink, const char* then) {
    blocks.kind == Kind::BF16 ? all<Kind::BF16>(blocks, data, weights, first, last, sink, then)
                              : all<Kind::INT8>(blocks, data, weights, first, last, sink, then);
}

}  // namespace npuc
#endif
