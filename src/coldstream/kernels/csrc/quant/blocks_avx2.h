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
// minus the scales times what the codes have added.
template <QuantType Q, int offset = Traits<Q>::is_signed ? 0 : Traits<Q>::offset>
struct WideScales {
  static constexpr bool has_factors = Traits<Q>::has_mins || offset != 0;
  __m256i scales;  // sixteen, or eight twice over
  __m256i factors;
  __m128i factors_32;  // of the sums over 32 inputs, for sub-blocks of 32

  inline __attribute__((always_inline)) explicit WideScales(const typename Traits<Q>::Block* b) {
    using T = Traits<Q>;
    const ScaleBytes bytes = T::scales(*b);
    if constexpr (T::sub_block == 32) {
      const __m128i eight = widen_8(bytes.low);
      scales = _mm256_set_m128i(eight, eight);
      if constexpr (T::has_mins) {
        factors_32 = widen_8(T::mins(*b).low);
      } else if constexpr (has_factors) {
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

 private:
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
