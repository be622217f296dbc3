// The mixture of experts of graphs/ops/moe_experts.py in bfloat16, with weights in panels: those of experts that no token chose are not read.
#include "chosen.h"
#include "grouped_panels.h"
#include "kernels.h"
#include "pack.h"

using namespace npuc;

void npuc_experts_bf16(const void* x, int64_t ld, const float* share, const int32_t* ids, const void* gate_up, const void* down, int64_t T,
                       int64_t X, int64_t E, int64_t F, int64_t M, void* out) {
    const Chosen chosen(ids, T * X, E);
    Groups groups{chosen.experts, {0}};
    for (const int64_t e : chosen.experts) groups.first.push_back(chosen.first[e + 1]);
    std::vector<const void*> rows(groups.rows());
    std::vector<int64_t> row_of(T * X, -1);
    for (int64_t i = 0; i < groups.rows(); i++) {
        rows[i] = static_cast<const char*>(x) + chosen.places[i] / X * ld * 2;
        row_of[chosen.places[i]] = i;
    }
    const int64_t half = panels(F), width = panels(M) * CHANNELS, wide = npuc_packed_bf16(F, M) * 2, narrow = npuc_packed_bf16(M, F);
    const auto product = [](const void* weights, int64_t bytes) {
        return [=](const Blocks& blocks, const char* data, int64_t e, int64_t begin, int64_t end, const Sink& sink) {
            multiply(blocks, data, static_cast<const char*>(weights) + e * bytes, begin, end, sink);
        };
    };
    const Expert expert{Kind::BF16, M, F, 2 * half, half * CHANNELS, wide + narrow};
    const float* outs = through_experts(groups, expert, rows.data(), product(gate_up, wide), activated(expert), product(down, narrow));
    // Summed in the order of the token's choices, so that the result does not depend on other tokens.
#pragma omp parallel for schedule(static) if (T * X * M >= WORTH_SHARING)
    for (int64_t t = 0; t < T; t++)
        for (int64_t m = 0; m < M; m += CHANNELS) {
            float sum[CHANNELS] = {};
            for (int64_t c = t * X; c < (t + 1) * X; c++)
                if (row_of[c] >= 0)
                    for (int64_t i = 0; i < CHANNELS; i++) sum[i] += share[c] * outs[row_of[c] * width + m + i];
            bf16 rounded[CHANNELS];
            narrow16(rounded, sum);
            std::memcpy(static_cast<bf16*>(out) + t * M + m, rounded, std::min(CHANNELS, M - m) * sizeof(bf16));
        }
}
