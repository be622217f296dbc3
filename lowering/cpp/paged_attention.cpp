// The grouped-query attention of graphs/ops/paged_attention.py over paged keys and values, which are read from the pools.
//
// The unit of work of a thread is one key head of one request with all its query rows, so each key is read once.
#include <omp.h>

#include <cmath>
#include <vector>

#include "attention.h"
#include "dots.h"
#include "kernels.h"

using namespace npuc;

namespace {

// B requests of Q tokens, H query heads and G key heads of width D, pages of P tokens, N pages per request.
struct Sizes {
    int64_t B, Q, H, G, D, P, N;
};

// Number of products from which a second thread pays.
constexpr int64_t WORTH = 1 << 16;

// Values that are accumulated per pass over the query rows.
constexpr int64_t VALUES = 32;

// A head's elements as floats: in the pool itself, or widened into `copy`.
const float* floats(const float* x, int64_t, float*) { return x; }

const float* floats(const bf16* x, int64_t D, float* copy) {
    for (int64_t d = 0; d < D; d++) copy[d] = widen(x[d]);
    return copy;
}

// sums[r][d] += sum over j of weights[r][j] * values[j][d] for R rows, L columns d at a time.
template <int R>
void gather(float* sums, int64_t D, const float* weights, int64_t ld, const float* const* values, int64_t count) {
    int64_t d = 0;
    for (; d + L <= D; d += L) {
        vec acc[R];
        UNROLL for (int r = 0; r < R; r++) acc[r] = load(sums + r * D + d);
        for (int64_t j = 0; j < count; j++) {
            const vec value = load(values[j] + d);
            UNROLL for (int r = 0; r < R; r++) acc[r] += weights[r * ld + j] * value;
        }
        UNROLL for (int r = 0; r < R; r++) store(sums + r * D + d, acc[r]);
    }
    for (; d < D; d++)
        for (int64_t j = 0; j < count; j++)
            for (int r = 0; r < R; r++) sums[r * D + d] += weights[r * ld + j] * values[j][d];
}

// Softmax of `count` scores in place; the buffer has room for L - 1 more.
void softmax(float* scores, int64_t count) {
    for (int64_t j = count; j % L; j++) scores[j] = -INFINITY;
    float lanes[L], most = -INFINITY, whole = 0.0f;
    vec largest = load(scores), sum = {};
    for (int64_t j = 0; j < count; j += L) {
        const vec next = load(scores + j);
        largest = (next > largest) | (next != next) ? next : largest;
    }
    store(lanes, largest);
    for (float lane : lanes) most = lane > most || lane != lane ? lane : most;
    for (int64_t j = 0; j < count; j += L) {
        const vec weight = exponential(load(scores + j) - most);
        store(scores + j, weight);
        sum += weight;
    }
    store(lanes, sum);
    for (float lane : lanes) whole += lane;
    for (int64_t j = 0; j < count; j += L) store(scores + j, load(scores + j) / whole);
}

template <typename T>
void one_head(const T* q, const T* k, const T* v, const int32_t* table, int64_t start, int64_t live, float scale, const Sizes& s,
              int64_t b, int64_t g, T* out) {
    constexpr int R = 4, KEYS = L / R;
    const int64_t heads = s.H / s.G, rows = s.Q * heads, D = s.D, last = std::min(start + s.Q, s.N * s.P), ld = (last + L) / L * L;
    const auto place = [&](int64_t row) { return ((b * s.Q + row / heads) * s.H + g * heads + row % heads) * D; };
    const auto entry = [&](int64_t j) { return ((int64_t(table[j / s.P]) * s.P + j % s.P) * s.G + g) * D; };
    std::vector<float> query(rows * D), scores(rows * ld), found(rows * D), copies(std::max<int64_t>(KEYS, VALUES) * D);
    for (int64_t row = 0; row < rows; row++)
        for (int64_t d = 0; d < D; d++) query[row * D + d] = widen(q[place(row) + d]) * scale;
    const float *own[R], *keys[KEYS];
    for (int64_t j = 0; j < last; j += KEYS) {
        const int64_t count = std::min<int64_t>(KEYS, last - j);
        for (int64_t i = 0; i < KEYS; i++) keys[i] = i < count ? floats(k + entry(j + i), D, &copies[i * D]) : keys[0];
        for (int64_t row = 0; row < rows; row += R) {
            for (int64_t r = 0; r < R; r++) own[r] = &query[std::min(row + r, rows - 1) * D];
            put(dots<R, 0>(own, keys, D, nullptr), KEYS, &scores[row * ld + j], ld, std::min<int64_t>(R, rows - row), count);
        }
    }
    // Token t attends to keys up to start + t; values at and beyond `live` have not been written and are never read.
    const auto seen = [&](int64_t row) { return std::min(start + row / heads + 1, last); };
    for (int64_t row = 0; row < rows; row++) softmax(&scores[row * ld], seen(row));
    const int64_t end = std::min(last, live);
    std::vector<const float*> values(VALUES);
    for (int64_t j = 0; j < end; j += VALUES) {
        const int64_t count = std::min(VALUES, end - j);
        for (int64_t i = 0; i < count; i++) values[i] = floats(v + entry(j + i), D, &copies[i * D]);
        for (int64_t row = 0; row < rows; row++) {
            // Rows that attend to all of these values go four at a time; other rows one by one, up to the last value they attend to.
            const int64_t sees = std::min(seen(row) - j, count);
            if (sees == count && row + 4 <= rows) {
                gather<4>(&found[row * D], D, &scores[row * ld + j], ld, values.data(), count);
                row += 3;
            } else if (sees > 0) {
                gather<1>(&found[row * D], D, &scores[row * ld + j], ld, values.data(), sees);
            }
        }
    }
    for (int64_t row = 0; row < rows; row++)
        for (int64_t d = 0; d < D; d++) narrow(out[place(row) + d], found[row * D + d]);
}

template <typename T>
void attend(const T* q, const T* k, const T* v, const int32_t* table, const int32_t* starts, const int32_t* lengths, float scale,
            const int64_t* sizes, T* out) {
    const Sizes s{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], sizes[6]};
    int64_t keys = 0;
    for (int64_t b = 0; b < s.B; b++) keys += starts[b] + s.Q;
#pragma omp parallel for collapse(2) schedule(dynamic) if (keys * s.Q * s.H * s.D >= WORTH)
    for (int64_t b = 0; b < s.B; b++)
        for (int64_t g = 0; g < s.G; g++)
            one_head(q, k, v, table + b * s.N, starts[b], starts[b] + lengths[b], scale, s, b, g, out);
}

#if defined(WITH_DOTS)
void attend_by_tiles(const bf16* q, const bf16* k, const bf16* v, const int32_t* table, const int32_t* starts, const int32_t* lengths,
                     float scale, const int64_t* sizes, bf16* out) {
    const int64_t B = sizes[0], Q = sizes[1], H = sizes[2], G = sizes[3], D = sizes[4], P = sizes[5], N = sizes[6];
    int64_t keys = 0;
    for (int64_t b = 0; b < B; b++) keys += starts[b] + Q;
#pragma omp parallel for collapse(2) schedule(dynamic) if (keys * Q * H * D >= WORTH)
    for (int64_t b = 0; b < B; b++)
        for (int64_t g = 0; g < G; g++)
            attend_tiles({q + b * Q * H * D, k, v, out + b * Q * H * D, table + b * N, starts[b], starts[b] + lengths[b], g, H / G, Q, H, G, D,
                          P, N, scale});
}

// Rows of queries go by so many at a time: keys are rearranged once for them, and their scores are not many.
constexpr int64_t DOT_ROWS = 144;

void attend_by_dots(const bf16* q, const bf16* k, const bf16* v, const int32_t* table, const int32_t* starts, const int32_t* lengths,
                    float scale, const int64_t* sizes, bf16* out) {
    const int64_t B = sizes[0], Q = sizes[1], H = sizes[2], G = sizes[3], D = sizes[4], P = sizes[5], N = sizes[6];
    int64_t keys = 0;
    for (int64_t b = 0; b < B; b++) keys += starts[b] + Q;
    const int64_t rows = Q * (H / G), parts = (rows + DOT_ROWS - 1) / DOT_ROWS;
#pragma omp parallel for collapse(3) schedule(dynamic) if (keys * Q * H * D >= WORTH)
    for (int64_t b = 0; b < B; b++)
        for (int64_t g = 0; g < G; g++)
            // The last rows, which attend to most, begin: no thread is left with them at the end.
            for (int64_t part = parts - 1; part >= 0; part--) {
                const int64_t first = rows * part / parts, count = rows * (part + 1) / parts - first;
                attend_dots({q + b * Q * H * D, k, v, out + b * Q * H * D, table + b * N, starts[b], starts[b] + lengths[b], g, H / G, Q, H, G, D,
                             P, N, scale},
                            first, count);
            }
}

// Neighbouring heads of a request go to one thread, as many as keep all threads busy.
template <typename Few>
void attend_few_rows(const Few& few, const bf16* q, const bf16* k, const bf16* v, const int32_t* table, const int32_t* starts,
                     const int32_t* lengths, float scale, const int64_t* sizes, bf16* out) {
    const int64_t B = sizes[0], Q = sizes[1], H = sizes[2], G = sizes[3], D = sizes[4], P = sizes[5], N = sizes[6];
    int64_t keys = 0;
    for (int64_t b = 0; b < B; b++) keys += starts[b] + Q;
    const int64_t parts = std::min<int64_t>(G, (2 * omp_get_max_threads() + B - 1) / B);
#pragma omp parallel for collapse(2) schedule(dynamic) if (keys * Q * H * D >= WORTH)
    for (int64_t b = 0; b < B; b++)
        for (int64_t part = 0; part < parts; part++) {
            const int64_t g = G * part / parts;
            few({q + b * Q * H * D, k, v, out + b * Q * H * D, table + b * N, starts[b], starts[b] + lengths[b], g, H / G, Q, H, G, D, P, N, scale},
                G * (part + 1) / parts - g);
        }
}
#endif

}  // namespace

void npuc_attention(const float* q, const float* k, const float* v, const int32_t* table, const int32_t* starts, const int32_t* lengths,
                    float scale, const int64_t* sizes, float* out) {
    attend(q, k, v, table, starts, lengths, scale, sizes, out);
}

void npuc_attention_bf16(const void* q, const void* k, const void* v, const int32_t* table, const int32_t* starts, const int32_t* lengths,
                         float scale, const int64_t* sizes, void* out) {
    const auto of = [](const void* x) { return static_cast<const bf16*>(x); };
#if defined(WITH_DOTS)
    const int64_t rows = sizes[1] * (sizes[2] / sizes[3]), D = sizes[4], P = sizes[5];
    auto* to = static_cast<bf16*>(out);
    if (has_few_dots_for(rows, D, P)) return attend_few_rows(attend_few_dots, of(q), of(k), of(v), table, starts, lengths, scale, sizes, to);
    if (has_few_for(rows, D, P)) return attend_few_rows(attend_few, of(q), of(k), of(v), table, starts, lengths, scale, sizes, to);
    if (has_dots_for(D)) return attend_by_dots(of(q), of(k), of(v), table, starts, lengths, scale, sizes, to);
    if (has_tiles_for(D)) return attend_by_tiles(of(q), of(k), of(v), table, starts, lengths, scale, sizes, to);
#endif
    attend(of(q), of(k), of(v), table, starts, lengths, scale, sizes, static_cast<bf16*>(out));
}
