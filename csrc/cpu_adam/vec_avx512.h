// Sixteen elements at a time with AVX-512 F, BW, VL and DQ. Included inside the AVX-512 target region; see
// vec_scalar.h. The bf16 conversion instruction is not used: it flushes subnormals to zero.

#define OFFLOADZERO_AVX512 1  // for remainders.h

struct Avx512 {
    using F = __m512;
    using D = __m512d;
    static constexpr size_t WIDTH = 16;
    static constexpr size_t DOUBLE_WIDTH = 8;
    static constexpr size_t PACK = 4;
    static constexpr int AND_OR = 0xEA;           // (a & b) | c
    static constexpr int SELECT_BY_THIRD = 0xD8;  // c ? b : a

    OFFLOADZERO_INLINE F set(float x) { return _mm512_set1_ps(x); }
    OFFLOADZERO_INLINE F add(F a, F b) { return _mm512_add_ps(a, b); }
    OFFLOADZERO_INLINE F sub(F a, F b) { return _mm512_sub_ps(a, b); }
    OFFLOADZERO_INLINE F mul(F a, F b) { return _mm512_mul_ps(a, b); }
    OFFLOADZERO_INLINE F div(F a, F b) { return _mm512_div_ps(a, b); }
    OFFLOADZERO_INLINE F sqrt(F a) { return _mm512_sqrt_ps(a); }

    OFFLOADZERO_INLINE D zero_double() { return _mm512_setzero_pd(); }
    OFFLOADZERO_INLINE D to_double(F x, size_t half) {
        return _mm512_cvtps_pd(half == 0 ? _mm512_castps512_ps256(x) : _mm512_extractf32x8_ps(x, 1));
    }
    OFFLOADZERO_INLINE D add_square(D sum, D x) { return _mm512_add_pd(sum, _mm512_mul_pd(x, x)); }
    OFFLOADZERO_INLINE void store_double(double* p, D x) { _mm512_storeu_pd(p, x); }

    OFFLOADZERO_INLINE __m256i load_16bit(const void* p) {
        return _mm256_loadu_si256(static_cast<const __m256i*>(p));
    }
    OFFLOADZERO_INLINE void store_16bit(void* p, __m512i x) {
        _mm256_storeu_si256(static_cast<__m256i*>(p), _mm512_cvtepi32_epi16(x));
    }

    OFFLOADZERO_INLINE F load_fp32(const float* p) { return _mm512_loadu_ps(p); }
    OFFLOADZERO_INLINE void store_fp32(float* p, F x) { _mm512_storeu_ps(p, x); }

    OFFLOADZERO_INLINE F load_bf16(const uint16_t* p) {
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_16bit(p)), 16));
    }
    OFFLOADZERO_INLINE void store_bf16(uint16_t* p, F x) {
        const __m512i bits = _mm512_castps_si512(x);
        const __m512i high = _mm512_srli_epi32(bits, 16);
        const __m512i odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
        const __m512i bias = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF));
        const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, bias), 16);
        const __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
        store_16bit(p, _mm512_mask_or_epi32(rounded, is_nan, high, _mm512_set1_epi32(0x40)));
    }

    OFFLOADZERO_INLINE F load_fp16(const uint16_t* p) { return _mm512_cvtph_ps(load_16bit(p)); }
    OFFLOADZERO_INLINE void store_fp16(uint16_t* p, F x) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                            _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    }

    OFFLOADZERO_INLINE F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
    OFFLOADZERO_INLINE F fms(F a, F b, F c) { return _mm512_fmsub_ps(a, b, c); }
    OFFLOADZERO_INLINE F abs(F x) { return _mm512_abs_ps(x); }
    OFFLOADZERO_INLINE F sign(F x) {
        const F sign_bit = _mm512_set1_ps(-0.0f);
        const F signed_one = _mm512_or_ps(_mm512_and_ps(x, sign_bit), _mm512_set1_ps(1.0f));
        return _mm512_mask_mov_ps(x, _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_NEQ_OQ), signed_one);
    }
    OFFLOADZERO_INLINE F max_bits(F a, F b) {
        return _mm512_castsi512_ps(_mm512_max_epu32(_mm512_castps_si512(a), _mm512_castps_si512(b)));
    }
    OFFLOADZERO_INLINE F copysign(F magnitude, F sign) {  // magnitude >= +0
        return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(
            _mm512_castps_si512(sign), _mm512_set1_epi32(INT32_MIN), _mm512_castps_si512(magnitude), AND_OR));
    }
    OFFLOADZERO_INLINE __m256i max_of_halves(F x) {
        const __m512i bits = _mm512_castps_si512(x);
        return _mm256_max_epu32(_mm512_castsi512_si256(bits), _mm512_extracti64x4_epi64(bits, 1));
    }
    OFFLOADZERO_INLINE void reduce_max_bits(F a, F b, float* largest) {
        const __m256i x = max_of_halves(a), y = max_of_halves(b);  // from here on theirs take turns
        const __m256i both = _mm256_max_epu32(_mm256_unpacklo_epi32(x, y), _mm256_unpackhi_epi32(x, y));
        __m128i m = _mm_max_epu32(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
        m = _mm_max_epu32(m, _mm_unpackhi_epi64(m, m));
        _mm_storel_epi64(reinterpret_cast<__m128i*>(largest), m);
    }

    // Groups of four vectors: unpacked_element() says where their elements are.
    OFFLOADZERO_INLINE size_t element(size_t slot) { return unpacked_element<WIDTH>(slot); }
    OFFLOADZERO_INLINE __m512i load_vector(const void* p) { return _mm512_loadu_si512(p); }
    OFFLOADZERO_INLINE __m512i load_bytes(const void* p) {
        return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), load_vector(p));
    }
    OFFLOADZERO_INLINE void store_bytes(void* p, __m512i packed) {
        _mm512_storeu_si512(p, _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), packed));
    }
    // Two vectors of numbers `high` << 16 | `low`.
    OFFLOADZERO_INLINE void join_words(__m512i low, __m512i high, F* x) {
        x[0] = _mm512_castsi512_ps(_mm512_unpacklo_epi16(low, high));
        x[1] = _mm512_castsi512_ps(_mm512_unpackhi_epi16(low, high));
    }
    OFFLOADZERO_INLINE __m512i high_words(__m512i a, __m512i b) {
        return _mm512_permutex2var_epi16(a, word_index(0x00010001), b);
    }
    OFFLOADZERO_INLINE __m512i low_words(__m512i a, __m512i b) {
        return _mm512_permutex2var_epi16(a, word_index(0), b);
    }
    // Of two vectors of numbers, the even words in the order of join_words, `plus` added to each index.
    OFFLOADZERO_INLINE __m512i word_index(int plus) {
        const __m512i even = _mm512_setr_epi32(
            0x00020000, 0x00060004, 0x00220020, 0x00260024, 0x000A0008, 0x000E000C, 0x002A0028, 0x002E002C,
            0x00120010, 0x00160014, 0x00320030, 0x00360034, 0x001A0018, 0x001E001C, 0x003A0038, 0x003E003C);
        return _mm512_add_epi16(even, _mm512_set1_epi32(plus));
    }

    OFFLOADZERO_INLINE void load_group_bf16(const uint16_t* p, F* x) {
        join_words(_mm512_setzero_si512(), load_vector(p), x);
        join_words(_mm512_setzero_si512(), load_vector(p + 32), x + 2);
    }
    OFFLOADZERO_INLINE void load_group_fp16(const uint16_t* p, F* x) {
        for (size_t half = 0; half < 2; ++half) {
            const __m512i words = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7),
                                                           load_vector(p + 32 * half));
            x[2 * half] = _mm512_cvtph_ps(_mm512_castsi512_si256(words));
            x[2 * half + 1] = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(words, 1));
        }
    }
    OFFLOADZERO_INLINE void load_group_fp32(const float* p, F* x) {
        for (size_t half = 0; half < 2; ++half) {
            const F a = load_fp32(p + 32 * half), b = load_fp32(p + 32 * half + 16);
            x[2 * half] = _mm512_shuffle_f32x4(a, b, 0x88);
            x[2 * half + 1] = _mm512_shuffle_f32x4(a, b, 0xDD);
        }
    }
    OFFLOADZERO_INLINE void store_group_fp32(float* p, const F* x) {
        const __m512i first = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
        const __m512i second = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
        for (size_t half = 0; half < 2; ++half) {
            const __m512d a = _mm512_castps_pd(x[2 * half]), b = _mm512_castps_pd(x[2 * half + 1]);
            _mm512_storeu_pd(p + 32 * half, _mm512_permutex2var_pd(a, first, b));
            _mm512_storeu_pd(p + 32 * half + 16, _mm512_permutex2var_pd(a, second, b));
        }
    }

    // [Note: compact state]
    OFFLOADZERO_INLINE __m512i expand(__m512i codes) {  // codes in the upper bytes of words: patterns of bf16
        return _mm512_ternarylogic_epi32(_mm512_srai_epi16(codes, 6),
                                         _mm512_set1_epi16(static_cast<int16_t>(0x81FC)),
                                         _mm512_set1_epi16(0x4000), AND_OR);
    }
    OFFLOADZERO_INLINE void load_signed_codes(const int8_t* p, F* x) {
        const __m512i zero = _mm512_setzero_si512(), bytes = load_bytes(p);
        join_words(zero, expand(_mm512_unpacklo_epi8(zero, bytes)), x);
        join_words(zero, expand(_mm512_unpackhi_epi8(zero, bytes)), x + 2);
    }
    OFFLOADZERO_INLINE void load_codes(const uint8_t* p, F* x) {
        const __m512i zero = _mm512_setzero_si512(), two = _mm512_set1_epi8(0x40), bytes = load_bytes(p);
        join_words(zero, _mm512_unpacklo_epi8(bytes, two), x);
        join_words(zero, _mm512_unpackhi_epi8(bytes, two), x + 2);
    }
    OFFLOADZERO_INLINE __m512i dithered_words(const F* y, const uint32_t* dither) {
        return high_words(_mm512_add_epi32(_mm512_castps_si512(y[0]), load_vector(dither)),
                          _mm512_add_epi32(_mm512_castps_si512(y[1]), load_vector(dither + WIDTH)));
    }
    OFFLOADZERO_INLINE __m512i signed_codes(__m512i words) {  // from bits 8 to 2, the sign stays above
        const __m512i sign = _mm512_set1_epi16(INT16_MIN);
        return _mm512_srli_epi16(
            _mm512_ternarylogic_epi32(_mm512_slli_epi16(words, 6), words, sign, SELECT_BY_THIRD), 8);
    }
    OFFLOADZERO_INLINE void store_signed_codes(int8_t* p, const F* y, const uint32_t* dither) {
        store_bytes(p, _mm512_packus_epi16(signed_codes(dithered_words(y, dither)),
                                           signed_codes(dithered_words(y + 2, dither + 2 * WIDTH))));
    }
    OFFLOADZERO_INLINE void store_codes_at_least_1(uint8_t* p, const F* y, const uint32_t* dither) {
        const __m512i packed =
            _mm512_packus_epi16(dithered_words(y, dither), dithered_words(y + 2, dither + 2 * WIDTH));
        store_bytes(p, _mm512_max_epu8(packed, _mm512_set1_epi8(1)));
    }
};
