// Attention over paged keys and values of bfloat16 by AVX-512's dot products, for query rows of one key head of one request.
//
// Keys and values of a segment of tokens are rearranged to panels (panels.h) and multiplied as weights are (product.h): that costs less than
// reading them from memory. All sums are in the order of tokens, so a row is the same bits in any company.
#include "attention.h"

#if defined(WITH_DOTS)
#include <vector>

#include "attention_x86.h"
#include "product.h"
#include "scratch.h"

namespace npuc {

namespace {

// Elements of a line of a token.
constexpr int64_t ELEMENTS = 32;

// Weighted values of a segment, added to those of segments before.
struct Added final : Sink {
    float* to;
    int64_t ld;

    Added(float* to, int64_t ld) : to(to), ld(ld) {}

    void put(const void* sums, int64_t m, int64_t rows, int64_t p) const override {
        for (int64_t r = 0; r < rows; r++) {
            float* row = to + (m + r) * ld + p * CHANNELS;
            for (int64_t c = 0; c < CHANNELS; c++) row[c] += static_cast<const float*>(sums)[r * CHANNELS + c];
        }
    }
};

// Keys [j, j + count) as panels of 16 tokens; there are zeros in place of tokens that do not exist.
WITH_DOTS void pack_keys(const Pointers& p, int64_t j, int64_t count, char* to) {
    alignas(64) float words[CHANNELS * 16];
    const int64_t D = p.h.D;
    for (int64_t t = 0; t < count; t += CHANNELS, to += D / 2 * LINE) {
        const bf16 *keys[CHANNELS], *ahead[CHANNELS];
        for (int64_t i = 0; i < CHANNELS; i++) {
            keys[i] = t + i < count ? p.token(p.h.k, j + t + i) : nullptr;
            ahead[i] = j + SEGMENT + t + i < p.last ? p.token(p.h.k, j + SEGMENT + t + i) : t + i < p.end ? p.token(p.h.v, t + i) : nullptr;
        }
        for (int64_t d = 0; d < D; d += ELEMENTS) {
            // One line of each token at a time: a core waits when it asks for too many.
            for (int64_t i = 0; i < CHANNELS; i++) {
                _mm512_store_si512(words + i * 16, keys[i] ? _mm512_loadu_si512(keys[i] + d) : _mm512_setzero_si512());
                if (ahead[i]) _mm_prefetch(ahead[i] + d, _MM_HINT_T0);
            }
            // A pair of bfloat16 is moved as a word.
            turn(words, 16, reinterpret_cast<float*>(to + d / 2 * LINE), 16);
        }
    }
}

// Values [j, j + count) as panels of 16 elements, of `all` tokens, zeros from `count` on.
WITH_DOTS void pack_values(const Pointers& p, int64_t j, int64_t count, int64_t all, char* to) {
    const Interleaved pairs;
    const int64_t panel = all / 2 * LINE;
    for (int64_t t = 0; t < all; t += 2, to += LINE) {
        const bf16* first = t < count ? p.token(p.h.v, j + t) : nullptr;
        const bf16* second = t + 1 < count ? p.token(p.h.v, j + t + 1) : nullptr;
        const bf16* ahead = j + SEGMENT + t < p.end ? p.token(p.h.v, j + SEGMENT + t) : nullptr;
        const bf16* beside = j + SEGMENT + t + 1 < p.end ? p.token(p.h.v, j + SEGMENT + t + 1) : nullptr;
        char* line = to;
        for (int64_t d = 0; d < p.h.D; d += ELEMENTS, line += 2 * panel) {
            const __m512i a = first ? _mm512_loadu_si512(first + d) : _mm512_setzero_si512();
            const __m512i b = second ? _mm512_loadu_si512(second + d) : _mm512_setzero_si512();
            _mm512_store_si512(line, pairs.first(a, b));
            _mm512_store_si512(line + panel, pairs.second(a, b));
            if (ahead) _mm_prefetch(ahead + d, _MM_HINT_T0);
            if (beside) _mm_prefetch(beside + d, _MM_HINT_T0);
        }
    }
}

}  // namespace

bool has_dots_for(int64_t D) { return isa() == Isa::DOTS && D % ELEMENTS == 0; }

WITH_DOTS void attend_dots(const HeadBf16& h, int64_t first, int64_t count) {
    static thread_local Scratch kept[6];
    const auto seen = [&](int64_t row) { return std::min(h.start + (first + row) / h.heads + 1, h.N * h.P); };
    // The first row of these that attends to token j.
    const auto seeing = [&](int64_t j) { return std::min(count - 1, std::max<int64_t>(0, (j - h.start) * h.heads - first)); };
    const Pointers p{h, seen(count - 1), std::min(seen(count - 1), h.live)};
    const int64_t ld = up(p.last, SEGMENT), D = h.D;
    auto* scores = static_cast<float*>(kept[0].get(count * ld * 4));
    auto* weights = static_cast<uint16_t*>(kept[1].get(count * ld * 2));
    auto* results = static_cast<float*>(kept[2].get(count * (D + 1) * 4));
    auto* panels_of = static_cast<char*>(kept[3].get(SEGMENT * D * 2));
    float* shares = results + count * D;
    std::vector<const void*> rows(count);

    const Blocks queries(Kind::BF16, count, D);
    auto* arranged = static_cast<char*>(kept[4].get(queries.bytes()));
    for (int64_t r = 0; r < count; r++) rows[r] = h.query(first + r);
    arrange(queries, rows.data(), arranged, 0, queries.count);
    for (int64_t j = 0; j < p.last; j += SEGMENT) {
        const int64_t tokens = std::min(SEGMENT, p.last - j), from = seeing(j) / queries.rows;
        pack_keys(p, j, tokens, panels_of);
        multiply(queries.some(from, queries.count), arranged + from * queries.block(), panels_of, 0, panels(tokens),
                 Placed(scores + from * queries.rows * ld + j, ld));
    }
    for (int64_t r = 0; r < count; r++)
        shares[r] = weigh(scores + r * ld, seen(r), ld, h.scale, [&](int64_t j, __m512 weight) __attribute__((target("avx512f,avx512bf16"))) {
            _mm256_store_si256(reinterpret_cast<__m256i*>(weights + r * ld + j), (__m256i)_mm512_cvtneps_pbh(weight));
        });
    std::fill(results, results + count * D, 0.0f);
    for (int64_t j = 0; j < p.end; j += SEGMENT) {
        const int64_t tokens = std::min(SEGMENT, p.end - j), all = up(tokens, 2 * LINES), from = seeing(j);
        pack_values(p, j, tokens, all, panels_of);
        const Blocks own(Kind::BF16, count - from, all);
        auto* data = static_cast<char*>(kept[5].get(own.bytes()));
        for (int64_t r = from; r < count; r++) rows[r - from] = weights + r * ld + j;
        arrange(own, rows.data(), data, 0, own.count);
        multiply(own, data, panels_of, 0, panels(D), Added(results + from * D, D));
    }
    for (int64_t r = 0; r < count; r++)
        for (int64_t d = 0; d < D; d++) narrow(h.result(first + r)[d], results[r * D + d] * shares[r]);
}

}  // namespace npuc
#endif
