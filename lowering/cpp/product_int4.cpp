// Products with panels of int4: the variant in float32, which runs everywhere.
#include "product_int4.h"

#include <algorithm>

#include "scratch.h"

namespace npuc {

namespace {

constexpr int V = CHANNELS / L;

// Weights of a line of int4 that are in one of its words.
constexpr int EIGHT = 8;

// Blocks from which a panel is widened once for all of them.
constexpr int64_t WORTH_WIDENING = 3;

// Weight j of eight of each of L channels, as floats.
template <int j>
INLINE vec weight(ints words) {
    constexpr int at = 4 * (j / 2) + 16 * (j % 2);
#if defined(__AVX512F__)
    const vec values = {0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1};
    return __builtin_shuffle(values, words >> at);
#else
    return __builtin_convertvector((words << (28 - at)) >> 28, vec);
#endif
}

// A panel as it lies.
struct Nibbles {
    const char* from;

    template <int j>
    INLINE vec get(int64_t quad, int v) const {
        ints words;
        std::memcpy(&words, from + quad * LINE + v * 4 * L, sizeof words);
        return weight<j>(words);
    }
};

// A panel as floats [K][16].
struct Floats {
    const float* from;

    template <int j>
    INLINE vec get(int64_t quad, int v) const {
        return load(from + (quad * EIGHT + j) * CHANNELS + v * L);
    }
};

void widen(const char* panel, int64_t quads, float* to) {
    const Nibbles nibbles{panel};
    for (int64_t quad = 0; quad < quads; quad++)
        for (int v = 0; v < V; v++) {
            float* at = to + quad * EIGHT * CHANNELS + v * L;
            store(at, nibbles.get<0>(quad, v)), store(at + CHANNELS, nibbles.get<1>(quad, v));
            store(at + 2 * CHANNELS, nibbles.get<2>(quad, v)), store(at + 3 * CHANNELS, nibbles.get<3>(quad, v));
            store(at + 4 * CHANNELS, nibbles.get<4>(quad, v)), store(at + 5 * CHANNELS, nibbles.get<5>(quad, v));
            store(at + 6 * CHANNELS, nibbles.get<6>(quad, v)), store(at + 7 * CHANNELS, nibbles.get<7>(quad, v));
        }
}

template <int j, int R, typename Weights>
INLINE void step(vec (&acc)[R][V], const float* x, const Weights& weights, int64_t quad) {
    vec own[V];
    UNROLL for (int v = 0; v < V; v++) own[v] = weights.template get<j>(quad, v);
    UNROLL for (int r = 0; r < R; r++) {
        UNROLL for (int v = 0; v < V; v++) acc[r][v] += own[v] * x[(quad * EIGHT + j) * R + r];
    }
}

// One block of R rows, `x` being [K][R], with one panel; `quads` are those of a group.
template <int R, typename Weights>
void block(const float* x, const Weights& weights, int64_t groups, int64_t quads, const float* scale, float (*out)[CHANNELS]) {
    for (int r = 0; r < R; r++) std::fill(out[r], out[r] + CHANNELS, 0.0f);
    for (int64_t g = 0; g < groups; g++) {
        vec acc[R][V] = {};
        for (int64_t quad = g * quads; quad < (g + 1) * quads; quad++) {
            step<0>(acc, x, weights, quad), step<1>(acc, x, weights, quad), step<2>(acc, x, weights, quad), step<3>(acc, x, weights, quad);
            step<4>(acc, x, weights, quad), step<5>(acc, x, weights, quad), step<6>(acc, x, weights, quad), step<7>(acc, x, weights, quad);
        }
        UNROLL for (int v = 0; v < V; v++) {
            const vec by = load(scale + g * CHANNELS + v * L);
            UNROLL for (int r = 0; r < R; r++) store(&out[r][v * L], load(&out[r][v * L]) + acc[r][v] * by);
        }
    }
}

template <int R>
void all(const Blocks& blocks, const char* data, const Int4& matrix, int64_t first, int64_t last, const Sink& sink) {
    static thread_local Scratch kept;
    const int64_t quads = matrix.panel() / LINE, own = quads / matrix.groups;
    const bool wide = blocks.count >= WORTH_WIDENING;
    auto* floats = static_cast<float*>(kept.get(wide ? quads * EIGHT * CHANNELS * 4 : 0));
    float sums[R][CHANNELS];
    for (int64_t p = first; p < last; p++) {
        const char* panel = matrix.weights + p * matrix.panel();
        const float* scale = scales_of(matrix, p, 1);
        if (wide) widen(panel, quads, floats);
        for (int64_t b = 0; b < blocks.count; b++) {
            // `arrange` wrote words where this reads them; the memory is aligned.
            const auto* x = reinterpret_cast<const float*>(data + b * blocks.block());
            wide ? block<R>(x, Floats{floats}, matrix.groups, own, scale, sums) : block<R>(x, Nibbles{panel}, matrix.groups, own, scale, sums);
            sink.put(sums, b * R, std::min<int64_t>(R, blocks.M - b * R), p);
        }
    }
}

using All = void (*)(const Blocks&, const char*, const Int4&, int64_t, int64_t, const Sink&);

#if defined(__AVX512F__)
constexpr All by_rows[] = {all<1>, all<2>, all<3>, all<4>, all<5>, all<6>, all<7>, all<8>, all<9>, all<10>, all<11>, all<12>};
#else
constexpr All by_rows[] = {all<1>, all<2>, all<3>, all<4>, all<5>, all<6>};
#endif

}  // namespace

const float* widened_rows(const void* const* x, int64_t M, int64_t K) {
    static thread_local Scratch kept;
    auto* wide = static_cast<float*>(kept.get(M * K * 4));
    for (int64_t m = 0; m < M; m++)
        for (int64_t k = 0; k < K; k++) wide[m * K + k] = npuc::widen(static_cast<const bf16*>(x[m])[k]);
    return wide;
}

const float* scales_of(const Int4& matrix, int64_t p, int64_t count) {
    static thread_local Scratch kept;
    auto* scales = static_cast<float*>(kept.get(count * matrix.groups * LINE));
    for (int64_t i = 0; i < count; i++) {
        const int64_t n = (p + i) * CHANNELS, channels = std::min(CHANNELS, matrix.N - n);
        float* to = scales + i * matrix.groups * CHANNELS;
        for (int64_t g = 0; g < matrix.groups; g++, to += CHANNELS) {
            const float* from = matrix.scale + g * matrix.N + n;
            __builtin_prefetch(from + count * CHANNELS);
            float own[CHANNELS] = {};
            if (channels == CHANNELS)
                std::memcpy(own, from, sizeof own);
            else
                std::memcpy(own, from, channels * sizeof(float));
            if (matrix.half) {
                bf16 rounded[CHANNELS];
                narrow16(rounded, own);
                for (int64_t c = 0; c < CHANNELS; c++) own[c] = widen(rounded[c]);
            }
            std::memcpy(to, own, sizeof own);
        }
    }
    return scales;
}

void multiply_int4(const Blocks& blocks, const char* data, const Int4& matrix, int64_t first, int64_t last, const Sink& sink) {
    if (blocks.count == 0) return;
#if defined(WITH_DOTS)
    if (blocks.isa == Isa::TILES) return multiply_int4_tiles(blocks, data, matrix, first, last, sink);
    if (blocks.isa == Isa::DOTS) return multiply_int4_dots(blocks, data, matrix, first, last, sink);
#endif
    by_rows[blocks.rows - 1](blocks, data, matrix, first, last, sink);
}

}  // namespace npuc
