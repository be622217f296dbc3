// The causal convolution of graphs/ops/causal_conv.py, one window at a time; windows are read from the pool and written to it.
#include <algorithm>
#include <vector>

#include "kernels.h"
#include "vec.h"

using namespace npuc;

namespace {

// Number of products from which a second thread pays.
constexpr int64_t WORTH = 1 << 14;

template <typename T>
void convolve(const T* x, const T* weight, T* state, const int32_t* read, const int32_t* write, const int32_t* starts, int64_t B, int64_t Q,
              int64_t C, int64_t taps, T* out) {
    // Weights transposed to [taps, C] like the inputs, with C padded to whole vectors.
    const int64_t past = taps - 1, wide = (C + L - 1) / L * L;
    std::vector<float> weights(taps * wide);
    for (int64_t c = 0; c < C; c++)
        for (int64_t tap = 0; tap < taps; tap++) weights[tap * wide + c] = widen(weight[c * taps + tap]);
#pragma omp parallel for schedule(static) if (B * Q * C * taps >= WORTH)
    for (int64_t b = 0; b < B; b++) {
        std::vector<float> window((past + Q) * wide);
        for (int64_t i = 0; i < past; i++) {
            const T* from = state + (read[b] * past + i) * C;
            for (int64_t c = 0; c < C; c++) window[i * wide + c] = starts[b] == 0 ? 0.0f : widen(from[c]);
        }
        for (int64_t t = 0; t < Q; t++)
            for (int64_t c = 0; c < C; c++) window[(past + t) * wide + c] = widen(x[(b * Q + t) * C + c]);
        for (int64_t t = 0; t < Q; t++) {
            T* to = out + (b * Q + t) * C;
            for (int64_t c = 0; c < C; c += L) {
                vec total = load(&window[t * wide + c]) * load(&weights[c]);
                for (int64_t tap = 1; tap < taps; tap++) total += load(&window[(t + tap) * wide + c]) * load(&weights[tap * wide + c]);
                float activated[L];
                store(activated, silu(total));
                for (int64_t i = 0; i < std::min<int64_t>(L, C - c); i++) narrow(to[c + i], activated[i]);
            }
            for (int64_t i = 0; i < past; i++) {
                const float* from = &window[(t + 1 + i) * wide];
                T* kept = state + (write[b * Q + t] * past + i) * C;
                for (int64_t c = 0; c < C; c++) narrow(kept[c], from[c]);
            }
        }
    }
}

}  // namespace

void npuc_conv(const float* x, const float* weight, float* state, const int32_t* read, const int32_t* write, const int32_t* starts,
               int64_t B, int64_t Q, int64_t C, int64_t taps, float* out) {
    convolve(x, weight, state, read, write, starts, B, Q, C, taps, out);
}

void npuc_conv_bf16(const void* x, const void* weight, void* state, const int32_t* read, const int32_t* write, const int32_t* starts,
                    int64_t B, int64_t Q, int64_t C, int64_t taps, void* out) {
    const auto of = [](const void* x) { return static_cast<const bf16*>(x); };
    convolve(of(x), of(weight), static_cast<bf16*>(state), read, write, starts, B, Q, C, taps, static_cast<bf16*>(out));
}
