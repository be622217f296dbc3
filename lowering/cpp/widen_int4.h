// Four lines of bfloat16 out of a line of int4 (panels.h), exact.
#pragma once

#include <immintrin.h>

#include "cpu.h"
#include "panels.h"

namespace npuc {

// The values of a nibble as bfloat16, twice: the instruction takes five bits of an index, of which the fifth is the next nibble's.
WITH_DOTS inline __m512i nibble_values() {
    alignas(64) static const uint16_t values[32] = {
        0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80,
        0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80};
    return _mm512_load_si512(values);
}

// Line i of the four.
template <int i>
WITH_DOTS inline __m512i widened(__m512i line, __m512i values) {
    return _mm512_permutexvar_epi16(i ? _mm512_srli_epi16(line, 4 * i) : line, values);
}

}  // namespace npuc
