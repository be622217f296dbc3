// Attention of a few query rows over paged keys and values of bfloat16 by AVX-512's dot products, for neighbouring key heads of one request:
// what a decode step has without AMX.
//
// All sums are in the order of `attend_dots`. What several heads have of a page is read from memory as one piece, and is turned and multiplied
// in registers: for so few rows, storing panels costs more than multiplying with them.
#include "attention.h"

#if defined(WITH_DOTS)
#include "attention_x86.h"
#include "scratch.h"

namespace npuc {

namespace {

// Tokens that are taken together, elements of a line of a token, query rows that are taken together, and most of them.
constexpr int64_t TOKENS = 16, ELEMENTS = 32, TOGETHER = 8, ROWS = 64;

INLINE void ask(const bf16* line) { __builtin_prefetch(line, 0, 2); }

WITH_DOTS INLINE __m512 dot(__m512 sum, __m512i pairs, const void* pair) {
    int32_t both;
    std::memcpy(&both, pair, sizeof both);
    return _mm512_dpbf16_ps(sum, (__m512bh)pairs, (__m512bh)_mm512_set1_epi32(both));
}

// Scores [R][ld] of 16 tokens, which are `apart` elements apart. Asks for as much from `next` on.
template <int R>
WITH_DOTS void score(const bf16* const* queries, const bf16* keys, const bf16* next, int64_t apart, int64_t D, float* scores, int64_t ld) {
    __m512 sums[R];
    UNROLL for (int r = 0; r < R; r++) sums[r] = _mm512_setzero_ps();
    for (int64_t d = 0; d < D; d += ELEMENTS) {
        // A pair of bfloat16 is moved as a word.
        __m512 lines[TOKENS];
        UNROLL for (int i = 0; i < TOKENS; i++) lines[i] = _mm512_loadu_ps(keys + i * apart + d);
        turn(lines);
        UNROLL for (int i = 0; i < TOKENS; i++) {
            // One line at a time: a core waits when it asks for too many.
            if (next) ask(next + i * apart + d);
            UNROLL for (int r = 0; r < R; r++) sums[r] = dot(sums[r], _mm512_castps_si512(lines[i]), queries[r] + d + 2 * i);
        }
    }
    UNROLL for (int r = 0; r < R; r++) _mm512_storeu_ps(scores + r * ld, sums[r]);
}

// sums [R][D] += weights [R][ld] * values of up to 16 tokens, from element `d` on as long as there are W lines. Asks for as many from `next`
// on. Returns the element where it stops.
template <int R, int W>
WITH_DOTS int64_t add_lines(const uint16_t* weights, int64_t ld, const bf16* values, const bf16* next, int64_t apart, int64_t tokens, int64_t d,
                            int64_t D, float* sums) {
    const Interleaved pairs;
    for (; d + W * ELEMENTS <= D; d += W * ELEMENTS) {
        __m512 own[R][2 * W];
        UNROLL for (int r = 0; r < R; r++) {
            UNROLL for (int i = 0; i < 2 * W; i++) own[r][i] = _mm512_load_ps(sums + r * D + d + i * 16);
        }
        for (int64_t t = 0; t < tokens; t += 2) {
            UNROLL for (int w = 0; w < W; w++) {
                const int64_t at = t * apart + d + w * ELEMENTS;
                const __m512i a = _mm512_loadu_si512(values + at);
                const __m512i b = t + 1 < tokens ? _mm512_loadu_si512(values + at + apart) : _mm512_setzero_si512();
                if (next) ask(next + at), ask(next + at + apart);
                const __m512i first = pairs.first(a, b), second = pairs.second(a, b);
                UNROLL for (int r = 0; r < R; r++) {
                    own[r][2 * w] = dot(own[r][2 * w], first, weights + r * ld + t);
                    own[r][2 * w + 1] = dot(own[r][2 * w + 1], second, weights + r * ld + t);
                }
            }
        }
        UNROLL for (int r = 0; r < R; r++) {
            UNROLL for (int i = 0; i < 2 * W; i++) _mm512_store_ps(sums + r * D + d + i * 16, own[r][i]);
        }
    }
    return d;
}

template <int R>
WITH_DOTS void add(const uint16_t* weights, int64_t ld, const bf16* values, const bf16* next, int64_t apart, int64_t tokens, int64_t D,
                   float* sums) {
    // As many sums as there are registers.
    const int64_t d = add_lines<R, R <= 2 ? 4 : R <= 4 ? 2 : 1>(weights, ld, values, next, apart, tokens, 0, D, sums);
    add_lines<R, 1>(weights, ld, values, next, apart, tokens, d, D, sums);
}

using Score = void (*)(const bf16* const*, const bf16*, const bf16*, int64_t, int64_t, float*, int64_t);
using Add = void (*)(const uint16_t*, int64_t, const bf16*, const bf16*, int64_t, int64_t, int64_t, float*);

constexpr Score score_rows[TOGETHER] = {score<1>, score<2>, score<3>, score<4>, score<5>, score<6>, score<7>, score<8>};
constexpr Add add_rows[TOGETHER] = {add<1>, add<2>, add<3>, add<4>, add<5>, add<6>, add<7>, add<8>};

// All query rows of `count` heads: row i is row i % rows of head i / rows.
struct Heads {
    const HeadBf16& h;
    int64_t count, rows, last;
    Pointers p{h, last, std::min(last, h.live)};
    int64_t all = count * rows, ld = up(last, TOKENS), apart = h.G * h.D, blocks = (rows + TOGETHER - 1) / TOGETHER;
    int64_t block = (rows + blocks - 1) / blocks;

    // What the heads have of 16 tokens, or none beyond the last.
    const bf16* keys(int64_t j) const { return j < last ? p.token(h.k, j) : nullptr; }
    const bf16* values(int64_t j) const { return j < p.end ? p.token(h.v, j) : nullptr; }

    bf16* result(int64_t i) const { return h.result(i % rows) + i / rows * h.heads * h.D; }

    // Calls `use(first, rows, head, at)` for every block of rows with what `next` has of the head, or nothing if a block before asked for it.
    template <typename Use>
    void by_blocks(const bf16* next, const Use& use) const {
        for (int64_t head = 0; head < count; head++)
            for (int64_t row = 0; row < rows; row += block)
                use(head * rows + row, std::min(block, rows - row), head * h.D, next && !row ? next + head * h.D : nullptr);
    }

    // Scores [all][ld], of keys up to the end of the last's 16.
    void score(float* scores) const {
        const bf16* queries[TOGETHER];
        for (int64_t j = 0; j < last; j += TOKENS)
            by_blocks(j + TOKENS < last ? keys(j + TOKENS) : values(0), [&](int64_t first, int64_t own, int64_t at, const bf16* next) {
                for (int64_t r = 0; r < own; r++) queries[r] = h.query((first + r) % rows) + (first + r) / rows * h.heads * h.D;
                score_rows[own - 1](queries, keys(j) + at, next, apart, h.D, scores + first * ld + j, ld);
            });
    }

    // Weights [all][ld], and the reciprocals of their sums. Token t attends to keys up to start + t.
    WITH_DOTS void weigh(const float* scores, uint16_t* weights, float* shares) const {
        for (int64_t i = 0; i < all; i++) {
            const auto keep = [own = weights + i * ld](int64_t j, __m512 weight) __attribute__((always_inline, target("avx512f,avx512bf16"))) {
                _mm256_storeu_si256(reinterpret_cast<__m256i*>(own + j), (__m256i)_mm512_cvtneps_pbh(weight));
            };
            shares[i] = npuc::weigh(scores + i * ld, std::min(h.start + i % rows / h.heads + 1, last), ld, h.scale, keep);
        }
    }

    // results [all][D] of weighted values, `sums` [all][D] being those of a segment.
    void add(const uint16_t* weights, float* sums, float* results) const {
        std::fill(results, results + all * h.D, 0.0f);
        for (int64_t j = 0; j < p.end; j += TOKENS) {
            if (j % SEGMENT == 0) std::fill(sums, sums + all * h.D, 0.0f);
            by_blocks(values(j + TOKENS), [&](int64_t first, int64_t own, int64_t at, const bf16* next) {
                add_rows[own - 1](weights + first * ld + j, ld, values(j) + at, next, apart, std::min(TOKENS, p.end - j), h.D, sums + first * h.D);
            });
            if (j % SEGMENT == SEGMENT - TOKENS || j + TOKENS >= p.end)
                for (int64_t i = 0; i < all * h.D; i++) results[i] += sums[i];
        }
    }
};

}  // namespace

bool has_few_dots_for(int64_t rows, int64_t D, int64_t P) { return has_dots_for(D) && rows <= ROWS && P % TOKENS == 0; }

void attend_few_dots(const HeadBf16& h, int64_t count) {
    static thread_local Scratch kept[5];
    const Heads heads{h, count, h.Q * h.heads, std::min(h.start + h.Q, h.N * h.P)};
    const auto floats = [&](int i, int64_t each) { return static_cast<float*>(kept[i].get(heads.all * each * 4)); };
    float *scores = floats(0, heads.ld), *sums = floats(1, h.D), *results = floats(2, h.D), *shares = floats(3, 1);
    auto* weights = static_cast<uint16_t*>(kept[4].get(heads.all * heads.ld * 2));
    heads.score(scores);
    heads.weigh(scores, weights, shares);
    heads.add(weights, sums, results);
    for (int64_t i = 0; i < heads.all; i++)
        for (int64_t d = 0; d < h.D; d++) narrow(heads.result(i)[d], results[i * h.D + d] * shares[i]);
}

}  // namespace npuc
#endif
