// The experts of graphs/ops/weight_quant_experts.py: weights of int4 in panels, those of experts that have no rows not read.
#include "grouped_panels.h"
#include "kernels.h"
#include "product_int4.h"

using namespace npuc;

namespace {

// Matrices [E, K, N] of int4 with their scales [E, groups, N].
struct Matrices {
    const void* weights;
    const float* scale;
    int64_t K, N, groups;
    bool half;

    int64_t bytes() const { return panels(N) * nibbles(K); }

    void operator()(const Blocks& blocks, const char* data, int64_t e, int64_t begin, int64_t end, const Sink& sink) const {
        const char* own = static_cast<const char*>(weights) + e * bytes();
        multiply_int4(blocks, data, Int4{own, scale + e * groups * N, K, N, groups, half}, begin, end, sink);
    }
};

// The rows of `outs`, which are `width` floats apart, and zeros behind them.
template <typename T>
void stored_rows(const float* outs, int64_t width, int64_t rows, int64_t R, int64_t M, T* to) {
#pragma omp parallel for schedule(static) if (R * M >= WORTH_SHARING)
    for (int64_t r = 0; r < R; r++)
        for (int64_t m = 0; m < M; m++) r < rows ? narrow(to[r * M + m], outs[r * width + m]) : narrow(to[r * M + m], 0.0f);
}

}  // namespace

void npuc_grouped_int4(const void* x, int64_t half, int64_t ld, const int64_t* counts, const void* gate_up, const float* gate_up_scale,
                       const void* down, const float* down_scale, const int64_t* sizes, void* out) {
    const int64_t R = sizes[0], E = sizes[1], F = sizes[2], M = sizes[3], width = panels(M) * CHANNELS;
    const Groups groups = Groups::of(counts, E);
    const bool floats = !half || isa() == Isa::WIDE;
    std::vector<const void*> rows = rows_of(x, groups.rows(), ld * (half ? 2 : 4));
    if (half && floats) rows = rows_of(widened_rows(rows.data(), groups.rows(), M), groups.rows(), M * 4);
    const Matrices wide{gate_up, gate_up_scale, M, 2 * F, sizes[4], half != 0}, narrow{down, down_scale, F, M, sizes[5], half != 0};
    const Expert expert{floats ? Kind::F32 : Kind::BF16, M, F, panels(2 * F), F, wide.bytes() + narrow.bytes()};
    const float* outs = through_experts(groups, expert, rows.data(), wide, activated(expert), narrow);
    if (half)
        stored_rows(outs, width, groups.rows(), R, M, static_cast<bf16*>(out));
    else
        stored_rows(outs, width, groups.rows(), R, M, static_cast<float*>(out));
}
