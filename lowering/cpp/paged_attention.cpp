// Grouped-query attention over paged keys and values that are read in place, as graphs/ops/paged_attention.py says.
//
// One thread takes one key head of one request: all its query rows pass over the keys together, so each key is read once.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

struct bf16 {
    uint16_t bits;
};

inline float load(float x) { return x; }

inline float load(bf16 x) {
    const uint32_t wide = uint32_t(x.bits) << 16;
    float value;
    std::memcpy(&value, &wide, sizeof value);
    return value;
}

inline void store(float& to, float x) { to = x; }

inline void store(bf16& to, float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    to.bits = std::isnan(x) ? 0x7fc0 : uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// B requests of Q tokens, H query heads on G key heads of width D, pages of P tokens, N pages a request.
struct Sizes {
    int64_t B, Q, H, G, D, P, N;
};

template <typename T>
void one_head(const T* q, const T* k, const T* v, const int32_t* table, int64_t start, int64_t live, float scale, const Sizes& s,
              int64_t b, int64_t g, T* out) {
    const int64_t R = s.H / s.G, rows = s.Q * R, D = s.D, last = std::min(start + s.Q, s.N * s.P);
    const auto place = [&](int64_t row) { return ((b * s.Q + row / R) * s.H + g * R + row % R) * D; };
    const auto entry = [&](int64_t j) { return ((int64_t(table[j / s.P]) * s.P + j % s.P) * s.G + g) * D; };
    const auto seen = [&](int64_t row) { return std::min(start + row / R + 1, last); };
    std::vector<float> query(rows * D), scores(rows * last), sums(rows * D, 0.0f), key(D);
    for (int64_t row = 0; row < rows; row++)
        for (int64_t d = 0; d < D; d++) query[row * D + d] = load(q[place(row) + d]) * scale;
    for (int64_t j = 0; j < last; j++) {
        const T* from = k + entry(j);
        for (int64_t d = 0; d < D; d++) key[d] = load(from[d]);
        // The first token that sees key j is token j - start; those before it do not.
        for (int64_t row = std::max<int64_t>(0, j - start) * R; row < rows; row++) {
            float dot = 0.0f;
            for (int64_t d = 0; d < D; d++) dot += query[row * D + d] * key[d];
            scores[row * last + j] = dot;
        }
    }
    for (int64_t row = 0; row < rows; row++) {
        float* own = &scores[row * last];
        const int64_t count = seen(row);
        float most = -INFINITY, whole = 0.0f;
        for (int64_t j = 0; j < count; j++) most = std::max(most, own[j]);
        for (int64_t j = 0; j < count; j++) whole += own[j] = std::exp(own[j] - most);
        for (int64_t j = 0; j < count; j++) own[j] /= whole;
    }
    // Values at and beyond `live` are never read: nobody wrote them.
    for (int64_t j = 0; j < std::min(last, live); j++) {
        const T* from = v + entry(j);
        for (int64_t d = 0; d < D; d++) key[d] = load(from[d]);
        for (int64_t row = std::max<int64_t>(0, j - start) * R; row < rows; row++) {
            const float weight = scores[row * last + j];
            for (int64_t d = 0; d < D; d++) sums[row * D + d] += weight * key[d];
        }
    }
    for (int64_t row = 0; row < rows; row++)
        for (int64_t d = 0; d < D; d++) store(out[place(row) + d], sums[row * D + d]);
}

template <typename T>
void attend(const T* q, const T* k, const T* v, const int32_t* table, const int32_t* starts, const int32_t* lengths, float scale,
            const Sizes& s, T* out) {
    int64_t keys = 0;
    for (int64_t b = 0; b < s.B; b++) keys += starts[b] + s.Q;
    // Below this much work threads cost more than they bring.
#pragma omp parallel for collapse(2) schedule(dynamic) if (keys * s.Q * s.H * s.D >= 200000)
    for (int64_t b = 0; b < s.B; b++)
        for (int64_t g = 0; g < s.G; g++)
            one_head(q, k, v, table + b * s.N, starts[b], starts[b] + lengths[b], scale, s, b, g, out);
}

}  // namespace

#define ENTRY(name, T)                                                                                                                 \
    extern "C" void name(const T* q, const T* k, const T* v, const int32_t* table, const int32_t* starts, const int32_t* lengths,     \
                         float scale, const int64_t* sizes, T* out) {                                                                  \
        const Sizes s{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], sizes[6]};                                           \
        attend<T>(q, k, v, table, starts, lengths, scale, s, out);                                                                     \
    }

ENTRY(paged_attention_f32, float)
ENTRY(paged_attention_bf16, bf16)
