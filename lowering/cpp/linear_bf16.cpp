// The product of graphs/ops/linear.py in bfloat16 with a matrix in panels, for any number of rows, and rows of an embedding that are such.
#include <algorithm>
#include <vector>

#include "kernels.h"
#include "product_bf16.h"
#include "scratch.h"
#include "threads.h"

using namespace npuc;

namespace {

// Number of weights from which a second thread pays.
constexpr int64_t SHARED = 1 << 15;

// Number of elements of rows from which a second thread pays to arrange them.
constexpr int64_t MANY = 1 << 16;

}  // namespace

void npuc_linear_bf16(const void* x, int64_t ld, const void* weights, int64_t M, int64_t N, int64_t K, void* y) {
    static thread_local Scratch kept;
    const Blocks blocks(M, K);
    auto* data = static_cast<uint16_t*>(kept.get(blocks.elements() * 2));
    std::vector<const bf16*> rows(M);
    for (int64_t m = 0; m < M; m++) rows[m] = static_cast<const bf16*>(x) + m * ld;
    const auto* own = static_cast<const uint16_t*>(weights);
    auto* out = static_cast<bf16*>(y);
    const int64_t all = panels(N), groups = (all + GROUP - 1) / GROUP;
    if (M * K < MANY) arrange(blocks, rows.data(), data, 0, blocks.count);
#pragma omp parallel if (N * K >= SHARED)
    {
        if (M * K >= MANY) {
#pragma omp for schedule(static)
            for (int64_t block = 0; block < blocks.count; block++) arrange(blocks, rows.data(), data, block, block + 1);
        }
        const int64_t threads = team(), me = member();
        const int64_t begin = groups * me / threads * GROUP, end = std::min(all, groups * (me + 1) / threads * GROUP);
        if (begin < end) multiply(blocks, data, own, begin, end, N, out, N);
    }
}

void npuc_embed_bf16(const void* ids, int64_t wide_ids, const void* table, int64_t T, int64_t N, int64_t K, void* out) {
    const int64_t step = lines(K, 2) * CHANNELS;
    (void)N;
    const auto row = [&](int64_t t) {
        const int64_t id = wide_ids ? static_cast<const int64_t*>(ids)[t] : static_cast<const int32_t*>(ids)[t];
        const auto* from = static_cast<const uint32_t*>(table) + id / CHANNELS * step + id % CHANNELS;
        auto* to = static_cast<uint16_t*>(out) + t * K;
        for (int64_t k = 0; k < K / 2; k++) std::memcpy(to + 2 * k, from + k * CHANNELS, 4);
        if (K % 2) to[K - 1] = uint16_t(from[K / 2 * CHANNELS]);
    };
#pragma omp parallel for schedule(static) if (T >= 32)
    for (int64_t t = 0; t < T; t++) row(t);
}
