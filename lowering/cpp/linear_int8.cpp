// The products of graphs/ops/quant_linear.py and static_quant_linear.py: rows are rounded to int8, sums are exact, and the results are those
// of the references bit for bit.
#include "kernels.h"
#include "linear_panels.h"
#include "rounding.h"

using namespace npuc;

namespace {

// Number of elements of rows from which a second thread pays to round them.
constexpr int64_t MANY = 1 << 15;

template <typename T>
void round_statically(const T* x, int64_t K, float reciprocal, float offset, int8_t* to) {
    round_all(x, K, to, [=](auto value) INLINED { return within(apart(value * reciprocal) + offset); });
}

// y [M, N] = (sums + bias) * scale [N] * row scale [M], in that order; no bias and no row scales where they are null.
template <typename T>
struct Scaled final : Sink {
    T* y;
    int64_t M, N;
    const float *scale, *row_scale;
    const int32_t* bias;

    Scaled(T* y, int64_t M, int64_t N, const float* scale, const float* row_scale, const int32_t* bias)
        : y(y), M(M), N(N), scale(scale), row_scale(row_scale), bias(bias) {}

    // What a panel's channels are changed by.
    struct Panel {
        float by[CHANNELS] = {}, added[CHANNELS] = {};
    };

    Panel of(int64_t p) const {
        Panel own;
        const int64_t n = p * CHANNELS, channels = std::min(CHANNELS, N - n);
        std::memcpy(own.by, scale + n, channels * sizeof(float));
        if (bias)
            for (int64_t c = 0; c < channels; c++) own.added[c] = float(bias[n + c]);
        return own;
    }

    INLINED void scaled(const int32_t* from, const Panel& own, int64_t m, float* to) const {
        // A row scale of 1 changes nothing.
        const float of_row = row_scale ? row_scale[m] : 1.0f;
        for (int64_t c = 0; c < CHANNELS; c++) to[c] = (float(from[c]) + own.added[c]) * own.by[c] * of_row;
    }

    void put(const void* sums, int64_t m, int64_t rows, int64_t p) const override {
        const auto* from = static_cast<const int32_t*>(sums);
        const int64_t n = p * CHANNELS, channels = std::min(CHANNELS, N - n);
        const Panel own = of(p);
        for (int64_t r = 0; r < rows; r++) {
            float results[CHANNELS];
            T rounded[CHANNELS], *to = y + (m + r) * N + n;
            scaled(from + r * CHANNELS, own, m + r, results);
            if (channels == CHANNELS) {
                stored(to, results);
                continue;
            }
            stored(rounded, results);
            std::memcpy(to, rounded, channels * sizeof(T));
        }
    }

#if defined(WITH_DOTS)
    WITH_DOTS void put_two(const void* sums, const void* beside, int64_t m, int64_t rows, int64_t p) const override {
        const auto *a = static_cast<const int32_t*>(sums), *b = static_cast<const int32_t*>(beside);
        const Lines<T> lines(y, M, N, p);
        if (!lines.whole) return Sink::put_two(sums, beside, m, rows, p);
        const Panel first = of(p), second = of(p + 1);
        for (int64_t r = 0; r < rows; r++) {
            float results[2][CHANNELS];
            scaled(a + r * CHANNELS, first, m + r, results[0]);
            scaled(b + r * CHANNELS, second, m + r, results[1]);
            const auto low = (__m256i)narrowed16(results[0]), high = (__m256i)narrowed16(results[1]);
            lines.put(m + r, _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1));
        }
    }
#endif
};

// `round(row, to)` of every row, which gives its scale; then the product.
template <typename T, typename Round>
void product(const T* x, int64_t ld, const void* weights, const float* scale, const int32_t* bias, bool scaled, int64_t M, int64_t N, int64_t K,
             T* y, const Round& round) {
    static thread_local Scratch kept[2];
    auto* data = static_cast<int8_t*>(kept[0].get(M * K));
    auto* scales = static_cast<float*>(kept[1].get(M * 4));
#pragma omp parallel for schedule(static) if (M * K >= MANY && M > 1)
    for (int64_t m = 0; m < M; m++) scales[m] = round(x + m * ld, data + m * K);
    const Scaled<T> sink(y, M, N, scale, scaled ? scales : nullptr, bias);
    linear_panels(Blocks(Kind::INT8, M, K), rows_of(data, M, K).data(), weights, N, sink);
}

template <typename T>
void dynamic(const void* x, int64_t ld, const void* weights, const float* scale, int64_t M, int64_t N, int64_t K, void* y) {
    const auto round = [K](const T* row, int8_t* to) { return round_row(row, K, to); };
    product(static_cast<const T*>(x), ld, weights, scale, nullptr, true, M, N, K, static_cast<T*>(y), round);
}

template <typename T>
void statically(const void* x, int64_t ld, const void* weights, const float* scale, const int32_t* bias, float reciprocal, float offset,
                int64_t M, int64_t N, int64_t K, void* y) {
    const auto round = [=](const T* row, int8_t* to) { return round_statically(row, K, reciprocal, offset, to), 0.0f; };
    product(static_cast<const T*>(x), ld, weights, scale, bias, false, M, N, K, static_cast<T*>(y), round);
}

}  // namespace

void npuc_quant_linear(const void* x, int64_t half, int64_t ld, const void* weights, const float* scale, int64_t M, int64_t N, int64_t K,
                       void* y) {
    (half ? dynamic<bf16> : dynamic<float>)(x, ld, weights, scale, M, N, K, y);
}

void npuc_static_quant_linear(const void* x, int64_t half, int64_t ld, const void* weights, const float* scale, const int32_t* bias,
                              float input_scale, float offset, int64_t M, int64_t N, int64_t K, void* y) {
    float reciprocal = 1.0f / input_scale;
    if (half) {
        bf16 stored;
        narrow(stored, reciprocal);
        reciprocal = widen(stored);
    }
    (half ? statically<bf16> : statically<float>)(x, ld, weights, scale, bias, reciprocal, offset, M, N, K, y);
}
