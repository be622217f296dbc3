// The C interface of the kernels. Operands are dense unless a row distance `ld` is given; size letters are those of graphs/ops.
#pragma once

#include <cstdint>

extern "C" {

// y [M, N] = x [M, K] times the transpose of w [N, K], which is in panels (panels.h); rows of x are `ld` elements apart.
void npuc_linear_f32(const void* x, int64_t ld, const void* w, int64_t M, int64_t N, int64_t K, void* y);
void npuc_linear_bf16(const void* x, int64_t ld, const void* w, int64_t M, int64_t N, int64_t K, void* y);

// out [T, K]: the rows `ids` [T], int32 or int64, of a table [.., K] in panels.
void npuc_embed_f32(const void* ids, int64_t wide_ids, const void* table, int64_t T, int64_t K, void* out);
void npuc_embed_bf16(const void* ids, int64_t wide_ids, const void* table, int64_t T, int64_t K, void* out);

// y [M, N] = x [M, K] times w [K, N] of int8 in panels; rows of x, bfloat16 if `half` and else float32, are rounded to int8 by scales of
// their own, or by one scale and offset, with a bias in units of `scale` [N].
void npuc_quant_linear(const void* x, int64_t half, int64_t ld, const void* w, const float* scale, int64_t M, int64_t N, int64_t K, void* y);
void npuc_static_quant_linear(const void* x, int64_t half, int64_t ld, const void* w, const float* scale, const int32_t* bias,
                              float input_scale, float offset, int64_t M, int64_t N, int64_t K, void* y);

// y [M, N] = x [M, K] times w [K, N] of int4 in panels, each group of K / groups rows of w times its row of `scale` [groups, N]. Rows of x
// and y are bfloat16 if `half` and else float32. Groups are multiples of 32 rows, unless there is one.
void npuc_linear_int4(const void* x, int64_t half, int64_t ld, const void* w, const float* scale, int64_t groups, int64_t M, int64_t N,
                      int64_t K, void* y);

// out [T, M]: experts with weights gate_up [E, 2, F, M] and down [E, M, F] on tokens x [T, M], which are `ld` floats apart. Each token
// has X experts `ids` [T, X] with weights `share` [T, X]; ids outside [0, E) are skipped.
void npuc_experts(const float* x, int64_t ld, const float* share, const int32_t* ids, const float* gate_up, const float* down, int64_t T,
                  int64_t X, int64_t E, int64_t F, int64_t M, float* out);

// The same in bfloat16, of gate_up and down in panels; rows are rounded before down, and at the end.
void npuc_experts_bf16(const void* x, int64_t ld, const float* share, const int32_t* ids, const void* gate_up, const void* down, int64_t T,
                       int64_t X, int64_t E, int64_t F, int64_t M, void* out);

// out [R, M]: experts with weights gate_up [E, M, 2 F] and down [E, F, M] of int4 in panels, each with `groups` of scales, on rows that are
// grouped by expert, the first counts[0] of expert 0. Rows and out are bfloat16 if `half` and else float32; rows of no expert become zeros.
// `sizes` are R, E, F, M, the groups of gate_up and of down.
void npuc_grouped_int4(const void* x, int64_t half, int64_t ld, const int64_t* counts, const void* gate_up, const float* gate_up_scale,
                       const void* down, const float* down_scale, const int64_t* sizes, void* out);

// The same of int8: x [R, M] with scales `row_scale` [R], and a scale of each channel; rows are rounded to int8 again before down. `sizes`
// are R, E, F, M; out is bfloat16 if `half`.
void npuc_grouped_int8(const int8_t* x, const float* row_scale, const int64_t* counts, const void* gate_up, const float* gate_up_scale,
                       const void* down, const float* down_scale, const int64_t* sizes, int64_t half, void* out);

// out [B, Q, C]: SiLU of x [B, Q, C] convolved with weight [C, taps]. A request continues from slot `read` [B] of the pool `state`
// [slots, taps - 1, C], or from zeros where `starts` [B], its num_computed_tokens, is 0; the window after every token is written to
// slot `write` [B, Q].
void npuc_conv(const float* x, const float* weight, float* state, const int32_t* read, const int32_t* write, const int32_t* starts,
               int64_t B, int64_t Q, int64_t C, int64_t taps, float* out);
void npuc_conv_bf16(const void* x, const void* weight, void* state, const int32_t* read, const int32_t* write, const int32_t* starts,
                    int64_t B, int64_t Q, int64_t C, int64_t taps, void* out);

// out [B, Q, C] of float32: the same of `lengths` [B] tokens of each request, the query_lens; only the window after the last of them is
// written, to slot `write` [B].
void npuc_conv_rows(const float* x, const float* weight, float* state, const int32_t* read, const int32_t* write, const int32_t* starts,
                    const int32_t* lengths, int64_t B, int64_t Q, int64_t C, int64_t taps, float* out);
void npuc_conv_rows_bf16(const void* x, const void* weight, void* state, const int32_t* read, const int32_t* write, const int32_t* starts,
                         const int32_t* lengths, int64_t B, int64_t Q, int64_t C, int64_t taps, float* out);

// out [B, Q, H, Dv]: the gated delta rule on q, k [B, Q, Hk, Dk], v [B, Q, H, Dv], g, beta [B, Q, H]. A request continues from slot `read`
// [B] of the pool `state` [slots, H, Dv, Dk], or from zeros where `starts` [B], its num_computed_tokens, is 0; the state after every token
// is written to slot `write` [B, Q]. `sizes` are B, Q, Hk, H, Dk, Dv.
void npuc_delta(const float* q, const float* k, const float* v, const float* g, const float* beta, float* state, const int32_t* read,
                const int32_t* write, const int32_t* starts, const int64_t* sizes, float* out);
void npuc_delta_bf16(const void* q, const void* k, const void* v, const float* g, const float* beta, float* state, const int32_t* read,
                     const int32_t* write, const int32_t* starts, const int64_t* sizes, void* out);

// out [B, Q, H, Dv]: the same of `lengths` [B] tokens of each request, the query_lens; only the state after the last of them is written, to
// slot `write` [B]. `decay` [B, Q, H] is e^g. `qkv` [B, Q, Hk, 2 Dk + H / Hk Dv] has query, key and values of each key head, the first two not yet of unit length:
// `eps` is added to their sums of squares, and queries are scaled by Dk^-0.5.
void npuc_delta_rows(const float* qkv, const float* decay, const float* beta, float* state, const int32_t* read, const int32_t* write,
                     const int32_t* starts, const int32_t* lengths, float eps, const int64_t* sizes, float* out);
void npuc_delta_rows_bf16(const float* qkv, const float* decay, const float* beta, float* state, const int32_t* read, const int32_t* write,
                          const int32_t* starts, const int32_t* lengths, float eps, const int64_t* sizes, void* out);

// out [B, Q, H, D]: attention of q [B, Q, H, D] over pools k, v [pages, P, G, D]. `table` [B, N] is the page table, `starts` [B] the
// num_computed_tokens and `lengths` [B] the query_lens of requests. `sizes` are B, Q, H, G, D, P, N.
void npuc_attention(const float* q, const float* k, const float* v, const int32_t* table, const int32_t* starts, const int32_t* lengths,
                    float scale, const int64_t* sizes, float* out);
void npuc_attention_bf16(const void* q, const void* k, const void* v, const int32_t* table, const int32_t* starts, const int32_t* lengths,
                         float scale, const int64_t* sizes, void* out);

// out [B, Q]: tokens sampled from logits [B, Q, V] with random numbers `uniform` [B, Q]; the sampling parameters are [B].
void npuc_sample(const float* logits, const float* temperature, const int32_t* top_k, const float* top_p, const float* min_p,
                 const float* uniform, int64_t B, int64_t Q, int64_t V, int32_t* out);

// chosen [B, Q]: log probabilities of `tokens` [B, Q]; ids and values [B, Q, n]: the n most likely tokens and their log probabilities.
// All are zeros for requests whose `asked` [B] is 0.
void npuc_logprobs(const float* logits, const int32_t* tokens, const int32_t* asked, int64_t B, int64_t Q, int64_t V, int64_t n,
                   float* chosen, int32_t* ids, float* values);
}
