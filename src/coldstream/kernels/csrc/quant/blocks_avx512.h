// 256 codes of any type in four 512-bit registers, and the scales of a super-block beside them.
#pragma once

#include <immintrin.h>

#include "quant/grid_avx512.h"
#include "quant/traits.h"
#include "quant/unpack_avx512.h"

namespace coldstream {

struct Codes512 {
  __m512i part[4];  // 64 codes each
};

namespace {

// The codes of a super-block, or of the small blocks of 256 inputs, as Traits has them.
template <QuantType Q>
inline __attribute__((always_inline)) Codes512 load_codes(const typename Traits<Q>::Block* b) {
  Codes512 c;
  if constexpr (Traits<Q>::has_fours) {
    load_fours<Q>(b, c.part);
  } else if constexpr (Traits<Q>::has_eights) {
    load_eights<Q>(b, c.part);
  } else {
    for (int k = 0; k < 4; k++) c.part[k] = Traits<Q>::template codes<UnpackAvx512>(b, k);
  }
  return c;
}

// How far unsigned codes lie above the signed ones.
template <QuantType Q>
inline constexpr int unsigned_offset = Traits<Q>::is_signed ? 128 : Traits<Q>::offset;

// The same as unsigned bytes, `unsigned_offset` above the signed codes.
template <QuantType Q>
inline __attribute__((always_inline)) Codes512 load_unsigned_codes(const typename Traits<Q>::Block* b) {
  Codes512 c = load_codes<Q>(b);
  if constexpr (Traits<Q>::is_signed) {
    for (int k = 0; k < 4; k++) c.part[k] = _mm512_xor_si512(c.part[k], _mm512_set1_epi8(-128));
  }
  return c;
}

// Bytes of scales as sixteen int16.
inline __attribute__((always_inline)) __m256i widen(const ScaleBytes& bytes) {
  return _mm256_cvtepi8_epi16(
      _mm_set_epi64x(static_cast<int64_t>(bytes.high), static_cast<int64_t>(bytes.low)));
}

// The int16 scales of a super-block spread over the lanes of its 256 codes taken as pairs.
template <QuantType Q>
struct SpreadScales {
  __m512i part[4];
  __m256i packed;   // sixteen scales; or eight, and eight minimums if there are any
  __m256i factors;  // of the sums over 16 inputs: the minimums, or minus the offset times the scales

  static constexpr bool has_factors = Traits<Q>::has_mins || !Traits<Q>::is_signed;

  inline __attribute__((always_inline)) explicit SpreadScales(const typename Traits<Q>::Block* b) {
    using T = Traits<Q>;
    constexpr int shift = T::sub_block == 32 ? 4 : 3, per_part = 64 / T::sub_block;
    const __m512i iota = _mm512_set_epi16(31, 30, 29, 28, 27, 26, 25, 24, 23, 22, 21, 20, 19, 18, 17, 16, 15,
                                          14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    ScaleBytes bytes = T::scales(*b);
    if constexpr (T::has_mins && T::sub_block == 32) bytes.high = T::mins(*b).low;
    packed = widen(bytes);
    for (int k = 0; k < 4; k++) {
      const __m512i index = _mm512_add_epi16(_mm512_srli_epi16(iota, shift),
                                             _mm512_set1_epi16(static_cast<short>(per_part * k)));
      part[k] = _mm512_permutexvar_epi16(index, _mm512_castsi256_si512(packed));
    }
    if constexpr (T::has_mins) {
      factors = T::sub_block == 32 ? twice(packed, 8) : widen(T::mins(*b));
    } else if constexpr (has_factors) {
      const __m256i scales = T::sub_block == 32 ? twice(packed, 0) : packed;
      factors = _mm256_mullo_epi16(scales, _mm256_set1_epi16(-T::offset));
    }
  }

 private:
  // Each of the eight int16 from `first` on, twice.
  static inline __attribute__((always_inline)) __m256i twice(__m256i v, int first) {
    const __m256i pairs = _mm256_setr_epi16(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    return _mm256_permutexvar_epi16(_mm256_add_epi16(pairs, _mm256_set1_epi16(static_cast<short>(first))), v);
  }
};

}  // namespace

}  // namespace coldstream
