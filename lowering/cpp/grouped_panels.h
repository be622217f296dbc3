// Experts over rows that are grouped by expert: gate and up, the activation, and down, by all threads.
#pragma once

#include <algorithm>
#include <vector>

#include "linear_panels.h"

namespace npuc {

// Which rows belong to which expert: those of experts[i] are [first[i], first[i + 1]), at least one.
struct Groups {
    std::vector<int64_t> experts, first;

    int64_t count() const { return int64_t(experts.size()); }
    int64_t rows() const { return first.back(); }
    int64_t expert_of(int64_t row) const { return experts[std::upper_bound(first.begin(), first.end(), row) - first.begin() - 1]; }

    // Of rows that are grouped by expert, counts[e] of each.
    static Groups of(const int64_t* counts, int64_t E) {
        Groups groups{{}, {0}};
        for (int64_t e = 0; e < E; e++)
            if (counts[e] > 0) groups.experts.push_back(e), groups.first.push_back(groups.rows() + counts[e]);
        return groups;
    }
};

// A product of each group's rows with its expert's matrix, whose panels are `all`.
struct GroupedProduct {
    GroupedProduct(const Groups& groups, Kind kind, int64_t K, int64_t all) : all(all) {
        for (int64_t i = 0; i < groups.count(); i++) {
            blocks.emplace_back(kind, groups.first[i + 1] - groups.first[i], K);
            at.push_back(bytes), bytes += blocks[i].bytes();
        }
    }

    std::vector<Blocks> blocks;
    std::vector<int64_t> at;  // where each group's arranged rows begin
    int64_t all, bytes = 0;
};

// Within a parallel region: calls `multiply(group, its arranged rows, first panel, last panel)` for this thread's share. What a panel costs
// is the number of blocks that it is multiplied with.
template <typename Multiply>
void share_groups(const GroupedProduct& product, const Groups& groups, const void* const* rows, char* data, const Multiply& multiply) {
    const int64_t count = groups.count(), steps = (product.all + GROUP - 1) / GROUP;
#pragma omp for schedule(static)
    for (int64_t i = 0; i < count; i++) arrange(product.blocks[i], rows + groups.first[i], data + product.at[i], 0, product.blocks[i].count);
    int64_t total = 0, before = 0;
    for (const Blocks& blocks : product.blocks) total += steps * blocks.count;
    const int64_t low = total * member() / team(), high = total * (member() + 1) / team();
    for (int64_t i = 0; i < count; before += steps * product.blocks[i++].count) {
        const int64_t each = product.blocks[i].count;
        const auto step = [&](int64_t cost) { return std::min(steps, (std::max<int64_t>(0, cost - before) + each - 1) / each); };
        const int64_t begin = step(low) * GROUP, end = std::min(product.all, step(high) * GROUP);
        if (begin < end) multiply(i, data + product.at[i], begin, end);
    }
#pragma omp barrier
}

// hidden = silu(gate) * up of a row, in float32 before it is rounded to T.
template <typename T>
void activate(const float* gates, const float* ups, int64_t F, T* to) {
    for (int64_t f = 0; f < F; f += L) {
        const int64_t count = std::min<int64_t>(L, F - f);
        float padded[2][L] = {}, activated[L];
        std::memcpy(padded[0], gates + f, count * sizeof(float));
        std::memcpy(padded[1], ups + f, count * sizeof(float));
        store(activated, silu(load(padded[0])) * load(padded[1]));
        for (int64_t i = 0; i < count; i++) narrow(to[f + i], activated[i]);
    }
}

// Sizes of experts, and what their rows are.
struct Expert {
    Kind kind;
    int64_t M, F;
    int64_t wide, up;  // panels of gate and up together, and the sum of a row of them where up begins
    int64_t bytes;     // of an expert's weights
};

// Rows [rows][panels(M) * 16] of sums that the experts make of rows `x`, in memory of this thread that the next call overwrites.
// `multiply_up` and `multiply_down` are called as `multiply(blocks, arranged rows, expert, first panel, last panel, sink)`, and in between
// `inner(group, row, sums of gate and up, to)` makes a row of F elements of them.
template <typename Up, typename Inner, typename Down>
const float* through_experts(const Groups& groups, const Expert& expert, const void* const* x, const Up& multiply_up, const Inner& inner,
                             const Down& multiply_down) {
    static thread_local Scratch kept[4];
    const int64_t rows = groups.rows(), wide = expert.wide * CHANNELS, width = panels(expert.M) * CHANNELS;
    const int64_t size = expert.F * bytes_of(expert.kind);
    const GroupedProduct first(groups, expert.kind, expert.M, expert.wide), second(groups, expert.kind, expert.F, panels(expert.M));
    auto* data = static_cast<char*>(kept[0].get(std::max(first.bytes, second.bytes)));
    auto* gates = static_cast<float*>(kept[1].get(rows * wide * 4));
    auto* hidden = static_cast<char*>(kept[2].get(rows * size));
    auto* outs = static_cast<float*>(kept[3].get(rows * width * 4));
    const std::vector<const void*> between = rows_of(hidden, rows, size);
#pragma omp parallel if (groups.count() * expert.bytes >= WORTH_SHARING)
    {
        share_groups(first, groups, x, data, [&](int64_t i, const char* own, int64_t begin, int64_t end) {
            multiply_up(first.blocks[i], own, groups.experts[i], begin, end, Placed(gates + groups.first[i] * wide, wide));
        });
#pragma omp for schedule(static)
        for (int64_t r = 0; r < rows; r++) inner(groups.expert_of(r), r, gates + r * wide, hidden + r * size);
        share_groups(second, groups, between.data(), data, [&](int64_t i, const char* own, int64_t begin, int64_t end) {
            multiply_down(second.blocks[i], own, groups.experts[i], begin, end, Placed(outs + groups.first[i] * width, width));
        });
    }
    return outs;
}

// The activation of sums of float32 for `through_experts`.
inline auto activated(const Expert& expert) {
    return [&expert](int64_t, int64_t, const float* from, void* to) {
        if (expert.kind == Kind::F32)
            activate(from, from + expert.up, expert.F, static_cast<float*>(to));
        else
            activate(from, from + expert.up, expert.F, static_cast<bf16*>(to));
    };
}

}  // namespace npuc
