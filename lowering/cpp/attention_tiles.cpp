// Attention over paged keys and values of bfloat16 by AMX, for one key head of one request.
//
// Keys are the rows of a product whose columns are queries, so they need no transposing: 16 queries read them in place, and more read a copy
// that has no gaps, since tokens of a pool that are a power of two apart share few lines of the cache. Values are interleaved in pairs of tokens
// once, and then read by every block of queries. Scores of 16 queries are kept for all tokens, so a row's sums have one order.
#include "attention.h"

#if defined(WITH_DOTS)
#include "attention_x86.h"
#include "scratch.h"
#include "tiles.h"

namespace npuc {

namespace {

// Tokens of a tile of keys, and of a tile of values.
constexpr int64_t KEYS = 16, VALUES = 32;

// Tiles of keys whose scores are summed side by side: one sum after the other would wait for the product before it.
constexpr int64_t BESIDE = 4;

// Scores of 16 queries, as columns at `columns`, for all tokens before `last`. Keys start at `keys`, `step` elements apart, or where they are in
// pools if it is null.
WITH_TILES void score(const Pointers& p, const uint16_t* columns, int64_t queries, int64_t last, const uint16_t* keys, float* scores, int64_t ld) {
    alignas(64) float found[BESIDE][KEYS * 16];
    const HeadBf16& h = p.h;
    const int64_t step = keys ? h.D * 2 : h.G * h.D * 2;
    for (int64_t j = 0; j < last; j += BESIDE * KEYS) {
        const int64_t tiles = std::min(BESIDE, (last - j + KEYS - 1) / KEYS);
        const void* from[BESIDE];
        for (int64_t t = 0; t < BESIDE; t++) {
            const int64_t at = j + std::min(t, tiles - 1) * KEYS;
            from[t] = keys ? static_cast<const void*>(keys + at * h.D) : p.token(h.k, at);
        }
        if (!keys)
            for (int64_t i = 0; i < BESIDE * KEYS; i++) p.prefetch(h.k, j + BESIDE * KEYS + i);
        _tile_zero(0);
        _tile_zero(3);
        _tile_zero(4);
        _tile_zero(5);
        for (int64_t d = 0; d < h.D * 2; d += LINE) {
            const auto tile = [=](int64_t t) __attribute__((always_inline)) { return static_cast<const char*>(from[t]) + d; };
            _tile_loadd(2, columns + d * 8, LINE);
            _tile_loadd(1, tile(0), step);
            _tile_dpbf16ps(0, 1, 2);
            if (tiles < 2) continue;
            _tile_loadd(6, tile(1), step);
            _tile_dpbf16ps(3, 6, 2);
            if (tiles < 3) continue;
            _tile_loadd(7, tile(2), step);
            _tile_dpbf16ps(4, 7, 2);
            if (tiles < 4) continue;
            _tile_loadd(1, tile(3), step);
            _tile_dpbf16ps(5, 1, 2);
        }
        _tile_stored(0, found[0], LINE);
        _tile_stored(3, found[1], LINE);
        _tile_stored(4, found[2], LINE);
        _tile_stored(5, found[3], LINE);
        for (int64_t t = 0; t < tiles; t++) turn(found[t], queries, scores + j + t * KEYS, ld);
    }
}

// Keys of all tokens without gaps: [tokens, filled up to a tile][D].
WITH_TILES void collect(const Pointers& p, uint16_t* to) {
    const HeadBf16& h = p.h;
    for (int64_t j = 0; j < p.last; j++, to += h.D) {
        p.prefetch(h.k, j + VALUES);
        std::memcpy(to, p.token(h.k, j), h.D * 2);
    }
    std::fill(to, to + (up(p.last, KEYS) - p.last) * h.D, uint16_t(0));
}

// Values in pairs of tokens: [tokens / 2][D][2], zeros for tokens without values.
WITH_TILES void interleave(const Pointers& p, uint16_t* to) {
    const HeadBf16& h = p.h;
    const int64_t all = up(p.last, VALUES);
    const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2,
                                         33, 1, 32, 0);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    for (int64_t j = 0; j < all; j += 2, to += 2 * h.D) {
        const bf16* a = j < p.end ? p.token(h.v, j) : nullptr;
        const bf16* b = j + 1 < p.end ? p.token(h.v, j + 1) : nullptr;
        p.prefetch(h.v, j + VALUES), p.prefetch(h.v, j + VALUES + 1);
        for (int64_t d = 0; d < h.D; d += 32) {
            const __m512i x = a ? _mm512_loadu_si512(a + d) : _mm512_setzero_si512(), y = b ? _mm512_loadu_si512(b + d) : _mm512_setzero_si512();
            _mm512_store_si512(to + 2 * d, _mm512_permutex2var_epi16(x, low, y));
            _mm512_store_si512(to + 2 * d + 32, _mm512_permutex2var_epi16(x, high, y));
        }
    }
}

// out of 16 queries with weights [16][ld] of `all` tokens: sums over interleaved values, 64 of D at a time.
WITH_TILES void add_up(const HeadBf16& h, const uint16_t* weights, int64_t ld, int64_t all, const uint16_t* values, int64_t first, int64_t queries,
                       const float* shares) {
    alignas(64) float found[4][16 * 16];
    for (int64_t d = 0; d < h.D; d += 64) {
        const bool both = d + 32 < h.D;
        _tile_zero(0);
        _tile_zero(3);
        _tile_zero(4);
        _tile_zero(5);
        for (int64_t j = 0; j < all; j += VALUES) {
            const uint16_t* from = values + j * h.D + 2 * d;
            _tile_loadd(1, weights + j, ld * 2);
            _tile_loadd(6, from, h.D * 4);
            _tile_dpbf16ps(0, 1, 6);
            _tile_loadd(7, from + 32, h.D * 4);
            _tile_dpbf16ps(3, 1, 7);
            if (both) {
                _tile_loadd(6, from + 64, h.D * 4);
                _tile_dpbf16ps(4, 1, 6);
                _tile_loadd(7, from + 96, h.D * 4);
                _tile_dpbf16ps(5, 1, 7);
            }
        }
        _tile_stored(0, found[0], LINE);
        _tile_stored(3, found[1], LINE);
        _tile_stored(4, found[2], LINE);
        _tile_stored(5, found[3], LINE);
        for (int64_t r = 0; r < queries; r++)
            for (int64_t i = 0; i < (both ? 4 : 2); i++) {
                const __m512 mean = _mm512_mul_ps(_mm512_load_ps(found[i] + r * 16), _mm512_set1_ps(shares[r]));
                _mm256_storeu_si256(reinterpret_cast<__m256i*>(h.result(first + r) + d + i * 16), (__m256i)_mm512_cvtneps_pbh(mean));
            }
    }
}

}  // namespace

bool has_tiles_for(int64_t D) { return isa() == Isa::TILES && D % 32 == 0; }

WITH_TILES void attend_tiles(const HeadBf16& h) {
    static thread_local Scratch kept[5];
    const int64_t rows = h.Q * h.heads, last = std::min(h.start + h.Q, h.N * h.P);
    const Pointers p{h, last, std::min(last, h.live)};
    // Rows of scores and weights are no power of two apart, as that would share few lines of the cache.
    const int64_t all = up(last, VALUES), ld = all + 32;
    auto* values = static_cast<uint16_t*>(kept[0].get(all * h.D * 2));
    auto* scores = static_cast<float*>(kept[1].get(16 * ld * 4));
    auto* weights = static_cast<uint16_t*>(kept[2].get(16 * ld * 2));
    auto* columns = static_cast<uint16_t*>(kept[3].get(16 * h.D * 2));
    uint16_t* keys = nullptr;
    // Tokens of several pages are not equally far apart.
    if (rows > 16 || h.P % KEYS != 0) {
        keys = static_cast<uint16_t*>(kept[4].get(all * h.D * 2));
        collect(p, keys);
    }
    configure_tiles(LINES, 0);
    std::fill(weights, weights + 16 * ld, uint16_t(0));
    bool ready = false;
    for (int64_t first = 0; first < rows; first += 16) {
        const int64_t queries = std::min<int64_t>(16, rows - first);
        const auto seen = [&](int64_t r) { return std::min(h.start + (first + r) / h.heads + 1, last); };
        const int64_t longest = seen(queries - 1), whole = up(longest, VALUES);
        lay_out(h, first, queries, columns);
        asm volatile("" : : "r"(columns), "r"(keys) : "memory");
        score(p, columns, queries, longest, keys, scores, ld);
        if (!ready) interleave(p, values), ready = true;
        float shares[16];
        for (int64_t r = 0; r < queries; r++) {
            uint16_t* own = weights + r * ld;
            shares[r] = weigh(scores + r * ld, seen(r), whole, h.scale, [own](int64_t j, __m512 weight) __attribute__((always_inline, target("avx512bf16,avx512vl"))) {
                _mm256_storeu_si256(reinterpret_cast<__m256i*>(own + j), (__m256i)_mm512_cvtneps_pbh(weight));
            });
        }
        asm volatile("" : : "r"(weights), "r"(values) : "memory");
        add_up(h, weights, ld, whole, values, first, queries, shares);
    }
    _tile_release();
}

}  // namespace npuc
#endif
