// The gated delta rule of graphs/ops/gated_delta.py, one token at a time; states are read from the pool and written to it.
#include <cmath>
#include <vector>

#include "dots.h"
#include "kernels.h"

using namespace npuc;

namespace {

// Number of products from which a second thread pays.
constexpr int64_t WORTH = 1 << 16;

// One token of one head: reads the state `from` [Dv, Dk], null for zeros, and writes the next one to `to`, which may be the same.
void one_token(const float* q, const float* k, const float* v, float decay, float beta, const float* from, float* to, int64_t Dk, int64_t Dv,
               float* out) {
    // Without a state, rows of zeros times a decay of zero.
    const float fade = from ? decay : 0.0f;
    if (!from) {
        std::fill(to, to + Dv * Dk, 0.0f);
        from = to;
    }
    float both = 0.0f;
    for (int64_t i = 0; i < Dk; i++) both += q[i] * k[i];
    for (int64_t row = 0; row < Dv; row += L) {
        const int64_t count = std::min<int64_t>(L, Dv - row);
        const float* rows[L];
        UNROLL for (int i = 0; i < L; i++) rows[i] = from + (row + std::min<int64_t>(i, count - 1)) * Dk;
        // The next rows come from memory while these are multiplied.
        const auto* next = reinterpret_cast<const char*>(from + (row + L) * Dk);
        const vec seen_k = dots<1, L * L / 16>(&k, rows, Dk, next), seen_q = dots<1, 0>(&q, rows, Dk, nullptr);
        float deltas[L] = {}, outs[L];
        std::memcpy(deltas, v + row, count * sizeof(float));
        const vec delta = beta * (load(deltas) - fade * seen_k);
        store(deltas, delta);
        store(outs, fade * seen_q + both * delta);
        std::memcpy(out + row, outs, count * sizeof(float));
        for (int64_t r = 0; r < count; r++) {
            const float* old = from + (row + r) * Dk;
            float* updated = to + (row + r) * Dk;
            int64_t i = 0;
            for (; i + L <= Dk; i += L) store(updated + i, fade * load(old + i) + deltas[r] * load(k + i));
            for (; i < Dk; i++) updated[i] = fade * old[i] + deltas[r] * k[i];
        }
    }
}

// Elements of a token as floats: where they are, or widened into `copy`.
const float* floats(const float* x, int64_t, float*) { return x; }

const float* floats(const bf16* x, int64_t count, float* copy) {
    for (int64_t i = 0; i < count; i++) copy[i] = widen(x[i]);
    return copy;
}

float* place_for(float* out, float*) { return out; }
float* place_for(bf16*, float* copy) { return copy; }

template <typename T>
void rule(const T* q, const T* k, const T* v, const float* g, const float* beta, float* state, const int32_t* read, const int32_t* write,
          const int32_t* starts, const int64_t* sizes, T* out) {
    const int64_t B = sizes[0], Q = sizes[1], own = sizes[2], H = sizes[3], Dk = sizes[4], Dv = sizes[5], share = H / own;
#pragma omp parallel for collapse(2) schedule(static) if (B * Q * H * Dk * Dv >= WORTH)
    for (int64_t b = 0; b < B; b++)
        for (int64_t h = 0; h < H; h++) {
            std::vector<float> copies(2 * Dk + 2 * Dv);
            float *own_q = copies.data(), *own_k = own_q + Dk, *own_v = own_k + Dk, *own_out = own_v + Dv;
            const auto slot = [&](int32_t s) { return state + (s * H + h) * Dk * Dv; };
            const float* from = starts[b] == 0 ? nullptr : slot(read[b]);
            for (int64_t t = 0; t < Q; t++) {
                const int64_t at = ((b * Q + t) * own + h / share) * Dk, gate = (b * Q + t) * H + h, place = gate * Dv;
                float *to = slot(write[b * Q + t]), *result = place_for(out + place, own_out);
                one_token(floats(q + at, Dk, own_q), floats(k + at, Dk, own_k), floats(v + place, Dv, own_v), std::exp(g[gate]), beta[gate], from,
                          to, Dk, Dv, result);
                if (result == own_out)
                    for (int64_t i = 0; i < Dv; i++) narrow(out[place + i], result[i]);
                from = to;
            }
        }
}

}  // namespace

void npuc_delta(const float* q, const float* k, const float* v, const float* g, const float* beta, float* state, const int32_t* read,
                const int32_t* write, const int32_t* starts, const int64_t* sizes, float* out) {
    rule(q, k, v, g, beta, state, read, write, starts, sizes, out);
}

void npuc_delta_bf16(const void* q, const void* k, const void* v, const float* g, const float* beta, float* state, const int32_t* read,
                     const int32_t* write, const int32_t* starts, const int64_t* sizes, void* out) {
    const auto of = [](const void* x) { return static_cast<const bf16*>(x); };
    rule(of(q), of(k), of(v), g, beta, state, read, write, starts, sizes, static_cast<bf16*>(out));
}
