// One key head of one request of graphs/ops/paged_attention.py in bfloat16, as variants of its kernel take it.
#pragma once

#include "cpu.h"
#include "vec.h"

namespace npuc {

struct HeadBf16 {
    const bf16 *q, *k, *v;  // of the request, and the pools
    bf16* out;              // of the request
    const int32_t* table;
    int64_t start, live;  // tokens before the step, and tokens with values
    int64_t g, heads;     // the key head, and query heads that read it
    int64_t Q, H, G, D, P, N;
    float scale;

    // Where a row of queries is: row r is of token r / heads.
    int64_t place(int64_t row) const { return (row / heads * H + g * heads + row % heads) * D; }
    const bf16* query(int64_t row) const { return q + place(row); }
    bf16* result(int64_t row) const { return out + place(row); }
};

// Whether this machine has AMX, and heads of width D are whole tiles.
bool has_tiles_for(int64_t D);
void attend_tiles(const HeadBf16& head);

// Whether `attend_few` takes heads of width D with so many rows, in pages of P tokens: what it computes are the bits of `attend_tiles`.
bool has_few_for(int64_t rows, int64_t D, int64_t P);
// `count` heads from `first` on.
void attend_few(const HeadBf16& first, int64_t count);


// Whether this machine has AVX-512's dot products and no AMX, and heads of width D are whole lines.
bool has_dots_for(int64_t D);
// `count` rows of queries from `first` on.
void attend_dots(const HeadBf16& head, int64_t first, int64_t count);

// The same for attention by dot products: what `attend_few_dots` computes are the bits of `attend_dots`.
bool has_few_dots_for(int64_t rows, int64_t D, int64_t P);
void attend_few_dots(const HeadBf16& first, int64_t count);

}  // namespace npuc
