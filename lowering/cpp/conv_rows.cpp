// The causal convolution of graphs/ops/causal_conv.py over long rows of tokens, of which only the last window is kept.
#include <algorithm>
#include <vector>

#include "kernels.h"
#include "vec.h"

using namespace npuc;

namespace {

// Number of products from which a second thread pays, and tokens that a thread takes at a time.
constexpr int64_t WORTH = 1 << 14, TOKENS = 32;

template <typename T>
struct Rows {
    const T *x, *state;
    const int32_t *read, *starts, *lengths;
    int64_t Q, C, past;

    // Inputs [C] of a request at a token of the step, or before it, where negative; null for zeros.
    const T* at(int64_t b, int64_t t) const {
        if (t >= 0) return x + (b * Q + t) * C;
        return starts[b] == 0 ? nullptr : state + (read[b] * past + past + t) * C;
    }

    int64_t length(int64_t b) const { return std::min<int64_t>(lengths[b], Q); }
};

// Up to L inputs from a channel on; zeros in place of those that do not exist.
template <typename T>
INLINE vec some(const T* from, int64_t c, int64_t count) {
    if (!from) return vec{};
    if (count == L) return load(from + c);
    float lanes[L] = {};
    for (int64_t i = 0; i < count; i++) lanes[i] = widen(from[c + i]);
    return load(lanes);
}

// One token; weights are [taps, wide].
template <typename T>
void convolve(const Rows<T>& rows, int64_t b, int64_t t, const float* weights, int64_t wide, const T** inputs, float* out) {
    const int64_t taps = rows.past + 1;
    for (int64_t tap = 0; tap < taps; tap++) inputs[tap] = rows.at(b, t - rows.past + tap);
    for (int64_t c = 0; c < rows.C; c += L) {
        const int64_t count = std::min<int64_t>(L, rows.C - c);
        vec total = some(inputs[0], c, count) * load(weights + c);
        for (int64_t tap = 1; tap < taps; tap++) total += some(inputs[tap], c, count) * load(weights + tap * wide + c);
        total = silu(total);
        if (count == L)
            store(out + c, total);
        else
            std::memcpy(out + c, &total, count * sizeof(float));
    }
}

template <typename T>
void whole(const Rows<T>& rows, const T* weight, T* state, const int32_t* write, int64_t B, float* out) {
    const int64_t taps = rows.past + 1, C = rows.C, wide = (C + L - 1) / L * L, parts = (rows.Q + TOKENS - 1) / TOKENS;
    std::vector<float> weights(taps * wide);
    for (int64_t c = 0; c < C; c++)
        for (int64_t tap = 0; tap < taps; tap++) weights[tap * wide + c] = widen(weight[c * taps + tap]);
#pragma omp parallel for collapse(2) schedule(dynamic) if (B * rows.Q * C * taps >= WORTH)
    for (int64_t b = 0; b < B; b++)
        for (int64_t part = 0; part < parts; part++) {
            std::vector<const T*> inputs(taps);
            const int64_t last = std::min((part + 1) * TOKENS, rows.Q), live = rows.length(b);
            for (int64_t t = part * TOKENS; t < last; t++) {
                float* to = out + (b * rows.Q + t) * C;
                if (t < live)
                    convolve(rows, b, t, weights.data(), wide, inputs.data(), to);
                else
                    std::fill(to, to + C, 0.0f);
            }
        }
    // Only now nobody reads the pool any more.
    const int64_t past = rows.past;
    std::vector<T> kept(B * past * C);
    for (int64_t i = 0; i < B * past; i++) {
        const T* from = rows.at(i / past, rows.length(i / past) - past + i % past);
        if (from) std::copy_n(from, C, kept.data() + i * C);
    }
    for (int64_t b = 0; b < B; b++) std::copy_n(kept.data() + b * past * C, past * C, state + write[b] * past * C);
}

}  // namespace

void npuc_conv_rows(const float* x, const float* weight, float* state, const int32_t* read, const int32_t* write, const int32_t* starts,
                    const int32_t* lengths, int64_t B, int64_t Q, int64_t C, int64_t taps, float* out) {
    whole(Rows<float>{x, state, read, starts, lengths, Q, C, taps - 1}, weight, state, write, B, out);
}

void npuc_conv_rows_bf16(const void* x, const void* weight, void* state, const int32_t* read, const int32_t* write, const int32_t* starts,
                         const int32_t* lengths, int64_t B, int64_t Q, int64_t C, int64_t taps, float* out) {
    const auto of = [](const void* x) { return static_cast<const bf16*>(x); };
    auto* pool = static_cast<bf16*>(state);
    whole(Rows<bf16>{of(x), pool, read, starts, lengths, Q, C, taps - 1}, of(weight), pool, write, B, out);
}
