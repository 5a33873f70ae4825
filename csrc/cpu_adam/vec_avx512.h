// Sixteen elements at a time with AVX-512 F, BW, VL and DQ. Included inside the AVX-512 target region; see
// vec_scalar.h. The bf16 conversion instruction is not used: it flushes subnormals to zero.

struct Avx512 {
    using F = __m512;
    using D = __m512d;
    static constexpr size_t WIDTH = 16;
    static constexpr size_t DOUBLE_WIDTH = 8;
    static constexpr size_t PACK = 4;

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

    OFFLOADZERO_INLINE F load_split(const uint16_t* hi, const int16_t* lo) {
        const __m512i high = _mm512_slli_epi32(_mm512_cvtepu16_epi32(load_16bit(hi)), 16);
        return _mm512_castsi512_ps(_mm512_add_epi32(high, _mm512_cvtepi16_epi32(load_16bit(lo))));
    }
    OFFLOADZERO_INLINE void store_split(uint16_t* hi, int16_t* lo, F x) {
        const __m512i bits = _mm512_castps_si512(x);
        store_16bit(hi, _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x8000)), 16));
        store_16bit(lo, bits);
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
    OFFLOADZERO_INLINE float reduce_max_bits(F x) {
        const __m512i bits = _mm512_castps_si512(x);
        const __m256i half =
            _mm256_max_epu32(_mm512_castsi512_si256(bits), _mm512_extracti64x4_epi64(bits, 1));
        __m128i m = _mm_max_epu32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
        m = _mm_max_epu32(m, _mm_shuffle_epi32(m, 0x4E));
        m = _mm_max_epu32(m, _mm_shuffle_epi32(m, 0xB1));
        return _mm_cvtss_f32(_mm_castsi128_ps(m));
    }

    OFFLOADZERO_INLINE __m128i load_8bit(const void* p) {
        return _mm_loadu_si128(static_cast<const __m128i*>(p));
    }
    OFFLOADZERO_INLINE F load_i8(const int8_t* p) {
        return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_8bit(p)));
    }
    OFFLOADZERO_INLINE F load_u8(const uint8_t* p) {
        return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(load_8bit(p)));
    }
    // The packs work on 128-bit lanes; this puts the bytes of four packed vectors in order.
    OFFLOADZERO_INLINE __m512i in_order(__m512i packed) {
        return _mm512_permutexvar_epi32(
            _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), packed);
    }
    OFFLOADZERO_INLINE __m512i nearest_16bit(F a, F b) {
        return _mm512_packs_epi32(_mm512_cvtps_epi32(a), _mm512_cvtps_epi32(b));
    }
    OFFLOADZERO_INLINE void store_i8(int8_t* p, const F* x) {
        const __m512i packed = _mm512_packs_epi16(nearest_16bit(x[0], x[1]), nearest_16bit(x[2], x[3]));
        _mm512_storeu_si512(p, in_order(packed));
    }
    OFFLOADZERO_INLINE void store_u8_at_least_1(uint8_t* p, const F* x) {
        const __m512i packed = _mm512_packus_epi16(nearest_16bit(x[0], x[1]), nearest_16bit(x[2], x[3]));
        _mm512_storeu_si512(p, in_order(_mm512_max_epu8(packed, _mm512_set1_epi8(1))));
    }

    OFFLOADZERO_INLINE F load_compact(const uint16_t* hi, const int8_t* lo) {
        const __m512i high = _mm512_slli_epi32(_mm512_cvtepu16_epi32(load_16bit(hi)), 16);
        return _mm512_castsi512_ps(
            _mm512_add_epi32(high, _mm512_slli_epi32(_mm512_cvtepi8_epi32(load_8bit(lo)), 8)));
    }
    OFFLOADZERO_INLINE __m512i rounded_bits(F x) {
        return _mm512_add_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(0x80));
    }
    // The odd 16-bit words of a and b, in order: the upper halves of their 32-bit numbers.
    OFFLOADZERO_INLINE __m512i high_halves(__m512i a, __m512i b) {
        const __m512i odd_words = _mm512_setr_epi32(
            0x00030001, 0x00070005, 0x000B0009, 0x000F000D, 0x00130011, 0x00170015, 0x001B0019, 0x001F001D,
            0x00230021, 0x00270025, 0x002B0029, 0x002F002D, 0x00330031, 0x00370035, 0x003B0039, 0x003F003D);
        const __m512i half = _mm512_set1_epi32(0x8000);
        return _mm512_permutex2var_epi16(_mm512_add_epi32(a, half), odd_words, _mm512_add_epi32(b, half));
    }
    OFFLOADZERO_INLINE __m512i second_bytes(__m512i a, __m512i b) {
        const __m512i byte = _mm512_set1_epi32(0xFF);
        return _mm512_packs_epi32(_mm512_and_si512(_mm512_srli_epi32(a, 8), byte),
                                  _mm512_and_si512(_mm512_srli_epi32(b, 8), byte));
    }
    OFFLOADZERO_INLINE void store_compact(uint16_t* hi, int8_t* lo, const F* x) {
        const __m512i a = rounded_bits(x[0]), b = rounded_bits(x[1]);
        const __m512i c = rounded_bits(x[2]), d = rounded_bits(x[3]);
        _mm512_storeu_si512(hi, high_halves(a, b));
        _mm512_storeu_si512(hi + 32, high_halves(c, d));
        const __m512i packed = _mm512_packus_epi16(second_bytes(a, b), second_bytes(c, d));
        _mm512_storeu_si512(lo, in_order(packed));
    }
};
