// Products of a few rows x with a large weight matrix w, as decode steps have them. Weights come from main memory, so they are
// prefetched and read once; the rows of x stay in the L1 cache.
#pragma once

#include <algorithm>

#include "vec.h"

namespace npuc {

// Columns of a piece, the unit of work of a thread: a multiple of every tile's columns.
constexpr int64_t PIECE = 32;

// Number of weights from which a second thread pays.
constexpr int64_t SHARED = 1 << 15;

// Dot products of R rows x and L / R rows w, each of K floats: lane r * (L / R) + n is x[r] . w[n]. The last K % L products are added
// one by one. Prefetches AHEAD cache lines of 64 bytes from `next` on for every L floats of K.
template <int R, int AHEAD>
INLINE vec dots(const float* const* x, const float* const* w, int64_t K, const char* next) {
    constexpr int N = L / R;
    vec acc[L] = {};
    const float *rows[R], *others[N];
    UNROLL for (int r = 0; r < R; r++) rows[r] = x[r];
    UNROLL for (int n = 0; n < N; n++) others[n] = w[n];
    int64_t k = 0;
    for (; k + L <= K; k += L) {
        UNROLL for (int i = 0; i < AHEAD; i++, next += 64) __builtin_prefetch(next);
        vec own[R];
        UNROLL for (int r = 0; r < R; r++) own[r] = load(rows[r] + k);
        UNROLL for (int n = 0; n < N; n++) {
            vec other = load(others[n] + k);
            if (R > 1) hold(other);
            UNROLL for (int r = 0; r < R; r++) acc[r * N + n] += own[r] * other;
        }
    }
    vec totals = sums(acc);
    for (; k < K; k++) {
        vec a = {}, b = {};
        UNROLL for (int i = 0; i < L; i++) a[i] = rows[i / N][k], b[i] = others[i % N][k];
        totals += a * b;
    }
    return totals;
}

// Calls `use(first row, rows, first column, columns, tile, N)` for every tile of x[0..M) . w[begin..end), rows of w having K floats; lane
// r * N + n of a tile is its row r and column n.
template <int R, int AHEAD, typename Use>
INLINE void sweep_with(const float* const* x, int64_t M, const float* w, int64_t begin, int64_t end, int64_t K, const Use& use) {
    constexpr int N = L / R;
    for (int64_t n = begin; n < end; n += N) {
        const int64_t columns = std::min<int64_t>(N, end - n);
        const char* next = reinterpret_cast<const char*>(w + (n + N) * K);
        const float *rows[R], *others[N];
        UNROLL for (int i = 0; i < N; i++) others[i] = w + (n + std::min<int64_t>(i, columns - 1)) * K;
        for (int64_t m = 0; m < M; m += R, next += AHEAD * (K / L) * 64) {
            const int64_t count = std::min<int64_t>(R, M - m);
            UNROLL for (int r = 0; r < R; r++) rows[r] = x[m + std::min<int64_t>(r, count - 1)];
            // The first 16 rows have prefetched all of the next columns.
            use(m, count, n, columns, m < 16 ? dots<R, AHEAD>(rows, others, K, next) : dots<R, 0>(rows, others, K, next), N);
        }
    }
}

// `sweep_with` for any M: tiles of up to 4 rows, and a prefetch that covers the next columns.
template <typename Use>
INLINE void sweep(const float* const* x, int64_t M, const float* w, int64_t begin, int64_t end, int64_t K, const Use& use) {
    constexpr int lines = 4 * L * L / 64;
    if (M == 1)
        sweep_with<1, lines>(x, M, w, begin, end, K, use);
    else if (M < 4)
        sweep_with<2, lines / 2>(x, M, w, begin, end, K, use);
    else if (M == 4)
        sweep_with<4, lines / 4>(x, M, w, begin, end, K, use);
    else if (M <= 8)
        sweep_with<4, (lines + 7) / 8>(x, M, w, begin, end, K, use);
    else
        sweep_with<4, (lines + 15) / 16>(x, M, w, begin, end, K, use);
}

// Writes a tile of `sweep` to rows that are `ld` floats apart.
INLINE void put(vec tile, int N, float* y, int64_t ld, int64_t rows, int64_t columns) {
    float found[L];
    store(found, tile);
    for (int64_t r = 0; r < rows; r++) {
        if (columns == N)
            std::memcpy(y + r * ld, found + r * N, N * sizeof(float));
        else
            std::memcpy(y + r * ld, found + r * N, columns * sizeof(float));
    }
}

}  // namespace npuc
