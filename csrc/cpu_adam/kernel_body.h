// The kernels, written once over a vector type V (Scalar, Avx2 or Avx512). Included inside an ISA's namespace
// and target region, after vec_scalar.h; no include guard, no includes. What is left over after the last full
// vector goes through Scalar: the same operations, hence the same bits.
//
// A group is V::PACK vectors of one load of bytes; kernel_compact.h works on groups.

struct Bf16 {
    using Element = uint16_t;
    template <class V>
    OFFLOADZERO_INLINE typename V::F load(const Element* p) {
        return V::load_bf16(p);
    }
    template <class V>
    OFFLOADZERO_INLINE void load_group(const Element* p, typename V::F* x) {
        V::load_group_bf16(p, x);
    }
    template <class V>
    OFFLOADZERO_INLINE void store(Element* p, typename V::F x) {
        V::store_bf16(p, x);
    }
};

struct Fp16 {
    using Element = uint16_t;
    template <class V>
    OFFLOADZERO_INLINE typename V::F load(const Element* p) {
        return V::load_fp16(p);
    }
    template <class V>
    OFFLOADZERO_INLINE void load_group(const Element* p, typename V::F* x) {
        V::load_group_fp16(p, x);
    }
    template <class V>
    OFFLOADZERO_INLINE void store(Element* p, typename V::F x) {
        V::store_fp16(p, x);
    }
};

struct Fp32 {
    using Element = float;
    template <class V>
    OFFLOADZERO_INLINE typename V::F load(const Element* p) {
        return V::load_fp32(p);
    }
    template <class V>
    OFFLOADZERO_INLINE void load_group(const Element* p, typename V::F* x) {
        V::load_group_fp32(p, x);
    }
    template <class V>
    OFFLOADZERO_INLINE void store(Element* p, typename V::F x) {
        V::store_fp32(p, x);
    }
};

// Reads and writes the fp32 weight of element i in (param, master).
struct SplitWeight {
    using ParamElement = uint16_t;
    using MasterElement = int16_t;
    static constexpr bool HAS_MASTER = true;

    template <class V>
    OFFLOADZERO_INLINE typename V::F load(const void* param, const void* master, size_t i) {
        return Remainders<V>::load_split(static_cast<const uint16_t*>(param) + i,
                                         static_cast<const int16_t*>(master) + i);
    }
    template <class V>
    OFFLOADZERO_INLINE void store(void* param, void* master, size_t i, typename V::F x) {
        Remainders<V>::store_split(static_cast<uint16_t*>(param) + i, static_cast<int16_t*>(master) + i, x);
    }
};

struct PlainWeight {
    using ParamElement = float;
    using MasterElement = float;
    static constexpr bool HAS_MASTER = false;

    template <class V>
    OFFLOADZERO_INLINE typename V::F load(const void* param, const void*, size_t i) {
        return V::load_fp32(static_cast<const float*>(param) + i);
    }
    template <class V>
    OFFLOADZERO_INLINE void store(void* param, void*, size_t i, typename V::F x) {
        V::store_fp32(static_cast<float*>(param) + i, x);
    }
};

template <class Param>
struct MasterWeight {
    using ParamElement = typename Param::Element;
    using MasterElement = float;
    static constexpr bool HAS_MASTER = true;

    template <class V>
    OFFLOADZERO_INLINE typename V::F load(const void*, const void* master, size_t i) {
        return V::load_fp32(static_cast<const float*>(master) + i);
    }
    template <class V>
    OFFLOADZERO_INLINE void store(void* param, void* master, size_t i, typename V::F x) {
        V::store_fp32(static_cast<float*>(master) + i, x);
        Param::template store<V>(static_cast<typename Param::Element*>(param) + i, x);
    }
};

// The streams are fetched this far ahead. Measured on two cores of Zen 4 at 95 GB/s with 64M elements
// (Gparam/s, memory's own 3.7): 64 to 256 elements 3.7, 512 3.5, 1024 3.2, none 3.5.
constexpr size_t PREFETCH_ELEMENTS = 256;
constexpr size_t PREFETCH_ELEMENTS_OF_ONE = 1024;  // a single stream: 5.5 against 5.2 G elements/s

// Address arithmetic on integers: the line may lie past the end of the buffer, where a prefetch does nothing.
template <class Element, size_t AHEAD = PREFETCH_ELEMENTS>
OFFLOADZERO_INLINE void prefetch(const void* base, size_t i) {
    const uintptr_t address = reinterpret_cast<uintptr_t>(base) + (i + AHEAD) * sizeof(Element);
    __builtin_prefetch(reinterpret_cast<const void*>(address));
}

// [Note: Adam arithmetic] in cpu_adam.h fixes the operations and their order. Returns the first element not
// done.
template <class V, class Weight, class Grad, bool L2>
OFFLOADZERO_INLINE size_t adam_span(const AdamBuffers& buffers, const StepScalars& scalars, size_t i,
                                    size_t end) {
    using F = typename V::F;
    const auto* grad = static_cast<const typename Grad::Element*>(buffers.grad);
    const F grad_scale = V::set(scalars.grad_scale), eps = V::set(scalars.eps);
    const F beta1 = V::set(scalars.beta1), one_minus_beta1 = V::set(scalars.one_minus_beta1);
    const F beta2 = V::set(scalars.beta2), one_minus_beta2 = V::set(scalars.one_minus_beta2);
    const F step_size = V::set(scalars.step_size), decay = V::set(L2 ? scalars.weight_decay : scalars.decay);
    const F inv_sqrt_bias_correction2 = V::set(scalars.inv_sqrt_bias_correction2);
    for (; i + V::WIDTH <= end; i += V::WIDTH) {
        if (V::WIDTH > 1) {
            prefetch<float>(buffers.exp_avg, i);
            prefetch<float>(buffers.exp_avg_sq, i);
            prefetch<typename Grad::Element>(buffers.grad, i);
            prefetch<typename Weight::ParamElement>(buffers.param, i);
            if (Weight::HAS_MASTER) prefetch<typename Weight::MasterElement>(buffers.master, i);
        }
        F p = Weight::template load<V>(buffers.param, buffers.master, i);
        F g = V::mul(Grad::template load<V>(grad + i), grad_scale);
        if (L2) {
            g = V::add(g, V::mul(decay, p));
        } else {
            p = V::mul(p, decay);
        }
        const F m = V::add(V::mul(beta1, V::load_fp32(buffers.exp_avg + i)), V::mul(one_minus_beta1, g));
        const F v = V::add(V::mul(beta2, V::load_fp32(buffers.exp_avg_sq + i)),
                           V::mul(V::mul(one_minus_beta2, g), g));
        const F denom = V::add(V::mul(V::sqrt(v), inv_sqrt_bias_correction2), eps);
        p = V::sub(p, V::div(V::mul(step_size, m), denom));
        V::store_fp32(buffers.exp_avg + i, m);
        V::store_fp32(buffers.exp_avg_sq + i, v);
        Weight::template store<V>(buffers.param, buffers.master, i, p);
    }
    return i;
}

template <class V, class Weight, class Grad, bool L2>
static void adam_range(const AdamBuffers& buffers, const StepScalars& scalars, size_t begin, size_t end) {
    const size_t rest = adam_span<V, Weight, Grad, L2>(buffers, scalars, begin, end);
    adam_span<Scalar, Weight, Grad, L2>(buffers, scalars, rest, end);
}

// Element i of the range goes to lane i % SQ_NORM_LANES; the lanes are added in index order at the end.
template <class V, class Grad>
static double sq_norm_range(const void* data, size_t begin, size_t end) {
    using D = typename V::D;
    constexpr size_t PER_LOAD = V::WIDTH / V::DOUBLE_WIDTH;
    constexpr size_t NUM_SUMS = SQ_NORM_LANES / V::DOUBLE_WIDTH;
    const auto* grad = static_cast<const typename Grad::Element*>(data);
    D sums[NUM_SUMS];
    for (size_t k = 0; k < NUM_SUMS; ++k) sums[k] = V::zero_double();
    size_t i = begin;
    for (; i + SQ_NORM_LANES <= end; i += SQ_NORM_LANES) {
        if (V::WIDTH > 1) prefetch<typename Grad::Element, PREFETCH_ELEMENTS_OF_ONE>(grad, i);
        for (size_t k = 0; k < NUM_SUMS; ++k) {
            const typename V::F x = Grad::template load<V>(grad + i + (k / PER_LOAD) * V::WIDTH);
            sums[k] = V::add_square(sums[k], V::to_double(x, k % PER_LOAD));
        }
    }
    double lanes[SQ_NORM_LANES];
    for (size_t k = 0; k < NUM_SUMS; ++k) V::store_double(lanes + k * V::DOUBLE_WIDTH, sums[k]);
    for (size_t lane = 0; i < end; ++i, ++lane) {
        lanes[lane] = Scalar::add_square(lanes[lane], Grad::template load<Scalar>(grad + i));
    }
    double total = 0.0;
    for (size_t lane = 0; lane < SQ_NORM_LANES; ++lane) total += lanes[lane];
    return total;
}

template <class V, class Acc, class Grad>
OFFLOADZERO_INLINE size_t accumulate_span(typename Acc::Element* acc, const typename Grad::Element* grad,
                                          size_t i, size_t end) {
    for (; i + V::WIDTH <= end; i += V::WIDTH) {
        Acc::template store<V>(acc + i,
                               V::add(Acc::template load<V>(acc + i), Grad::template load<V>(grad + i)));
    }
    return i;
}

template <class V, class Acc, class Grad>
static void accumulate_range(void* acc_data, const void* grad_data, size_t begin, size_t end) {
    auto* acc = static_cast<typename Acc::Element*>(acc_data);
    const auto* grad = static_cast<const typename Grad::Element*>(grad_data);
    accumulate_span<Scalar, Acc, Grad>(acc, grad, accumulate_span<V, Acc, Grad>(acc, grad, begin, end), end);
}

template <class V>
static void split_range(const float* master, uint16_t* param, int16_t* remainder, size_t begin, size_t end) {
    size_t i = begin;
    for (; i + V::WIDTH <= end; i += V::WIDTH)
        Remainders<V>::store_split(param + i, remainder + i, V::load_fp32(master + i));
    for (; i < end; ++i) Remainders<Scalar>::store_split(param + i, remainder + i, master[i]);
}

template <class V>
static void join_range(const uint16_t* param, const int16_t* remainder, float* master, size_t begin,
                       size_t end) {
    size_t i = begin;
    for (; i + V::WIDTH <= end; i += V::WIDTH)
        V::store_fp32(master + i, Remainders<V>::load_split(param + i, remainder + i));
    for (; i < end; ++i) master[i] = Remainders<Scalar>::load_split(param + i, remainder + i);
}
