// Bytes to fp32 and back, a block of numbers at a time: the definition is in blockwise.py, and every bit is the same.

#pragma once

#include <algorithm>

#include "vectors.h"

namespace blockwise {

constexpr int64_t kBlock = 256;
constexpr int kRungs = 9, kRows = 16;  // of 0, of seven decades, and of 1; rows are filled up to what registers hold

struct Map {
    float unit[kRows], less[kRows], ratio[kRows], bounds[kRows];
};

struct Maps {
    Map with_sign, without;
};

using namespace vectors;

// Numbers of a table by rung.
struct Table {
#if defined(__AVX512F__)
    __m512 row;
    explicit Table(const float* from) : row(_mm512_loadu_ps(from)) {}
    Floats operator[](Ints rung) const { return bits<Floats>(_mm512_permutexvar_ps(bits<__m512i>(rung), row)); }
#elif defined(__AVX2__)
    __m256 row, last;
    explicit Table(const float* from) : row(_mm256_loadu_ps(from)), last(_mm256_set1_ps(from[kRungs - 1])) {}
    Floats operator[](Ints rung) const {
        const __m256i index = bits<__m256i>(rung);
        const __m256 found = _mm256_permutevar8x32_ps(row, index);
        return bits<Floats>(_mm256_blendv_ps(found, last, _mm256_castsi256_ps(_mm256_slli_epi32(index, 28))));
    }
#else
    const float* row;
    explicit Table(const float* from) : row(from) {}
    Floats operator[](Ints rung) const {
        Floats found;
        for (int lane = 0; lane < kLanes; ++lane) found[lane] = row[rung[lane]];
        return found;
    }
#endif
};

// Add one where a size reaches its bound: one instruction, which compilers do not find.
inline Ints count(Ints rung, Floats size, Floats bound) {
#if defined(__AVX512F__)
    const __mmask16 reached = _mm512_cmp_ps_mask(bits<__m512>(size), bits<__m512>(bound), _CMP_GE_OQ);
    return bits<Ints>(_mm512_mask_add_epi32(bits<__m512i>(rung), reached, bits<__m512i>(rung), _mm512_set1_epi32(1)));
#else
    return rung - (size >= bound);
#endif
}

template <bool kSigned>
inline void decode(const uint8_t* __restrict from, float scale, const Map& map, float* __restrict to) {
    const Table unit(map.unit), less(map.less);
    alignas(64) int32_t codes[kBlock];  // compilers widen bytes well in a loop, and badly in vectors
    for (int64_t i = 0; i < kBlock; ++i) codes[i] = from[i];
    for (int64_t i = 0; i < kBlock; i += kLanes) {
        Ints rank = load<Ints>(codes + i);
        Ints sign{};
        if constexpr (kSigned) {
            rank -= 127;
            sign = rank >> 31;
            rank = (rank ^ sign) - sign;
        }
        const Floats odd = __builtin_convertvector(2 * rank + (kSigned ? 1 : 3), Floats);
        const Ints rung = (bits<Ints>(odd) >> 23) - (kSigned ? 127 : 128);
        Floats value = (9.0f * odd - less[rung]) * unit[rung];
        if constexpr (kSigned) value = bits<Floats>(bits<Ints>(value) ^ (sign & INT32_MIN));
        value *= scale;
        std::memcpy(to + i, &value, sizeof value);
    }
}

// Return the rungs of numbers from 0 to 1. The bits of a float are its logarithm, nearly, and bounds are evenly spaced in
// that, nearly: so a line through them tells the rung or the one below, and one comparison tells which.
inline Ints rungs(Floats size, const Table& bounds) {
    const float per_rung = 3.1f * (1 << 23), first = (127 - 23.7f) * (1 << 23);
    const Floats line = __builtin_convertvector(bits<Ints>(size), Floats) * (1 / per_rung) - first / per_rung;
    const Ints guess = __builtin_convertvector(within(line, Floats{}, all(kRungs - 2.0f)), Ints);
    return count(guess, size, bounds[guess]);
}

// Return the scale.
template <bool kSigned>
inline float encode(const float* __restrict from, const Map& map, uint8_t* __restrict to) {
    int32_t most = 0;  // numbers that are not negative are ordered as their bits are, and what is no number comes last
    for (int64_t i = 0; i < kBlock; ++i) most = std::max(most, bits<int32_t>(from[i]) & INT32_MAX);
    const bool finite = most < 0x7f800000;
    const float scale = bits<float>(finite ? most : 0x7fc00000);
    if (!finite || most < 0x00800000) {
        std::memset(to, kSigned ? 127 : 0, kBlock);
        return scale;
    }
    const float factor = 1.0f / scale;
    const Table ratio(map.ratio), bounds(map.bounds);
    const Floats one = all(1.0f), below_two = all(bits<float>(0x3fffffff)), before = all(8.0f / 9.0f);
    alignas(64) int32_t codes[kBlock];
    for (int64_t i = 0; i < kBlock; i += kLanes) {
        const Floats value = load<Floats>(from + i);
        const Floats size = bits<Floats>(bits<Ints>(value) & INT32_MAX) * factor;
        const Ints rung = rungs(size, bounds);
        const Ints inside = bits<Ints>(within(size * ratio[rung] + before, one, below_two));
        Ints code = ((inside & 0x7fffff) | 0x800000) >> ((kSigned ? 24 : 23) - rung);
        if constexpr (kSigned) {
            const Ints sign = bits<Ints>(value) >> 31;
            code -= (code >> 7) & sign;  // there is no -1
            code = ((code ^ sign) - sign) + 127;
        } else {
            code -= 1;
        }
        std::memcpy(codes + i, &code, sizeof code);
    }
    for (int64_t i = 0; i < kBlock; ++i) to[i] = static_cast<uint8_t>(codes[i]);
    return scale;
}

}  // namespace blockwise
