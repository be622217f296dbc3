// Sampling as in graphs/ops/sample.py, and log probabilities as in graphs/ops/token_logprobs.py.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "kernels.h"
#include "vec.h"

using namespace npuc;

namespace {

// Number of logits from which a second thread pays.
constexpr int64_t WORTH = 1 << 15;

// The largest of x [V]; NaN if any is NaN, as torch.max.
float largest(const float* x, int64_t V) {
    const auto later = [](float next, float most) { return next > most || next != next ? next : most; };
    float lanes[L], most = x[0];
    int64_t i = 0;
    if (V >= L) {
        vec greatest = load(x);
        for (i = L; i + L <= V; i += L) {
            const vec next = load(x + i);
            greatest = (next > greatest) | (next != next) ? next : greatest;
        }
        store(lanes, greatest);
        for (float lane : lanes) most = later(lane, most);
    }
    for (; i < V; i++) most = later(x[i], most);
    return most;
}

// NON_FINITE of graphs/step_inputs.py.
constexpr int32_t NON_FINITE = -2;

// Softmax of x [V], the largest of which is known, at a temperature, with zeros for the tokens that top_k, top_p or min_p drop.
std::vector<float> kept(const float* x, float most, int64_t V, float temperature, int32_t top_k, float top_p, float min_p) {
    std::vector<float> weights((V + L - 1) / L * L, -INFINITY);
    // The largest is subtracted before the division, so that a small temperature cannot overflow to infinity.
    for (int64_t i = 0; i < V; i++) weights[i] = (x[i] - most) / temperature;
    for (size_t i = 0; i < weights.size(); i += L) store(&weights[i], exponential(load(&weights[i])));
    const float whole = std::accumulate(weights.begin(), weights.begin() + V, 0.0);
    for (float& weight : weights) weight /= whole;
    const float least = min_p * largest(weights.data(), V);
    std::vector<int32_t> order(V);
    std::iota(order.begin(), order.end(), 0);
    int64_t leading = V;
    if (top_k > 0 || top_p < 1.0f) {
        std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return weights[a] > weights[b]; });
        leading = top_k > 0 ? std::min<int64_t>(top_k, V) : V;
        double sum = 0.0, before = 0.0;
        for (int64_t i = 0; i < leading; i++) sum += weights[order[i]];
        if (top_p < 1.0f)
            for (int64_t i = 0; i < leading; before += weights[order[i++]])
                if (before / sum >= top_p) leading = i;
    }
    for (int64_t i = leading; i < V; i++) weights[order[i]] = 0.0f;
    for (float& weight : weights) weight = weight >= least ? weight : 0.0f;
    return weights;
}

int32_t drawn(const std::vector<float>& weights, int64_t V, float uniform) {
    double whole = 0.0, mass = 0.0;
    for (int64_t i = 0; i < V; i++) whole += weights[i];
    int32_t last = 0;
    for (int64_t i = 0; i < V; i++) {
        mass += weights[i];
        if (weights[i] > 0) last = i;
        // A token of weight zero is never drawn; if rounding leaves the last sum below its target, the last token of nonzero weight is.
        if (mass > double(uniform) * whole) return last;
    }
    return last;
}

}  // namespace

void npuc_sample(const float* logits, const float* temperature, const int32_t* top_k, const float* top_p, const float* min_p,
                 const float* uniform, int64_t B, int64_t Q, int64_t V, int32_t* out) {
#pragma omp parallel for schedule(static) if (B * Q * V >= WORTH)
    for (int64_t i = 0; i < B * Q; i++) {
        const int64_t b = i / Q;
        const float* x = logits + i * V;
        const float most = largest(x, V);
        if (!std::isfinite(most))
            out[i] = NON_FINITE;
        else if (temperature[b] > 0.0f)
            out[i] = drawn(kept(x, most, V, temperature[b], top_k[b], top_p[b], min_p[b]), V, uniform[i]);
        else
            out[i] = std::find(x, x + V, most) - x;
    }
}

void npuc_logprobs(const float* logits, const int32_t* tokens, const int32_t* asked, int64_t B, int64_t Q, int64_t V, int64_t n,
                   float* chosen, int32_t* ids, float* values) {
    for (int64_t i = 0; i < B * Q; i++) {
        chosen[i] = 0.0f;
        std::fill(ids + i * n, ids + (i + 1) * n, 0);
        std::fill(values + i * n, values + (i + 1) * n, 0.0f);
        if (asked[i / Q] <= 0) continue;
        const float* x = logits + i * V;
        const float most = largest(x, V);
        std::vector<float> shares((V + L - 1) / L * L, -INFINITY);
        for (int64_t v = 0; v < V; v++) shares[v] = x[v] - most;
        for (size_t v = 0; v < shares.size(); v += L) store(&shares[v], exponential(load(&shares[v])));
        const float whole = std::log(std::accumulate(shares.begin(), shares.begin() + V, 0.0));
        std::vector<int32_t> order(V);
        std::iota(order.begin(), order.end(), 0);
        std::partial_sort(order.begin(), order.begin() + n, order.end(), [&](int32_t a, int32_t b) { return x[a] > x[b] || (x[a] == x[b] && a < b); });
        // What could not be sampled has none.
        chosen[i] = x[std::max(tokens[i], 0)] - most - whole;
        for (int64_t j = 0; j < n; j++) ids[i * n + j] = order[j], values[i * n + j] = x[order[j]] - most - whole;
    }
}
