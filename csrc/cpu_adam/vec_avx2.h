// Eight elements at a time with AVX2 and F16C. Included inside the AVX2 target region; see vec_scalar.h.

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

    OFFLOADZERO_INLINE F load_split(const uint16_t* hi, const int16_t* lo) {
        const __m256i high = _mm256_slli_epi32(_mm256_cvtepu16_epi32(load_16bit(hi)), 16);
        return _mm256_castsi256_ps(_mm256_add_epi32(high, _mm256_cvtepi16_epi32(load_16bit(lo))));
    }
    OFFLOADZERO_INLINE void store_split(uint16_t* hi, int16_t* lo, F x) {
        const __m256i bits = _mm256_castps_si256(x);
        store_16bit(hi, _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x8000)), 16));
        store_16bit(lo, _mm256_and_si256(bits, _mm256_set1_epi32(0xFFFF)));
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
    OFFLOADZERO_INLINE float reduce_max_bits(F x) {
        const __m256i bits = _mm256_castps_si256(x);
        __m128i m = _mm_max_epu32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1));
        m = _mm_max_epu32(m, _mm_shuffle_epi32(m, 0x4E));
        m = _mm_max_epu32(m, _mm_shuffle_epi32(m, 0xB1));
        return _mm_cvtss_f32(_mm_castsi128_ps(m));
    }

    OFFLOADZERO_INLINE __m128i load_8bit(const void* p) {
        return _mm_loadl_epi64(static_cast<const __m128i*>(p));
    }
    OFFLOADZERO_INLINE F load_i8(const int8_t* p) {
        return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(load_8bit(p)));
    }
    OFFLOADZERO_INLINE F load_u8(const uint8_t* p) {
        return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(load_8bit(p)));
    }
    // The packs work on 128-bit halves; this puts the bytes of four packed vectors in order.
    OFFLOADZERO_INLINE __m256i in_order(__m256i packed) {
        return _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    }
    OFFLOADZERO_INLINE __m256i nearest_16bit(F a, F b) {
        return _mm256_packs_epi32(_mm256_cvtps_epi32(a), _mm256_cvtps_epi32(b));
    }
    OFFLOADZERO_INLINE void store_i8(int8_t* p, const F* x) {
        const __m256i packed = _mm256_packs_epi16(nearest_16bit(x[0], x[1]), nearest_16bit(x[2], x[3]));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), in_order(packed));
    }
    OFFLOADZERO_INLINE void store_u8_at_least_1(uint8_t* p, const F* x) {
        const __m256i packed = _mm256_packus_epi16(nearest_16bit(x[0], x[1]), nearest_16bit(x[2], x[3]));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                            in_order(_mm256_max_epu8(packed, _mm256_set1_epi8(1))));
    }

    OFFLOADZERO_INLINE F load_compact(const uint16_t* hi, const int8_t* lo) {
        const __m256i high = _mm256_slli_epi32(_mm256_cvtepu16_epi32(load_16bit(hi)), 16);
        return _mm256_castsi256_ps(
            _mm256_add_epi32(high, _mm256_slli_epi32(_mm256_cvtepi8_epi32(load_8bit(lo)), 8)));
    }
    OFFLOADZERO_INLINE __m256i rounded_bits(F x) {
        return _mm256_add_epi32(_mm256_castps_si256(x), _mm256_set1_epi32(0x80));
    }
    OFFLOADZERO_INLINE __m256i high_halves(__m256i a, __m256i b) {
        const __m256i half = _mm256_set1_epi32(0x8000);
        const __m256i packed = _mm256_packus_epi32(_mm256_srli_epi32(_mm256_add_epi32(a, half), 16),
                                                   _mm256_srli_epi32(_mm256_add_epi32(b, half), 16));
        return _mm256_permute4x64_epi64(packed, 0xD8);
    }
    OFFLOADZERO_INLINE __m256i second_bytes(__m256i a, __m256i b) {
        const __m256i byte = _mm256_set1_epi32(0xFF);
        return _mm256_packs_epi32(_mm256_and_si256(_mm256_srli_epi32(a, 8), byte),
                                  _mm256_and_si256(_mm256_srli_epi32(b, 8), byte));
    }
    OFFLOADZERO_INLINE void store_compact(uint16_t* hi, int8_t* lo, const F* x) {
        const __m256i a = rounded_bits(x[0]), b = rounded_bits(x[1]);
        const __m256i c = rounded_bits(x[2]), d = rounded_bits(x[3]);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(hi), high_halves(a, b));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(hi + 16), high_halves(c, d));
        const __m256i packed = _mm256_packus_epi16(second_bytes(a, b), second_bytes(c, d));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(lo), in_order(packed));
    }
};
