// The mixture of experts of graphs/ops/moe_experts.py for few tokens: weights of experts that no token chose are not read.
#include <vector>

#include "chosen.h"
#include "dots.h"
#include "kernels.h"

using namespace npuc;

namespace {

void gate(const float* gates, const float* ups, int64_t F, float* to) {
    int64_t f = 0;
    for (; f + L <= F; f += L) store(to + f, silu(load(gates + f)) * load(ups + f));
    if (f < F) {
        float padded[2][L] = {};
        std::memcpy(padded[0], gates + f, (F - f) * sizeof(float));
        std::memcpy(padded[1], ups + f, (F - f) * sizeof(float));
        const vec last = silu(load(padded[0])) * load(padded[1]);
        std::memcpy(to + f, &last, (F - f) * sizeof(float));
    }
}

}  // namespace

void npuc_experts(const float* x, int64_t ld, const float* share, const int32_t* ids, const float* gate_up, const float* down, int64_t T,
                  int64_t X, int64_t E, int64_t F, int64_t M, float* out) {
    const Chosen chosen(ids, T * X, E);
    const int64_t taken = chosen.first[E], active = chosen.experts.size();
    // One row per choice, grouped by expert.
    std::vector<float> wide(taken * 2 * F), hidden(taken * F), outs(taken * M);
    std::vector<const float*> inputs(taken), hiddens(taken);
    std::vector<int64_t> row_of(T * X, -1);
    for (int64_t i = 0; i < taken; i++) {
        inputs[i] = x + chosen.places[i] / X * ld;
        hiddens[i] = &hidden[i * F];
        row_of[chosen.places[i]] = i;
    }
    const int64_t widths = (2 * F + PIECE - 1) / PIECE, columns = (M + PIECE - 1) / PIECE;
#pragma omp parallel if (active * F * M >= SHARED)
    {
#pragma omp for schedule(static)
        for (int64_t piece = 0; piece < active * widths; piece++) {
            const int64_t e = chosen.experts[piece / widths], from = chosen.first[e], n0 = piece % widths * PIECE;
            sweep(&inputs[from], chosen.first[e + 1] - from, gate_up + e * 2 * F * M, n0, std::min(2 * F, n0 + PIECE), M,
                  [&](int64_t m, int64_t rows, int64_t n, int64_t count, vec tile, int N) INLINED {
                      put(tile, N, &wide[(from + m) * 2 * F + n], 2 * F, rows, count);
                  });
        }
#pragma omp for schedule(static)
        for (int64_t i = 0; i < taken; i++) gate(&wide[i * 2 * F], &wide[i * 2 * F + F], F, &hidden[i * F]);
#pragma omp for schedule(static)
        for (int64_t piece = 0; piece < active * columns; piece++) {
            const int64_t e = chosen.experts[piece / columns], from = chosen.first[e], n0 = piece % columns * PIECE;
            sweep(&hiddens[from], chosen.first[e + 1] - from, down + e * M * F, n0, std::min(M, n0 + PIECE), F,
                  [&](int64_t m, int64_t rows, int64_t n, int64_t count, vec tile, int N) INLINED {
                      put(tile, N, &outs[(from + m) * M + n], M, rows, count);
                  });
        }
        // Summed in the order of the token's choices, so that the result does not depend on other tokens.
#pragma omp for schedule(static)
        for (int64_t t = 0; t < T; t++) {
            float* to = out + t * M;
            std::fill(to, to + M, 0.0f);
            for (int64_t c = t * X; c < (t + 1) * X; c++)
                if (row_of[c] >= 0)
                    for (int64_t m = 0; m < M; m++) to[m] += share[c] * outs[row_of[c] * M + m];
        }
    }
}
