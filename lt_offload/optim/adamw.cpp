// One pass of AdamW over memory: gradients in, weights and moments out. Knows arrays of numbers and threads, no tensors.
// Moments are fp32, bfloat16, or bytes in blocks with a scale each; those that are not fp32 are for a block at a time.
//
// Every rounding is that of torch's fused CPU kernel, so that it does not matter which of the two runs: products and
// sums are contracted where std::fma says so and nowhere else (compile with -ffp-contract=off). The loops are left to
// the compiler's vectorizer; memory is the bottleneck, so nothing more elaborate is faster.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "blockwise.h"

namespace {

constexpr int64_t kTile = 16384;  // elements that a thread takes at a time: half a megabyte of traffic

struct Options {
    float keep;           // 1 - lr * weight_decay
    float weight1;        // 1 - beta1
    float beta2;
    float weight2;        // 1 - beta2
    float eps;
    float scale;          // of the gradient, negative to maximize
};

struct Step {
    float negative_size;  // -lr / (1 - beta1 ** step)
    float correction;     // sqrt(1 - beta2 ** step)
    uint32_t seed;        // of the noise by which weights without fp32 ones are rounded
    uint32_t first;       // number of the first element
    uint32_t moment_seed; // of the noise by which second moments in bfloat16 are rounded
};

struct Arrays {
    void* low;            // bfloat16 weights; null: there are none, the gradient is fp32
    const void* grad;
    float* weight;        // fp32 weights, which those in bfloat16 follow; null: there are none, noise rounds
    void* exp_avg;
    void* exp_avg_sq;
    float* scale;         // of the blocks of exp_avg, where it has bytes
    float* scale_sq;
};

inline float wide(uint16_t value) {
    const uint32_t bits = static_cast<uint32_t>(value) << 16;
    float result;
    std::memcpy(&result, &bits, sizeof result);
    return result;
}

inline float wide(float value) { return value; }

// Round to nearest, ties to even.
inline uint16_t narrow(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (bits & 0x7fffffffu) > 0x7f800000u ? uint16_t{0x7fc0} : static_cast<uint16_t>(rounded);
}

// Up or down, by noise that is a hash of the element's number: see stochastic() in plain.py.
inline uint16_t narrow(float value, uint32_t number, uint32_t seed) {
    uint32_t noise = number * 0x9e3779b9u + seed;
    noise = (noise ^ (noise >> 16)) * 0x7feb352du;
    noise = (noise ^ (noise >> 15)) * 0x846ca68bu;
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    const uint32_t rounded = (bits + (noise >> 16)) >> 16;
    return (bits & 0x7fffffffu) > 0x7f800000u ? uint16_t{0x7fc0} : static_cast<uint16_t>(rounded);
}

enum class Kind { kFull, kMasters, kNoise };
enum class Moments : int { kFull, kHalf, kBytes };

template <Kind kKind, bool kSmall, typename Grad>
void run(int64_t n, uint16_t* __restrict low, const Grad* __restrict grad, float* __restrict weight,
         float* __restrict exp_avg, float* __restrict exp_avg_sq, const Options o, const Step s,
         const uint32_t first) {
    for (int64_t i = 0; i < n; ++i) {
        const float g = wide(grad[i]) * o.scale;
        const float m0 = exp_avg[i];
        // Interpolation from the nearer end, as torch.lerp does it.
        const float m = kSmall ? std::fma(o.weight1, g - m0, m0) : std::fma(o.weight1 - 1.0f, g - m0, g);
        const float v = std::fma(o.weight2 * g, g, exp_avg_sq[i] * o.beta2);
        const float w0 = kKind == Kind::kNoise ? wide(low[i]) : weight[i];
        const float w = w0 * o.keep + s.negative_size * m / (std::sqrt(v) / s.correction + o.eps);
        exp_avg[i] = m;
        exp_avg_sq[i] = v;
        if constexpr (kKind != Kind::kNoise) weight[i] = w;
        if constexpr (kKind == Kind::kMasters) low[i] = narrow(w);
        if constexpr (kKind == Kind::kNoise) low[i] = narrow(w, first + static_cast<uint32_t>(i), s.seed);
    }
}

// A block of moments that are not kept in fp32: they are so here, between two runs over a few kilobytes in the cache.
struct Block {
    alignas(64) float exp_avg[blockwise::kBlock];
    alignas(64) float exp_avg_sq[blockwise::kBlock];
};

void widen(int64_t n, const uint16_t* __restrict from, float* __restrict to) {
    for (int64_t i = 0; i < n; ++i) to[i] = wide(from[i]);
}

template <Kind kKind, bool kSmall, Moments kMoments, typename Grad>
void run(int64_t begin, int64_t n, const Arrays& a, const Options& o, const Step& s, const blockwise::Maps& maps) {
    auto* low = static_cast<uint16_t*>(a.low);
    const auto* grad = static_cast<const Grad*>(a.grad);
    constexpr int64_t kBlock = blockwise::kBlock;
    if constexpr (kMoments == Moments::kFull) {
        run<kKind, kSmall>(n, low ? low + begin : nullptr, grad + begin, a.weight ? a.weight + begin : nullptr,
                           static_cast<float*>(a.exp_avg) + begin, static_cast<float*>(a.exp_avg_sq) + begin, o, s,
                           s.first + static_cast<uint32_t>(begin));
        return;
    }
    Block block;
    for (int64_t i = begin; i < begin + n; i += kBlock) {
        const int64_t count = std::min(kBlock, begin + n - i);
        auto* bytes = static_cast<uint8_t*>(a.exp_avg) + i;
        auto* bytes_sq = static_cast<uint8_t*>(a.exp_avg_sq) + i;
        auto* half = static_cast<uint16_t*>(a.exp_avg) + i;
        auto* half_sq = static_cast<uint16_t*>(a.exp_avg_sq) + i;
        const uint32_t first = s.first + static_cast<uint32_t>(i);
        if constexpr (kMoments == Moments::kHalf) {
            widen(count, half, block.exp_avg);
            widen(count, half_sq, block.exp_avg_sq);
        } else {
            blockwise::decode<true>(bytes, a.scale[i / kBlock], maps.with_sign, block.exp_avg);
            blockwise::decode<false>(bytes_sq, a.scale_sq[i / kBlock], maps.without, block.exp_avg_sq);
        }
        run<kKind, kSmall>(count, low ? low + i : nullptr, grad + i, a.weight ? a.weight + i : nullptr, block.exp_avg,
                           block.exp_avg_sq, o, s, first);
        if constexpr (kMoments == Moments::kHalf) {
            for (int64_t j = 0; j < count; ++j) half[j] = narrow(block.exp_avg[j]);
            for (int64_t j = 0; j < count; ++j) {
                half_sq[j] = narrow(block.exp_avg_sq[j], first + static_cast<uint32_t>(j), s.moment_seed);
            }
        } else {
            a.scale[i / kBlock] = blockwise::encode<true>(block.exp_avg, maps.with_sign, bytes);
            a.scale_sq[i / kBlock] = blockwise::encode<false>(block.exp_avg_sq, maps.without, bytes_sq);
        }
    }
}

template <Kind kKind, typename Grad>
void run(int64_t begin, int64_t n, const Arrays& a, const Options& o, const Step& s, Moments moments,
         const blockwise::Maps& maps) {
    const bool small = std::fabs(o.weight1) < 0.5f;
    if (moments == Moments::kFull) {
        (small ? run<kKind, true, Moments::kFull, Grad> : run<kKind, false, Moments::kFull, Grad>)(begin, n, a, o, s,
                                                                                                 maps);
    } else if (moments == Moments::kHalf) {
        (small ? run<kKind, true, Moments::kHalf, Grad> : run<kKind, false, Moments::kHalf, Grad>)(begin, n, a, o, s,
                                                                                                 maps);
    } else {
        (small ? run<kKind, true, Moments::kBytes, Grad> : run<kKind, false, Moments::kBytes, Grad>)(begin, n, a, o, s,
                                                                                                   maps);
    }
}

}  // namespace

extern "C" void lt_offload_adamw(int64_t count, const int64_t* sizes, const Arrays* arrays, const Step* steps,
                                 const Options* options, Moments moments, const blockwise::Maps* maps, int threads) {
    std::vector<int64_t> ends(count);  // in tiles, over all tensors: small ones share one parallel region
    int64_t tiles = 0;
    for (int64_t i = 0; i < count; ++i) ends[i] = tiles += (sizes[i] + kTile - 1) / kTile;
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (tiles > 1 && threads > 1)
    for (int64_t tile = 0; tile < tiles; ++tile) {
        const int64_t i = std::upper_bound(ends.begin(), ends.end(), tile) - ends.begin();
        const int64_t begin = (tile - (i ? ends[i - 1] : 0)) * kTile;
        const int64_t n = std::min(kTile, sizes[i] - begin);
        if (!arrays[i].low) {
            run<Kind::kFull, float>(begin, n, arrays[i], *options, steps[i], moments, *maps);
        } else if (arrays[i].weight) {
            run<Kind::kMasters, uint16_t>(begin, n, arrays[i], *options, steps[i], moments, *maps);
        } else {
            run<Kind::kNoise, uint16_t>(begin, n, arrays[i], *options, steps[i], moments, *maps);
        }
    }
}
