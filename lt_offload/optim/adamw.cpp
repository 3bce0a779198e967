// One pass of AdamW over memory: gradients in, weights and moments out. Knows arrays of numbers and threads, no tensors.
//
// Every rounding is that of torch's fused CPU kernel, so that it does not matter which of the two runs: products and
// sums are contracted where std::fma says so and nowhere else (compile with -ffp-contract=off). The loops are left to
// the compiler's vectorizer; memory is the bottleneck, so nothing more elaborate is faster.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

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
};

struct Arrays {
    void* low;            // bfloat16 weights; null: there are none, the gradient is fp32
    const void* grad;
    float* weight;        // fp32 weights, which those in bfloat16 follow; null: there are none, noise rounds
    float* exp_avg;
    float* exp_avg_sq;
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

template <Kind kKind, typename Grad>
void run(int64_t begin, int64_t n, const Arrays& a, const Options& o, const Step& s) {
    const auto loop = std::fabs(o.weight1) < 0.5f ? run<kKind, true, Grad> : run<kKind, false, Grad>;
    auto* low = a.low ? static_cast<uint16_t*>(a.low) + begin : nullptr;
    auto* weight = a.weight ? a.weight + begin : nullptr;
    loop(n, low, static_cast<const Grad*>(a.grad) + begin, weight, a.exp_avg + begin, a.exp_avg_sq + begin, o, s,
         s.first + static_cast<uint32_t>(begin));
}

}  // namespace

extern "C" void lt_offload_adamw(int64_t count, const int64_t* sizes, const Arrays* arrays, const Step* steps,
                                 const Options* options, int threads) {
    std::vector<int64_t> ends(count);  // in tiles, over all tensors: small ones share one parallel region
    int64_t tiles = 0;
    for (int64_t i = 0; i < count; ++i) ends[i] = tiles += (sizes[i] + kTile - 1) / kTile;
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (tiles > 1 && threads > 1)
    for (int64_t tile = 0; tile < tiles; ++tile) {
        const int64_t i = std::upper_bound(ends.begin(), ends.end(), tile) - ends.begin();
        const int64_t begin = (tile - (i ? ends[i - 1] : 0)) * kTile;
        const int64_t n = std::min(kTile, sizes[i] - begin);
        if (!arrays[i].low) {
            run<Kind::kFull, float>(begin, n, arrays[i], *options, steps[i]);
        } else if (arrays[i].weight) {
            run<Kind::kMasters, uint16_t>(begin, n, arrays[i], *options, steps[i]);
        } else {
            run<Kind::kNoise, uint16_t>(begin, n, arrays[i], *options, steps[i]);
        }
    }
}
