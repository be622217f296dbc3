// Attention over paged keys and values of bfloat16 by AMX, for one key head of one request.
//
// Keys are read in place as the rows of a product whose columns are queries, so they need no transposing; values are interleaved in pairs
// of tokens once, and then read by every block of queries. Scores of 16 queries are kept for all tokens, so a row's sums have one order.
#include "attention.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <initializer_list>

#include "scratch.h"
#include "tiles.h"

namespace npuc {

namespace {

// Tokens of a tile of keys, and of a tile of values.
constexpr int64_t KEYS = 16, VALUES = 32;

struct Pointers {
    const HeadBf16& h;
    int64_t last, end;  // tokens that a query attends to, and those whose values exist

    const bf16* token(const bf16* pool, int64_t j) const { return pool + ((int64_t(h.table[j / h.P]) * h.P + j % h.P) * h.G + h.g) * h.D; }

    // Asks for all lines of a token that some later step reads.
    void prefetch(const bf16* pool, int64_t j) const {
        if (j >= end) return;
        const auto* from = reinterpret_cast<const char*>(token(pool, j));
        for (int64_t at = 0; at < h.D * 2; at += LINE) __builtin_prefetch(from + at);
    }
};

// [16 tokens][16 queries] to [query][token], rows of the result being `ld` apart; only the first `queries` are stored.
WITH_TILES void turn(const float* from, int64_t queries, float* to, int64_t ld) {
    __m512 a[16], b[16];
    UNROLL for (int i = 0; i < 16; i++) a[i] = _mm512_load_ps(from + i * 16);
    UNROLL for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_ps(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_ps(a[i], a[i + 1]);
    }
    UNROLL for (int i = 0; i < 16; i += 4) {
        const auto pairs = [](__m512 x) __attribute__((always_inline, target("avx512f"))) { return _mm512_castps_pd(x); };
        a[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(pairs(b[i]), pairs(b[i + 2])));
        a[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(pairs(b[i]), pairs(b[i + 2])));
        a[i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(pairs(b[i + 1]), pairs(b[i + 3])));
        a[i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(pairs(b[i + 1]), pairs(b[i + 3])));
    }
    // Now a[4 t + c] has column c of each quarter, for tokens 4 t on.
    UNROLL for (int c = 0; c < 4; c++) {
        const __m512 low = _mm512_shuffle_f32x4(a[c], a[4 + c], 0x88), high = _mm512_shuffle_f32x4(a[c], a[4 + c], 0xdd);
        const __m512 low2 = _mm512_shuffle_f32x4(a[8 + c], a[12 + c], 0x88), high2 = _mm512_shuffle_f32x4(a[8 + c], a[12 + c], 0xdd);
        b[c] = _mm512_shuffle_f32x4(low, low2, 0x88);
        b[8 + c] = _mm512_shuffle_f32x4(low, low2, 0xdd);
        b[4 + c] = _mm512_shuffle_f32x4(high, high2, 0x88);
        b[12 + c] = _mm512_shuffle_f32x4(high, high2, 0xdd);
    }
    UNROLL for (int i = 0; i < 16; i++) {
        if (i < queries) _mm512_storeu_ps(to + i * ld, b[i]);
    }
}

// Queries as columns: [D / 2][16][2], zeros for those that do not exist.
void lay_out(const HeadBf16& h, int64_t first, int64_t queries, uint16_t* to) {
    std::fill(to, to + h.D * KEYS, uint16_t(0));
    for (int64_t r = 0; r < queries; r++) {
        const bf16* from = h.query(first + r);
        for (int64_t d = 0; d < h.D; d++) to[(d / 2 * 16 + r) * 2 + d % 2] = from[d].bits;
    }
}

// Scores of 16 queries, as columns at `columns`, for all tokens.
WITH_TILES void score(const Pointers& p, const uint16_t* columns, int64_t queries, int64_t last, uint16_t* copies, float* scores, int64_t ld) {
    alignas(64) float found[KEYS * 16];
    const HeadBf16& h = p.h;
    const int64_t apart = h.G * h.D;
    for (int64_t j = 0; j < last; j += KEYS) {
        const bf16* keys = p.token(h.k, j);
        int64_t step = apart;
        if (h.P % KEYS != 0) {
            // Tokens of several pages are not equally far apart.
            for (int64_t i = 0; i < KEYS; i++) std::copy_n(p.token(h.k, std::min(j + i, last - 1)), h.D, reinterpret_cast<bf16*>(copies) + i * h.D);
            keys = reinterpret_cast<const bf16*>(copies), step = h.D;
            asm volatile("" : : "r"(copies) : "memory");
        }
        for (int64_t i = 0; i < KEYS; i++) p.prefetch(h.k, j + 2 * KEYS + i);
        _tile_zero(0);
        for (int64_t d = 0; d < h.D; d += 32) {
            _tile_loadd(1, keys + d, step * 2);
            _tile_loadd(2, columns + d * 16, LINE);
            _tile_dpbf16ps(0, 1, 2);
        }
        _tile_stored(0, found, LINE);
        turn(found, queries, scores + j, ld);
    }
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

// e^x of numbers that are at most 0, as `exponential` of vec.h.
WITH_TILES INLINE __m512 exponential16(__m512 x) {
    const __mmask16 some = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.0f), _CMP_NLT_UQ);
    const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 8);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fmadd_ps(n, _mm512_set1_ps(2.12194440e-4f), r);
    __m512 y = _mm512_set1_ps(1.9875691500e-4f);
    for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
        y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(c));
    y = _mm512_add_ps(_mm512_fmadd_ps(y, _mm512_mul_ps(r, r), r), _mm512_set1_ps(1.0f));
    return _mm512_maskz_scalef_ps(some, y, n);
}

// Scores [count] become weights of bfloat16 [all], zeros from `count` on; returns the reciprocal of their sum.
WITH_TILES float weigh(float* scores, int64_t count, int64_t all, float scale, uint16_t* weights) {
    __m512 most = _mm512_set1_ps(-INFINITY);
    const auto some = [count](int64_t j) { return count - j >= 16 ? __mmask16(0xffff) : __mmask16((1u << std::max<int64_t>(0, count - j)) - 1); };
    // A score that is no number is no maximum, but makes the sum none.
    for (int64_t j = 0; j < count; j += 16) most = _mm512_mask_max_ps(most, some(j), _mm512_loadu_ps(scores + j), most);
    const float largest = _mm512_reduce_max_ps(most) * scale;
    __m512 sum = _mm512_setzero_ps();
    for (int64_t j = 0; j < all; j += 16) {
        __m512 weight = _mm512_setzero_ps();
        if (j < count) {
            const __m512 at = _mm512_sub_ps(_mm512_mul_ps(_mm512_loadu_ps(scores + j), _mm512_set1_ps(scale)), _mm512_set1_ps(largest));
            weight = _mm512_maskz_mov_ps(some(j), exponential16(at));
        }
        sum = _mm512_add_ps(sum, weight);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(weights + j), (__m256i)_mm512_cvtneps_pbh(weight));
    }
    return 1.0f / _mm512_reduce_add_ps(sum);
}

// out of 16 queries with weights [16][all]: sums over interleaved values, 64 of D at a time.
WITH_TILES void add_up(const HeadBf16& h, const uint16_t* weights, int64_t all, const uint16_t* values, int64_t first, int64_t queries,
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
            _tile_loadd(1, weights + j, all * 2);
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
    const int64_t all = up(last, VALUES);
    auto* values = static_cast<uint16_t*>(kept[0].get(all * h.D * 2));
    auto* scores = static_cast<float*>(kept[1].get(16 * all * 4));
    auto* weights = static_cast<uint16_t*>(kept[2].get(16 * all * 2));
    auto* columns = static_cast<uint16_t*>(kept[3].get(16 * h.D * 2));
    auto* copies = static_cast<uint16_t*>(kept[4].get(KEYS * h.D * 2));
    configure_tiles(LINES, 0);
    std::fill(weights, weights + 16 * all, uint16_t(0));
    bool ready = false;
    for (int64_t first = 0; first < rows; first += 16) {
        const int64_t queries = std::min<int64_t>(16, rows - first);
        const auto seen = [&](int64_t r) { return std::min(h.start + (first + r) / h.heads + 1, last); };
        const int64_t longest = seen(queries - 1);
        lay_out(h, first, queries, columns);
        score(p, columns, queries, longest, copies, scores, all);
        if (!ready) interleave(p, values), ready = true;
        float shares[16];
        for (int64_t r = 0; r < queries; r++) shares[r] = weigh(scores + r * all, seen(r), all, h.scale, weights + r * all);
        asm volatile("" : : "r"(weights), "r"(values) : "memory");
        add_up(h, weights, all, values, first, queries, shares);
    }
    _tile_release();
}

}  // namespace npuc
#endif
