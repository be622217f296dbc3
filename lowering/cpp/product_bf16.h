// Products of rows of bfloat16 with panels of a matrix (panels.h), sums in float32, results in bfloat16.
//
// A row's sums have an order that depends on nothing but the variant (cpu.h), so a row is the same bits in any company.
#pragma once

#include "cpu.h"
#include "panels.h"
#include "vec.h"

namespace npuc {

// How M rows of K elements are cut into blocks of equally many rows; the last ones are filled up with zeros.
struct Blocks {
    Blocks(int64_t M, int64_t K);

    // Elements of all blocks.
    int64_t elements() const { return count * rows * wide; }

    Isa isa;
    int64_t M, K, wide, rows, count;
};

// Copies the rows of blocks [first, last) into `data`, in the order in which the variant reads them.
void arrange(const Blocks& blocks, const bf16* const* x, uint16_t* data, int64_t first, int64_t last);

// y[m * ld + n] of all rows, which `arrange` left in `data`, for channels n of the panels [first, last) of a matrix of N channels.
void multiply(const Blocks& blocks, const uint16_t* data, const uint16_t* weights, int64_t first, int64_t last, int64_t N, bf16* y, int64_t ld);

// The panels that a thread takes at a time are a multiple of these, which variants read side by side.
constexpr int64_t GROUP = 4;

#if defined(__x86_64__)
void multiply_dots(const Blocks& blocks, const int32_t* data, const uint16_t* weights, int64_t first, int64_t last, int64_t N, bf16* y,
                   int64_t ld);
void multiply_tiles(const Blocks& blocks, const uint16_t* data, const uint16_t* weights, int64_t first, int64_t last, int64_t N, bf16* y,
                    int64_t ld);
#endif

}  // namespace npuc
