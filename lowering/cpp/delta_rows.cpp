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

// What a token changes in the rows of a task: they are multiplied by `fade`, and then `change` times its key is added.
struct Update {
    vec change[2];
    float fade;
};

// The rows [Dk][ROWS] after an update by the token with `key`: their products with its query, and with the key of the next token.
INLINE void pass(float* rows, int64_t Dk, const Update& update, const float* key, const float* query, const float* next_key,
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

// `scale` times a vector of unit length, as graphs/ops/l2_norm.py.
void unit(const float* x, int64_t count, float eps, float scale, float* to) {
    vec squares = {};
    float lanes[L], sum = 0.0f;
    int64_t i = 0;
    for (; i + L <= count; i += L) squares += load(x + i) * load(x + i);
    store(lanes, squares);
    for (float lane : lanes) sum += lane;
    for (; i < count; i++) sum += x[i] * x[i];
    const float by = 1.0f / std::sqrt(sum + eps) * scale;
    for (i = 0; i < count; i++) to[i] = by * x[i];
}

struct Sizes {
    int64_t B, Q, own, H, Dk, Dv;
};

template <typename Out>
struct Operands {
    const float *qkv, *g, *beta;
    float eps;
    Out* out;
};

template <typename Out>
INLINE void put(Out* to, int64_t count, const vec (&x)[2]) {
    float lanes[ROWS];
    store(lanes, x[0]), store(lanes + L, x[1]);
    for (int64_t r = 0; r < count; r++) narrow(to[r], lanes[r]);
}

INLINE void take(const float* from, int64_t count, vec (&x)[2]) {
    float lanes[ROWS] = {};
    if (count < ROWS) std::copy_n(from, count, lanes), from = lanes;
    x[0] = load(from), x[1] = load(from + L);
}

// Takes `count` rows from `first` on, of one head of one request, through its tokens.
template <typename Out>
void some_rows(const Operands<Out>& x, const Sizes& s, int64_t b, int64_t h, int64_t first, int64_t count, int64_t length,
               const float* from, float* to) {
    static thread_local Scratch kept[2];
    auto* rows = static_cast<float*>(kept[0].get(s.Dk * ROWS * 4));
    auto* vectors = static_cast<float*>(kept[1].get(3 * s.Dk * 4));
    for (int64_t i = 0; i < s.Dk; i++)
        for (int64_t r = 0; r < ROWS; r++) rows[i * ROWS + r] = from && r < count ? from[(first + r) * s.Dk + i] : 0.0f;
    // Query, key and values of each key head lie one behind the other.
    const int64_t share = s.H / s.own, width = 2 * s.Dk + share * s.Dv;
    const auto head = [&](int64_t t) { return x.qkv + ((b * s.Q + t) * s.own + h / share) * width; };
    const auto key_of = [&](int64_t t) {
        float* key = vectors + t % 2 * s.Dk;
        unit(head(t) + s.Dk, s.Dk, x.eps, 1.0f, key);
        return key;
    };
    const float scale = 1.0f / std::sqrt(float(s.Dk));
    float* query = vectors + 2 * s.Dk;
    std::fill_n(query, s.Dk, 0.0f);
    // The first pass changes nothing, and the last one has no next token.
    Update update{{}, 1.0f};
    const float* key = length ? key_of(0) : query;
    for (int64_t t = 0; t <= length && length; t++) {
        const float* next = t < length && t ? key_of(t) : key;
        vec found[2], seen[2], values[2];
        pass(rows, s.Dk, update, key, query, next, found, seen);
        const int64_t gate = (b * s.Q + t) * s.H + h;
        if (t) put(x.out + (gate - s.H) * s.Dv + first, count, found);
        if (t == length) break;
        take(head(t) + 2 * s.Dk + h % share * s.Dv + first, count, values);
        update.fade = std::exp(x.g[gate]);
        UNROLL for (int half = 0; half < 2; half++) update.change[half] = x.beta[gate] * (values[half] - update.fade * seen[half]);
        unit(head(t), s.Dk, x.eps, scale, query);
        key = next;
    }
    for (int64_t r = 0; r < count; r++)
        for (int64_t i = 0; i < s.Dk; i++) to[(first + r) * s.Dk + i] = rows[i * ROWS + r];
    for (int64_t t = length; t < s.Q; t++) std::fill_n(x.out + ((b * s.Q + t) * s.H + h) * s.Dv + first, count, Out{});
}

template <typename Out>
void rule(const Operands<Out>& x, float* state, const int32_t* read, const int32_t* write, const int32_t* starts, const int32_t* lengths,
          const int64_t* sizes) {
    const Sizes s{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5]};
    const int64_t parts = (s.Dv + ROWS - 1) / ROWS;
    // Requests differ in length.
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

void npuc_delta_rows(const float* qkv, const float* g, const float* beta, float* state, const int32_t* read, const int32_t* write,
                     const int32_t* starts, const int32_t* lengths, float eps, const int64_t* sizes, float* out) {
    rule(Operands<float>{qkv, g, beta, eps, out}, state, read, write, starts, lengths, sizes);
}

void npuc_delta_rows_bf16(const float* qkv, const float* g, const float* beta, float* state, const int32_t* read, const int32_t* write,
                          const int32_t* starts, const int32_t* lengths, float eps, const int64_t* sizes, void* out) {
    rule(Operands<bf16>{qkv, g, beta, eps, static_cast<bf16*>(out)}, state, read, write, starts, lengths, sizes);
}
