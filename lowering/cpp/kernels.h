// The kernels: plain C over pointers to dense rows, sizes in the letters of the primitives' Python files.
#pragma once

#include <cstdint>

extern "C" {

// y [M, N] = x [M, K] w^T with w [N, K]; rows of x are `ld` floats apart.
void npuc_linear(const float* x, int64_t ld, const float* w, int64_t M, int64_t N, int64_t K, float* y);

// out [T, M]: experts of gate_up [E, 2, F, M] and down [E, M, F] on tokens x [T, M], `ld` floats apart, each with X of them (`ids`,
// those outside [0, E) left out) and their weights (`share`), both [T, X].
void npuc_experts(const float* x, int64_t ld, const float* share, const int32_t* ids, const float* gate_up, const float* down, int64_t T,
                  int64_t X, int64_t E, int64_t F, int64_t M, float* out);

// out [B, Q, C]: x [B, Q, C] convolved with weight [C, taps] and activated, after slots `read` [B] of the pool `state`
// [slots, taps - 1, C], or after zeros where `starts` [B] is 0; the window after every token goes to slots `write` [B, Q].
void npuc_conv(const float* x, const float* weight, float* state, const int32_t* read, const int32_t* write, const int32_t* starts,
               int64_t B, int64_t Q, int64_t C, int64_t taps, float* out);

// out [B, Q, H, Dv]: the delta rule on q, k [B, Q, Hk, Dk], v [B, Q, H, Dv], g, beta [B, Q, H] from slots `read` [B] of the pool `state`
// [slots, H, Dv, Dk], or from zeros where `starts` [B] is 0; the state after every token goes to slots `write` [B, Q]. Sizes are B, Q, Hk,
// H, Dk and Dv.
void npuc_delta(const float* q, const float* k, const float* v, const float* g, const float* beta, float* state, const int32_t* read,
                const int32_t* write, const int32_t* starts, const int64_t* sizes, float* out);

// out [B, Q, H, D]: attention of q [B, Q, H, D] over pools k, v [pages, P, G, D]; sizes are B, Q, H, G, D, P and N, pages a request in
// `table` [B, N]; `starts` and `lengths` are [B].
void npuc_attention(const float* q, const float* k, const float* v, const int32_t* table, const int32_t* starts, const int32_t* lengths,
                    float scale, const int64_t* sizes, float* out);
void npuc_attention_bf16(const void* q, const void* k, const void* v, const int32_t* table, const int32_t* starts, const int32_t* lengths,
                         float scale, const int64_t* sizes, void* out);

// out [B, Q]: tokens drawn of logits [B, Q, V] with random numbers `uniform` [B, Q]; the other operands are [B].
void npuc_sample(const float* logits, const float* temperature, const int32_t* top_k, const float* top_p, const float* min_p,
                 const float* uniform, int64_t B, int64_t Q, int64_t V, int32_t* out);

// chosen [B, Q], ids and values [B, Q, n]: log probabilities of `tokens` [B, Q] and of the n most likely ones; zeros for rows whose
// `asked` [B] is 0.
void npuc_logprobs(const float* logits, const int32_t* tokens, const int32_t* asked, int64_t B, int64_t Q, int64_t V, int64_t n,
                   float* chosen, int32_t* ids, float* values);
}
