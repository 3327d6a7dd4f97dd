// Blocks of the integer types to 256-bit registers: 256 codes at a time, in their natural order.
#pragma once

#include <immintrin.h>

#include "quant/blocks.h"

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

static inline __m256i load_256(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }

// For each type: `load`, which reads one super-block or eight blocks. Codes are unsigned, `offset_bits` the
// power of two that they lie above those of the type, if they do; those of Q8_0 are signed.
template <QuantType Q>
struct Format256;

template <>
struct Format256<QuantType::q4_k> {
  using Block = BlockQ4_K;
  static constexpr bool super_block = true, has_mins = true, is_signed = false;
  static Codes256 load(const Block* b) {
    const __m256i mask = _mm256_set1_epi8(15);
    Codes256 c;
    for (int k = 0; k < 4; k++) {
      const __m256i packed = load_256(b->qs + 32 * k);
      c.part[2 * k] = _mm256_and_si256(packed, mask);
      c.part[2 * k + 1] = _mm256_and_si256(_mm256_srli_epi16(packed, 4), mask);
    }
    return c;
  }
};

template <>
struct Format256<QuantType::q5_k> {
  using Block = BlockQ5_K;
  static constexpr bool super_block = true, has_mins = true, is_signed = false;
  static Codes256 load(const Block* b) {
    const __m256i mask = _mm256_set1_epi8(15), sixteen = _mm256_set1_epi8(16), high = load_256(b->qh);
    Codes256 c;
    for (int j = 0; j < 8; j++) {
      const __m256i packed = load_256(b->qs + 32 * (j / 2));
      const __m256i low = _mm256_and_si256(j % 2 == 0 ? packed : _mm256_srli_epi16(packed, 4), mask);
      const __m256i bit = _mm256_set1_epi8(static_cast<char>(1 << j));
      const __m256i is_high = _mm256_cmpeq_epi8(_mm256_and_si256(high, bit), bit);
      c.part[j] = _mm256_or_si256(low, _mm256_and_si256(is_high, sixteen));
    }
    return c;
  }
};

template <>
struct Format256<QuantType::q6_k> {
  using Block = BlockQ6_K;
  static constexpr bool super_block = true, has_mins = false, is_signed = false;
  static constexpr int offset_bits = 5;
  static Codes256 load(const Block* b) {
    const __m256i low_mask = _mm256_set1_epi8(15), high_mask = _mm256_set1_epi8(48);
    Codes256 c;
    for (int n = 0; n < 2; n++) {
      const __m256i first = load_256(b->ql + 64 * n), second = load_256(b->ql + 64 * n + 32);
      const __m256i high = load_256(b->qh + 32 * n);
      const __m256i low[4] = {first, second, _mm256_srli_epi16(first, 4), _mm256_srli_epi16(second, 4)};
      const __m256i top[4] = {_mm256_slli_epi16(high, 4), _mm256_slli_epi16(high, 2), high,
                              _mm256_srli_epi16(high, 2)};
      for (int j = 0; j < 4; j++) {
        c.part[4 * n + j] =
            _mm256_or_si256(_mm256_and_si256(low[j], low_mask), _mm256_and_si256(top[j], high_mask));
      }
    }
    return c;
  }
};

// 16 bytes of nibbles: 16 codes low, the next 16 high.
static inline __m256i load_nibbles_32(const uint8_t* qs) {
  const __m128i packed = _mm_loadu_si128(reinterpret_cast<const __m128i*>(qs));
  return _mm256_and_si256(_mm256_set_m128i(_mm_srli_epi16(packed, 4), packed), _mm256_set1_epi8(15));
}

template <>
struct Format256<QuantType::q4_0> {
  using Block = BlockQ4_0;
  static constexpr bool super_block = false, has_mins = false, is_signed = false;
  static constexpr int offset_bits = 3;
  static Codes256 load(const Block* b) {
    Codes256 c;
    for (int j = 0; j < 8; j++) c.part[j] = load_nibbles_32(b[j].qs);
    return c;
  }
};

template <>
struct Format256<QuantType::q5_0> {
  using Block = BlockQ5_0;
  static constexpr bool super_block = false, has_mins = false, is_signed = false;
  static constexpr int offset_bits = 4;
  static Codes256 load(const Block* b) {
    // Byte i of the 32 bits to lanes 8i … 8i + 7, then bit k of it to lane 8i + k.
    const __m256i spread = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
    const __m256i bits = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201));
    Codes256 c;
    for (int j = 0; j < 8; j++) {
      const __m256i packed = _mm256_set1_epi32(static_cast<int>(load_u32(b[j].qh)));
      const __m256i is_high =
          _mm256_cmpeq_epi8(_mm256_and_si256(_mm256_shuffle_epi8(packed, spread), bits), bits);
      c.part[j] = _mm256_or_si256(load_nibbles_32(b[j].qs), _mm256_and_si256(is_high, _mm256_set1_epi8(16)));
    }
    return c;
  }
};

template <>
struct Format256<QuantType::q8_0> {
  using Block = BlockQ8_0;
  static constexpr bool super_block = false, has_mins = false, is_signed = true;
  static constexpr int offset_bits = 0;
  static Codes256 load(const Block* b) {
    Codes256 c;
    for (int j = 0; j < 8; j++) c.part[j] = load_256(b[j].qs);
    return c;
  }
};

}  // namespace coldstream
