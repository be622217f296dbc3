// A product of many rows with one matrix in panels, by all threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <vector>

#include "product.h"
#include "scratch.h"
#include "threads.h"

#if defined(WITH_DOTS)
#include <immintrin.h>
#endif

namespace npuc {

// Bytes of weights from which a second thread pays, and bytes of rows from which it pays to arrange them.
constexpr int64_t WORTH_SHARING = 1 << 16, WORTH_ARRANGING = 1 << 17;

// One part of this many is not shared evenly: threads that are done take of it in turns, as memory is not equally fast for all of them.
constexpr int64_t IN_TURNS = 8;

// Bytes of arranged rows from which a thread takes some of the rows and not some of the panels: no cache would hold all rows beside the panels
// that pass, and they are more than weights.
constexpr int64_t WORTH_PARTING = 3 << 19;

// Results of so many bytes go past the caches, which would read their lines first.
constexpr int64_t WORTH_STREAMING = 1 << 20;

// Calls `multiply(arranged rows, first panel, last panel, panel that the thread takes next or -1)` for all of `all` panels of `panel` bytes;
// x[m] are the rows.
template <typename Multiply>
void share_panels(const Blocks& blocks, const void* const* x, int64_t all, int64_t panel, const Multiply& multiply) {
    static thread_local Scratch kept;
    auto* data = static_cast<char*>(kept.get(blocks.bytes()));
    const int64_t groups = (all + GROUP - 1) / GROUP;
    const bool large = blocks.bytes() >= WORTH_ARRANGING;
    if (!large) arrange(blocks, x, data, 0, blocks.count);
    const int64_t even = groups - groups / IN_TURNS;
    std::atomic<int64_t> taken{even};
#pragma omp parallel if (all * panel >= WORTH_SHARING)
    {
        if (large) {
#pragma omp for schedule(static)
            for (int64_t block = 0; block < blocks.count; block++) arrange(blocks, x, data, block, block + 1);
        }
        // A group is taken before the one in front of it is multiplied, which so prefetches it.
        int64_t begin = even * member() / team(), end = even * (member() + 1) / team();
        for (int64_t next; begin < groups; begin = next, end = next + 1) {
            next = taken.fetch_add(1, std::memory_order_relaxed);
            if (begin < end) multiply(data, begin * GROUP, std::min(all, end * GROUP), next < groups ? next * GROUP : -1);
        }
    }
}

// What becomes of the sums of rows from `first` on.
struct Below final : Sink {
    const Sink& all;
    int64_t first;

    Below(const Sink& all, int64_t first) : all(all), first(first) {}

    void put(const void* sums, int64_t m, int64_t rows, int64_t p) const override { all.put(sums, first + m, rows, p); }
    void put_two(const void* sums, const void* beside, int64_t m, int64_t rows, int64_t p) const override {
        all.put_two(sums, beside, first + m, rows, p);
    }
};

// All of `all` panels with the rows, of which each thread takes some, an even number of blocks.
inline void share_rows(const Blocks& blocks, const void* const* x, const char* weights, int64_t all, const Sink& sink) {
    static thread_local Scratch kept;
    auto* data = static_cast<char*>(kept.get(blocks.bytes()));
#pragma omp parallel
    {
        const int64_t pairs = blocks.count / 2, begin = pairs * member() / team() * 2, end = pairs * (member() + 1) / team() * 2;
        if (begin < end) {
            arrange(blocks, x, data, begin, end);
            multiply(blocks.some(begin, end), data + begin * blocks.block(), weights, 0, all, Below(sink, begin * blocks.rows));
        }
    }
}

// The product with a matrix of bfloat16 or int8; N is its number of channels.
inline void linear_panels(const Blocks& blocks, const void* const* x, const void* weights, int64_t N, const Sink& sink) {
    const auto* from = static_cast<const char*>(weights);
    if (blocks.isa == Isa::TILES && blocks.count >= 8 && blocks.bytes() > WORTH_PARTING) return share_rows(blocks, x, from, panels(N), sink);
    share_panels(blocks, x, panels(N), blocks.panel(), [&](const char* data, int64_t begin, int64_t end, int64_t next) {
        multiply(blocks, data, from, begin, end, sink, next < 0 ? nullptr : from + next * blocks.panel());
    });
}

// The row pointers of a matrix whose rows are `step` bytes apart.
inline std::vector<const void*> rows_of(const void* x, int64_t M, int64_t step) {
    std::vector<const void*> rows(M);
    for (int64_t m = 0; m < M; m++) rows[m] = static_cast<const char*>(x) + m * step;
    return rows;
}

// 16 sums in the dtype of results.
INLINE void stored(float* to, const float* from) { std::memcpy(to, from, CHANNELS * sizeof(float)); }
INLINE void stored(bf16* to, const float* from) { narrow16(to, from); }

#if defined(WITH_DOTS)
// The lines of y [M, N] that hold the channels of panels p and p + 1, of results of 16 bits.
template <typename T>
struct Lines {
    T* first;
    int64_t N;
    bool whole, past;

    Lines(T* y, int64_t M, int64_t N, int64_t p) : first(y + p * CHANNELS), N(N), past(M * N * int64_t(sizeof(T)) >= WORTH_STREAMING) {
        whole = sizeof(T) == 2 && N % (2 * CHANNELS) == 0 && (p + 2) * CHANNELS <= N && reinterpret_cast<uintptr_t>(y) % LINE == 0;
    }

    WITH_DOTS void put(int64_t m, __m512i line) const {
        auto* to = reinterpret_cast<__m512i*>(first + m * N);
        past ? _mm512_stream_si512(to, line) : _mm512_store_si512(to, line);
    }
};
#endif

// y [M, N] of float32 or, rounded, of bfloat16.
template <typename T>
struct Stored final : Sink {
    T* y;
    int64_t M, N;

    Stored(void* y, int64_t M, int64_t N) : y(static_cast<T*>(y)), M(M), N(N) {}

    void put(const void* sums, int64_t m, int64_t rows, int64_t p) const override {
        const auto* from = static_cast<const float*>(sums);
        const int64_t n = p * CHANNELS, channels = std::min(CHANNELS, N - n);
        if (channels == CHANNELS) {
            for (int64_t r = 0; r < rows; r++) stored(y + (m + r) * N + n, from + r * CHANNELS);
            return;
        }
        for (int64_t r = 0; r < rows; r++) {
            T rounded[CHANNELS];
            stored(rounded, from + r * CHANNELS);
            std::memcpy(y + (m + r) * N + n, rounded, channels * sizeof(T));
        }
    }

#if defined(WITH_DOTS)
    // The instruction rounds what a tile holds, in which nothing is denormal, as `narrow` does.
    WITH_DOTS void put_two(const void* sums, const void* beside, int64_t m, int64_t rows, int64_t p) const override {
        const auto *a = static_cast<const float*>(sums), *b = static_cast<const float*>(beside);
        const Lines<T> lines(y, M, N, p);
        if (!lines.whole) return Sink::put_two(sums, beside, m, rows, p);
        for (int64_t r = 0; r < rows; r++)
            lines.put(m + r, (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(b + r * CHANNELS), _mm512_loadu_ps(a + r * CHANNELS)));
    }
#endif
};

}  // namespace npuc
