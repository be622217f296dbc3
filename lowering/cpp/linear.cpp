// The product of graphs/ops/linear.py with a matrix in panels, for any number of rows, and rows of an embedding that is such a matrix.
#include "kernels.h"
#include "linear_panels.h"

using namespace npuc;

namespace {

// Rows of `width` bytes, out of panels that have `words` of 32 bits a channel.
void embed(const void* ids, int64_t wide_ids, const void* table, int64_t T, int64_t width, int64_t words, void* out) {
#pragma omp parallel for schedule(static) if (T * width >= 2 * WORTH_ARRANGING)
    for (int64_t t = 0; t < T; t++) {
        const int64_t id = wide_ids ? static_cast<const int64_t*>(ids)[t] : static_cast<const int32_t*>(ids)[t];
        const auto* from = static_cast<const uint32_t*>(table) + id / CHANNELS * words * CHANNELS + id % CHANNELS;
        auto* to = static_cast<char*>(out) + t * width;
        for (int64_t k = 0; k < width / 4; k++) std::memcpy(to + 4 * k, from + k * CHANNELS, 4);
        if (width % 4) std::memcpy(to + width / 4 * 4, from + width / 4 * CHANNELS, 2);
    }
}

}  // namespace

void npuc_linear_f32(const void* x, int64_t ld, const void* weights, int64_t M, int64_t N, int64_t K, void* y) {
    linear_panels(Blocks(Kind::F32, M, K), rows_of(x, M, ld * 4).data(), weights, N, Stored<float>(y, M, N));
}

void npuc_linear_bf16(const void* x, int64_t ld, const void* weights, int64_t M, int64_t N, int64_t K, void* y) {
    linear_panels(Blocks(Kind::BF16, M, K, FEW), rows_of(x, M, ld * 2).data(), weights, N, Stored<bf16>(y, M, N));
}

void npuc_embed_f32(const void* ids, int64_t wide_ids, const void* table, int64_t T, int64_t K, void* out) {
    embed(ids, wide_ids, table, T, 4 * K, 2 * lines(K, 2), out);
}

void npuc_embed_bf16(const void* ids, int64_t wide_ids, const void* table, int64_t T, int64_t K, void* out) {
    embed(ids, wide_ids, table, T, 2 * K, lines(K, 2), out);
}
