// The gated delta rule of graphs/ops/chunk_gated_delta.py over long rows of tokens, of which only the last state is kept.
//
// Rows of a state [Dv, Dk] change independently of each other. A task takes 2 L of them through all tokens, side by side in lanes, so
// they stay in the L1 cache, and a state is read and written once a step. The products with a state are taken while it is updated: each
// token takes one pass over it.
#include <algorithm>
#include <cmath>

#include "kernels.h"
#include "scratch.h"
#include "vec.h"

using namespace npuc;

namespace {

// Number of products from which a second thread pays.
constexpr int64_t WORTH = 1 << 16;

// Rows of a state in a task.
constexpr int64_t ROWS = 2 * L;

const float* floats(const float* x, int64_t, float*) { return x; }

const float* floats(const bf16* x, int64_t count, float* copy) {
    for (int64_t i = 0; i < count; i++) copy[i] = widen(x[i]);
    return copy;
}

// What a token changes in the rows of a task: the state is multiplied by `fade`, and then `change` times its key is added.
struct Update {
    vec change[2];
    float fade;
};

// The rows [Dk][ROWS] after an update by the token with `key`: their products with its query, and with the key of the next token.
INLINED inline void pass(float* rows, int64_t Dk, const Update& update, const float* key, const float* query, const float* next_key,
                         vec (&by_query)[2], vec (&by_key)[2]) {
    vec q[2][2] = {}, k[2][2] = {};
    const auto one = [&](int64_t i, int chain) INLINED {
        UNROLL for (int half = 0; half < 2; half++) {
            float* at = rows + i * ROWS + half * L;
            const vec row = update.fade * load(at) + key[i] * update.change[half];
            store(at, row);
            q[chain][half] += query[i] * row;
            k[chain][half] += next_key[i] * row;
        }
    };
    int64_t i = 0;
    // Two chains of sums, because an addition takes longer than the loop.
    for (; i + 2 <= Dk; i += 2) one(i, 0), one(i + 1, 1);
    if (i < Dk) one(i, 0);
    UNROLL for (int half = 0; half < 2; half++) {
        by_query[half] = q[0][half] + q[1][half];
        by_key[half] = k[0][half] + k[1][half];
    }
}

struct Sizes {
    int64_t B, Q, own, H, Dk, Dv;
};

template <typename T>
struct Operands {
    const T *q, *k, *v;
    const float *g, *beta;
    T* out;
};

// Takes `count` rows from `first` on, of one head of one request, through its tokens.
template <typename T>
void some_rows(const Operands<T>& x, const Sizes& s, int64_t b, int64_t h, int64_t first, int64_t count, int64_t length, const float* from,
               float* to) {
    static thread_local Scratch kept[2];
    auto* rows = static_cast<float*>(kept[0].get(s.Dk * ROWS * 4));
    auto* copies = static_cast<float*>(kept[1].get(4 * s.Dk * 4));
    for (int64_t i = 0; i < s.Dk; i++)
        for (int64_t r = 0; r < ROWS; r++) rows[i * ROWS + r] = from && r < count ? from[(first + r) * s.Dk + i] : 0.0f;
    const auto token = [&](const T* of, int64_t t, int64_t place) {
        return floats(of + ((b * s.Q + t) * s.own + h / (s.H / s.own)) * s.Dk, s.Dk, copies + (2 * place + t % 2) * s.Dk);
    };
    // The first pass changes nothing, and the last one has no next token.
    Update update{{}, 1.0f};
    alignas(64) float lanes[ROWS];
    const float *key = token(x.k, 0, 0), *query = key;
    for (int64_t t = 0; t <= length && length; t++) {
        const int64_t gate = (b * s.Q + t) * s.H + h;
        const float* next = t < length ? token(x.k, t, 0) : key;
        vec found[2], seen[2];
        pass(rows, s.Dk, update, key, query, next, found, seen);
        if (t) {
            store(lanes, found[0]), store(lanes + L, found[1]);
            T* result = x.out + (gate - s.H) * s.Dv + first;
            for (int64_t r = 0; r < count; r++) narrow(result[r], lanes[r]);
        }
        if (t == length) break;
        for (int64_t r = 0; r < ROWS; r++) lanes[r] = r < count ? widen(x.v[gate * s.Dv + first + r]) : 0.0f;
        update.fade = std::exp(x.g[gate]);
        UNROLL for (int half = 0; half < 2; half++) update.change[half] = x.beta[gate] * (load(lanes + half * L) - update.fade * seen[half]);
        key = next, query = token(x.q, t, 1);
    }
    for (int64_t r = 0; r < count; r++)
        for (int64_t i = 0; i < s.Dk; i++) to[(first + r) * s.Dk + i] = rows[i * ROWS + r];
    // What no token is at is zero.
    for (int64_t t = length; t < s.Q; t++)
        for (int64_t r = 0; r < count; r++) narrow(x.out[((b * s.Q + t) * s.H + h) * s.Dv + first + r], 0.0f);
}

template <typename T>
void rule(const Operands<T>& x, float* state, const int32_t* read, const int32_t* write, const int32_t* starts, const int32_t* lengths,
          const int64_t* sizes) {
    const Sizes s{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5]};
    const int64_t parts = (s.Dv + ROWS - 1) / ROWS;
    // Rows of a batch differ in length.
#pragma omp parallel for collapse(3) schedule(dynamic) if (s.B * s.Q * s.H * s.Dk * s.Dv >= WORTH)
    for (int64_t b = 0; b < s.B; b++)
        for (int64_t h = 0; h < s.H; h++)
            for (int64_t part = 0; part < parts; part++) {
                const auto slot = [&](int32_t number) { return state + (number * s.H + h) * s.Dk * s.Dv; };
                const int64_t first = part * ROWS, count = std::min(ROWS, s.Dv - first);
                const float* from = starts[b] == 0 ? nullptr : slot(read[b]);
                some_rows(x, s, b, h, first, count, std::min<int64_t>(lengths[b], s.Q), from, slot(write[b]));
            }
}

}  // namespace

void npuc_delta_rows(const float* q, const float* k, const float* v, const float* g, const float* beta, float* state, const int32_t* read,
                     const int32_t* write, const int32_t* starts, const int32_t* lengths, const int64_t* sizes, float* out) {
    rule(Operands<float>{q, k, v, g, beta, out}, state, read, write, starts, lengths, sizes);
}

void npuc_delta_rows_bf16(const void* q, const void* k, const void* v, const float* g, const float* beta, float* state,
                          const int32_t* read, const int32_t* write, const int32_t* starts, const int32_t* lengths, const int64_t* sizes,
                          void* out) {
    const auto of = [](const void* x) { return static_cast<const bf16*>(x); };
    rule(Operands<bf16>{of(q), of(k), of(v), g, beta, static_cast<bf16*>(out)}, state, read, write, starts, lengths, sizes);
}
