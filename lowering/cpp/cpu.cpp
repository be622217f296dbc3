#include "cpu.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>

#if defined(WITH_DOTS) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace npuc {

namespace {

#if defined(WITH_DOTS) && defined(__linux__)
bool bit(unsigned value, int at) { return value >> at & 1; }

// The parts of the registers that the operating system saves (Intel SDM, volume 1, chapter 13).
uint64_t saved() {
    unsigned low, high;
    asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return uint64_t(high) << 32 | low;
}

// Linux gives a process the tiles' registers if it asks (Documentation/arch/x86/xstate.rst).
bool tiles_allowed() {
    constexpr int REQUEST = 0x1023, TILE_DATA = 18;
    return syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
}

Isa found() {
    unsigned a, b, c, d, a1, b1, c1, d1;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !__get_cpuid_count(7, 1, &a1, &b1, &c1, &d1)) return Isa::WIDE;
    constexpr uint64_t VECTORS = 0xe6, TILES = 3u << 17;
    const bool avx512 = bit(b, 16) && bit(b, 17) && bit(b, 30) && bit(b, 31);  // F, DQ, BW, VL
    if (!avx512 || !bit(c, 11) || !bit(a1, 5) || (saved() & VECTORS) != VECTORS) return Isa::WIDE;  // VNNI, BF16
    const bool amx = bit(d, 22) && bit(d, 24) && bit(d, 25);  // BF16, TILE, INT8
    return amx && (saved() & TILES) == TILES && tiles_allowed() ? Isa::TILES : Isa::DOTS;
}
#else
Isa found() { return Isa::WIDE; }
#endif

// What the switch leaves that hides instruction sets from torch as well (lowering/isa.py).
Isa allowed() {
    const char* level = std::getenv("NPUCOMPILE_ISA");
    if (level == nullptr || *level == 0 || std::strcmp(level, "amx") == 0) return Isa::TILES;
    return std::strcmp(level, "avx512_bf16") == 0 ? Isa::DOTS : Isa::WIDE;
}

std::atomic<int> limit{int(Isa::TILES)};

}  // namespace

Isa isa() {
    static const Isa best = std::min(found(), allowed());
    return Isa(std::min(int(best), limit.load(std::memory_order_relaxed)));
}

}  // namespace npuc

int npuc_limit(int most) {
    npuc::limit = most;
    return int(npuc::isa());
}
