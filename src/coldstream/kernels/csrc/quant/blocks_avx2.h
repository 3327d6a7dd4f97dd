// 256 codes of any type in eight 256-bit registers, and the scales of a super-block beside them.
#pragma once

#include <immintrin.h>

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

// The integer scales of a super-block as int16, and the factors of the sums over 16 inputs: the minimums, or
// minus the offset times the scales.
template <QuantType Q>
struct WideScales {
  static constexpr bool has_factors = Traits<Q>::has_mins || !Traits<Q>::is_signed;
  __m256i scales;  // sixteen, or eight twice over
  __m256i factors;

  inline __attribute__((always_inline)) explicit WideScales(const typename Traits<Q>::Block* b) {
    using T = Traits<Q>;
    const ScaleBytes bytes = T::scales(*b);
    if constexpr (T::sub_block == 32) {
      const __m128i words = _mm_cvtepi8_epi16(_mm_cvtsi64_si128(static_cast<int64_t>(bytes.low)));
      scales = _mm256_set_m128i(words, words);
    } else {
      scales = _mm256_cvtepi8_epi16(both(bytes));
    }
    if constexpr (T::has_mins) {
      factors = sixteen_of(T::mins(*b));
    } else if constexpr (has_factors) {
      factors = _mm256_mullo_epi16(sixteen_of(bytes), _mm256_set1_epi16(-T::offset));
    }
  }

 private:
  static inline __attribute__((always_inline)) __m128i both(const ScaleBytes& bytes) {
    return _mm_set_epi64x(static_cast<int64_t>(bytes.high), static_cast<int64_t>(bytes.low));
  }
  // One for each 16 inputs.
  static inline __attribute__((always_inline)) __m256i sixteen_of(const ScaleBytes& bytes) {
    if constexpr (Traits<Q>::sub_block == 16) return _mm256_cvtepi8_epi16(both(bytes));
    const __m128i eight = _mm_cvtsi64_si128(static_cast<int64_t>(bytes.low));
    return _mm256_cvtepi8_epi16(_mm_unpacklo_epi8(eight, eight));
  }
};

}  // namespace

}  // namespace coldstream
