// AMX's tile registers, 8 of up to 16 lines of 64 bytes. A thread configures them for its work and releases them after it, since other
// libraries in the process configure them for theirs.
#pragma once

#include <immintrin.h>

#include "cpu.h"
#include "panels.h"
#include "vec.h"

namespace npuc {

// The first `short_ones` registers get `rows` lines, the others 16.
WITH_TILES inline void configure_tiles(int64_t rows, int short_ones) {
    // Layout of the operand of LDTILECFG (Intel SDM, volume 2).
    struct alignas(64) {
        uint8_t palette = 1, start = 0, reserved[14] = {};
        uint16_t bytes[16] = {};
        uint8_t lines[16] = {};
    } layout;
    for (int i = 0; i < 8; i++) layout.bytes[i] = LINE, layout.lines[i] = uint8_t(i < short_ones ? rows : LINES);
    // The intrinsic declares only the first 8 bytes of the layout as read.
    asm volatile("" : : "r"(&layout) : "memory");
    _tile_loadconfig(&layout);
}

}  // namespace npuc
