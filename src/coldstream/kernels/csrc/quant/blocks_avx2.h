// 256 codes of any type in eight 256-bit registers, and the scales of a super-block beside them.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <type_traits>

#include "quant/traits.h"
#include "quant/unpack_avx2.h"

namespace coldstream {

struct Codes256 {
  __m256i part[8];  // 32 codes each
};

// Products of codes and inputs, added in pairs as int16: two of at most 128 · 127 fit.
template <bool is_signed>
static inline __m256i multiply_pairs(__m256i codes, __m256i inputs) {
  // |w| is unsigned and x takes w's sign.
  if constexpr (is_signed)
    return _mm256_maddubs_epi16(_mm256_abs_epi8(codes), _mm256_sign_epi8(inputs, codes));
  return _mm256_maddubs_epi16(codes, inputs);
}

namespace {

// The codes of a super-block, or of the small blocks of 256 inputs, as Traits has them.
template <QuantType Q>
inline __attribute__((always_inline)) Codes256 load_codes(const typename Traits<Q>::Block* b) {
  Codes256 c;
  for (int k = 0; k < 4; k++) {
    const UnpackAvx2::Bytes bytes = Traits<Q>::template codes<UnpackAvx2>(b, k);
    c.part[2 * k] = bytes.half[0];
    c.part[2 * k + 1] = bytes.half[1];
  }
  return c;
}

// What is added to each code of a type, as load_codes has them.
template <QuantType Q>
inline constexpr int added_to_codes = Traits<Q>::is_signed ? 0 : Traits<Q>::offset;

// The integer scales of a super-block as int16, and the factors of the sums over 16 inputs: the minimums, or
// minus the scales times what the codes have added.
template <QuantType Q, int offset = added_to_codes<Q>>
struct WideScales {
  static constexpr bool has_factors = Traits<Q>::has_mins || offset != 0;
  __m256i scales;  // sixteen, or eight twice over
  __m256i factors;
  __m128i factors_32;  // of the sums over 32 inputs, for sub-blocks of 32

  inline __attribute__((always_inline)) explicit WideScales(const typename Traits<Q>::Block* b) {
    using T = Traits<Q>;
    if constexpr (std::is_base_of_v<K4Block<typename T::Block>, T>) {
      static_assert(offsetof(typename T::Block, scales) == 4);
      unpack_k4(b->d);
    } else {
      widen(T::scales(*b), b);
    }
  }

 private:
  inline __attribute__((always_inline)) void widen(const ScaleBytes& bytes,
                                                   const typename Traits<Q>::Block* b) {
    using T = Traits<Q>;
    if constexpr (T::sub_block == 32) {
      static_assert(!T::has_mins);
      const __m128i eight = widen_8(bytes.low);
      scales = _mm256_set_m128i(eight, eight);
      if constexpr (has_factors) {
        factors_32 = _mm_mullo_epi16(eight, _mm_set1_epi16(-offset));
      }
      if constexpr (has_factors) {
        factors = _mm256_set_m128i(_mm_unpackhi_epi16(factors_32, factors_32),
                                   _mm_unpacklo_epi16(factors_32, factors_32));
      }
    } else {
      scales = widen_16(bytes);
      if constexpr (T::has_mins) {
        factors = widen_16(T::mins(*b));
      } else if constexpr (has_factors) {
        factors = _mm256_mullo_epi16(scales, _mm256_set1_epi16(-offset));
      }
    }
  }

  // Of a block that begins with four other bytes. Scales and minimums have six bits. Those of the first four
  // sub-blocks lie in the low bits of a byte each. Those of the others have four bits in the last four bytes,
  // scales below minimums, and the top bits of the first.
  inline __attribute__((always_inline)) void unpack_k4(const uint8_t* block) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(block));
    const __m128i low =
        _mm_shuffle_epi8(bytes, _mm_setr_epi8(4, 5, 6, 7, 12, 13, 14, 15, 8, 9, 10, 11, 12, 13, 14, 15));
    const __m128i high =
        _mm_shuffle_epi8(bytes, _mm_setr_epi8(-1, -1, -1, -1, 4, 5, 6, 7, -1, -1, -1, -1, 8, 9, 10, 11));
    const __m128i low_bits = _mm_and_si128(_mm_srlv_epi32(low, _mm_setr_epi32(0, 0, 0, 4)),
                                           _mm_setr_epi32(0x3f3f3f3f, 0x0f0f0f0f, 0x3f3f3f3f, 0x0f0f0f0f));
    const __m128i high_bits = _mm_and_si128(_mm_srli_epi16(high, 2), _mm_set1_epi8(0x30));
    const __m128i of_both = _mm_or_si128(low_bits, high_bits), zero = _mm_setzero_si128();
    const __m256i twice = _mm256_broadcastsi128_si256(of_both);
    scales = _mm256_unpacklo_epi8(twice, _mm256_setzero_si256());
    factors = _mm256_shuffle_epi8(
        twice, _mm256_setr_epi8(8, -1, 8, -1, 9, -1, 9, -1, 10, -1, 10, -1, 11, -1, 11, -1, 12, -1, 12, -1,
                                13, -1, 13, -1, 14, -1, 14, -1, 15, -1, 15, -1));
    factors_32 = _mm_unpackhi_epi8(of_both, zero);
  }
  static inline __attribute__((always_inline)) __m128i widen_8(uint64_t bytes) {
    return _mm_cvtepi8_epi16(_mm_cvtsi64_si128(static_cast<int64_t>(bytes)));
  }
  static inline __attribute__((always_inline)) __m256i widen_16(const ScaleBytes& bytes) {
    return _mm256_cvtepi8_epi16(
        _mm_set_epi64x(static_cast<int64_t>(bytes.high), static_cast<int64_t>(bytes.low)));
  }
};

}  // namespace

}  // namespace coldstream
