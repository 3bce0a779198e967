// Vectors of fp32 numbers: arithmetic with the roundings that IEEE 754 says, and numbers as they are stored.
//
// Written with the vectors of GCC and Clang, which all processors have. What compilers do not find by themselves is
// said for AVX-512, AVX2 and NEON, and in loops over the lanes for all others; every way gives the same bits.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace vectors {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#else
constexpr int kLanes = 8;
#endif
typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));

template <typename To, typename From>
inline To bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "as many bits");
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

template <typename Vector>
inline Vector load(const void* from) {
    Vector vector;
    std::memcpy(&vector, from, sizeof vector);
    return vector;
}

inline Floats all(float value) { return value - Floats{}; }

inline Ints all(int32_t value) { return value - Ints{}; }

inline Words lanes() {
    Words number;
    for (int lane = 0; lane < kLanes; ++lane) number[lane] = static_cast<uint32_t>(lane);
    return number;
}

#if defined(__AVX512F__)
inline Floats fma(Floats a, Floats b, Floats c) {
    return bits<Floats>(_mm512_fmadd_ps(bits<__m512>(a), bits<__m512>(b), bits<__m512>(c)));
}
inline Floats root(Floats a) { return bits<Floats>(_mm512_sqrt_ps(bits<__m512>(a))); }
inline Floats within(Floats value, Floats least, Floats most) {
    return bits<Floats>(_mm512_min_ps(_mm512_max_ps(bits<__m512>(value), bits<__m512>(least)), bits<__m512>(most)));
}
#elif defined(__AVX2__) && defined(__FMA__)
inline Floats fma(Floats a, Floats b, Floats c) {
    return bits<Floats>(_mm256_fmadd_ps(bits<__m256>(a), bits<__m256>(b), bits<__m256>(c)));
}
inline Floats root(Floats a) { return bits<Floats>(_mm256_sqrt_ps(bits<__m256>(a))); }
inline Floats within(Floats value, Floats least, Floats most) {
    return bits<Floats>(_mm256_min_ps(_mm256_max_ps(bits<__m256>(value), bits<__m256>(least)), bits<__m256>(most)));
}
#elif defined(__aarch64__)
inline Floats fma(Floats a, Floats b, Floats c) {
    const auto x = bits<float32x4x2_t>(a), y = bits<float32x4x2_t>(b), z = bits<float32x4x2_t>(c);
    return bits<Floats>(float32x4x2_t{{vfmaq_f32(z.val[0], x.val[0], y.val[0]), vfmaq_f32(z.val[1], x.val[1], y.val[1])}});
}
inline Floats root(Floats a) {
    const auto x = bits<float32x4x2_t>(a);
    return bits<Floats>(float32x4x2_t{{vsqrtq_f32(x.val[0]), vsqrtq_f32(x.val[1])}});
}
inline Floats within(Floats value, Floats least, Floats most) {
    const Floats enough = value > least ? value : least;
    return enough < most ? enough : most;
}
#else
inline Floats fma(Floats a, Floats b, Floats c) {
    for (int lane = 0; lane < kLanes; ++lane) c[lane] = std::fma(a[lane], b[lane], c[lane]);
    return c;
}
inline Floats root(Floats a) {
    for (int lane = 0; lane < kLanes; ++lane) a[lane] = std::sqrt(a[lane]);
    return a;
}
inline Floats within(Floats value, Floats least, Floats most) {
    const Floats enough = value > least ? value : least;
    return enough < most ? enough : most;
}
#endif

// Where a core's divider is slow, two corrections of a product are faster than a division and give the same bits: with the
// reciprocal rounded to the nearest, the first leaves less than a last bit, and then the second is exact (P. Markstein,
// IBM J. Res. Dev. 34, 1990). Nothing on the way may be too large or too small for that.
inline Floats quotient(Floats a, Floats d, Floats reciprocal) {
    Floats q = a * reciprocal;
    q = fma(fma(-q, d, a), reciprocal, q);
    return fma(fma(-q, d, a), reciprocal, q);
}

#if defined(__AVX512F__)
inline Floats reciprocal(Floats d) {
    Floats r = bits<Floats>(_mm512_rcp14_ps(bits<__m512>(d)));
    r = fma(fma(-d, r, all(1.0f)), r, r);
    return fma(fma(-d, r, all(1.0f)), r, r);
}
// True if `reciprocal` is rounded to the nearest, which that of a number of ones alone is not, and `quotient` is exact:
// d from 2**-60 to 2**20, and a from 2**-100 to 2**60.
inline bool corrects(Floats a, Floats d) {
    const __m512i size = bits<__m512i>(bits<Words>(d) - (67u << 23));
    const __m512i twice = bits<__m512i>((bits<Words>(a) << 1) - (27u << 24));
    __mmask16 good = _mm512_cmplt_epu32_mask(size, _mm512_set1_epi32(80 << 23));
    good = _mm512_mask_cmplt_epu32_mask(good, twice, _mm512_set1_epi32(static_cast<int>(160u << 24)));
    good = _mm512_mask_cmpneq_epi32_mask(good, bits<__m512i>(bits<Words>(d) | 0xff800000u), _mm512_set1_epi32(-1));
    return good == 0xffff;
}
#else  // as many instructions as a division takes cycles
inline Floats reciprocal(Floats d) { return 1.0f / d; }
inline bool corrects(Floats, Floats) { return false; }
#endif

// Random bits of an element, a hash of its number: see stochastic() in plain.py.
struct Noise {
    uint32_t seed, first;
    Words operator()(int64_t i) const {
        Words noise = (lanes() + (first + static_cast<uint32_t>(i))) * 0x9e3779b9u + seed;
        noise = (noise ^ (noise >> 16)) * 0x7feb352du;
        noise = (noise ^ (noise >> 15)) * 0x846ca68bu;
        return noise >> 16;
    }
};

// What a type of number has: `load` and `store` of as many as a vector has, and `round`, which does what both would do.
struct Full {
    using Stored = float;
    static Floats load(const float* from) { return vectors::load<Floats>(from); }
    static void store(float* to, Floats value, const Noise&, int64_t) { std::memcpy(to, &value, sizeof value); }
    static Floats round(Floats value) { return value; }
};

// Sixteen bits as thirty-two, and the upper halves of those.
#if defined(__AVX512BW__)
inline Words widen(Halves from) { return bits<Words>(_mm512_cvtepu16_epi32(bits<__m256i>(from))); }
inline Halves upper(Words from) {
    const __m512i odd = _mm512_set_epi16(31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1, 31, 29, 27, 25, 23,
                                         21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
    return bits<Halves>(_mm512_castsi512_si256(_mm512_permutexvar_epi16(odd, bits<__m512i>(from))));
}
#elif defined(__AVX2__)
inline Words widen(Halves from) { return bits<Words>(_mm256_cvtepu16_epi32(bits<__m128i>(from))); }
inline Halves upper(Words from) {
    const __m256i pairs = _mm256_srli_epi32(bits<__m256i>(from), 16), packed = _mm256_packus_epi32(pairs, pairs);
    return bits<Halves>(_mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08)));
}
#else
inline Words widen(Halves from) { return __builtin_convertvector(from, Words); }
inline Halves upper(Words from) { return __builtin_convertvector(from >> 16, Halves); }
#endif

struct Brain {
    using Stored = uint16_t;
    static Floats load(const uint16_t* from) { return bits<Floats>(widen(vectors::load<Halves>(from)) << 16); }
    static Words nearest(Floats value) {  // ties to even
        const Words word = bits<Words>(value);
        return word + 0x7fffu + ((word >> 16) & 1u);
    }
    // What is no number has no lower bits here, so that no carry makes a number of it: it comes from sixteen bits.
    static Floats round(Floats value) { return bits<Floats>(nearest(value) & 0xffff0000u); }
    static void keep(uint16_t* to, Words rounded) {
        const Halves half = upper(rounded);
        std::memcpy(to, &half, sizeof half);
    }
    static void store(uint16_t* to, Floats value, const Noise&, int64_t) { keep(to, nearest(value)); }
};

// Of any fp32 numbers.
struct Rounded : Brain {
    static Words checked(Floats value, Words rounded) { return value == value ? rounded : Words{} + 0x7fc00000u; }
    static void store(uint16_t* to, Floats value, const Noise&, int64_t) { keep(to, checked(value, nearest(value))); }
};

struct Noisy : Rounded {
    static void store(uint16_t* to, Floats value, const Noise& noise, int64_t i) {
        keep(to, checked(value, bits<Words>(value) + noise(i)));
    }
};

struct Half {
    using Stored = uint16_t;
#if defined(__AVX512F__)
    static Floats wide(Halves from) { return bits<Floats>(_mm512_cvtph_ps(bits<__m256i>(from))); }
    static Halves narrow(Floats from) { return bits<Halves>(_mm512_cvtps_ph(bits<__m512>(from), 0)); }
#elif defined(__AVX2__) && defined(__F16C__)
    static Floats wide(Halves from) { return bits<Floats>(_mm256_cvtph_ps(bits<__m128i>(from))); }
    static Halves narrow(Floats from) { return bits<Halves>(_mm256_cvtps_ph(bits<__m256>(from), 0)); }
#elif defined(__aarch64__)
    static Floats wide(Halves from) {
        const auto halves = bits<float16x8_t>(from);
        return bits<Floats>(float32x4x2_t{{vcvt_f32_f16(vget_low_f16(halves)), vcvt_high_f32_f16(halves)}});
    }
    static Halves narrow(Floats from) {
        const auto two = bits<float32x4x2_t>(from);
        return bits<Halves>(vcvt_high_f16_f32(vcvt_f16_f32(two.val[0]), two.val[1]));
    }
#else
    static Floats wide(Halves from) {
        Floats to;
        for (int lane = 0; lane < kLanes; ++lane) to[lane] = static_cast<float>(bits<_Float16>(uint16_t{from[lane]}));
        return to;
    }
    static Halves narrow(Floats from) {
        Halves to;
        for (int lane = 0; lane < kLanes; ++lane) to[lane] = bits<uint16_t>(static_cast<_Float16>(from[lane]));
        return to;
    }
#endif
    static Floats load(const uint16_t* from) { return wide(vectors::load<Halves>(from)); }
    static Floats round(Floats value) { return wide(narrow(value)); }
    static void store(uint16_t* to, Floats value, const Noise&, int64_t) {
        const Halves half = narrow(value);
        std::memcpy(to, &half, sizeof half);
    }
};

}  // namespace vectors
