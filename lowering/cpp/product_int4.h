// Products of rows with panels of int4 (panels.h) that have a scale for each group of a channel's weights.
//
// Weights are widened in registers, where integers are exact; the sum of a group is multiplied by its scale and added to those before it, in
// float32. So weights are never rounded, and a row's sums have one order in any company.
#pragma once

#include "product.h"

namespace npuc {

// A matrix [K, N] of int4 in panels with its scales [groups, N]. A group that is not the only one has whole tiles: multiples of 32.
struct Int4 {
    const char* weights;
    const float* scale;
    int64_t K, N, groups;
    bool half;  // scales are rounded to bfloat16 before

    int64_t panel() const { return nibbles(K); }
    // Lines of bfloat16 of a group.
    int64_t group() const { return lines(K, 2) / groups; }
};

// All rows, bfloat16 or float32, which `arrange` left in `data`, with panels [first, last); bfloat16 only where the variant multiplies it.
void multiply_int4(const Blocks& blocks, const char* data, const Int4& matrix, int64_t first, int64_t last, const Sink& sink);

// M rows of bfloat16 as the rows [M, K] of float32 that they are, in memory of this thread.
const float* widened_rows(const void* const* x, int64_t M, int64_t K);

// The scales of `count` panels from `p` on, [count][groups][16], in memory of this thread.
const float* scales_of(const Int4& matrix, int64_t p, int64_t count);

#if defined(WITH_DOTS)
void multiply_int4_dots(const Blocks& blocks, const char* data, const Int4& matrix, int64_t first, int64_t last, const Sink& sink);
void multiply_int4_tiles(const Blocks& blocks, const char* data, const Int4& matrix, int64_t first, int64_t last, const Sink& sink);
#endif

}  // namespace npuc
