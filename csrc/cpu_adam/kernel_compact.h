// Adam on the compact state, written once over a vector type V. Included after kernel_body.h, like it.
// [Note: compact state] and [Note: compact arithmetic] in cpu_adam.h fix format, operations and order.
//
// A block is read, updated and its new maxima found; its moments wait in registers or in the first-level
// cache and are written with the new scales. A short last block goes through a copy filled up with zeros.

// P(t) = 1 / (254 - t) for t = 0 .. 127, exact at 127, and Q(u) = 254 / (1 + u) for u in [0, 1], exact at 1:
// least maximum of the relative error, 3.6e-4 and 3.3e-4. Coefficients from the constant up.
constexpr float COMPAND_DECODE[5] = {0x1.021b76p-8f, 0x1.f648aap-17f, 0x1.8aaa5ap-24f, -0x1.7d9386p-32f,
                                     0x1.55b850p-38f};
constexpr float COMPAND_ENCODE[5] = {0x1.fbd5cep+7f, -0x1.f3cb7ep+7f, 0x1.b50bf8p+7f, -0x1.09a6bep+7f,
                                     0x1.2a41e0p+5f};

constexpr float LARGEST_FLOAT = 0x1.FFFFFEp127f;
constexpr float SMALLEST_NORMAL = 0x1p-126f;
constexpr uint32_t INFINITY_BITS = 0x7F800000u;

template <class V>
OFFLOADZERO_INLINE typename V::F polynomial(const float (&c)[5], typename V::F t) {
    typename V::F sum = V::fma(V::set(c[4]), t, V::set(c[3]));
    sum = V::fma(sum, t, V::set(c[2]));
    sum = V::fma(sum, t, V::set(c[1]));
    return V::fma(sum, t, V::set(c[0]));
}

// q * P(|q|): the companded code as a share of the block's largest magnitude.
template <class V>
OFFLOADZERO_INLINE typename V::F expand(typename V::F q) {
    return V::mul(q, polynomial<V>(COMPAND_DECODE, V::abs(q)));
}

// 127 y for x = share of the block's largest magnitude.
template <class V>
OFFLOADZERO_INLINE typename V::F compand(typename V::F x) {
    return V::mul(x, polynomial<V>(COMPAND_ENCODE, V::abs(x)));
}

// The new moments of one block before they are encoded: m and sqrt(v), and the largest patterns of |m| and
// sqrt(v) per lane.
template <class V>
struct BlockMoments {
    static constexpr size_t NUM_VECTORS = COMPACT_BLOCK / V::WIDTH;
    typename V::F m[NUM_VECTORS];
    typename V::F s[NUM_VECTORS];
    typename V::F largest_m;
    typename V::F largest_s;
};

struct BlockScales {
    float m, m_inverse;  // of the share; 0 where the block is kept as zero
    float s, s_inverse;  // of one unit of the code, and 255 / largest
};

OFFLOADZERO_INLINE BlockScales block_scales(float largest_m, float largest_s) {
    const bool has_m = largest_m >= SMALLEST_NORMAL, has_s = largest_s >= SMALLEST_NORMAL;
    return {has_m ? largest_m : 0.0f, has_m ? 1.0f / largest_m : 0.0f,
            has_s ? largest_s * (1.0f / 255.0f) : 0.0f, has_s ? 255.0f / largest_s : 0.0f};
}

// What [Note: compact state] says of blocks whose largest magnitude is not finite.
template <class V>
static __attribute__((noinline, cold)) void encode_not_finite(const BlockMoments<V>& moments, float largest_m,
                                                              float largest_s, const CompactBuffers& buffers,
                                                              size_t i) {
    constexpr float NOT_A_NUMBER = __builtin_nanf("");
    float m[COMPACT_BLOCK], s[COMPACT_BLOCK];
    for (size_t k = 0; k < COMPACT_BLOCK / V::WIDTH; ++k) {
        V::store_fp32(m + k * V::WIDTH, moments.m[k]);
        V::store_fp32(s + k * V::WIDTH, moments.s[k]);
    }
    const bool m_is_finite = Scalar::bits_of(largest_m) < INFINITY_BITS;
    const bool s_overflows = Scalar::bits_of(largest_s) == INFINITY_BITS;
    const bool s_is_nan = Scalar::bits_of(largest_s) > INFINITY_BITS;
    BlockScales scales =
        block_scales(m_is_finite ? largest_m : 0.0f, s_overflows ? LARGEST_FLOAT : largest_s);
    if (!m_is_finite) scales.m = NOT_A_NUMBER;
    if (s_is_nan) scales.s = NOT_A_NUMBER;
    buffers.scales[i / COMPACT_BLOCK * 2] = scales.m;
    buffers.scales[i / COMPACT_BLOCK * 2 + 1] = scales.s;
    for (size_t k = 0; k < COMPACT_BLOCK; ++k) {
        const bool lost = Scalar::bits_of(Scalar::abs(m[k])) >= INFINITY_BITS;
        const float q = m_is_finite ? compand<Scalar>(m[k] * scales.m_inverse) : 0.0f;
        const float code = s_is_nan ? 0.0f : s[k] > LARGEST_FLOAT ? 255.0f : s[k] * scales.s_inverse;
        Scalar::store_i8(buffers.exp_avg + i + k, &q);
        Scalar::store_u8_at_least_1(buffers.exp_avg_sq + i + k, &code);
        if (lost) Scalar::store_compact(buffers.param + i + k, buffers.remainder + i + k, &NOT_A_NUMBER);
    }
}

template <class V>
OFFLOADZERO_INLINE void encode_moments(const BlockMoments<V>& moments, const CompactBuffers& buffers,
                                       size_t i) {
    using F = typename V::F;
    const float largest_m = V::reduce_max_bits(moments.largest_m);
    const float largest_s = V::reduce_max_bits(moments.largest_s);
    if (__builtin_expect(
            Scalar::bits_of(largest_m) >= INFINITY_BITS || Scalar::bits_of(largest_s) >= INFINITY_BITS, 0)) {
        encode_not_finite<V>(moments, largest_m, largest_s, buffers, i);
        return;
    }
    const BlockScales scales = block_scales(largest_m, largest_s);
    buffers.scales[i / COMPACT_BLOCK * 2] = scales.m;
    buffers.scales[i / COMPACT_BLOCK * 2 + 1] = scales.s;
    const F m_inverse = V::set(scales.m_inverse), s_inverse = V::set(scales.s_inverse);
    for (size_t k = 0; k < BlockMoments<V>::NUM_VECTORS; k += V::PACK) {
        F q[V::PACK], code[V::PACK];
        for (size_t j = 0; j < V::PACK; ++j) {
            q[j] = compand<V>(V::mul(moments.m[k + j], m_inverse));
            code[j] = V::mul(moments.s[k + j], s_inverse);
        }
        V::store_i8(buffers.exp_avg + i + k * V::WIDTH, q);
        V::store_u8_at_least_1(buffers.exp_avg_sq + i + k * V::WIDTH, code);
    }
}

template <class Element>
OFFLOADZERO_INLINE void prefetch_block(const void* base, size_t i) {
    constexpr size_t LINE_ELEMENTS = 64 / sizeof(Element);
    for (size_t k = 0; k < COMPACT_BLOCK; k += LINE_ELEMENTS) prefetch<Element>(base, i + k);
}

// One whole block, from element i on.
template <class V, class Grad, bool L2>
OFFLOADZERO_INLINE void compact_adam_block(const CompactBuffers& buffers, const AdamScalars& scalars,
                                           size_t i) {
    using F = typename V::F;
    const auto* grad = static_cast<const typename Grad::Element*>(buffers.grad);
    const float* scale = buffers.scales + i / COMPACT_BLOCK * 2;
    const F scale_m = V::set(scalars.beta1 * scale[0]), scale_s = V::set(scalars.sqrt_beta2 * scale[1]);
    const F grad_scale = V::set(scalars.grad_scale), eps = V::set(scalars.eps);
    const F one_minus_beta1 = V::set(scalars.one_minus_beta1);
    const F one_minus_beta2 = V::set(scalars.one_minus_beta2);
    const F step_size = V::set(scalars.step_size), decay = V::set(scalars.decay);
    const F weight_decay = V::set(scalars.weight_decay);
    const F inv_sqrt_bias_correction2 = V::set(scalars.inv_sqrt_bias_correction2);
    BlockMoments<V> moments;
    moments.largest_m = moments.largest_s = V::set(0.0f);
    for (size_t k = 0; k < BlockMoments<V>::NUM_VECTORS; k += V::PACK) {
        F p[V::PACK];
        for (size_t j = 0; j < V::PACK; ++j) {
            const size_t at = i + (k + j) * V::WIDTH;
            const F weight = V::load_compact(buffers.param + at, buffers.remainder + at);
            F g = V::mul(Grad::template load<V>(grad + at), grad_scale);
            if (L2) g = V::fma(weight_decay, weight, g);
            const F m =
                V::fma(expand<V>(V::load_i8(buffers.exp_avg + at)), scale_m, V::mul(one_minus_beta1, g));
            const F old_s = V::mul(V::load_u8(buffers.exp_avg_sq + at), scale_s);
            const F s = V::sqrt(V::fma(old_s, old_s, V::mul(V::mul(one_minus_beta2, g), g)));
            const F denom = V::fma(s, inv_sqrt_bias_correction2, eps);
            p[j] = V::fms(weight, decay, V::div(V::mul(step_size, m), denom));
            moments.m[k + j] = m;
            moments.s[k + j] = s;
            moments.largest_m = V::max_bits(moments.largest_m, V::abs(m));
            moments.largest_s = V::max_bits(moments.largest_s, s);
        }
        const size_t at = i + k * V::WIDTH;
        V::store_compact(buffers.param + at, buffers.remainder + at, p);
    }
    encode_moments<V>(moments, buffers, i);
}

// The block at the end that is not whole, as a whole one: zeros change no maximum.
struct PaddedBlock {
    uint16_t param[COMPACT_BLOCK] = {};
    int8_t remainder[COMPACT_BLOCK] = {};
    int8_t exp_avg[COMPACT_BLOCK] = {};
    uint8_t exp_avg_sq[COMPACT_BLOCK] = {};
    float scales[2];

    PaddedBlock(const CompactBuffers& from, size_t i, size_t count) {
        __builtin_memcpy(param, from.param + i, count * sizeof(uint16_t));
        __builtin_memcpy(remainder, from.remainder + i, count);
        __builtin_memcpy(exp_avg, from.exp_avg + i, count);
        __builtin_memcpy(exp_avg_sq, from.exp_avg_sq + i, count);
        __builtin_memcpy(scales, from.scales + i / COMPACT_BLOCK * 2, sizeof scales);
    }
    CompactBuffers buffers(const void* grad) { return {param, remainder, exp_avg, exp_avg_sq, scales, grad}; }
    void copy_to(const CompactBuffers& to, size_t i, size_t count) const {
        __builtin_memcpy(to.param + i, param, count * sizeof(uint16_t));
        __builtin_memcpy(to.remainder + i, remainder, count);
        __builtin_memcpy(to.exp_avg + i, exp_avg, count);
        __builtin_memcpy(to.exp_avg_sq + i, exp_avg_sq, count);
        __builtin_memcpy(to.scales + i / COMPACT_BLOCK * 2, scales, sizeof scales);
    }
};

template <class V, class Grad, bool L2>
static void compact_adam_range(const CompactBuffers& buffers, const AdamScalars& scalars, size_t begin,
                               size_t end) {
    using Element = typename Grad::Element;
    size_t i = begin;
    for (; i + COMPACT_BLOCK <= end; i += COMPACT_BLOCK) {
        if (V::WIDTH > 1) {
            prefetch_block<uint16_t>(buffers.param, i);
            prefetch_block<Element>(buffers.grad, i);
            prefetch_block<int8_t>(buffers.remainder, i);
            prefetch_block<int8_t>(buffers.exp_avg, i);
            prefetch_block<uint8_t>(buffers.exp_avg_sq, i);
        }
        compact_adam_block<V, Grad, L2>(buffers, scalars, i);
    }
    if (i == end) return;
    PaddedBlock block(buffers, i, end - i);
    Element grad[COMPACT_BLOCK] = {};
    __builtin_memcpy(grad, static_cast<const Element*>(buffers.grad) + i, (end - i) * sizeof(Element));
    compact_adam_block<V, Grad, L2>(block.buffers(grad), scalars, 0);
    block.copy_to(buffers, i, end - i);
}

template <class V>
OFFLOADZERO_INLINE void compact_encode_block(const Fp32State& state, const CompactBuffers& buffers,
                                             size_t i) {
    using F = typename V::F;
    BlockMoments<V> moments;
    moments.largest_m = moments.largest_s = V::set(0.0f);
    for (size_t k = 0; k < BlockMoments<V>::NUM_VECTORS; k += V::PACK) {
        F p[V::PACK];
        for (size_t j = 0; j < V::PACK; ++j) {
            const size_t at = i + (k + j) * V::WIDTH;
            p[j] = V::load_fp32(state.master + at);
            moments.m[k + j] = V::load_fp32(state.exp_avg + at);
            // + 0: the root of -0 is -0, whose pattern is not the least.
            moments.s[k + j] = V::add(V::sqrt(V::load_fp32(state.exp_avg_sq + at)), V::set(0.0f));
            moments.largest_m = V::max_bits(moments.largest_m, V::abs(moments.m[k + j]));
            moments.largest_s = V::max_bits(moments.largest_s, moments.s[k + j]);
        }
        const size_t at = i + k * V::WIDTH;
        V::store_compact(buffers.param + at, buffers.remainder + at, p);
    }
    encode_moments<V>(moments, buffers, i);
    for (size_t k = i; k < i + COMPACT_BLOCK; ++k) {  // rounding a NaN of full payload up would make it zero
        constexpr float NOT_A_NUMBER = __builtin_nanf("");
        const bool is_nan = state.master[k] != state.master[k];
        if (is_nan) Scalar::store_compact(buffers.param + k, buffers.remainder + k, &NOT_A_NUMBER);
    }
}

template <class V>
static void compact_encode_range(const Fp32State& state, const CompactBuffers& buffers, size_t begin,
                                 size_t end) {
    size_t i = begin;
    for (; i + COMPACT_BLOCK <= end; i += COMPACT_BLOCK) compact_encode_block<V>(state, buffers, i);
    if (i == end) return;
    const size_t count = end - i;
    float master[COMPACT_BLOCK] = {}, exp_avg[COMPACT_BLOCK] = {}, exp_avg_sq[COMPACT_BLOCK] = {};
    __builtin_memcpy(master, state.master + i, count * sizeof(float));
    __builtin_memcpy(exp_avg, state.exp_avg + i, count * sizeof(float));
    __builtin_memcpy(exp_avg_sq, state.exp_avg_sq + i, count * sizeof(float));
    PaddedBlock block(buffers, i, count);
    compact_encode_block<V>({master, exp_avg, exp_avg_sq}, block.buffers(nullptr), 0);
    block.copy_to(buffers, i, count);
}

template <class V>
OFFLOADZERO_INLINE size_t compact_decode_span(const CompactBuffers& buffers, const Fp32State& state,
                                              const float* scale, size_t i, size_t end) {
    using F = typename V::F;
    const F scale_m = V::set(scale[0]), scale_s = V::set(scale[1]);
    for (; i + V::WIDTH <= end; i += V::WIDTH) {
        const F s = V::mul(V::load_u8(buffers.exp_avg_sq + i), scale_s);
        V::store_fp32(state.master + i, V::load_compact(buffers.param + i, buffers.remainder + i));
        V::store_fp32(state.exp_avg + i, V::mul(expand<V>(V::load_i8(buffers.exp_avg + i)), scale_m));
        V::store_fp32(state.exp_avg_sq + i, V::mul(s, s));
    }
    return i;
}

template <class V>
static void compact_decode_range(const CompactBuffers& buffers, const Fp32State& state, size_t begin,
                                 size_t end) {
    for (size_t i = begin; i < end; i += COMPACT_BLOCK) {
        const size_t block_end = end - i < COMPACT_BLOCK ? end : i + COMPACT_BLOCK;
        const float* scale = buffers.scales + i / COMPACT_BLOCK * 2;
        const size_t rest = compact_decode_span<V>(buffers, state, scale, i, block_end);
        compact_decode_span<Scalar>(buffers, state, scale, rest, block_end);
    }
}
