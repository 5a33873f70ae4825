// One element at a time, in plain C++: the baseline, and the tail of every vector kernel.
//
// Included inside an ISA's namespace and target region (so that the tails of AVX kernels are VEX-encoded): it
// has no include guard and includes nothing. The conversions give the bits of the F16C instructions.

struct Scalar {
    using F = float;
    using D = double;
    static constexpr size_t WIDTH = 1;
    static constexpr size_t DOUBLE_WIDTH = 1;
    static constexpr size_t PACK = 1;  // vectors of a group: one load of bytes

    OFFLOADZERO_INLINE uint32_t bits_of(float x) {
        uint32_t bits;
        __builtin_memcpy(&bits, &x, sizeof bits);
        return bits;
    }
    OFFLOADZERO_INLINE float from_bits(uint32_t bits) {
        float x;
        __builtin_memcpy(&x, &bits, sizeof x);
        return x;
    }

    OFFLOADZERO_INLINE F set(float x) { return x; }
    OFFLOADZERO_INLINE F add(F a, F b) { return a + b; }
    OFFLOADZERO_INLINE F sub(F a, F b) { return a - b; }
    OFFLOADZERO_INLINE F mul(F a, F b) { return a * b; }
    OFFLOADZERO_INLINE F div(F a, F b) { return a / b; }
    OFFLOADZERO_INLINE F sqrt(F a) { return __builtin_sqrtf(a); }

    OFFLOADZERO_INLINE D zero_double() { return 0.0; }
    OFFLOADZERO_INLINE D to_double(F x, size_t) { return static_cast<double>(x); }
    OFFLOADZERO_INLINE D add_square(D sum, D x) { return sum + x * x; }
    OFFLOADZERO_INLINE void store_double(double* p, D x) { *p = x; }

    OFFLOADZERO_INLINE F load_fp32(const float* p) { return *p; }
    OFFLOADZERO_INLINE void store_fp32(float* p, F x) { *p = x; }

    OFFLOADZERO_INLINE F load_bf16(const uint16_t* p) { return from_bits(static_cast<uint32_t>(*p) << 16); }
    OFFLOADZERO_INLINE void store_bf16(uint16_t* p, F x) {
        const uint32_t bits = bits_of(x);
        const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
        const uint32_t quiet_nan = (bits >> 16) | 0x40u;
        *p = static_cast<uint16_t>(x != x ? quiet_nan : rounded);
    }

    OFFLOADZERO_INLINE F load_fp16(const uint16_t* p) {
        const uint32_t half = *p;
        const uint32_t sign = (half & 0x8000u) << 16;
        const uint32_t magnitude = (half & 0x7FFFu) << 13;
        if (magnitude < 0x00800000u) {  // zero and subnormal: an integer times 2^-24, exact in fp32
            const float value = static_cast<float>(half & 0x7FFFu) * 0x1p-24f;
            return from_bits(sign | bits_of(value));
        }
        if (magnitude >= 0x0F800000u) {  // infinity, NaN (made quiet)
            const uint32_t quiet = magnitude > 0x0F800000u ? 0x00400000u : 0u;
            return from_bits(sign | magnitude | 0x7F800000u | quiet);
        }
        return from_bits(sign | (magnitude + (112u << 23)));
    }
    OFFLOADZERO_INLINE void store_fp16(uint16_t* p, F x) {
        const uint32_t bits = bits_of(x);
        const uint32_t sign = (bits >> 16) & 0x8000u;
        const uint32_t magnitude = bits & 0x7FFFFFFFu;
        uint32_t half;
        if (magnitude > 0x7F800000u) {
            half = 0x7E00u | ((magnitude >> 13) & 0x3FFu);
        } else if (magnitude >= 0x47800000u) {  // 2^16 and above
            half = 0x7C00u;
        } else if (magnitude < 0x38800000u) {
            // Below 2^-14: adding 0.5 puts fp16's subnormal grid at the sum's last bit, so the addition
            // rounds.
            half = bits_of(from_bits(magnitude) + 0.5f) - 0x3F000000u;
        } else {  // rebias the exponent, round to nearest even; a carry runs into the exponent, up to
                  // infinity
            half = (magnitude - (112u << 23) + 0xFFFu + ((magnitude >> 13) & 1u)) >> 13;
        }
        *p = static_cast<uint16_t>(sign | half);
    }

    OFFLOADZERO_INLINE F fma(F a, F b, F c) { return __builtin_fmaf(a, b, c); }
    OFFLOADZERO_INLINE F fms(F a, F b, F c) { return __builtin_fmaf(a, b, -c); }
    OFFLOADZERO_INLINE F abs(F x) { return from_bits(bits_of(x) & 0x7FFFFFFFu); }
    // -1, 0 or 1; zeros and NaN are returned as they are.
    OFFLOADZERO_INLINE F sign(F x) {
        return x < 0.0f || x > 0.0f ? from_bits((bits_of(x) & 0x80000000u) | 0x3F800000u) : x;
    }
    // The larger pattern as an unsigned number: for values >= +0 the larger value, and NaN above all.
    OFFLOADZERO_INLINE F max_bits(F a, F b) { return bits_of(a) < bits_of(b) ? b : a; }
    OFFLOADZERO_INLINE F copysign(F magnitude, F sign) {  // magnitude >= +0
        return from_bits(bits_of(magnitude) | (bits_of(sign) & 0x80000000u));
    }
    OFFLOADZERO_INLINE void reduce_max_bits(F a, F b, float* largest) {
        largest[0] = a;
        largest[1] = b;
    }

    // Groups: here of one element.
    OFFLOADZERO_INLINE size_t element(size_t slot) { return slot; }
    OFFLOADZERO_INLINE void load_group_bf16(const uint16_t* p, F* x) { *x = load_bf16(p); }
    OFFLOADZERO_INLINE void load_group_fp16(const uint16_t* p, F* x) { *x = load_fp16(p); }
    OFFLOADZERO_INLINE void load_group_fp32(const float* p, F* x) { *x = *p; }
    OFFLOADZERO_INLINE void store_group_fp32(float* p, const F* x) { *p = *x; }

    // [Note: compact state]
    OFFLOADZERO_INLINE void load_signed_codes(const int8_t* p, F* x) {
        const auto code = static_cast<uint32_t>(static_cast<uint8_t>(*p));
        *x = from_bits((code & 0x80u) << 24 | 0x40000000u | (code & 0x7Fu) << 18);
    }
    OFFLOADZERO_INLINE void load_codes(const uint8_t* p, F* x) {
        *x = from_bits(0x40000000u | static_cast<uint32_t>(*p) << 16);
    }
    OFFLOADZERO_INLINE void store_signed_codes(int8_t* p, const F* y, const uint32_t* dither) {
        const uint32_t code = ((bits_of(*y) & 0x7FFFFFFFu) + *dither) >> 18;
        *p = static_cast<int8_t>(code | (bits_of(*y) >> 24 & 0x80u));
    }
    OFFLOADZERO_INLINE void store_codes_at_least_1(uint8_t* p, const F* y, const uint32_t* dither) {
        const uint32_t code = (bits_of(*y) + *dither) >> 16;
        *p = static_cast<uint8_t>(code < 1u ? 1u : code);
    }
};

// In the vector types bytes become words and words numbers by unpacking within 128 bits, which needs no
// widening conversion: 128 bits of vector j of a group of four hold four numbers out of eight that follow
// each other, the first four if j is even. This is the element in slot k of such groups.
template <size_t WIDTH>
OFFLOADZERO_INLINE size_t unpacked_element(size_t slot) {
    const size_t vector = slot / WIDTH % 4, lane = slot % WIDTH;
    return slot / (4 * WIDTH) * (4 * WIDTH) + vector / 2 * 2 * WIDTH + lane / 4 * 8 + vector % 2 * 4 +
           lane % 4;
}
