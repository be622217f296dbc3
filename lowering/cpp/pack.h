// The C interface of packing, which happens when weights are loaded.
#pragma once

#include <cstdint>

extern "C" {

// Bytes of one packed matrix [N, K] of bfloat16, and the packing of several that lie one behind the other.
int64_t npuc_packed_bf16(int64_t N, int64_t K);
void npuc_pack_bf16(const void* weights, int64_t matrices, int64_t N, int64_t K, void* out);

// The same of matrices [N, K] of float32.
int64_t npuc_packed_f32(int64_t N, int64_t K);
void npuc_pack_f32(const void* weights, int64_t matrices, int64_t N, int64_t K, void* out);

// The same of matrices [K, N] of int8.
int64_t npuc_packed_int8(int64_t K, int64_t N);
void npuc_pack_int8(const void* weights, int64_t matrices, int64_t K, int64_t N, void* out);

// The same of matrices [K, 8 * words] of int4, of which eight neighbours are an int32 (`pack_w4` of graphs/quantise.py).
int64_t npuc_packed_int4(int64_t K, int64_t words);
void npuc_pack_int4(const void* weights, int64_t matrices, int64_t K, int64_t words, void* out);
}
