// The product of graphs/ops/weight_quant_linear.py: rows of bfloat16 or float32 with weights of int4 in panels.
#include "kernels.h"
#include "linear_panels.h"
#include "product_int4.h"

using namespace npuc;

void npuc_linear_int4(const void* x, int64_t half, int64_t ld, const void* weights, const float* scale, int64_t groups, int64_t M, int64_t N,
                      int64_t K, void* y) {
    const Int4 matrix{static_cast<const char*>(weights), scale, K, N, groups, half != 0};
    const bool floats = !half || isa() == Isa::WIDE;
    const Blocks blocks(floats ? Kind::F32 : Kind::BF16, M, K);
    std::vector<const void*> rows = rows_of(x, M, ld * (half ? 2 : 4));
    if (half && floats) rows = rows_of(widened_rows(rows.data(), M, K), M, K * 4);
    const Stored<float> wide(y, M, N);
    const Stored<bf16> narrow(y, M, N);
    const Sink& sink = half ? static_cast<const Sink&>(narrow) : wide;
    share_panels(blocks, rows.data(), panels(N), matrix.panel(), [&](const char* data, int64_t begin, int64_t end, int64_t) {
        multiply_int4(blocks, data, matrix, begin, end, sink);
    });
}
