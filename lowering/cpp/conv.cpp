// The causal convolution of graphs/ops/causal_conv.py, one window at a time; windows are read from the pool and written to it.
#include <algorithm>
#include <vector>

#include "kernels.h"
#include "vec.h"

using namespace npuc;

namespace {

// Number of products from which a second thread pays.
constexpr int64_t WORTH = 1 << 14;

}  // namespace

void npuc_conv(const float* x, const float* weight, float* state, const int32_t* read, const int32_t* write, const int32_t* starts,
               int64_t B, int64_t Q, int64_t C, int64_t taps, float* out) {
    // Weights transposed to [taps, C] like the inputs, with C padded to whole vectors.
    const int64_t past = taps - 1, wide = (C + L - 1) / L * L;
    std::vector<float> weights(taps * wide);
    for (int64_t c = 0; c < C; c++)
        for (int64_t tap = 0; tap < taps; tap++) weights[tap * wide + c] = weight[c * taps + tap];
#pragma omp parallel for schedule(static) if (B * Q * C * taps >= WORTH)
    for (int64_t b = 0; b < B; b++) {
        std::vector<float> window((past + Q) * wide);
        for (int64_t i = 0; i < past; i++) {
            const float* from = state + (read[b] * past + i) * C;
            float* to = &window[i * wide];
            starts[b] == 0 ? std::fill(to, to + C, 0.0f) : void(std::copy(from, from + C, to));
        }
        for (int64_t t = 0; t < Q; t++) std::copy(x + (b * Q + t) * C, x + (b * Q + t + 1) * C, &window[(past + t) * wide]);
        for (int64_t t = 0; t < Q; t++) {
            float* to = out + (b * Q + t) * C;
            for (int64_t c = 0; c < C; c += L) {
                vec total = load(&window[t * wide + c]) * load(&weights[c]);
                for (int64_t tap = 1; tap < taps; tap++) total += load(&window[(t + tap) * wide + c]) * load(&weights[tap * wide + c]);
                const vec activated = silu(total);
                std::memcpy(to + c, &activated, std::min<int64_t>(L, C - c) * sizeof(float));
            }
            for (int64_t i = 0; i < past; i++) {
                const float* from = &window[(t + 1 + i) * wide];
                std::copy(from, from + C, state + (write[b * Q + t] * past + i) * C);
            }
        }
    }
}
