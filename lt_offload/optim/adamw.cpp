// One pass of AdamW over memory: gradients in, weights and moments out. Knows arrays of numbers and threads, no tensors.
// Each operand has a type of its own (vectors.h); moments in bytes, in blocks with a scale each, are fp32 while a block
// is updated. Arithmetic is fp32.
//
// Every rounding is that of torch on this processor, so that it does not matter which of the two runs: products and
// sums are contracted where fma says so and nowhere else (compile with -ffp-contract=off). Torch's fused kernel rounds
// what it stores. Its plain form is one operation after the other, each of which rounds to what the tensors hold; and
// of fp32 it takes roots with a library, which does not round them to the nearest.

#include <algorithm>
#include <vector>

#include "blockwise.h"

namespace {

using namespace vectors;

constexpr int64_t kTile = 16384;  // elements that a thread takes at a time: half a megabyte of traffic
constexpr int64_t kAhead = 2048;  // bytes that memory is asked for early; of arrays of several types it would come late
constexpr int64_t kBlock = blockwise::kBlock;

struct Options {
    float keep;           // 1 - lr * weight_decay; 1 where that is not decoupled
    float decay;          // weight_decay where that is not decoupled, else 0
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
    void* weight;         // what is updated
    void* low;            // what follows it, in the type of the gradient; null: nothing does
    const void* grad;
    void* exp_avg;
    void* exp_avg_sq;
    float* scale;         // of the blocks of exp_avg, where it has bytes
    float* scale_sq;
};

enum class Type : int { kFull, kBrain, kHalf };
enum class Moments : int { kFull, kNoisy, kBytes, kOwn };     // fp32, bfloat16 with noise, bytes, and as the weight
enum class Way : int { kOnce, kMasters, kNoise, kEach };      // kEach: every operation is rounded

using Root = void (*)(int64_t n, const float* from, float* to, int64_t mode);
using Limit = int (*)(int threads);

struct Common {
    Options options;
    const blockwise::Maps* maps;
    Root root;            // that of the library, for fp32 where each operation is rounded; null: the processor's
    Limit limit;          // sets the threads of the library for the thread that calls it, and returns what was set
    int64_t mode;         // of the library
    int64_t corrects;     // not 0: divide by products that are corrected
};

// The last elements of an array, in vectors of their own.
template <typename Stored>
struct Padded {
    Stored numbers[kLanes] = {};
    Stored* home;
    int64_t n;
    Padded(const Stored* from, int64_t count, Stored* to) : home(to), n(count) {
        if (from) std::memcpy(numbers, from, n * sizeof(Stored));
    }
    ~Padded() {
        if (home) std::memcpy(home, numbers, n * sizeof(Stored));
    }
};

template <typename... Stored>
inline void ask(const Stored*... arrays) {
    (__builtin_prefetch(reinterpret_cast<const char*>(arrays) + kAhead), ...);
}

template <typename Weight, typename Grad, typename First, typename Second, bool kLow, bool kEach>
struct Run {
    static Floats round(Floats value) { return kEach ? Weight::round(value) : value; }

    // Update both moments.
    static void advance(Floats weight, Floats grad, Floats& first, Floats& second, const Options& o) {
        Floats g = grad * o.scale;
        if (o.decay != 0.0f) g = fma(weight, all(o.decay), g);
        // Interpolation from the nearer end, as torch.lerp does it.
        const bool small = std::fabs(o.weight1) < 0.5f;
        first = round(fma(all(small ? o.weight1 : o.weight1 - 1.0f), g - first, small ? first : g));
        second = round(fma(o.weight2 * g, g, round(second * o.beta2)));
    }

    static Floats step(Floats weight, Floats first, Floats root, const Options& o, const Step& s, float inverse) {
        const Floats above = s.negative_size * first, correction = all(s.correction), eps = round(all(o.eps));
        weight = round(weight * o.keep);
        if (inverse != 0.0f) {
            const Floats below = round(round(quotient(round(root), correction, all(inverse))) + eps);
            if (corrects(above, below)) return weight + quotient(above, below, reciprocal(below));
        }
        return weight + above / round(round(round(root) / correction) + eps);
    }

    static void run(int64_t n, typename Weight::Stored* weight, typename Grad::Stored* low,
                    const typename Grad::Stored* grad, typename First::Stored* exp_avg,
                    typename Second::Stored* exp_avg_sq, const Step s, uint32_t number, const Common& common) {
        const Noise noise{s.seed, number}, moment_noise{s.moment_seed, number};
        const Options o = common.options;
        const float inverse = common.corrects ? 1.0f / s.correction : 0.0f;
        if (kEach && sizeof(typename Weight::Stored) == sizeof(float) && common.root) {
            alignas(64) float roots[kBlock];
            const int before = common.limit(1);
            for (int64_t begin = 0; begin < n; begin += kBlock) {
                const int64_t end = std::min(n, begin + kBlock);
                for (int64_t i = begin; i < end; i += kLanes) {
                    Floats first = First::load(exp_avg + i), second = Second::load(exp_avg_sq + i);
                    advance(Weight::load(weight + i), Grad::load(grad + i), first, second, o);
                    First::store(exp_avg + i, first, noise, i);
                    Second::store(exp_avg_sq + i, second, noise, i);
                    std::memcpy(roots + (i - begin), &second, sizeof second);
                }
                common.root(end - begin, roots, roots, common.mode);
                for (int64_t i = begin; i < end; i += kLanes) {
                    const Floats root = load<Floats>(roots + (i - begin));
                    Weight::store(weight + i, step(Weight::load(weight + i), First::load(exp_avg + i), root, o, s,
                                                     inverse), noise, i);
                }
            }
            common.limit(before);
            return;
        }
        for (int64_t i = 0; i < n; i += kLanes) {
            ask(weight + i, grad + i, exp_avg + i, exp_avg_sq + i);
            Floats value = Weight::load(weight + i);
            Floats first = First::load(exp_avg + i), second = Second::load(exp_avg_sq + i);
            advance(value, Grad::load(grad + i), first, second, o);
            value = step(value, first, root(second), o, s, inverse);
            First::store(exp_avg + i, first, noise, i);
            Second::store(exp_avg_sq + i, second, moment_noise, i);
            Weight::store(weight + i, value, noise, i);
            if constexpr (kLow) Grad::store(low + i, value, noise, i);
        }
    }

    // Elements of a tensor.
    static void of(int64_t begin, int64_t n, const Arrays& a, const Step& s, const Common& common) {
        auto* weight = static_cast<typename Weight::Stored*>(a.weight) + begin;
        auto* low = kLow ? static_cast<typename Grad::Stored*>(a.low) + begin : nullptr;
        auto* grad = static_cast<const typename Grad::Stored*>(a.grad) + begin;
        auto* exp_avg = static_cast<typename First::Stored*>(a.exp_avg) + begin;
        auto* exp_avg_sq = static_cast<typename Second::Stored*>(a.exp_avg_sq) + begin;
        const uint32_t number = s.first + static_cast<uint32_t>(begin);
        const int64_t rest = n % kLanes, i = n - rest;
        run(i, weight, low, grad, exp_avg, exp_avg_sq, s, number, common);
        if (!rest) return;
        Padded<typename Weight::Stored> last(weight + i, rest, weight + i);
        Padded<typename Grad::Stored> last_low(nullptr, rest, kLow ? low + i : nullptr);
        Padded<typename Grad::Stored> last_grad(grad + i, rest, nullptr);
        Padded<typename First::Stored> first(exp_avg + i, rest, exp_avg + i);
        Padded<typename Second::Stored> second(exp_avg_sq + i, rest, exp_avg_sq + i);
        run(kLanes, last.numbers, last_low.numbers, last_grad.numbers, first.numbers, second.numbers, s,
            number + static_cast<uint32_t>(i), common);
    }
};

// Moments in bytes are fp32 here, for a few kilobytes in the cache.
template <typename Weight, typename Grad, bool kLow>
void in_blocks(int64_t begin, int64_t n, const Arrays& a, const Step& s, const Common& common) {
    alignas(64) float exp_avg[kBlock], exp_avg_sq[kBlock];
    const blockwise::Maps& maps = *common.maps;
    for (int64_t i = begin; i < begin + n; i += kBlock) {
        auto* bytes = static_cast<uint8_t*>(a.exp_avg) + i;
        auto* bytes_sq = static_cast<uint8_t*>(a.exp_avg_sq) + i;
        blockwise::decode<true>(bytes, a.scale[i / kBlock], maps.with_sign, exp_avg);
        blockwise::decode<false>(bytes_sq, a.scale_sq[i / kBlock], maps.without, exp_avg_sq);
        Run<Weight, Grad, Full, Full, kLow, false>::run(
            kBlock, static_cast<typename Weight::Stored*>(a.weight) + i,
            kLow ? static_cast<typename Grad::Stored*>(a.low) + i : nullptr,
            static_cast<const typename Grad::Stored*>(a.grad) + i, exp_avg, exp_avg_sq, s,
            s.first + static_cast<uint32_t>(i), common);
        a.scale[i / kBlock] = blockwise::encode<true>(exp_avg, maps.with_sign, bytes);
        a.scale_sq[i / kBlock] = blockwise::encode<false>(exp_avg_sq, maps.without, bytes_sq);
    }
}

using Update = void (*)(int64_t begin, int64_t n, const Arrays& arrays, const Step& step, const Common& common);

template <typename Weight, typename Grad, bool kLow>
Update with(Moments moments) {
    if (moments == Moments::kFull) return Run<Weight, Grad, Full, Full, kLow, false>::of;
    if (moments == Moments::kNoisy) return Run<Weight, Grad, Rounded, Noisy, kLow, false>::of;
    return in_blocks<Weight, Grad, kLow>;
}

template <typename Own>
Update own(bool each) {
    return each ? Run<Own, Own, Own, Own, false, true>::of : Run<Own, Own, Own, Own, false, false>::of;
}

Update chosen(Type type, Moments moments, Way way) {
    if (way == Way::kMasters) return (type == Type::kBrain ? with<Full, Rounded, true> : with<Full, Half, true>)(moments);
    if (way == Way::kNoise) return with<Noisy, Brain, false>(moments);
    if (moments != Moments::kOwn) return with<Full, Full, false>(moments);
    return (type == Type::kFull ? own<Full> : type == Type::kBrain ? own<Brain> : own<Half>)(way == Way::kEach);
}

}  // namespace

extern "C" void lt_offload_adamw(int64_t count, const int64_t* sizes, const Arrays* arrays, const Step* steps,
                                 const Common* common, Type type, Moments moments, Way way, int threads) {
    const Update update = chosen(type, moments, way);
    std::vector<int64_t> ends(count);  // in tiles, over all tensors: small ones share one parallel region
    int64_t tiles = 0;
    for (int64_t i = 0; i < count; ++i) ends[i] = tiles += (sizes[i] + kTile - 1) / kTile;
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (tiles > 1 && threads > 1)
    for (int64_t tile = 0; tile < tiles; ++tile) {
        const int64_t i = std::upper_bound(ends.begin(), ends.end(), tile) - ends.begin();
        const int64_t begin = (tile - (i ? ends[i - 1] : 0)) * kTile;
        update(begin, std::min(kTile, sizes[i] - begin), arrays[i], steps[i], *common);
    }
}
