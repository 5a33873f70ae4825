// Adam on the compact state, written once over a vector type V. Included after kernel_body.h, like it.
// [Note: compact state], [Note: compact arithmetic] and [Note: dithered codes] in cpu_adam.h fix format,
// operations and order.
//
// A block is read, updated and its new maxima found; its moments wait in the first-level cache and are
// written with the new scales after the next block's update. So the chain from maxima to scales, some 40
// cycles in which nothing else of the block can run, hides behind that (Zen 5: 4.1 against 4.8 ns per 16
// elements). A short last block goes through a copy filled up with zeros.

constexpr float LARGEST_FLOAT = 0x1.FFFFFEp127f;
constexpr float SMALLEST_FLOAT = 0x1p-149f;
constexpr float COMPAND_LIMIT = 0x1p119f;  // up to here 254 m and largest + |m| are finite
constexpr float NOT_A_NUMBER = __builtin_nanf("");
constexpr uint32_t INFINITY_BITS = 0x7F800000u;
constexpr Dither NO_DITHER{};

// q / (254 - |q|): the companded code as a share of the block's largest magnitude.
template <class V>
OFFLOADZERO_INLINE typename V::F expand(typename V::F q) {
    return V::div(q, V::sub(V::set(254.0f), V::abs(q)));
}

// The new moments of one block before they are encoded: m, sqrt(v), and the largest patterns of |m| and
// sqrt(v).
template <class V>
struct BlockMoments {
    static constexpr size_t NUM_VECTORS = COMPACT_BLOCK / V::WIDTH;
    typename V::F m[NUM_VECTORS];
    typename V::F s[NUM_VECTORS];
    float largest_m;
    float largest_s;
    float s_inverse;  // 255 / largest_s, or 0
};

OFFLOADZERO_INLINE float inverse_of_s(float largest_s) {
    return largest_s > 0.0f ? 255.0f / largest_s : 0.0f;
}

// A block whose moments are too large for encode_moments or not finite: what [Note: compact state] says of
// it.
template <class V>
static __attribute__((noinline, cold)) void encode_extremes(const BlockMoments<V>& moments,
                                                            const CompactBuffers& buffers,
                                                            const Dither& dither, size_t i) {
    float m[COMPACT_BLOCK], s[COMPACT_BLOCK];
    for (size_t k = 0; k < COMPACT_BLOCK / V::WIDTH; ++k) {
        V::store_fp32(m + k * V::WIDTH, moments.m[k]);
        V::store_fp32(s + k * V::WIDTH, moments.s[k]);
    }
    const bool m_is_finite = Scalar::bits_of(moments.largest_m) < INFINITY_BITS;
    const bool s_is_nan = Scalar::bits_of(moments.largest_s) > INFINITY_BITS;
    const float largest_s = moments.largest_s > LARGEST_FLOAT ? LARGEST_FLOAT : moments.largest_s;
    const float s_inverse = inverse_of_s(largest_s);
    buffers.scales[i / COMPACT_BLOCK * 2] = m_is_finite ? moments.largest_m : NOT_A_NUMBER;
    buffers.scales[i / COMPACT_BLOCK * 2 + 1] = s_is_nan ? NOT_A_NUMBER : largest_s * (1.0f / 255.0f);
    for (size_t k = 0; k < COMPACT_BLOCK; ++k) {
        const bool is_lost = Scalar::bits_of(Scalar::abs(m[k])) >= INFINITY_BITS;
        const float x = m_is_finite && moments.largest_m > 0.0f ? m[k] / moments.largest_m : 0.0f;
        const float q = 254.0f * x / (1.0f + Scalar::abs(x)) + dither.exp_avg[k];
        const float exact = s_is_nan ? 0.0f : s[k] > LARGEST_FLOAT ? 255.0f : s[k] * s_inverse;
        const float code = exact + dither.exp_avg_sq[k];
        Scalar::store_i8(buffers.exp_avg + i + k, &q);
        Scalar::store_u8_at_least_1(buffers.exp_avg_sq + i + k, &code);
        if (is_lost) Scalar::store_compact(buffers.param + i + k, buffers.remainder + i + k, &NOT_A_NUMBER);
    }
}

template <class V>
OFFLOADZERO_INLINE void set_maxima(BlockMoments<V>& moments, typename V::F largest_m,
                                   typename V::F largest_s) {
    moments.largest_m = V::reduce_max_bits(largest_m);
    moments.largest_s = V::reduce_max_bits(largest_s);
    moments.s_inverse = inverse_of_s(moments.largest_s);
}

template <class V>
OFFLOADZERO_INLINE void encode_moments(const BlockMoments<V>& moments, const CompactBuffers& buffers,
                                       const Dither& dither, size_t i) {
    using F = typename V::F;
    const uint32_t m_bits = Scalar::bits_of(moments.largest_m), s_bits = Scalar::bits_of(moments.largest_s);
    if (__builtin_expect(m_bits >= Scalar::bits_of(COMPAND_LIMIT) || s_bits >= INFINITY_BITS, 0)) {
        encode_extremes<V>(moments, buffers, dither, i);
        return;
    }
    buffers.scales[i / COMPACT_BLOCK * 2] = moments.largest_m;
    buffers.scales[i / COMPACT_BLOCK * 2 + 1] = moments.largest_s * (1.0f / 255.0f);
    // Above zero, so that a block of zeros gives zeros and not 0 / 0.
    const F largest_m = V::set(moments.largest_m > 0.0f ? moments.largest_m : SMALLEST_FLOAT);
    const F s_inverse = V::set(moments.s_inverse), twice_127 = V::set(254.0f);
    for (size_t k = 0; k < BlockMoments<V>::NUM_VECTORS; k += V::PACK) {
        F q[V::PACK], code[V::PACK];
        for (size_t j = 0; j < V::PACK; ++j) {
            const F m = moments.m[k + j];
            const size_t at = (k + j) * V::WIDTH;
            q[j] = V::add(V::div(V::mul(twice_127, m), V::add(largest_m, V::abs(m))),
                          V::load_fp32(dither.exp_avg + at));
            code[j] = V::add(V::mul(moments.s[k + j], s_inverse), V::load_fp32(dither.exp_avg_sq + at));
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

// Updates one whole block, from element i on; its moments are yet to be encoded.
template <class V, class Grad, bool L2>
OFFLOADZERO_INLINE void compact_adam_block(const CompactBuffers& buffers, const AdamScalars& scalars,
                                           size_t i, BlockMoments<V>& moments) {
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
    F largest_m = V::set(0.0f), largest_s = V::set(0.0f);
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
            largest_m = V::max_bits(largest_m, V::abs(m));
            largest_s = V::max_bits(largest_s, s);
        }
        const size_t at = i + k * V::WIDTH;
        V::store_compact(buffers.param + at, buffers.remainder + at, p);
    }
    set_maxima<V>(moments, largest_m, largest_s);
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
static void compact_adam_range(const CompactBuffers& buffers, const AdamScalars& scalars,
                               const Dither& dither, size_t begin, size_t end) {
    using Element = typename Grad::Element;
    BlockMoments<V> moments[2];
    size_t i = begin, turn = 0;
    for (; i + COMPACT_BLOCK <= end; i += COMPACT_BLOCK, turn ^= 1) {
        if (V::WIDTH > 1) {
            prefetch_block<uint16_t>(buffers.param, i);
            prefetch_block<Element>(buffers.grad, i);
            prefetch_block<int8_t>(buffers.remainder, i);
            prefetch_block<int8_t>(buffers.exp_avg, i);
            prefetch_block<uint8_t>(buffers.exp_avg_sq, i);
        }
        compact_adam_block<V, Grad, L2>(buffers, scalars, i, moments[turn]);
        if (i != begin) encode_moments<V>(moments[turn ^ 1], buffers, dither, i - COMPACT_BLOCK);
    }
    if (i != begin) encode_moments<V>(moments[turn ^ 1], buffers, dither, i - COMPACT_BLOCK);
    if (i == end) return;
    PaddedBlock block(buffers, i, end - i);
    Element grad[COMPACT_BLOCK] = {};
    __builtin_memcpy(grad, static_cast<const Element*>(buffers.grad) + i, (end - i) * sizeof(Element));
    compact_adam_block<V, Grad, L2>(block.buffers(grad), scalars, 0, moments[0]);
    encode_moments<V>(moments[0], block.buffers(grad), dither, 0);
    block.copy_to(buffers, i, end - i);
}

template <class V>
OFFLOADZERO_INLINE void compact_encode_block(const Fp32State& state, const CompactBuffers& buffers,
                                             size_t i) {
    using F = typename V::F;
    BlockMoments<V> moments;
    F largest_m = V::set(0.0f), largest_s = V::set(0.0f);
    for (size_t k = 0; k < BlockMoments<V>::NUM_VECTORS; k += V::PACK) {
        F p[V::PACK];
        for (size_t j = 0; j < V::PACK; ++j) {
            const size_t at = i + (k + j) * V::WIDTH;
            p[j] = V::load_fp32(state.master + at);
            moments.m[k + j] = V::load_fp32(state.exp_avg + at);
            // + 0: the root of -0 is -0, whose pattern is not the least.
            moments.s[k + j] = V::add(V::sqrt(V::load_fp32(state.exp_avg_sq + at)), V::set(0.0f));
            largest_m = V::max_bits(largest_m, V::abs(moments.m[k + j]));
            largest_s = V::max_bits(largest_s, moments.s[k + j]);
        }
        const size_t at = i + k * V::WIDTH;
        V::store_compact(buffers.param + at, buffers.remainder + at, p);
    }
    set_maxima<V>(moments, largest_m, largest_s);
    encode_moments<V>(moments, buffers, NO_DITHER, i);
    for (size_t k = i; k < i + COMPACT_BLOCK; ++k) {  // rounding a NaN of full payload up would make it zero
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
