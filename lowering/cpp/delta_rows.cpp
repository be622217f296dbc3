// The gated delta rule of graphs/ops/chunk_gated_delta.py over long rows of tokens, of which only the last state is kept.
//
// Rows of a state [Dv, Dk] change independently of each other: some of them, side by side in lanes, go through a tile of tokens in the L1
// cache. The products with a state are taken while it is updated, so that each token takes one pass over it.
#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels.h"
#include "scratch.h"
#include "vec.h"

using namespace npuc;

namespace {

// Number of products from which a second thread pays.
constexpr int64_t WORTH = 1 << 16;

// Vectors of rows of a state that a pass takes, as many as registers hold sums of; and tokens of a tile. A head's tokens are far apart in
// memory, so a tile is copied.
constexpr int WIDE = L == 16 ? 4 : 2;
constexpr int64_t ROWS = WIDE * L, TOKENS = 16;

// What a token changes in some rows: they are multiplied by `fade`, and then `change` times its key is added.
struct Update {
    vec change[WIDE];
    float fade;
};

// The rows [Dk][ROWS] after an update by the token with `key`: their products with its query, and with the key of the next token.
INLINE void pass(float* rows, int64_t Dk, const Update& update, const float* key, const float* query, const float* next_key,
                 vec (&by_query)[WIDE], vec (&by_key)[WIDE]) {
    vec q[WIDE] = {}, k[WIDE] = {};
    for (int64_t i = 0; i < Dk; i++) {
        vec one = fill(key[i]), two = fill(query[i]), three = fill(next_key[i]);
        hold(one), hold(two), hold(three);
        UNROLL for (int w = 0; w < WIDE; w++) {
            float* at = rows + i * ROWS + w * L;
            const vec row = update.fade * load(at) + one * update.change[w];
            store(at, row);
            q[w] += two * row;
            k[w] += three * row;
        }
    }
    UNROLL for (int w = 0; w < WIDE; w++) by_query[w] = q[w], by_key[w] = k[w];
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

    // Tasks' rows, in whole passes.
    int64_t parts() const { return (Dv + ROWS - 1) / ROWS; }
};

template <typename Out>
struct Operands {
    const float *qkv, *decay, *beta;
    float eps;
    Out* out;
};

// One head of one request: its state, and a tile of its tokens.
template <typename Out>
class Head {
   public:
    Head(const Operands<Out>& x, const Sizes& s, int64_t b, int64_t h) : x_(x), s_(s), b_(b), h_(h), updates_(s.parts(), Update{{}, 1.0f}) {
        static thread_local Scratch kept;
        const int64_t wide = s.parts() * ROWS;
        rows_ = static_cast<float*>(kept.get((wide * s.Dk + 2 * s.Dk * (TOKENS + 1) + 2 * wide * TOKENS) * 4));
        tokens_ = rows_ + wide * s.Dk, values_ = tokens_ + 2 * s.Dk * (TOKENS + 1), outs_ = values_ + wide * TOKENS;
        std::fill(tokens_, outs_, 0.0f);
    }

    void start(const float* from) {
        for (int64_t part = 0; part < s_.parts(); part++)
            for (int64_t i = 0; i < s_.Dk; i++)
                for (int64_t r = 0; r < ROWS; r++) {
                    const int64_t row = part * ROWS + r;
                    rows_[(part * s_.Dk + i) * ROWS + r] = from && row < s_.Dv ? from[row * s_.Dk + i] : 0.0f;
                }
    }

    // The tokens [begin, begin + count). Results come a token late: of the last one with the next tile, or `finish`.
    void tile(int64_t begin, int64_t count) {
        std::copy_n(tokens_ + 2 * s_.Dk * last_, 2 * s_.Dk, tokens_);
        last_ = count;
        const int64_t share = s_.H / s_.own, wide = s_.parts() * ROWS;
        const float scale = 1.0f / std::sqrt(float(s_.Dk));
        for (int64_t t = 0; t < count; t++) {
            // Query, key and values of each key head lie one behind the other.
            const float* from = x_.qkv + ((b_ * s_.Q + begin + t) * s_.own + h_ / share) * (2 * s_.Dk + share * s_.Dv);
            float* to = tokens_ + 2 * s_.Dk * (t + 1);
            unit(from, s_.Dk, x_.eps, scale, to);
            unit(from + s_.Dk, s_.Dk, x_.eps, 1.0f, to + s_.Dk);
            std::copy_n(from + 2 * s_.Dk + h_ % share * s_.Dv, s_.Dv, values_ + t * wide);
        }
        for (int64_t part = 0; part < s_.parts(); part++) {
            // In registers, which the compiler could not know of a reference.
            Update update = updates_[part];
            for (int64_t t = 0; t < count; t++) {
                const float *before = tokens_ + 2 * s_.Dk * t, *now = before + 2 * s_.Dk, *values = values_ + t * wide + part * ROWS;
                const int64_t gate = (b_ * s_.Q + begin + t) * s_.H + h_;
                vec seen[WIDE];
                step(part, t, update, before, now + s_.Dk, seen);
                update.fade = x_.decay[gate];
                UNROLL for (int w = 0; w < WIDE; w++) update.change[w] = x_.beta[gate] * (load(values + w * L) - update.fade * seen[w]);
            }
            updates_[part] = update;
        }
        for (int64_t t = begin ? 0 : 1; t < count; t++) write(begin + t - 1, t);
    }

    // The state, and the result of the last of `length` tokens.
    void finish(int64_t length, float* to) {
        const float* last = tokens_ + 2 * s_.Dk * last_;
        vec unused[WIDE];
        for (int64_t part = 0; part < s_.parts(); part++) {
            if (length) step(part, 0, updates_[part], last, last + s_.Dk, unused);
            for (int64_t r = 0; r < std::min(ROWS, s_.Dv - part * ROWS); r++)
                for (int64_t i = 0; i < s_.Dk; i++) to[(part * ROWS + r) * s_.Dk + i] = rows_[(part * s_.Dk + i) * ROWS + r];
        }
        if (length) write(length - 1, 0);
        for (int64_t t = length; t < s_.Q; t++) std::fill_n(result(t), s_.Dv, Out{});
    }

   private:
    INLINE void step(int64_t part, int64_t t, const Update& update, const float* before, const float* next_key, vec (&seen)[WIDE]) {
        vec found[WIDE];
        pass(rows_ + part * s_.Dk * ROWS, s_.Dk, update, before + s_.Dk, before, next_key, found, seen);
        float* to = outs_ + (t * s_.parts() + part) * ROWS;
        UNROLL for (int w = 0; w < WIDE; w++) store(to + w * L, found[w]);
    }

    Out* result(int64_t t) const { return x_.out + ((b_ * s_.Q + t) * s_.H + h_) * s_.Dv; }

    void write(int64_t t, int64_t from) const {
        const float* found = outs_ + from * s_.parts() * ROWS;
        Out* to = result(t);
        for (int64_t i = 0; i < s_.Dv; i++) narrow(to[i], found[i]);
    }

    const Operands<Out>& x_;
    const Sizes& s_;
    int64_t b_, h_, last_ = 0;  // place of the last token of the tile before
    std::vector<Update> updates_;
    float *rows_, *tokens_, *values_, *outs_;
};

template <typename Out>
void rule(const Operands<Out>& x, float* state, const int32_t* read, const int32_t* write, const int32_t* starts, const int32_t* lengths,
          const int64_t* sizes) {
    const Sizes s{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5]};
    // Requests differ in length.
#pragma omp parallel for collapse(2) schedule(dynamic) if (s.B * s.Q * s.H * s.Dk * s.Dv >= WORTH)
    for (int64_t b = 0; b < s.B; b++)
        for (int64_t h = 0; h < s.H; h++) {
            const auto slot = [&](int32_t number) { return state + (number * s.H + h) * s.Dk * s.Dv; };
            const int64_t length = std::min<int64_t>(lengths[b], s.Q);
            Head<Out> head(x, s, b, h);
            head.start(starts[b] == 0 ? nullptr : slot(read[b]));
            for (int64_t t = 0; t < length; t += TOKENS) head.tile(t, std::min(TOKENS, length - t));
            head.finish(length, slot(write[b]));
        }
}

}  // namespace

void npuc_delta_rows(const float* qkv, const float* decay, const float* beta, float* state, const int32_t* read, const int32_t* write,
                     const int32_t* starts, const int32_t* lengths, float eps, const int64_t* sizes, float* out) {
    rule(Operands<float>{qkv, decay, beta, eps, out}, state, read, write, starts, lengths, sizes);
}

void npuc_delta_rows_bf16(const float* qkv, const float* decay, const float* beta, float* state, const int32_t* read, const int32_t* write,
                          const int32_t* starts, const int32_t* lengths, float eps, const int64_t* sizes, void* out) {
    rule(Operands<bf16>{qkv, decay, beta, eps, static_cast<bf16*>(out)}, state, read, write, starts, lengths, sizes);
}
