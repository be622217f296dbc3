// Which of a kernel's variants this machine runs: packages have those beyond the level that they are compiled for, where one can be proved.
#pragma once

#include <cstdint>

#if defined(__x86_64__) && !defined(WIDE_ALONE)
// Of functions that only run where `cpu.h` says so; both go with the intrinsics of immintrin.h.
#define WITH_DOTS __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vnni")))
#define WITH_TILES __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vnni,amx-tile,amx-bf16,amx-int8")))
#endif

namespace npuc {

// Each with all that is before it. WIDE is what the compiler was told to use; DOTS are AVX-512's products of pairs of bfloat16 and of fours
// of int8; TILES are AMX's.
enum class Isa : int { WIDE = 0, DOTS = 1, TILES = 2 };

// The best that the machine has, and the operating system lets this process use.
Isa isa();

}  // namespace npuc

extern "C" {

// Limits `isa()` to a variant, by its number, so that each can be tested; returns the variant that kernels now use.
int npuc_limit(int most);
}
