// A bf16 parameter and its remainder, which together are the master weight: the format, and all of its forms
// in C++.
//
// [Note: bf16 split]
// A bf16 parameter `hi` and a signed 16-bit remainder `lo` hold an fp32 master weight exactly:
//     hi = (bits + 0x8000) >> 16,  lo = int16(bits & 0xFFFF),  bits = (hi << 16) + lo   (all modulo 2^32)
// `hi` is the master rounded to the nearest bf16, ties away from zero. The join is exact for all 2^32
// patterns.
//
// [Note: compact remainder]
// In the compact layout the remainder `r` has 8 bits; reading is `bits = (hi << 16) + (r << 8)`. The fp32
// weight is rounded to the upper 24 bits of its pattern (nearest, ties away from zero) and split as above:
//     b = bits + 0x80,  hi = (b + 0x8000) >> 16,  r = int8(b >> 8)   (all modulo 2^32)
// The rounded weight lies at most 2^7 spacings of fp32 from the exact one, which is ulp_bf16(master) / 512;
// docs/compact.md has the proof. Zero and every bf16 value are kept exactly; finite weights within 2^7
// spacings of the largest round to infinity; writing the values that were read gives the same bytes.
//
// The same in torch operations, and in Triton's in the fused kernel of devices, is
// offloadzero/arithmetic/remainders.py; tests hold all of them to the same bits.
//
// Included inside an ISA's namespace and target region, after its vec_*.h: it has no include guard and
// includes nothing.

// load_split, store_split: an int16 remainder, of V::WIDTH elements.
// load_compact, store_compact: an int8 remainder, of V::PACK vectors in the order of `V::element`.
template <class V>
struct Remainders;

template <>
struct Remainders<Scalar> {
    OFFLOADZERO_INLINE Scalar::F load_split(const uint16_t* hi, const int16_t* lo) {
        return Scalar::from_bits((static_cast<uint32_t>(*hi) << 16) +
                                 static_cast<uint32_t>(static_cast<int32_t>(*lo)));
    }
    OFFLOADZERO_INLINE void store_split(uint16_t* hi, int16_t* lo, Scalar::F x) {
        const uint32_t bits = Scalar::bits_of(x);
        *hi = static_cast<uint16_t>((bits + 0x8000u) >> 16);
        *lo = static_cast<int16_t>(bits & 0xFFFFu);
    }
    OFFLOADZERO_INLINE void load_compact(const uint16_t* hi, const int8_t* lo, Scalar::F* x) {
        *x = Scalar::from_bits((static_cast<uint32_t>(*hi) << 16) +
                               (static_cast<uint32_t>(static_cast<int32_t>(*lo)) << 8));
    }
    OFFLOADZERO_INLINE void store_compact(uint16_t* hi, int8_t* lo, const Scalar::F* x) {
        const uint32_t bits = Scalar::bits_of(*x) + 0x80u;
        *hi = static_cast<uint16_t>((bits + 0x8000u) >> 16);
        *lo = static_cast<int8_t>((bits >> 8) & 0xFFu);
    }
};

#if defined(OFFLOADZERO_AVX2)
template <>
struct Remainders<Avx2> {
    OFFLOADZERO_INLINE Avx2::F load_split(const uint16_t* hi, const int16_t* lo) {
        const __m256i high = _mm256_slli_epi32(_mm256_cvtepu16_epi32(Avx2::load_16bit(hi)), 16);
        return _mm256_castsi256_ps(_mm256_add_epi32(high, _mm256_cvtepi16_epi32(Avx2::load_16bit(lo))));
    }
    OFFLOADZERO_INLINE void store_split(uint16_t* hi, int16_t* lo, Avx2::F x) {
        const __m256i bits = _mm256_castps_si256(x);
        Avx2::store_16bit(hi, _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x8000)), 16));
        Avx2::store_16bit(lo, _mm256_and_si256(bits, _mm256_set1_epi32(0xFFFF)));
    }
    OFFLOADZERO_INLINE void load_compact(const uint16_t* hi, const int8_t* lo, Avx2::F* x) {
        const __m256i zero = _mm256_setzero_si256(), bytes = Avx2::swap_middle(Avx2::load_vector(lo));
        const __m256i low0 = _mm256_unpacklo_epi8(zero, bytes), low1 = _mm256_unpackhi_epi8(zero, bytes);
        Avx2::join_words(low0, _mm256_add_epi16(Avx2::load_vector(hi), _mm256_srai_epi16(low0, 15)), x);
        Avx2::join_words(low1, _mm256_add_epi16(Avx2::load_vector(hi + 16), _mm256_srai_epi16(low1, 15)),
                         x + 2);
    }
    OFFLOADZERO_INLINE __m256i second_bytes(__m256i a, __m256i b) {
        const __m256i byte = _mm256_set1_epi32(0xFF);
        return _mm256_packus_epi32(_mm256_and_si256(_mm256_srli_epi32(a, 8), byte),
                                   _mm256_and_si256(_mm256_srli_epi32(b, 8), byte));
    }
    // Adding 0x8000 to b has turned the highest bit of its second byte.
    OFFLOADZERO_INLINE void store_compact(uint16_t* hi, int8_t* lo, const Avx2::F* x) {
        const __m256i rounding = _mm256_set1_epi32(0x8080);
        __m256i bits[Avx2::PACK];
        for (size_t j = 0; j < Avx2::PACK; ++j) {
            bits[j] = _mm256_add_epi32(_mm256_castps_si256(x[j]), rounding);
        }
        Avx2::store_vector(hi, Avx2::high_words(bits[0], bits[1]));
        Avx2::store_vector(hi + 16, Avx2::high_words(bits[2], bits[3]));
        const __m256i packed =
            _mm256_packus_epi16(second_bytes(bits[0], bits[1]), second_bytes(bits[2], bits[3]));
        Avx2::store_bytes(lo, _mm256_xor_si256(packed, _mm256_set1_epi8(INT8_MIN)));
    }
};
#endif  // OFFLOADZERO_AVX2

#if defined(OFFLOADZERO_AVX512)
template <>
struct Remainders<Avx512> {
    OFFLOADZERO_INLINE Avx512::F load_split(const uint16_t* hi, const int16_t* lo) {
        const __m512i high = _mm512_slli_epi32(_mm512_cvtepu16_epi32(Avx512::load_16bit(hi)), 16);
        return _mm512_castsi512_ps(_mm512_add_epi32(high, _mm512_cvtepi16_epi32(Avx512::load_16bit(lo))));
    }
    OFFLOADZERO_INLINE void store_split(uint16_t* hi, int16_t* lo, Avx512::F x) {
        const __m512i bits = _mm512_castps_si512(x);
        Avx512::store_16bit(hi, _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x8000)), 16));
        Avx512::store_16bit(lo, bits);
    }
    OFFLOADZERO_INLINE void load_compact(const uint16_t* hi, const int8_t* lo, Avx512::F* x) {
        const __m512i zero = _mm512_setzero_si512(), bytes = Avx512::load_bytes(lo);
        const __m512i low0 = _mm512_unpacklo_epi8(zero, bytes), low1 = _mm512_unpackhi_epi8(zero, bytes);
        Avx512::join_words(low0, _mm512_add_epi16(Avx512::load_vector(hi), _mm512_srai_epi16(low0, 15)), x);
        Avx512::join_words(low1, _mm512_add_epi16(Avx512::load_vector(hi + 32), _mm512_srai_epi16(low1, 15)),
                           x + 2);
    }
    // Adding 0x8000 to b has turned the highest bit of its second byte.
    OFFLOADZERO_INLINE void store_compact(uint16_t* hi, int8_t* lo, const Avx512::F* x) {
        const __m512i rounding = _mm512_set1_epi32(0x8080);
        __m512i bits[Avx512::PACK];
        for (size_t j = 0; j < Avx512::PACK; ++j) {
            bits[j] = _mm512_add_epi32(_mm512_castps_si512(x[j]), rounding);
        }
        _mm512_storeu_si512(hi, Avx512::high_words(bits[0], bits[1]));
        _mm512_storeu_si512(hi + 32, Avx512::high_words(bits[2], bits[3]));
        const __m512i packed = _mm512_packus_epi16(_mm512_srli_epi16(Avx512::low_words(bits[0], bits[1]), 8),
                                                   _mm512_srli_epi16(Avx512::low_words(bits[2], bits[3]), 8));
        Avx512::store_bytes(lo, _mm512_xor_si512(packed, _mm512_set1_epi8(INT8_MIN)));
    }
};
#endif  // OFFLOADZERO_AVX512
