// Eight elements at a time with AVX2 and F16C. Included inside the AVX2 target region; see vec_scalar.h.

#define OFFLOADZERO_AVX2 1  // for remainders.h

struct Avx2 {
    using F = __m256;
    using D = __m256d;
    static constexpr size_t WIDTH = 8;
    static constexpr size_t DOUBLE_WIDTH = 4;
    static constexpr size_t PACK = 4;

    OFFLOADZERO_INLINE F set(float x) { return _mm256_set1_ps(x); }
    OFFLOADZERO_INLINE F add(F a, F b) { return _mm256_add_ps(a, b); }
    OFFLOADZERO_INLINE F sub(F a, F b) { return _mm256_sub_ps(a, b); }
    OFFLOADZERO_INLINE F mul(F a, F b) { return _mm256_mul_ps(a, b); }
    OFFLOADZERO_INLINE F div(F a, F b) { return _mm256_div_ps(a, b); }
    OFFLOADZERO_INLINE F sqrt(F a) { return _mm256_sqrt_ps(a); }

    OFFLOADZERO_INLINE D zero_double() { return _mm256_setzero_pd(); }
    OFFLOADZERO_INLINE D to_double(F x, size_t half) {
        return _mm256_cvtps_pd(half == 0 ? _mm256_castps256_ps128(x) : _mm256_extractf128_ps(x, 1));
    }
    OFFLOADZERO_INLINE D add_square(D sum, D x) { return _mm256_add_pd(sum, _mm256_mul_pd(x, x)); }
    OFFLOADZERO_INLINE void store_double(double* p, D x) { _mm256_storeu_pd(p, x); }

    OFFLOADZERO_INLINE __m128i load_16bit(const void* p) {
        return _mm_loadu_si128(static_cast<const __m128i*>(p));
    }
    // The low halves of eight 32-bit numbers below 2^16, in order.
    OFFLOADZERO_INLINE void store_16bit(void* p, __m256i x) {
        const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(x, x), 0x08);
        _mm_storeu_si128(static_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
    }

    OFFLOADZERO_INLINE F load_fp32(const float* p) { return _mm256_loadu_ps(p); }
    OFFLOADZERO_INLINE void store_fp32(float* p, F x) { _mm256_storeu_ps(p, x); }

    OFFLOADZERO_INLINE F load_bf16(const uint16_t* p) {
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_16bit(p)), 16));
    }
    OFFLOADZERO_INLINE void store_bf16(uint16_t* p, F x) {
        const __m256i bits = _mm256_castps_si256(x);
        const __m256i high = _mm256_srli_epi32(bits, 16);
        const __m256i odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
        const __m256i bias = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF));
        const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, bias), 16);
        const __m256i quiet_nan = _mm256_or_si256(high, _mm256_set1_epi32(0x40));
        const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
        store_16bit(p, _mm256_blendv_epi8(rounded, quiet_nan, is_nan));
    }

    OFFLOADZERO_INLINE F load_fp16(const uint16_t* p) { return _mm256_cvtph_ps(load_16bit(p)); }
    OFFLOADZERO_INLINE void store_fp16(uint16_t* p, F x) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                         _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    }

    OFFLOADZERO_INLINE F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
    OFFLOADZERO_INLINE F fms(F a, F b, F c) { return _mm256_fmsub_ps(a, b, c); }
    OFFLOADZERO_INLINE F abs(F x) {
        return _mm256_and_ps(x, _mm256_castsi256_ps(_mm256_set1_epi32(0x7FFFFFFF)));
    }
    OFFLOADZERO_INLINE F sign(F x) {
        const F sign_bit = _mm256_set1_ps(-0.0f);
        const F signed_one = _mm256_or_ps(_mm256_and_ps(x, sign_bit), _mm256_set1_ps(1.0f));
        return _mm256_blendv_ps(x, signed_one, _mm256_cmp_ps(x, _mm256_setzero_ps(), _CMP_NEQ_OQ));
    }
    OFFLOADZERO_INLINE F max_bits(F a, F b) {
        return _mm256_castsi256_ps(_mm256_max_epu32(_mm256_castps_si256(a), _mm256_castps_si256(b)));
    }
    OFFLOADZERO_INLINE F copysign(F magnitude, F sign) {  // magnitude >= +0
        return _mm256_or_ps(magnitude, _mm256_and_ps(sign, _mm256_set1_ps(-0.0f)));
    }
    OFFLOADZERO_INLINE void reduce_max_bits(F a, F b, float* largest) {
        const __m256i x = _mm256_castps_si256(a), y = _mm256_castps_si256(b);  // then theirs take turns
        const __m256i both = _mm256_max_epu32(_mm256_unpacklo_epi32(x, y), _mm256_unpackhi_epi32(x, y));
        __m128i m = _mm_max_epu32(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
        m = _mm_max_epu32(m, _mm_unpackhi_epi64(m, m));
        _mm_storel_epi64(reinterpret_cast<__m128i*>(largest), m);
    }

    // Groups of four vectors, as in vec_avx512.h.
    OFFLOADZERO_INLINE size_t element(size_t slot) { return unpacked_element<WIDTH>(slot); }
    OFFLOADZERO_INLINE __m256i load_vector(const void* p) {
        return _mm256_loadu_si256(static_cast<const __m256i*>(p));
    }
    OFFLOADZERO_INLINE void store_vector(void* p, __m256i x) {
        _mm256_storeu_si256(static_cast<__m256i*>(p), x);
    }
    OFFLOADZERO_INLINE __m256i swap_middle(__m256i x) { return _mm256_permute4x64_epi64(x, 0xD8); }
    OFFLOADZERO_INLINE void store_bytes(void* p, __m256i packed) { store_vector(p, swap_middle(packed)); }
    // Two vectors of numbers `high` << 16 | `low`.
    OFFLOADZERO_INLINE void join_words(__m256i low, __m256i high, F* x) {
        x[0] = _mm256_castsi256_ps(_mm256_unpacklo_epi16(low, high));
        x[1] = _mm256_castsi256_ps(_mm256_unpackhi_epi16(low, high));
    }
    OFFLOADZERO_INLINE __m256i high_words(__m256i a, __m256i b) {
        return _mm256_packus_epi32(_mm256_srli_epi32(a, 16), _mm256_srli_epi32(b, 16));
    }

    OFFLOADZERO_INLINE void load_group_bf16(const uint16_t* p, F* x) {
        join_words(_mm256_setzero_si256(), load_vector(p), x);
        join_words(_mm256_setzero_si256(), load_vector(p + 16), x + 2);
    }
    OFFLOADZERO_INLINE void load_group_fp16(const uint16_t* p, F* x) {
        for (size_t half = 0; half < 2; ++half) {
            const __m256i words = swap_middle(load_vector(p + 16 * half));
            x[2 * half] = _mm256_cvtph_ps(_mm256_castsi256_si128(words));
            x[2 * half + 1] = _mm256_cvtph_ps(_mm256_extracti128_si256(words, 1));
        }
    }
    OFFLOADZERO_INLINE void load_group_fp32(const float* p, F* x) {
        for (size_t half = 0; half < 2; ++half) {
            const F a = load_fp32(p + 16 * half), b = load_fp32(p + 16 * half + 8);
            x[2 * half] = _mm256_permute2f128_ps(a, b, 0x20);
            x[2 * half + 1] = _mm256_permute2f128_ps(a, b, 0x31);
        }
    }
    OFFLOADZERO_INLINE void store_group_fp32(float* p, const F* x) {
        for (size_t half = 0; half < 2; ++half) {
            const F a = x[2 * half], b = x[2 * half + 1];
            store_fp32(p + 16 * half, _mm256_permute2f128_ps(a, b, 0x20));
            store_fp32(p + 16 * half + 8, _mm256_permute2f128_ps(a, b, 0x31));
        }
    }

    // [Note: compact state]
    OFFLOADZERO_INLINE __m256i expand(__m256i codes) {  // codes in the upper bytes of words: patterns of bf16
        const __m256i mask = _mm256_set1_epi16(static_cast<int16_t>(0x81FC));
        return _mm256_or_si256(_mm256_and_si256(_mm256_srai_epi16(codes, 6), mask),
                               _mm256_set1_epi16(0x4000));
    }
    OFFLOADZERO_INLINE void load_signed_codes(const int8_t* p, F* x) {
        const __m256i zero = _mm256_setzero_si256(), bytes = swap_middle(load_vector(p));
        join_words(zero, expand(_mm256_unpacklo_epi8(zero, bytes)), x);
        join_words(zero, expand(_mm256_unpackhi_epi8(zero, bytes)), x + 2);
    }
    OFFLOADZERO_INLINE void load_codes(const uint8_t* p, F* x) {
        const __m256i zero = _mm256_setzero_si256(), two = _mm256_set1_epi8(0x40);
        const __m256i bytes = swap_middle(load_vector(p));
        join_words(zero, _mm256_unpacklo_epi8(bytes, two), x);
        join_words(zero, _mm256_unpackhi_epi8(bytes, two), x + 2);
    }
    OFFLOADZERO_INLINE __m256i dithered_words(const F* y, const uint32_t* dither) {
        return high_words(_mm256_add_epi32(_mm256_castps_si256(y[0]), load_vector(dither)),
                          _mm256_add_epi32(_mm256_castps_si256(y[1]), load_vector(dither + WIDTH)));
    }
    OFFLOADZERO_INLINE __m256i signed_codes(__m256i words) {  // from bits 8 to 2, the sign stays above
        const __m256i sign = _mm256_and_si256(words, _mm256_set1_epi16(INT16_MIN));
        return _mm256_srli_epi16(_mm256_or_si256(_mm256_slli_epi16(words, 6), sign), 8);
    }
    OFFLOADZERO_INLINE void store_signed_codes(int8_t* p, const F* y, const uint32_t* dither) {
        store_bytes(p, _mm256_packus_epi16(signed_codes(dithered_words(y, dither)),
                                           signed_codes(dithered_words(y + 2, dither + 2 * WIDTH))));
    }
    OFFLOADZERO_INLINE void store_codes_at_least_1(uint8_t* p, const F* y, const uint32_t* dither) {
        const __m256i packed =
            _mm256_packus_epi16(dithered_words(y, dither), dithered_words(y + 2, dither + 2 * WIDTH));
        store_bytes(p, _mm256_max_epu8(packed, _mm256_set1_epi8(1)));
    }
};
