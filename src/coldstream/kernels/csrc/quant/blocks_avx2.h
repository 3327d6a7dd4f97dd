// 256 codes of any type in eight 256-bit registers, and the scales of a super-block beside them.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <type_traits>

#include "quant/eight_lanes.h"
#include "quant/grid_avx2.h"
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
  if constexpr (has_grid<Q>) {
    load_grid_codes<Q>(*b, c.part);
    return c;
  }
  for (int k = 0; k < 4; k++) {
    const UnpackAvx2::Bytes bytes = Traits<Q>::template codes<UnpackAvx2>(b, k);
    c.part[2 * k] = bytes.half[0];
    c.part[2 * k + 1] = bytes.half[1];
  }
  return c;
}

// Sixteen bytes of one block, and of another.
inline __attribute__((always_inline)) __m256i load_two(const uint8_t* first, const uint8_t* second) {
  return _mm256_inserti128_si256(
      _mm256_castsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(first))),
      _mm_loadu_si128(reinterpret_cast<const __m128i*>(second)), 1);
}

// Codes of four small blocks, half of the 256 inputs, as activations have them by block: eight of each block,
// then the next eight.
struct Codes128 {
  __m256i part[4];
};

template <typename Block>
inline __attribute__((always_inline)) Codes128 load_nibbles_by_block(const Block* b) {
  const __m256i even = load_two(b[0].qs, b[2].qs), odd = load_two(b[1].qs, b[3].qs);
  const __m256i first = _mm256_unpacklo_epi64(even, odd), second = _mm256_unpackhi_epi64(even, odd);
  const __m256i nibble = _mm256_set1_epi8(15);
  return {{_mm256_and_si256(first, nibble), _mm256_and_si256(second, nibble),
           _mm256_and_si256(_mm256_srli_epi16(first, 4), nibble),
           _mm256_and_si256(_mm256_srli_epi16(second, 4), nibble)}};
}

// Codes of two bits of two blocks of 64.
inline __attribute__((always_inline)) Codes128 load_crumbs_by_block(const BlockQ2_0* b) {
  const __m256i packed = load_two(b[0].qs, b[1].qs), nibble = _mm256_set1_epi8(15);
  const __m256i low = _mm256_and_si256(packed, nibble),
                high = _mm256_and_si256(_mm256_srli_epi16(packed, 4), nibble);
  const __m256i first = _mm256_unpacklo_epi8(low, high), second = _mm256_unpackhi_epi8(low, high);
  const __m256i pairs[2] = {_mm256_unpacklo_epi32(first, second), _mm256_unpackhi_epi32(first, second)};
  const __m256i zero = _mm256_setzero_si256(), three = _mm256_set1_epi8(3);
  Codes128 codes;
  for (int j = 0; j < 4; j++) {
    const __m256i words =
        j % 2 == 0 ? _mm256_unpacklo_epi8(pairs[j / 2], zero) : _mm256_unpackhi_epi8(pairs[j / 2], zero);
    // The upper two bits of a nibble go to the next byte.
    codes.part[j] = _mm256_and_si256(_mm256_or_si256(words, _mm256_slli_epi16(words, 6)), three);
  }
  return codes;
}

// Codes that are bytes.
template <typename Block>
inline __attribute__((always_inline)) Codes128 load_bytes_by_block(const Block* b) {
  Codes128 codes;
  for (int h = 0; h < 2; h++) {
    const __m256i even = load_two(b[0].qs + 16 * h, b[2].qs + 16 * h),
                  odd = load_two(b[1].qs + 16 * h, b[3].qs + 16 * h);
    codes.part[2 * h] = _mm256_unpacklo_epi64(even, odd);
    codes.part[2 * h + 1] = _mm256_unpackhi_epi64(even, odd);
  }
  return codes;
}

// The first four 16-bit words of each of eight blocks: word 0 of all of them, then word 1, and so on.
struct FirstWords {
  __m128i word[4];

  template <typename Block>
  inline __attribute__((always_inline)) explicit FirstWords(const Block* b) {
    static_assert(sizeof(Block) >= sizeof(__m128i));
    const auto load = [&](int i) __attribute__((always_inline)) {
      return _mm_loadu_si128(reinterpret_cast<const __m128i*>(b + i));
    };
    __m128i low[2], high[2];  // of four blocks each: words 0 and 1, words 2 and 3
    for (int i = 0; i < 2; i++) {
      const __m128i first = _mm_unpacklo_epi16(load(4 * i), load(4 * i + 1));
      const __m128i second = _mm_unpacklo_epi16(load(4 * i + 2), load(4 * i + 3));
      low[i] = _mm_unpacklo_epi32(first, second);
      high[i] = _mm_unpackhi_epi32(first, second);
    }
    word[0] = _mm_unpacklo_epi64(low[0], low[1]);
    word[1] = _mm_unpackhi_epi64(low[0], low[1]);
    word[2] = _mm_unpacklo_epi64(high[0], high[1]);
    word[3] = _mm_unpackhi_epi64(high[0], high[1]);
  }
};

// The scales of the eight blocks of 256 inputs, and the minimums of types that have them. Types that need
// other words of their blocks as well take the scales from these.
template <QuantType Q>
struct SmallScales {
  __m256 d;
  __m256 m = _mm256_setzero_ps();

  inline __attribute__((always_inline)) explicit SmallScales(const typename Traits<Q>::Block* b) {
    using T = Traits<Q>;
    if constexpr (T::has_mins || T::has_fifth_bits) {
      static_assert(offsetof(typename T::Block, d) == 0 && T::d_factor == 1.0f);
      const FirstWords words(b);
      d = _mm256_cvtph_ps(words.word[0]);
      if constexpr (T::has_mins) {
        static_assert(offsetof(typename T::Block, m) == 2);
        m = _mm256_cvtph_ps(words.word[1]);
      }
    } else {
      d = load_small_scales<Q>(b);
    }
  }
};

// The fifth bits of the codes of eight blocks, inverted.
struct FifthBits {
  // The lower 16 bits of each block, then the upper: words of blocks 0, 1, 4 and 5 and the same shifted by
  // one, then those of blocks 2, 3, 6 and 7.
  __m256i missing[2];

  template <typename Block>
  inline __attribute__((always_inline)) explicit FifthBits(const Block* b) {
    constexpr int at = offsetof(Block, qh) / 2;
    const FirstWords words(b);
    for (int upper = 0; upper < 2; upper++) {
      const __m128i inverse = _mm_xor_si128(words.word[at + upper], _mm_set1_epi32(-1));
      const __m128 bits = _mm_castsi128_ps(inverse), shifted = _mm_castsi128_ps(_mm_srli_epi16(inverse, 1));
      missing[upper] = _mm256_castps_si256(
          _mm256_set_m128(_mm_shuffle_ps(bits, shifted, 0xdd), _mm_shuffle_ps(bits, shifted, 0x88)));
    }
  }

  inline __attribute__((always_inline)) void add(int half, Codes128& codes) const {
    // Bit i becomes the sign of byte i of eight: from its word if i is even, from the shifted one if not.
    // With a sign, a byte looks up zero.
    const __m256i to_sign = _mm256_set1_epi64x(0x0002000800200080), sixteen = _mm256_set1_epi8(16);
    for (int j = 0; j < 4; j++) {
      const int first = 4 * half + j % 2;
      const int64_t of_first = 0x0001000100010001 * ((first + 8) << 8 | first);
      const int64_t of_second = of_first + 0x0202020202020202;
      const __m256i index = _mm256_setr_epi64x(of_first, of_second, of_first, of_second);
      const __m256i signs = _mm256_mullo_epi16(_mm256_shuffle_epi8(missing[j / 2], index), to_sign);
      codes.part[j] = _mm256_or_si256(codes.part[j], _mm256_shuffle_epi8(sixteen, signs));
    }
  }
};
struct NoFifthBits {
  inline __attribute__((always_inline)) explicit NoFifthBits(const void*) {}
};

// The codes of small blocks of 256 inputs, a half at a time.
template <QuantType Q>
struct CodesByBlock {
  using T = Traits<Q>;
  using Block = typename T::Block;
  const Block* b;
  [[no_unique_address]] std::conditional_t<T::has_fifth_bits, FifthBits, NoFifthBits> fifth_bits;

  inline __attribute__((always_inline)) explicit CodesByBlock(const Block* blocks)
      : b(blocks), fifth_bits(blocks) {}

  inline __attribute__((always_inline)) Codes128 half(int i) const {
    const Block* from = b + i * (128 / T::block_inputs);
    Codes128 codes;
    if constexpr (Q == QuantType::q2_0) {
      codes = load_crumbs_by_block(from);
    } else if constexpr (T::has_nibbles) {
      codes = load_nibbles_by_block(from);
      if constexpr (T::has_fifth_bits) fifth_bits.add(i, codes);
    } else {
      codes = load_bytes_by_block(from);
    }
    if constexpr (requires { T::values; }) {
      const __m256i values =
          _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(T::values)));
      for (__m256i& part : codes.part) part = _mm256_shuffle_epi8(values, part);
    }
    return codes;
  }
};

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
