// Attention of a few query rows over paged keys and values of bfloat16, for neighbouring key heads of one request: what a decode step has.
//
// Scores are `attend_tiles`'s. Values are added up by vectors, in the order of tiles, so that a query's result is the same bits in any
// company: for so few rows, interleaving values for tiles costs more than reading them. What several heads have of a token is read from memory
// as one piece, where a head at a time is read in pieces of 256 bytes.
#include "attention.h"

#if defined(WITH_DOTS)
#include "attention_x86.h"
#include "scratch.h"
#include "tiles.h"

namespace npuc {

namespace {

// Tokens of a tile of keys, tokens and elements that a tile of values takes together, and most query rows.
constexpr int64_t KEYS = 16, VALUES = 32, PAIRS = 32, ROWS = 4;

// What is asked for while other tokens are computed, one line at a time between the arithmetic: a core waits when it asks for too many.
const bf16* next_of(const Pointers& p, const bf16* pool, int64_t j) { return j < p.end ? p.token(pool, j) : nullptr; }

INLINE void ask(const bf16* line) { __builtin_prefetch(line, 0, 2); }

// Scores [heads][rows][ld] of all tokens, with queries as columns [heads][D / 2][16][2]. Those of a page beyond the last token are read and
// never used.
WITH_TILES void score(const Pointers& p, int64_t count, int64_t rows, const uint16_t* columns, float* scores, int64_t ld) {
    alignas(64) float found[KEYS * 16];
    const HeadBf16& h = p.h;
    const int64_t apart = h.G * h.D;
    for (int64_t j = 0; j < p.last; j += KEYS) {
        const bf16 *keys = p.token(h.k, j), *next = j + KEYS < p.last ? next_of(p, h.k, j + KEYS) : next_of(p, h.v, 0);
        for (int64_t g = 0; g < count; g++) {
            const uint16_t* own = columns + g * h.D * 16;
            _tile_zero(0);
            for (int64_t d = 0; d < h.D; d += PAIRS) {
                if (next) {
                    UNROLL for (int i = 0; i < KEYS; i++) ask(next + i * apart + g * h.D + d);
                }
                _tile_loadd(1, keys + g * h.D + d, apart * 2);
                _tile_loadd(2, own + d * 16, LINE);
                _tile_dpbf16ps(0, 1, 2);
            }
            _tile_stored(0, found, LINE);
            turn(found, rows, scores + g * rows * ld + j, ld);
        }
    }
}

// sums [R][D / 32][2][16] += weights [R][ld] * values of up to 32 tokens, half of them from `values[1]` on, of one head; a vector has elements
// at even places or at odd ones. As in a tile, tokens at even places and at odd ones have sums of their own (Intel SDM, TDPBF16PS).
template <int R>
WITH_DOTS void add(const bf16* const (&values)[2], const bf16* const (&next)[2], int64_t apart, int64_t tokens, const float* weights, int64_t ld,
                   int64_t D, float* sums) {
    const __m512i high = _mm512_set1_epi32(int32_t(0xffff0000));
    for (int64_t d = 0; d < D; d += PAIRS) {
        __m512 even[2][R], odd[2][R];
        UNROLL for (int r = 0; r < R; r++) even[0][r] = odd[0][r] = even[1][r] = odd[1][r] = _mm512_setzero_ps();
        const auto take = [&](int64_t t, int half, __m512(&first)[R], __m512(&second)[R])
                              __attribute__((always_inline, target("avx512f,avx512bw,avx512dq,avx512vl"))) {
            const int64_t at = (t - half * KEYS) * apart + d;
            const __m512i line = _mm512_loadu_si512(values[half] + at);
            if (next[half]) ask(next[half] + at);
            const __m512 low = _mm512_castsi512_ps(_mm512_slli_epi32(line, 16)), up = _mm512_castsi512_ps(_mm512_and_si512(line, high));
            UNROLL for (int r = 0; r < R; r++) {
                const __m512 weight = _mm512_set1_ps(weights[r * ld + t]);
                first[r] = _mm512_fmadd_ps(low, weight, first[r]);
                second[r] = _mm512_fmadd_ps(up, weight, second[r]);
            }
        };
        for (int half = 0; half < 2; half++) {
            const int64_t stop = std::min<int64_t>(tokens, (half + 1) * KEYS);
            int64_t t = half * KEYS;
            for (; t + 1 < stop; t += 2) take(t, half, even[0], odd[0]), take(t + 1, half, even[1], odd[1]);
            if (t < stop) take(t, half, even[0], odd[0]);
        }
        UNROLL for (int r = 0; r < R; r++) {
            float* own = sums + r * D + d;
            _mm512_store_ps(own, _mm512_add_ps(_mm512_load_ps(own), _mm512_add_ps(even[0][r], even[1][r])));
            _mm512_store_ps(own + 16, _mm512_add_ps(_mm512_load_ps(own + 16), _mm512_add_ps(odd[0][r], odd[1][r])));
        }
    }
}

using Add = void (*)(const bf16* const (&)[2], const bf16* const (&)[2], int64_t, int64_t, const float*, int64_t, int64_t, float*);

constexpr Add by_rows[ROWS] = {add<1>, add<2>, add<3>, add<4>};

// A row's sums over the sum of its weights.
WITH_DOTS void put(const float* sums, int64_t D, float share, bf16* out) {
    const __m512 all = _mm512_set1_ps(share);
    for (int64_t d = 0; d < D; d += PAIRS) {
        const __m512i even = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(_mm512_mul_ps(_mm512_load_ps(sums + d), all)));
        const __m512i odd = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(_mm512_mul_ps(_mm512_load_ps(sums + d + 16), all)));
        _mm512_storeu_si512(out + d, _mm512_or_si512(even, _mm512_slli_epi32(odd, 16)));
    }
}

}  // namespace

bool has_few_for(int64_t rows, int64_t D, int64_t P) { return has_tiles_for(D) && rows <= ROWS && P % KEYS == 0; }

WITH_TILES void attend_few(const HeadBf16& h, int64_t count) {
    static thread_local Scratch kept[4];
    const int64_t rows = h.Q * h.heads, last = std::min(h.start + h.Q, h.N * h.P), ld = (last + KEYS - 1) / KEYS * KEYS;
    const Pointers p{h, last, std::min(last, h.live)};
    auto* scores = static_cast<float*>(kept[0].get(count * rows * ld * 4));
    auto* sums = static_cast<float*>(kept[1].get(count * rows * h.D * 4));
    auto* shares = static_cast<float*>(kept[2].get(count * rows * 4));
    auto* columns = static_cast<uint16_t*>(kept[3].get(count * h.D * 16 * 2));
    HeadBf16 one = h;
    for (; one.g < h.g + count; one.g++) lay_out(one, 0, rows, columns + (one.g - h.g) * h.D * 16);
    configure_tiles(LINES, 0);
    asm volatile("" : : "r"(columns) : "memory");
    score(p, count, rows, columns, scores, ld);
    _tile_release();
    for (int64_t i = 0; i < count * rows; i++) {
        float* own = scores + i * ld;
        // Token t attends to keys up to start + t. Weights are rounded, as tiles take them.
        const int64_t seen = std::min(h.start + i % rows / h.heads + 1, last);
        const auto keep = [own](int64_t j, __m512 weight) __attribute__((always_inline, target("avx512f,avx512bw,avx512vl,avx512bf16"))) {
            const __m512i bits = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(weight));
            _mm512_storeu_ps(own + j, _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16)));
        };
        shares[i] = weigh(own, seen, ld, h.scale, keep);
    }
    std::fill(sums, sums + count * rows * h.D, 0.0f);
    const auto pages = [&p](int64_t j, const bf16*(&to)[2]) { to[0] = next_of(p, p.h.v, j), to[1] = next_of(p, p.h.v, j + KEYS); };
    for (int64_t j = 0; j < p.end; j += VALUES) {
        const bf16 *values[2], *next[2];
        pages(j, values), pages(j + VALUES, next);
        for (int64_t g = 0; g < count; g++) {
            const bf16* const own[2] = {values[0] + g * h.D, values[1] ? values[1] + g * h.D : nullptr};
            const bf16* const asked[2] = {next[0] ? next[0] + g * h.D : nullptr, next[1] ? next[1] + g * h.D : nullptr};
            by_rows[rows - 1](own, asked, h.G * h.D, std::min(VALUES, p.end - j), scores + g * rows * ld + j, ld, h.D, sums + g * rows * h.D);
        }
    }
    for (one.g = h.g; one.g < h.g + count; one.g++)
        for (int64_t r = 0; r < rows; r++) {
            const int64_t i = (one.g - h.g) * rows + r;
            put(sums + i * h.D, h.D, shares[i], one.result(r));
        }
}

}  // namespace npuc
#endif
