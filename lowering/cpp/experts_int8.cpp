// The experts of graphs/ops/quant_experts.py with weights of int8 in panels: sums are exact, and scales are multiplied in the order of the
// reference; those of experts that have no rows are not read.
#include "grouped_panels.h"
#include "kernels.h"
#include "pack.h"
#include "rounding.h"

using namespace npuc;

namespace {

// to[n] = sums[n] * scale[n] * row scale, in that order.
template <typename T>
void scaled(const float* sums, const float* scale, float row_scale, int64_t N, T* to) {
    for (int64_t n = 0; n < N; n++) {
        int32_t sum;
        std::memcpy(&sum, sums + n, sizeof sum);
        narrow(to[n], float(sum) * scale[n] * row_scale);
    }
}

template <typename T>
void grouped(const int8_t* x, const float* row_scale, const int64_t* counts, const void* gate_up, const float* gate_up_scale, const void* down,
             const float* down_scale, const int64_t* sizes, T* out) {
    const int64_t R = sizes[0], E = sizes[1], F = sizes[2], M = sizes[3], width = panels(M) * CHANNELS;
    const Groups groups = Groups::of(counts, E);
    const int64_t wide = npuc_packed_int8(M, 2 * F), narrow_bytes = npuc_packed_int8(F, M);
    const auto product = [](const void* weights, int64_t bytes) {
        return [=](const Blocks& blocks, const char* data, int64_t e, int64_t begin, int64_t end, const Sink& sink) {
            multiply(blocks, data, static_cast<const char*>(weights) + e * bytes, begin, end, sink);
        };
    };
    std::vector<float> hidden_scale(groups.rows());
    const auto rounded_again = [&](int64_t e, int64_t r, const float* from, void* to) {
        static thread_local Scratch kept;
        auto* floats = static_cast<float*>(kept.get(2 * F * 4));
        scaled(from, gate_up_scale + e * 2 * F, row_scale[r], 2 * F, floats);
        activate(floats, floats + F, F, floats);
        hidden_scale[r] = round_row(floats, F, static_cast<int8_t*>(to));
    };
    const Expert expert{Kind::INT8, M, F, panels(2 * F), F, wide + narrow_bytes};
    const std::vector<const void*> rows = rows_of(x, groups.rows(), M);
    const float* outs = through_experts(groups, expert, rows.data(), product(gate_up, wide), rounded_again, product(down, narrow_bytes));
#pragma omp parallel for schedule(static) if (R * M >= WORTH_SHARING)
    for (int64_t r = 0; r < R; r++) {
        if (r < groups.rows())
            scaled(outs + r * width, down_scale + groups.expert_of(r) * M, hidden_scale[r], M, out + r * M);
        else
            std::memset(static_cast<void*>(out + r * M), 0, M * sizeof(T));
    }
}

}  // namespace

void npuc_grouped_int8(const int8_t* x, const float* row_scale, const int64_t* counts, const void* gate_up, const float* gate_up_scale,
                       const void* down, const float* down_scale, const int64_t* sizes, int64_t half, void* out) {
    if (half)
        grouped(x, row_scale, counts, gate_up, gate_up_scale, down, down_scale, sizes, static_cast<bf16*>(out));
    else
        grouped(x, row_scale, counts, gate_up, gate_up_scale, down, down_scale, sizes, static_cast<float*>(out));
}
