// bfloat16 numbers, closed and opened without a loss: plain.py defines the pieces, and every bit here is the same. Knows
// arrays of numbers and threads, no tensors.
//
// The codes of a group of 64 numbers are three words, a bit of each number in each. So the numbers with an escape are the
// AND of the words, wide instructions take the words as masks, and all that differs between processors is below `Group`.

#include <algorithm>

#include "vectors.h"

namespace {

using vectors::load;

constexpr int64_t kBlock = 1024;                // numbers: has its own place in the escapes
constexpr int64_t kGroup = 64, kGroups = kBlock / kGroup;
constexpr int64_t kTile = 16 * kBlock;          // numbers that a thread takes at a time
constexpr int kPlanes = 3, kCodes = 7;          // bits of a code, and exponents that have one; all bits: an escape

inline uint8_t exponent_of(uint16_t number) { return static_cast<uint8_t>(number >> 7); }

inline uint8_t mantissa_of(uint16_t number) { return static_cast<uint8_t>((number & 0x7f) | (number >> 8 & 0x80)); }

inline uint16_t joined(uint8_t mantissa, uint8_t exponent) {
    return static_cast<uint16_t>((mantissa & 0x80) << 8 | exponent << 7 | (mantissa & 0x7f));
}

// Codes of 64 numbers.
struct Planes {
    uint64_t words[kPlanes];
    uint64_t escapes() const { return words[0] & words[1] & words[2]; }
};

inline Planes planes_of(const uint8_t* block, int64_t group) {
    Planes planes;
    for (int plane = 0; plane < kPlanes; ++plane) planes.words[plane] = load<uint64_t>(block + (plane * kGroups + group) * 8);
    return planes;
}

// Of 64 numbers. `open` leaves those with an escape to `patch` and returns false, or takes their exponents and returns true.
#if defined(__AVX512BW__)
struct Group {
    __m512i table;
    __m512i each[kCodes];
    explicit Group(const uint8_t* exponents) {
        table = _mm512_broadcast_i32x4(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(exponents)));
        for (int code = 0; code < kCodes; ++code) each[code] = _mm512_set1_epi8(static_cast<char>(exponents[code]));
    }

    static __m512i joined(__m256i mantissas, __m256i exponents) {
        const __m512i low = _mm512_cvtepu8_epi16(mantissas), high = _mm512_cvtepu8_epi16(exponents);
        const __m512i both = _mm512_or_si512(low, _mm512_slli_epi16(low, 8));
        const __m512i kept = _mm512_and_si512(both, _mm512_set1_epi16(static_cast<int16_t>(0x807f)));
        return _mm512_or_si512(kept, _mm512_slli_epi16(high, 7));
    }

    bool open(const uint8_t* mantissas, const Planes& planes, const uint8_t* escapes, uint16_t* to) const {
        __m512i code = _mm512_maskz_set1_epi8(planes.words[0], 1);
        code = _mm512_mask_add_epi8(code, planes.words[1], code, _mm512_set1_epi8(2));
        code = _mm512_mask_add_epi8(code, planes.words[2], code, _mm512_set1_epi8(4));
        __m512i exponents = _mm512_shuffle_epi8(table, code);
#if defined(__AVX512VBMI2__)
        const uint64_t escaped = planes.escapes();
        const int count = __builtin_popcountll(escaped);
        const __m512i next = _mm512_maskz_loadu_epi8(count ? ~uint64_t{} >> (64 - count) : 0, escapes);
        exponents = _mm512_mask_expand_epi8(exponents, escaped, next);
#endif
        const __m512i low = _mm512_loadu_si512(mantissas);
        _mm512_storeu_si512(to, joined(_mm512_castsi512_si256(low), _mm512_castsi512_si256(exponents)));
        _mm512_storeu_si512(to + 32, joined(_mm512_extracti64x4_epi64(low, 1), _mm512_extracti64x4_epi64(exponents, 1)));
#if defined(__AVX512VBMI2__)
        return true;
#else
        return false;
#endif
    }

    Planes close(const uint16_t* from, uint8_t* mantissas) const {
        const __m512i numbers[] = {_mm512_loadu_si512(from), _mm512_loadu_si512(from + 32)};
        __m256i low[2], high[2];
        for (int half = 0; half < 2; ++half) {
            const __m512i sign = _mm512_and_si512(_mm512_srli_epi16(numbers[half], 8), _mm512_set1_epi16(0x80));
            const __m512i rest = _mm512_and_si512(numbers[half], _mm512_set1_epi16(0x7f));
            low[half] = _mm512_cvtepi16_epi8(_mm512_or_si512(sign, rest));
            high[half] = _mm512_cvtepi16_epi8(_mm512_srli_epi16(numbers[half], 7));
        }
        _mm512_storeu_si512(mantissas, _mm512_inserti64x4(_mm512_castsi256_si512(low[0]), low[1], 1));
        const __m512i exponents = _mm512_inserti64x4(_mm512_castsi256_si512(high[0]), high[1], 1);
        uint64_t is[kCodes], any = 0;
        for (int code = 0; code < kCodes; ++code) any |= is[code] = _mm512_cmpeq_epi8_mask(exponents, each[code]);
        return {{is[1] | is[3] | is[5] | ~any, is[2] | is[3] | is[6] | ~any, is[4] | is[5] | is[6] | ~any}};
    }
};
#elif defined(__AVX2__)
struct Group {
    __m256i table;
    __m256i each[kCodes];
    explicit Group(const uint8_t* exponents) {
        table = _mm256_broadcastsi128_si256(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(exponents)));
        for (int code = 0; code < kCodes; ++code) each[code] = _mm256_set1_epi8(static_cast<char>(exponents[code]));
    }

    // A byte for each bit of a word, with the bits of `value` where it is one.
    static __m256i spread(uint32_t word, char value) {
        const __m256i bytes = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
        const __m256i bits = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201));
        const __m256i mine = _mm256_shuffle_epi8(_mm256_set1_epi32(static_cast<int>(word)), bytes);
        const __m256i is = _mm256_cmpeq_epi8(_mm256_and_si256(mine, bits), bits);
        return _mm256_and_si256(is, _mm256_set1_epi8(value));
    }

    static __m256i joined(__m128i mantissas, __m128i exponents) {
        const __m256i low = _mm256_cvtepu8_epi16(mantissas), high = _mm256_cvtepu8_epi16(exponents);
        const __m256i both = _mm256_or_si256(low, _mm256_slli_epi16(low, 8));
        const __m256i kept = _mm256_and_si256(both, _mm256_set1_epi16(static_cast<int16_t>(0x807f)));
        return _mm256_or_si256(kept, _mm256_slli_epi16(high, 7));
    }

    bool open(const uint8_t* mantissas, const Planes& planes, const uint8_t*, uint16_t* to) const {
        for (int half = 0; half < 2; ++half) {
            __m256i code = spread(static_cast<uint32_t>(planes.words[0] >> 32 * half), 1);
            code = _mm256_or_si256(code, spread(static_cast<uint32_t>(planes.words[1] >> 32 * half), 2));
            code = _mm256_or_si256(code, spread(static_cast<uint32_t>(planes.words[2] >> 32 * half), 4));
            const __m256i high = _mm256_shuffle_epi8(table, code), low = load<__m256i>(mantissas + 32 * half);
            const __m256i numbers[] = {
                joined(_mm256_castsi256_si128(low), _mm256_castsi256_si128(high)),
                joined(_mm256_extracti128_si256(low, 1), _mm256_extracti128_si256(high, 1)),
            };
            std::memcpy(to + 32 * half, numbers, sizeof numbers);
        }
        return false;
    }

    // The lower bytes of two vectors of sixteen bits.
    static __m256i narrow(__m256i first, __m256i second) {
        return _mm256_permute4x64_epi64(_mm256_packus_epi16(first, second), 0xd8);
    }

    Planes close(const uint16_t* from, uint8_t* mantissas) const {
        const __m256i byte = _mm256_set1_epi16(0xff);
        uint64_t is[kCodes] = {}, any = 0;
        for (int half = 0; half < 2; ++half) {
            __m256i low[2], high[2];
            for (int quarter = 0; quarter < 2; ++quarter) {
                const __m256i numbers = load<__m256i>(from + 32 * half + 16 * quarter);
                const __m256i sign = _mm256_and_si256(_mm256_srli_epi16(numbers, 8), _mm256_set1_epi16(0x80));
                low[quarter] = _mm256_or_si256(sign, _mm256_and_si256(numbers, _mm256_set1_epi16(0x7f)));
                high[quarter] = _mm256_and_si256(_mm256_srli_epi16(numbers, 7), byte);
            }
            const __m256i all = narrow(low[0], low[1]), exponents = narrow(high[0], high[1]);
            std::memcpy(mantissas + 32 * half, &all, sizeof all);
            for (int code = 0; code < kCodes; ++code) {
                const auto mask = static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_cmpeq_epi8(exponents, each[code])));
                is[code] |= static_cast<uint64_t>(mask) << 32 * half;
            }
        }
        for (uint64_t mask : is) any |= mask;
        return {{is[1] | is[3] | is[5] | ~any, is[2] | is[3] | is[6] | ~any, is[4] | is[5] | is[6] | ~any}};
    }
};
#else
struct Group {
    uint8_t table[kCodes + 1];
    uint8_t codes[256];
    explicit Group(const uint8_t* exponents) {
        std::memcpy(table, exponents, sizeof table);
        std::memset(codes, kCodes, sizeof codes);
        for (int code = kCodes; code--;) codes[exponents[code]] = static_cast<uint8_t>(code);
    }

    // A byte for each of eight bits.
    static uint64_t spread(uint64_t bits) {
        const uint64_t each = ((bits & 0xff) * 0x0101010101010101u) & 0x8040201008040201u;
        return (each + 0x7f7f7f7f7f7f7f7fu) >> 7 & 0x0101010101010101u;
    }

    bool open(const uint8_t* mantissas, const Planes& planes, const uint8_t*, uint16_t* to) const {
        for (int i = 0; i < kGroup; i += 8) {
            const uint64_t code = spread(planes.words[0] >> i) | spread(planes.words[1] >> i) << 1 |
                                  spread(planes.words[2] >> i) << 2;
            for (int k = 0; k < 8; ++k) to[i + k] = ::joined(mantissas[i + k], table[code >> 8 * k & 7]);
        }
        return false;
    }

    Planes close(const uint16_t* from, uint8_t* mantissas) const {
        Planes planes{};
        for (int i = 0; i < kGroup; ++i) {
            const uint64_t code = codes[exponent_of(from[i])];
            for (int plane = 0; plane < kPlanes; ++plane) planes.words[plane] |= (code >> plane & 1) << i;
            mantissas[i] = mantissa_of(from[i]);
        }
        return planes;
    }
};
#endif

// Call `with(block)` for each block of `n` numbers.
template <typename Each>
void blocks(int64_t n, int threads, const Each& with) {
    const int64_t tiles = (n + kTile - 1) / kTile;
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (tiles > 1 && threads > 1)
    for (int64_t tile = 0; tile < tiles; ++tile) {
        const int64_t end = std::min(n, (tile + 1) * kTile);
        for (int64_t begin = tile * kTile; begin < end; begin += kBlock) with(begin / kBlock);
    }
}

}  // namespace

// Add how many of `n` numbers have each of 256 exponents.
extern "C" void lt_offload_lossless_count(int64_t n, const uint16_t* from, int64_t* counts, int threads) {
    const int64_t tiles = (n + kTile - 1) / kTile;
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (tiles > 1 && threads > 1)
    for (int64_t tile = 0; tile < tiles; ++tile) {
        constexpr int kWays = 8;  // neighbours often have the same exponent: one count would wait for the last
        int32_t own[kWays][256] = {};
        const int64_t begin = tile * kTile, end = std::min(n, begin + kTile);
        int64_t i = begin;
        for (; i + kWays <= end; i += kWays)
            for (int way = 0; way < kWays; ++way) ++own[way][exponent_of(from[i + way])];
        for (; i < end; ++i) ++own[0][exponent_of(from[i])];
        for (int exponent = 0; exponent < 256; ++exponent) {
            int64_t sum = 0;
            for (auto& way : own) sum += way[exponent];
            if (!sum) continue;
#pragma omp atomic
            counts[exponent] += sum;
        }
    }
}

// Write the bytes of `n` numbers, their codes, and how many escapes each block has.
extern "C" void lt_offload_lossless_close(int64_t n, const uint16_t* from, const uint8_t* exponents, uint8_t* mantissas,
                                          uint8_t* codes, int32_t* counts, int threads) {
    const Group group(exponents);
    blocks(n, threads, [&](int64_t block) {
        uint8_t* to = codes + block * kPlanes * kBlock / 8;
        int32_t count = 0;
        for (int64_t k = 0; k < kGroups; ++k) {
            const int64_t begin = block * kBlock + k * kGroup, size = std::max<int64_t>(0, std::min(kGroup, n - begin));
            Planes planes{};
            if (size == kGroup) {
                planes = group.close(from + begin, mantissas + begin);
            } else if (size) {
                uint16_t numbers[kGroup] = {};
                uint8_t last[kGroup];
                std::memcpy(numbers, from + begin, 2 * size);
                planes = group.close(numbers, last);
                std::memcpy(mantissas + begin, last, size);
                for (uint64_t& word : planes.words) word &= ~uint64_t{} >> (kGroup - size);
            }
            count += __builtin_popcountll(planes.escapes());
            for (int plane = 0; plane < kPlanes; ++plane)
                std::memcpy(to + (plane * kGroups + k) * 8, &planes.words[plane], sizeof planes.words[plane]);
        }
        counts[block] = count;
    });
}

// Write the exponents of the numbers that have an escape.
extern "C" void lt_offload_lossless_escapes(int64_t n, const uint16_t* from, const uint8_t* codes, const int32_t* starts,
                                            uint8_t* escapes, int threads) {
    blocks(n, threads, [&](int64_t block) {
        uint8_t* next = escapes + starts[block];
        for (int64_t k = 0; k < kGroups; ++k) {
            const uint16_t* numbers = from + block * kBlock + k * kGroup;
            uint64_t left = planes_of(codes + block * kPlanes * kBlock / 8, k).escapes();
            for (; left; left &= left - 1) *next++ = exponent_of(numbers[__builtin_ctzll(left)]);
        }
    });
}

extern "C" void lt_offload_lossless_open(int64_t n, const uint8_t* mantissas, const uint8_t* codes, const int32_t* starts,
                                         const uint8_t* escapes, const uint8_t* exponents, uint16_t* to, int threads) {
    const Group group(exponents);
    blocks(n, threads, [&](int64_t block) {
        const uint8_t* next = escapes + starts[block];
        for (int64_t begin = block * kBlock; begin < std::min(n, (block + 1) * kBlock); begin += kGroup) {
            const Planes planes = planes_of(codes + block * kPlanes * kBlock / 8, begin % kBlock / kGroup);
            const int64_t size = std::min(kGroup, n - begin);
            bool whole;
            if (size == kGroup) {
                whole = group.open(mantissas + begin, planes, next, to + begin);
            } else {
                uint8_t last[kGroup] = {};
                uint16_t numbers[kGroup];
                std::memcpy(last, mantissas + begin, size);
                whole = group.open(last, planes, next, numbers);
                std::memcpy(to + begin, numbers, 2 * size);
            }
            uint64_t left = planes.escapes();
            if (whole) {
                next += __builtin_popcountll(left);
                continue;
            }
            for (; left; left &= left - 1) {
                const int i = __builtin_ctzll(left);
                to[begin + i] = joined(mantissas[begin + i], *next++);
            }
        }
    });
}
