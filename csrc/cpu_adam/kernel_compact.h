// Adam on the compact state, written once over a vector type V. Included after kernel_body.h, like it.
// [Note: compact state], [Note: compact arithmetic] and [Note: dithered codes] in cpu_adam.h fix format,
// operations and order.
//
// [Note: stages of a block]
// A block goes through three loops: its moments are updated and wait in the first-level cache; its weights
// are updated by them; its moments are encoded with the new scales. In one loop square roots and quotients
// make chains so long that the next vector's instructions do not fit into the core's window beside them (Zen
// 4, in the cache: 7.7 ns per 16 elements against 7.45). Each loop takes the blocks one after the one before
// it: a value that is read back right after it was stored waits for the store, and everything behind it waits
// too (11.8 ns when the weights follow their own moments). It also hides the chain from maxima to scales.
//
// A short last block goes through a copy filled up with zeros.

constexpr float LARGEST_FLOAT = 0x1.FFFFFEp127f;
constexpr float NOT_A_NUMBER = __builtin_nanf("");
constexpr uint32_t INFINITY_BITS = 0x7F800000u;
constexpr float SMALLEST_SCALED = 0x1p-100f;
constexpr float SPAN_M = 14.75f, SPAN_S = 2.984375f;  // of y from the code 0 to the largest code

constexpr Dither nearest() {
    Dither dither{};
    for (size_t slot = 0; slot < COMPACT_BLOCK; ++slot) {
        dither.exp_avg[slot] = (1u << 17) - BITS_OF_1;
        dither.exp_avg_sq[slot] = (1u << 15) - BITS_OF_1;
    }
    return dither;
}
constexpr Dither NO_DITHER = nearest();

template <class V>
static size_t compact_element(size_t slot) {
    return V::element(slot);
}

// The new moments of one block before they are encoded: m, sqrt(v), the largest patterns of |m| and sqrt(v).
template <class V>
struct BlockMoments {
    static constexpr size_t NUM_VECTORS = COMPACT_BLOCK / V::WIDTH;
    typename V::F m[NUM_VECTORS];
    typename V::F s[NUM_VECTORS];
    float largest[2];  // m, s
    float inverse_m;
    float inverse_s;
};

OFFLOADZERO_INLINE float scale_of(float largest, float span) {
    const uint32_t keep = Scalar::bits_of(largest) < Scalar::bits_of(SMALLEST_SCALED) ? 0u : ~0u;
    return Scalar::from_bits(Scalar::bits_of(largest * (1.0f / (2.0f * span))) & keep);
}
OFFLOADZERO_INLINE float inverse_of(float largest, float span) {
    const uint32_t a = Scalar::bits_of(largest), b = Scalar::bits_of(SMALLEST_SCALED);
    return span / Scalar::from_bits(a > b ? a : b);
}

template <class V>
OFFLOADZERO_INLINE void set_scales(BlockMoments<V>& moments, typename V::F largest_m, typename V::F largest_s,
                                   float* scales) {
    V::reduce_max_bits(largest_m, largest_s, moments.largest);
    scales[0] = scale_of(moments.largest[0], SPAN_M);
    scales[1] = scale_of(moments.largest[1], SPAN_S);
    moments.inverse_m = inverse_of(moments.largest[0], SPAN_M);
    moments.inverse_s = inverse_of(moments.largest[1], SPAN_S);
}

template <class V>
OFFLOADZERO_INLINE void encode_m(int8_t* codes, const typename V::F* m, float inverse,
                                 const uint32_t* dither) {
    const typename V::F inverse_m = V::set(inverse), one = V::set(1.0f);
    typename V::F y[V::PACK];
    for (size_t j = 0; j < V::PACK; ++j) y[j] = V::fma(m[j], inverse_m, V::copysign(one, m[j]));
    V::store_signed_codes(codes, y, dither);
}

template <class V>
OFFLOADZERO_INLINE void encode_s(uint8_t* codes, const typename V::F* s, float inverse,
                                 const uint32_t* dither) {
    const typename V::F inverse_s = V::set(inverse), one = V::set(1.0f);
    typename V::F y[V::PACK];
    for (size_t j = 0; j < V::PACK; ++j) y[j] = V::fma(s[j], inverse_s, one);
    V::store_codes_at_least_1(codes, y, dither);
}

// Treats a block whose moments are not all finite as [Note: compact arithmetic] says.
template <class V>
static __attribute__((noinline, cold)) void encode_extremes(const BlockMoments<V>& moments,
                                                            const CompactBuffers buffers,
                                                            const Dither& dither, size_t i) {
    float m[COMPACT_BLOCK], s[COMPACT_BLOCK];
    __builtin_memcpy(m, moments.m, sizeof m);
    __builtin_memcpy(s, moments.s, sizeof s);
    const bool m_is_finite = Scalar::bits_of(moments.largest[0]) < INFINITY_BITS;
    const bool s_is_nan = Scalar::bits_of(moments.largest[1]) > INFINITY_BITS;
    const float largest_s = moments.largest[1] > LARGEST_FLOAT ? LARGEST_FLOAT : moments.largest[1];
    buffers.scales[i / COMPACT_BLOCK * 2] = m_is_finite ? scale_of(moments.largest[0], SPAN_M) : NOT_A_NUMBER;
    buffers.scales[i / COMPACT_BLOCK * 2 + 1] = s_is_nan ? NOT_A_NUMBER : scale_of(largest_s, SPAN_S);
    const float inverse_m = inverse_of(moments.largest[0], SPAN_M), inverse_s = inverse_of(largest_s, SPAN_S);
    for (size_t slot = 0; slot < COMPACT_BLOCK; ++slot) {
        const size_t at = i + V::element(slot);
        const bool is_lost = Scalar::bits_of(Scalar::abs(m[slot])) >= INFINITY_BITS;
        if (is_lost)
            Remainders<Scalar>::store_compact(buffers.param + at, buffers.remainder + at, &NOT_A_NUMBER);
        const float kept_m = m_is_finite ? m[slot] : 0.0f;
        const float kept_s = s_is_nan ? 0.0f : s[slot] > LARGEST_FLOAT ? LARGEST_FLOAT : s[slot];
        encode_m<Scalar>(buffers.exp_avg + at, &kept_m, m_is_finite ? inverse_m : 0.0f,
                         dither.exp_avg + slot);
        encode_s<Scalar>(buffers.exp_avg_sq + at, &kept_s, s_is_nan ? 0.0f : inverse_s,
                         dither.exp_avg_sq + slot);
    }
}

template <class V>
OFFLOADZERO_INLINE void encode_moments(const BlockMoments<V>& moments, const CompactBuffers& buffers,
                                       const Dither& dither, size_t i) {
    const uint32_t m_bits = Scalar::bits_of(moments.largest[0]), s_bits = Scalar::bits_of(moments.largest[1]);
    if (__builtin_expect(m_bits >= INFINITY_BITS || s_bits >= INFINITY_BITS, 0)) {
        encode_extremes<V>(moments, buffers, dither, i);
        return;
    }
    for (size_t k = 0; k < BlockMoments<V>::NUM_VECTORS; k += V::PACK) {
        const size_t at = k * V::WIDTH;
        encode_m<V>(buffers.exp_avg + i + at, moments.m + k, moments.inverse_m, dither.exp_avg + at);
        encode_s<V>(buffers.exp_avg_sq + i + at, moments.s + k, moments.inverse_s, dither.exp_avg_sq + at);
    }
}

template <class Element>
OFFLOADZERO_INLINE void prefetch_block(const void* base, size_t i) {
    constexpr size_t LINE_ELEMENTS = 64 / sizeof(Element);
    for (size_t k = 0; k < COMPACT_BLOCK; k += LINE_ELEMENTS) prefetch<Element>(base, i + k);
}

// Updates the moments of the whole block from element i on, without encoding them.
template <class V, class Grad, bool L2>
OFFLOADZERO_INLINE void update_moments(const CompactBuffers& buffers, const CompactScalars& scalars, size_t i,
                                       BlockMoments<V>& moments) {
    using F = typename V::F;
    const auto* grad = static_cast<const typename Grad::Element*>(buffers.grad);
    float* scales = buffers.scales + i / COMPACT_BLOCK * 2;
    const F scale_m = V::mul(V::set(scalars.beta1), V::set(scales[0]));
    const F scale_s = V::mul(V::set(scalars.sqrt_beta2), V::set(scales[1]));
    const F twice_scale_m = V::add(scale_m, scale_m), twice_scale_s = V::add(scale_s, scale_s);
    const F grad_m = V::set(scalars.grad_m), grad_s = V::set(scalars.grad_s);
    const F grad_scale = V::set(scalars.grad_scale), weight_decay = V::set(scalars.weight_decay);
    F largest_m = V::set(0.0f), largest_s = V::set(0.0f);
    for (size_t k = 0; k < BlockMoments<V>::NUM_VECTORS; k += V::PACK) {
        const size_t at = i + k * V::WIDTH;
        F g[V::PACK], f[V::PACK], y[V::PACK], p[V::PACK];
        Grad::template load_group<V>(grad + at, g);
        V::load_signed_codes(buffers.exp_avg + at, f);
        V::load_codes(buffers.exp_avg_sq + at, y);
        if (L2) Remainders<V>::load_compact(buffers.param + at, buffers.remainder + at, p);
        for (size_t j = 0; j < V::PACK; ++j) {
            if (L2) g[j] = V::fma(weight_decay, p[j], V::mul(g[j], grad_scale));
            const F m = V::fma(f[j], scale_m, V::fms(g[j], grad_m, V::copysign(twice_scale_m, f[j])));
            const F old_s = V::fms(y[j], scale_s, twice_scale_s);
            const F t = V::mul(g[j], grad_s);
            const F s = V::sqrt(V::fma(old_s, old_s, V::mul(t, t)));
            moments.m[k + j] = m;
            moments.s[k + j] = s;
            largest_m = V::max_bits(largest_m, V::abs(m));
            largest_s = V::max_bits(largest_s, s);
        }
    }
    set_scales<V>(moments, largest_m, largest_s, scales);
}

template <class V>
OFFLOADZERO_INLINE void update_weights(const CompactBuffers& buffers, const CompactScalars& scalars, size_t i,
                                       const BlockMoments<V>& moments) {
    using F = typename V::F;
    const F root = V::set(scalars.root), floor = V::set(scalars.floor), decay = V::set(scalars.decay);
    for (size_t k = 0; k < BlockMoments<V>::NUM_VECTORS; k += V::PACK) {
        const size_t at = i + k * V::WIDTH;
        F p[V::PACK];
        Remainders<V>::load_compact(buffers.param + at, buffers.remainder + at, p);
        for (size_t j = 0; j < V::PACK; ++j) {
            const F denom = V::fma(moments.s[k + j], root, floor);
            p[j] = V::fms(p[j], decay, V::div(moments.m[k + j], denom));
        }
        Remainders<V>::store_compact(buffers.param + at, buffers.remainder + at, p);
    }
}

// A copy of the short block at the end, filled up with zeros, which change no maximum.
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
static void compact_adam_range(const CompactBuffers& all_buffers, const CompactScalars& all_scalars,
                               const Dither& dither, size_t begin, size_t end) {
    using Element = typename Grad::Element;
    // These are copies: a store of bytes could change a referenced value.
    const CompactBuffers buffers = all_buffers;
    const CompactScalars scalars = all_scalars;
    const size_t num_blocks = (end - begin) / COMPACT_BLOCK;
    BlockMoments<V> moments[3];
    BlockMoments<V>*now = moments, *before = moments + 1, *older = moments + 2;
    for (size_t block = 0; block < num_blocks + 2; ++block) {
        const size_t i = begin + block * COMPACT_BLOCK;
        if (block < num_blocks) {
            if (V::WIDTH > 1) {
                prefetch_block<uint16_t>(buffers.param, i);
                prefetch_block<Element>(buffers.grad, i);
                prefetch_block<int8_t>(buffers.remainder, i);
                prefetch_block<int8_t>(buffers.exp_avg, i);
                prefetch_block<uint8_t>(buffers.exp_avg_sq, i);
            }
            update_moments<V, Grad, L2>(buffers, scalars, i, *now);
        }
        if (block >= 2) encode_moments<V>(*older, buffers, dither, i - 2 * COMPACT_BLOCK);
        if (block >= 1 && block <= num_blocks) {
            update_weights<V>(buffers, scalars, i - COMPACT_BLOCK, *before);
        }
        BlockMoments<V>* const free = older;
        older = before;
        before = now;
        now = free;
    }
    const size_t i = begin + num_blocks * COMPACT_BLOCK;
    if (i == end) return;
    PaddedBlock block(buffers, i, end - i);
    Element grad[COMPACT_BLOCK] = {};
    __builtin_memcpy(grad, static_cast<const Element*>(buffers.grad) + i, (end - i) * sizeof(Element));
    update_moments<V, Grad, L2>(block.buffers(grad), scalars, 0, *now);
    update_weights<V>(block.buffers(grad), scalars, 0, *now);
    encode_moments<V>(*now, block.buffers(grad), dither, 0);
    block.copy_to(buffers, i, end - i);
}

template <class V>
OFFLOADZERO_INLINE void compact_encode_block(const Fp32State& state, const CompactBuffers& buffers,
                                             size_t i) {
    using F = typename V::F;
    BlockMoments<V> moments;
    F largest_m = V::set(0.0f), largest_s = V::set(0.0f);
    for (size_t k = 0; k < BlockMoments<V>::NUM_VECTORS; k += V::PACK) {
        const size_t at = i + k * V::WIDTH;
        F p[V::PACK];
        V::load_group_fp32(state.master + at, p);
        V::load_group_fp32(state.exp_avg + at, moments.m + k);
        V::load_group_fp32(state.exp_avg_sq + at, moments.s + k);
        for (size_t j = k; j < k + V::PACK; ++j) {
            // + 0: the root of -0 is -0, whose pattern is not the least.
            moments.s[j] = V::add(V::sqrt(moments.s[j]), V::set(0.0f));
            largest_m = V::max_bits(largest_m, V::abs(moments.m[j]));
            largest_s = V::max_bits(largest_s, moments.s[j]);
        }
        Remainders<V>::store_compact(buffers.param + at, buffers.remainder + at, p);
    }
    set_scales<V>(moments, largest_m, largest_s, buffers.scales + i / COMPACT_BLOCK * 2);
    encode_moments<V>(moments, buffers, NO_DITHER, i);
    for (size_t k = i; k < i + COMPACT_BLOCK; ++k) {  // rounding a NaN of full payload up would make it zero
        const bool is_nan = state.master[k] != state.master[k];
        if (is_nan)
            Remainders<Scalar>::store_compact(buffers.param + k, buffers.remainder + k, &NOT_A_NUMBER);
    }
}

// Three fp32 arrays of one block.
struct PaddedState {
    float master[COMPACT_BLOCK] = {};
    float exp_avg[COMPACT_BLOCK] = {};
    float exp_avg_sq[COMPACT_BLOCK] = {};

    Fp32State arrays() { return {master, exp_avg, exp_avg_sq}; }
};

template <class V>
static void compact_encode_range(const Fp32State& state, const CompactBuffers& buffers, size_t begin,
                                 size_t end) {
    size_t i = begin;
    for (; i + COMPACT_BLOCK <= end; i += COMPACT_BLOCK) compact_encode_block<V>(state, buffers, i);
    if (i == end) return;
    const size_t count = end - i;
    PaddedState padded;
    __builtin_memcpy(padded.master, state.master + i, count * sizeof(float));
    __builtin_memcpy(padded.exp_avg, state.exp_avg + i, count * sizeof(float));
    __builtin_memcpy(padded.exp_avg_sq, state.exp_avg_sq + i, count * sizeof(float));
    PaddedBlock block(buffers, i, count);
    compact_encode_block<V>(padded.arrays(), block.buffers(nullptr), 0);
    block.copy_to(buffers, i, count);
}

template <class V>
OFFLOADZERO_INLINE void compact_decode_block(const CompactBuffers& buffers, const Fp32State& state,
                                             size_t i) {
    using F = typename V::F;
    const float* scales = buffers.scales + i / COMPACT_BLOCK * 2;
    const F scale_m = V::set(scales[0]), scale_s = V::set(scales[1]), two = V::set(2.0f);
    for (size_t k = 0; k < BlockMoments<V>::NUM_VECTORS; k += V::PACK) {
        const size_t at = i + k * V::WIDTH;
        F p[V::PACK], m[V::PACK], v[V::PACK];
        Remainders<V>::load_compact(buffers.param + at, buffers.remainder + at, p);
        V::load_signed_codes(buffers.exp_avg + at, m);
        V::load_codes(buffers.exp_avg_sq + at, v);
        for (size_t j = 0; j < V::PACK; ++j) {
            m[j] = V::mul(V::copysign(V::sub(V::abs(m[j]), two), m[j]), scale_m);
            const F s = V::mul(V::sub(v[j], two), scale_s);
            v[j] = V::mul(s, s);
        }
        V::store_group_fp32(state.master + at, p);
        V::store_group_fp32(state.exp_avg + at, m);
        V::store_group_fp32(state.exp_avg_sq + at, v);
    }
}

template <class V>
static void compact_decode_range(const CompactBuffers& buffers, const Fp32State& state, size_t begin,
                                 size_t end) {
    size_t i = begin;
    for (; i + COMPACT_BLOCK <= end; i += COMPACT_BLOCK) compact_decode_block<V>(buffers, state, i);
    if (i == end) return;
    const size_t count = end - i;
    PaddedBlock block(buffers, i, count);
    PaddedState padded;
    compact_decode_block<V>(block.buffers(nullptr), padded.arrays(), 0);
    __builtin_memcpy(state.master + i, padded.master, count * sizeof(float));
    __builtin_memcpy(state.exp_avg + i, padded.exp_avg, count * sizeof(float));
    __builtin_memcpy(state.exp_avg_sq + i, padded.exp_avg_sq, count * sizeof(float));
}
