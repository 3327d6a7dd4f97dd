// Blocks of the integer types to 512-bit registers: 256 codes at a time, in their natural order, as unsigned
// bytes.
#pragma once

#include <immintrin.h>

#include "quant/blocks.h"

namespace coldstream {

struct Codes512 {
  __m512i part[4];  // 64 codes each
};

static inline __m512i broadcast_256(const uint8_t* p) {
  return _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

// Two values, one for each half of a register.
static inline __m512i halves_epi16(int low, int high) {
  return _mm512_inserti64x4(_mm512_set1_epi16(static_cast<short>(low)),
                            _mm256_set1_epi16(static_cast<short>(high)), 1);
}

static inline __m512i halves_epi8(int low, int high) {
  return _mm512_inserti64x4(_mm512_set1_epi8(static_cast<char>(low)),
                            _mm256_set1_epi8(static_cast<char>(high)), 1);
}

// For each type: `offset_bits`, the power of two that its signed codes lie below the unsigned ones, and
// `load`, which reads one super-block or eight blocks.
template <QuantType Q>
struct Format512;

template <>
struct Format512<QuantType::q4_k> {
  using Block = BlockQ4_K;
  static constexpr bool super_block = true, has_mins = true;
  static Codes512 load(const Block* b) {
    // 32 bytes hold 32 codes in their low nibbles and the next 32 in their high nibbles.
    const __m512i shifts = halves_epi16(0, 4), mask = _mm512_set1_epi8(15);
    Codes512 c;
    for (int k = 0; k < 4; k++) {
      c.part[k] = _mm512_and_si512(_mm512_srlv_epi16(broadcast_256(b->qs + 32 * k), shifts), mask);
    }
    return c;
  }
};

template <>
struct Format512<QuantType::q5_k> {
  using Block = BlockQ5_K;
  static constexpr bool super_block = true, has_mins = true;
  static Codes512 load(const Block* b) {
    const __m512i shifts = halves_epi16(0, 4), mask = _mm512_set1_epi8(15), sixteen = _mm512_set1_epi8(16);
    const __m512i high = broadcast_256(b->qh);
    Codes512 c;
    for (int k = 0; k < 4; k++) {
      const __m512i low = _mm512_and_si512(_mm512_srlv_epi16(broadcast_256(b->qs + 32 * k), shifts), mask);
      const __mmask64 is_high = _mm512_test_epi8_mask(high, halves_epi8(1 << 2 * k, 2 << 2 * k));
      c.part[k] = _mm512_mask_add_epi8(low, is_high, low, sixteen);
    }
    return c;
  }
};

template <>
struct Format512<QuantType::q6_k> {
  using Block = BlockQ6_K;
  static constexpr bool super_block = true, has_mins = false;
  static constexpr int offset_bits = 5;
  static Codes512 load(const Block* b) {
    const __m512i low_mask = _mm512_set1_epi8(15), mask = _mm512_set1_epi8(63);
    constexpr int select = 0xca;  // a ? b : c, bit by bit
    Codes512 c;
    for (int n = 0; n < 2; n++) {
      const __m512i low = _mm512_loadu_si512(b->ql + 64 * n), high = broadcast_256(b->qh + 32 * n);
      const __m512i first = _mm512_sllv_epi16(high, halves_epi16(4, 2));
      const __m512i second = _mm512_srlv_epi16(high, halves_epi16(0, 2));
      c.part[2 * n] = _mm512_and_si512(_mm512_ternarylogic_epi64(low_mask, low, first, select), mask);
      c.part[2 * n + 1] = _mm512_and_si512(
          _mm512_ternarylogic_epi64(low_mask, _mm512_srli_epi16(low, 4), second, select), mask);
    }
    return c;
  }
};

// 16 bytes of nibbles: 16 codes low, the next 16 high.
static inline __m256i load_nibbles_32(const uint8_t* qs) {
  const __m128i packed = _mm_loadu_si128(reinterpret_cast<const __m128i*>(qs));
  const __m256i both = _mm256_inserti128_si256(_mm256_castsi128_si256(packed), _mm_srli_epi16(packed, 4), 1);
  return _mm256_and_si256(both, _mm256_set1_epi8(15));
}

static inline __m512i join_256(__m256i low, __m256i high) {
  return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}

template <>
struct Format512<QuantType::q4_0> {
  using Block = BlockQ4_0;
  static constexpr bool super_block = false, has_mins = false;
  static constexpr int offset_bits = 3;
  static Codes512 load(const Block* b) {
    Codes512 c;
    for (int k = 0; k < 4; k++)
      c.part[k] = join_256(load_nibbles_32(b[2 * k].qs), load_nibbles_32(b[2 * k + 1].qs));
    return c;
  }
};

template <>
struct Format512<QuantType::q5_0> {
  using Block = BlockQ5_0;
  static constexpr bool super_block = false, has_mins = false;
  static constexpr int offset_bits = 4;
  static Codes512 load(const Block* b) {
    const __m512i sixteen = _mm512_set1_epi8(16);
    Codes512 c;
    for (int k = 0; k < 4; k++) {
      const __m512i low = join_256(load_nibbles_32(b[2 * k].qs), load_nibbles_32(b[2 * k + 1].qs));
      const __mmask64 is_high = load_u32(b[2 * k].qh) | static_cast<uint64_t>(load_u32(b[2 * k + 1].qh))
                                                            << 32;
      c.part[k] = _mm512_mask_add_epi8(low, is_high, low, sixteen);
    }
    return c;
  }
};

template <>
struct Format512<QuantType::q8_0> {
  using Block = BlockQ8_0;
  static constexpr bool super_block = false, has_mins = false;
  static constexpr int offset_bits = 7;
  static Codes512 load(const Block* b) {
    const __m512i sign = _mm512_set1_epi8(-128);
    Codes512 c;
    for (int k = 0; k < 4; k++) {
      const auto* low = reinterpret_cast<const __m256i*>(b[2 * k].qs);
      const auto* high = reinterpret_cast<const __m256i*>(b[2 * k + 1].qs);
      c.part[k] = _mm512_xor_si512(join_256(_mm256_loadu_si256(low), _mm256_loadu_si256(high)), sign);
    }
    return c;
  }
};

// Scales of a super-block with minimums, as int16: eight scales, then eight minimums.
template <typename Block>
static inline __m256i load_scales_and_mins(const Block* b) {
  const ScalesK4 bytes = unpack_scales_k4(b->scales);
  const auto scales = static_cast<int64_t>(bytes.scales), mins = static_cast<int64_t>(bytes.mins);
  return _mm256_cvtepu8_epi16(_mm_set_epi64x(mins, scales));
}

// The sixteen scales of a Q6_K block as int16.
static inline __m256i load_scales_16(const BlockQ6_K* b) {
  return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(b->scales)));
}

// The int16 scales of a super-block spread over the lanes of its 256 codes taken as pairs, and its eight
// minimums.
template <QuantType Q>
struct SpreadScales {
  __m512i part[4];
  __m256i packed;  // Q4_K, Q5_K: eight scales, then eight minimums; Q6_K: sixteen scales

  explicit SpreadScales(const typename Format512<Q>::Block* b) {
    constexpr int shift = Format512<Q>::has_mins ? 4 : 3, per_part = Format512<Q>::has_mins ? 2 : 4;
    const __m512i iota = _mm512_set_epi16(31, 30, 29, 28, 27, 26, 25, 24, 23, 22, 21, 20, 19, 18, 17, 16, 15,
                                          14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    if constexpr (Format512<Q>::has_mins) {
      packed = load_scales_and_mins(b);
    } else {
      packed = load_scales_16(b);
    }
    for (int k = 0; k < 4; k++) {
      const __m512i index = _mm512_add_epi16(_mm512_srli_epi16(iota, shift),
                                             _mm512_set1_epi16(static_cast<short>(per_part * k)));
      part[k] = _mm512_permutexvar_epi16(index, _mm512_castsi256_si512(packed));
    }
  }
};

}  // namespace coldstream
