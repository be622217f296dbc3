// Products of rows with panels of a matrix (panels.h): float32 and bfloat16 with sums in float32, and int8 with exact sums in int32. Rows
// are arranged here for products with int4, too (product_int4.h), which multiplies bfloat16 and float32.
//
// A row's sums have an order that depends on nothing but the variant (cpu.h), so a row is the same bits in any company.
#pragma once

#include <algorithm>
#include <cstring>

#include "cpu.h"
#include "panels.h"
#include "vec.h"

namespace npuc {

enum class Kind { BF16, INT8, F32 };

// Bytes of an element.
constexpr int64_t bytes_of(Kind kind) { return kind == Kind::BF16 ? 2 : kind == Kind::INT8 ? 1 : 4; }

// Rows of bfloat16 that vectors multiply as fast as memory gives weights.
constexpr int64_t FEW = 3;

// How M rows of K elements are cut into blocks of equally many rows; the last ones are filled up with zeros.
struct Blocks {
    // Up to `few` rows are multiplied by vectors where there are tiles.
    Blocks(Kind kind, int64_t M, int64_t K, int64_t few = 0);

    // Bytes of a block, of all blocks, and of a panel of their own dtype.
    int64_t block() const { return rows * words * 4; }
    int64_t bytes() const { return count * block(); }
    int64_t panel() const { return (lines * (kind == Kind::F32 ? 2 : 1) + (kind == Kind::INT8)) * LINE; }

    // The blocks [first, last) alone.
    Blocks some(int64_t first, int64_t last) const {
        Blocks own = *this;
        own.count = last - first, own.M = std::min(M, last * rows) - first * rows;
        return own;
    }

    Kind kind;
    Isa isa;
    bool in_order_of_tiles;  // sums of WIDE
    // `width` is bytes of a row, `lines` those of a panel, of float32 by twos; `words` is what a row of a block has of 32 bits.
    int64_t M, width, lines, words, rows, count;
};

// What becomes of sums: `put` gets those of up to 16 rows from `m` on, and of the 16 channels of panel `p`, in 32 bits each.
struct Sink {
    virtual void put(const void* sums, int64_t m, int64_t rows, int64_t p) const = 0;
    // The same of panels `p` and `p + 1`, of variants that have both at once.
    virtual void put_two(const void* sums, const void* beside, int64_t m, int64_t rows, int64_t p) const {
        put(sums, m, rows, p);
        put(beside, m, rows, p + 1);
    }

   protected:
    ~Sink() = default;
};

// Sums as rows that are `width` floats apart.
struct Placed final : Sink {
    float* to;
    int64_t width;

    Placed(float* to, int64_t width) : to(to), width(width) {}

    void put(const void* sums, int64_t m, int64_t rows, int64_t p) const override {
        for (int64_t r = 0; r < rows; r++)
            std::memcpy(to + (m + r) * width + p * CHANNELS, static_cast<const float*>(sums) + r * CHANNELS, LINE);
    }
};

// Copies the rows of blocks [first, last), which start at `x[m]`, into `data`, in the order in which the variant reads them.
void arrange(const Blocks& blocks, const void* const* x, char* data, int64_t first, int64_t last);

// All rows, which `arrange` left in `data`, with panels [first, last) of a matrix. A few rows prefetch the panels from `then` on in the end,
// which this thread takes next.
void multiply(const Blocks& blocks, const char* data, const char* weights, int64_t first, int64_t last, const Sink& sink,
              const char* then = nullptr);

// The panels that a thread takes at a time are a multiple of these, which variants read side by side.
constexpr int64_t GROUP = 4;

void multiply_wide(const Blocks& blocks, const char* data, const char* weights, int64_t first, int64_t last, const Sink& sink, const char* then);
#if defined(WITH_DOTS)
void multiply_few(const Blocks& blocks, const char* data, const char* weights, int64_t first, int64_t last, const Sink& sink, const char* then);
void multiply_dots(const Blocks& blocks, const char* data, const char* weights, int64_t first, int64_t last, const Sink& sink, const char* then);
void multiply_tiles(const Blocks& blocks, const char* data, const char* weights, int64_t first, int64_t last, const Sink& sink, const char* then);
#endif

}  // namespace npuc
