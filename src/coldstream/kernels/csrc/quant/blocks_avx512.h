// 256 codes of any type in four 512-bit registers, and the scales of a super-block beside them.
#pragma once

#include <immintrin.h>

#include "quant/grid_avx2.h"
#include "quant/grid_avx512.h"
#include "quant/traits.h"
#include "quant/transpose_avx512.h"
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
  } else if constexpr (has_grid<Q>) {
    const GridCodes<Q> grid(*b);
    for (int k = 0; k < 4; k++) {
      const __m512i low = _mm512_castsi256_si512(grid.codes(2 * k));
      c.part[k] = _mm512_inserti64x4(low, grid.codes(2 * k + 1), 1);
    }
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

// The first 16 bytes of `qs` of four blocks.
template <typename Block>
inline __attribute__((always_inline)) __m512i load_four_qs(const Block* b) {
  const auto qs = [&](int i) __attribute__((always_inline)) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(b[i].qs));
  };
  const __m512i two = _mm512_inserti32x4(_mm512_castsi128_si512(qs(0)), qs(1), 1);
  return _mm512_inserti32x4(_mm512_inserti32x4(two, qs(2), 2), qs(3), 3);
}

// The nibbles of eight blocks, eight of each block in a register.
template <typename Block>
inline __attribute__((always_inline)) Codes512 load_nibbles_by_block(const Block* b) {
  const __m512i low = load_four_qs(b), high = load_four_qs(b + 4), nibble = _mm512_set1_epi8(15);
  const __m512i even = _mm512_setr_epi64(0, 2, 4, 6, 8, 10, 12, 14), one = _mm512_set1_epi64(1);
  const __m512i first = _mm512_permutex2var_epi64(low, even, high);
  const __m512i second = _mm512_permutex2var_epi64(low, _mm512_add_epi64(even, one), high);
  return {{_mm512_and_si512(first, nibble), _mm512_and_si512(second, nibble),
           _mm512_and_si512(_mm512_srli_epi16(first, 4), nibble),
           _mm512_and_si512(_mm512_srli_epi16(second, 4), nibble)}};
}

// Adds 16 to codes of eight blocks whose bit in `qh` is set.
template <typename Block>
inline __attribute__((always_inline)) void add_fifth_bits(const Block* b, Codes512& codes) {
  const auto word = [&](int i) __attribute__((always_inline)) { return static_cast<int>(load_u32(b[i].qh)); };
  const __m256i words =
      _mm256_setr_epi32(word(0), word(1), word(2), word(3), word(4), word(5), word(6), word(7));
  // The same byte of all eight words together.
  const __m256i by_byte =
      _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
  const __m256i bits = _mm256_permutevar8x32_epi32(_mm256_shuffle_epi8(words, by_byte),
                                                   _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  const __m512i value = _mm512_set1_epi8(16);
  const __mmask64 has[4] = {static_cast<uint64_t>(_mm256_extract_epi64(bits, 0)),
                            static_cast<uint64_t>(_mm256_extract_epi64(bits, 1)),
                            static_cast<uint64_t>(_mm256_extract_epi64(bits, 2)),
                            static_cast<uint64_t>(_mm256_extract_epi64(bits, 3))};
  for (int j = 0; j < 4; j++)
    codes.part[j] = _mm512_mask_add_epi8(codes.part[j], has[j], codes.part[j], value);
}

// Codes of two bits of four blocks of 64.
inline __attribute__((always_inline)) Codes512 load_crumbs_by_block(const BlockQ2_0* b) {
  const __m512i qs = load_four_qs(b), three = _mm512_set1_epi8(3);
  const __m512i starts = _mm512_set1_epi64(0x0e0c0a0806040200);
  Codes512 c;
  for (int j = 0; j < 4; j++) {
    // Two bytes of each half of a block to a word of 64 bits.
    const int64_t first = 2 * j | (2 * j + 1) << 8 | int64_t{-0x10000}, other = first + 0x808;
    const __m512i pairs = _mm512_shuffle_epi8(qs, _mm512_broadcast_i32x4(_mm_set_epi64x(other, first)));
    c.part[j] = _mm512_and_si512(_mm512_multishift_epi64_epi8(starts, pairs), three);
  }
  return c;
}

// The unsigned codes of small blocks of 256 inputs in the order that activations have by block.
template <QuantType Q>
inline __attribute__((always_inline)) Codes512 load_codes_by_block(const typename Traits<Q>::Block* b) {
  using T = Traits<Q>;
  if constexpr (Q == QuantType::q2_0) {
    return load_crumbs_by_block(b);
  } else if constexpr (T::has_nibbles) {
    Codes512 c = load_nibbles_by_block(b);
    if constexpr (T::has_fifth_bits) add_fifth_bits(b, c);
    for (int j = 0; j < 4; j++) {
      if constexpr (requires { T::values; }) c.part[j] = UnpackAvx512::look_up(c.part[j], T::values);
      if constexpr (T::is_signed) c.part[j] = _mm512_xor_si512(c.part[j], _mm512_set1_epi8(-128));
    }
    return c;
  } else {
    Codes512 c = load_unsigned_codes<Q>(b);
    transpose_8x4_64(c.part);
    return c;
  }
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
