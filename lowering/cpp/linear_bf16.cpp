// The product of graphs/ops/linear.py in bfloat16 with a matrix in panels, for any number of rows, and rows of an embedding that are such.
#include "kernels.h"
#include "linear_panels.h"

using namespace npuc;

void npuc_linear_bf16(const void* x, int64_t ld, const void* weights, int64_t M, int64_t N, int64_t K, void* y) {
    linear_panels(Blocks(Kind::BF16, M, K, FEW), rows_of(x, M, ld * 2).data(), weights, N, Stored<bf16>(y, M, N));
}

void npuc_embed_bf16(const void* ids, int64_t wide_ids, const void* table, int64_t T, int64_t K, void* out) {
    const int64_t step = lines(K, 2) * CHANNELS;
#pragma omp parallel for schedule(static) if (T * K >= WORTH_ARRANGING)
    for (int64_t t = 0; t < T; t++) {
        const int64_t id = wide_ids ? static_cast<const int64_t*>(ids)[t] : static_cast<const int32_t*>(ids)[t];
        const auto* from = static_cast<const uint32_t*>(table) + id / CHANNELS * step + id % CHANNELS;
        auto* to = static_cast<uint16_t*>(out) + t * K;
        for (int64_t k = 0; k < K / 2; k++) std::memcpy(to + 2 * k, from + k * CHANNELS, 4);
        if (K % 2) to[K - 1] = uint16_t(from[K / 2 * CHANNELS]);
    }
}
