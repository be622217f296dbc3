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

// x[m] are the rows; N is the matrix's number of channels.
inline void linear_panels(const Blocks& blocks, const void* const* x, const void* weights, int64_t N, const Sink& sink) {
    static thread_local Scratch kept;
    auto* data = static_cast<char*>(kept.get(blocks.bytes()));
    const auto* own = static_cast<const char*>(weights);
    const int64_t all = panels(N), groups = (all + GROUP - 1) / GROUP;
    const bool large = blocks.bytes() >= WORTH_ARRANGING;
    if (!large) arrange(blocks, x, data, 0, blocks.count);
#pragma omp parallel if (all * blocks.panel() >= WORTH_SHARING)
    {
        if (large) {
#pragma omp for schedule(static)
            for (int64_t block = 0; block < blocks.count; block++) arrange(blocks, x, data, block, block + 1);
        }
        const int64_t begin = groups * member() / team() * GROUP, end = std::min(all, groups * (member() + 1) / team() * GROUP);
        if (begin < end) multiply(blocks, data, own, begin, end, sink);
    }
}

// The row pointers of a matrix whose rows are `step` bytes apart.
inline std::vector<const void*> rows_of(const void* x, int64_t M, int64_t step) {
    std::vector<const void*> rows(M);
    for (int64_t m = 0; m < M; m++) rows[m] = static_cast<const char*>(x) + m * step;
    return rows;
}

}  // namespace npuc
