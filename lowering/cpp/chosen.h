// The choices of all tokens grouped by expert.
#pragma once

#include <cstdint>
#include <vector>

namespace npuc {

// Choices are numbered token * X + choice; those of experts outside [0, E) are left out.
struct Chosen {
    std::vector<int64_t> places, first;  // those of expert e are places[first[e]..first[e + 1])
    std::vector<int64_t> experts;        // chosen by at least one token

    Chosen(const int32_t* ids, int64_t count, int64_t E) : places(count), first(E + 1) {
        for (int64_t i = 0; i < count; i++)
            if (0 <= ids[i] && ids[i] < E) first[ids[i] + 1]++;
        for (int64_t e = 0; e < E; e++) {
            if (first[e + 1]) experts.push_back(e);
            first[e + 1] += first[e];
        }
        std::vector<int64_t> next(first);
        for (int64_t i = 0; i < count; i++)
            if (0 <= ids[i] && ids[i] < E) places[next[ids[i]]++] = i;
    }
};

}  // namespace npuc
