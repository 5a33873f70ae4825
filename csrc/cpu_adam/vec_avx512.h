// Sixteen elements at a time with AVX-512 F, BW, VL and DQ. Included inside the AVX-512 target region; see
// vec_scalar.h. The bf16 conversion instruction is not used: it flushes subnormals to zero.

struct Avx512 {
    using F = __m512;
    using D = __m512d;
    static constexpr size_t WIDTH = 16;
    static constexpr size_t DOUBLE_WIDTH = 8;

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
};
