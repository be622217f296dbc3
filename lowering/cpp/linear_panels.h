// A product of many rows with one matrix in panels, by all threads.
#pragma once

#include <algorithm>
#include <vector>

#include "product.h"
#include "scratch.h"
#include "threads.h"

namespace npuc {

// Bytes of weights from which a second thread pays, and bytes of rows from which it pays to arrange them.
constexpr int64_t WORTH_SHARING = 1 << 16, WORTH_ARRANGING = 1 << 17;

// Calls `multiply(arranged rows, first panel, last panel)` for all of `all` panels of `panel` bytes; x[m] are the rows.
template <typename Multiply>
void share_panels(const Blocks& blocks, const void* const* x, int64_t all, int64_t panel, const Multiply& multiply) {
    static thread_local Scratch kept;
    auto* data = static_cast<char*>(kept.get(blocks.bytes()));
    const int64_t groups = (all + GROUP - 1) / GROUP;
    const bool large = blocks.bytes() >= WORTH_ARRANGING;
    if (!large) arrange(blocks, x, data, 0, blocks.count);
#pragma omp parallel if (all * panel >= WORTH_SHARING)
    {
        if (large) {
#pragma omp for schedule(static)
            for (int64_t block = 0; block < blocks.count; block++) arrange(blocks, x, data, block, block + 1);
        }
        const int64_t begin = groups * member() / team() * GROUP, end = std::min(all, groups * (member() + 1) / team() * GROUP);
        if (begin < end) multiply(data, begin, end);
    }
}

// The product with a matrix of bfloat16 or int8; N is its number of channels.
inline void linear_panels(const Blocks& blocks, const void* const* x, const void* weights, int64_t N, const Sink& sink) {
    share_panels(blocks, x, panels(N), blocks.panel(), [&](const char* data, int64_t begin, int64_t end) {
        multiply(blocks, data, static_cast<const char*>(weights), begin, end, sink);
    });
}

// The row pointers of a matrix whose rows are `step` bytes apart.
inline std::vector<const void*> rows_of(const void* x, int64_t M, int64_t step) {
    std::vector<const void*> rows(M);
    for (int64_t m = 0; m < M; m++) rows[m] = static_cast<const char*>(x) + m * step;
    return rows;
}

// 16 sums in the dtype of results.
INLINE void stored(float* to, const float* from) { std::memcpy(to, from, CHANNELS * sizeof(float)); }
INLINE void stored(bf16* to, const float* from) { narrow16(to, from); }

// y [M, N] of float32 or, rounded, of bfloat16.
template <typename T>
struct Stored final : Sink {
    T* y;
    int64_t N;

    Stored(void* y, int64_t N) : y(static_cast<T*>(y)), N(N) {}

    void put(const void* sums, int64_t m, int64_t rows, int64_t p) const override {
        const auto* from = static_cast<const float*>(sums);
        const int64_t n = p * CHANNELS, channels = std::min(CHANNELS, N - n);
        if (channels == CHANNELS) {
            for (int64_t r = 0; r < rows; r++) stored(y + (m + r) * N + n, from + r * CHANNELS);
            return;
        }
        for (int64_t r = 0; r < rows; r++) {
            T rounded[CHANNELS];
            stored(rounded, from + r * CHANNELS);
            std::memcpy(y + (m + r) * N + n, rounded, channels * sizeof(T));
        }
    }
};

}  // namespace npuc
