// The product of graphs/ops/linear.py for few rows.
#include <vector>

#include "dots.h"
#include "kernels.h"

using namespace npuc;

void npuc_linear(const float* x, int64_t ld, const float* w, int64_t M, int64_t N, int64_t K, float* y) {
    std::vector<const float*> rows(M);
    for (int64_t m = 0; m < M; m++) rows[m] = x + m * ld;
    const int64_t pieces = (N + PIECE - 1) / PIECE;
#pragma omp parallel for schedule(static) if (N * K >= SHARED)
    for (int64_t i = 0; i < pieces; i++)
        sweep(rows.data(), M, w, i * PIECE, std::min(N, (i + 1) * PIECE), K,
              [&](int64_t m, int64_t count, int64_t n, int64_t columns, vec tile, int wide) INLINED {
                  put(tile, wide, y + m * N + n, N, count, columns);
              });
}
