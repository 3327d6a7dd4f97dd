// 64 codes at a time in a register: what traits.h unpacks with on the avx512 and amx tiers. unpack_generic.h
// says in plain loops what each operation gives.
#pragma once

#include <immintrin.h>

#include <array>
#include <cstdint>
#include <cstring>

namespace coldstream {

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

static inline __m512i join_256(__m256i low, __m256i high) {
  return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}

namespace {

struct UnpackAvx512 {
  using Bytes = __m512i;

  static inline __attribute__((always_inline)) Bytes halves(const uint8_t* p, const uint8_t* q) {
    return join_256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
                    _mm256_loadu_si256(reinterpret_cast<const __m256i*>(q)));
  }
  static inline __attribute__((always_inline)) Bytes nibbles(const uint8_t* p) {
    return _mm512_and_si512(_mm512_srlv_epi16(broadcast_256(p), halves_epi16(0, 4)), _mm512_set1_epi8(15));
  }
  static inline __attribute__((always_inline)) __m256i nibbles_16(const uint8_t* p) {
    const __m128i packed = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_inserti128_si256(_mm256_castsi128_si256(packed), _mm_srli_epi16(packed, 4), 1);
  }
  static inline __attribute__((always_inline)) Bytes nibble_halves(const uint8_t* p, const uint8_t* q) {
    return _mm512_and_si512(join_256(nibbles_16(p), nibbles_16(q)), _mm512_set1_epi8(15));
  }
  static inline __attribute__((always_inline)) Bytes crumbs(const uint8_t* p, int shift) {
    return _mm512_and_si512(_mm512_srlv_epi16(broadcast_256(p), halves_epi16(shift, shift + 2)),
                            _mm512_set1_epi8(3));
  }
  static inline __attribute__((always_inline)) Bytes spread_crumbs_16(const uint8_t* p) {
    // Two bytes to each of eight words, whose bits from 0, 2 … 14 on go to its bytes.
    const __m512i pairs = _mm512_cvtepu16_epi64(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    const __m512i starts = _mm512_set1_epi64(0x0e0c0a0806040200);
    return _mm512_and_si512(_mm512_multishift_epi64_epi8(starts, pairs), _mm512_set1_epi8(3));
  }
  static inline __attribute__((always_inline)) Bytes nibbles_and_crumbs(const uint8_t* low, int upper,
                                                                        const uint8_t* high) {
    constexpr int select = 0xca;  // a ? b : c, bit by bit
    const __m512i packed = _mm512_loadu_si512(low), top = broadcast_256(high);
    const __m512i nibble = upper ? _mm512_srli_epi16(packed, 4) : packed;
    const __m512i crumb =
        upper ? _mm512_srlv_epi16(top, halves_epi16(0, 2)) : _mm512_sllv_epi16(top, halves_epi16(4, 2));
    return _mm512_and_si512(_mm512_ternarylogic_epi64(_mm512_set1_epi8(15), nibble, crumb, select),
                            _mm512_set1_epi8(63));
  }
  static inline __attribute__((always_inline)) Bytes add_bits(Bytes codes, const uint8_t* p, int bit,
                                                              int value) {
    const __mmask64 is_set = _mm512_test_epi8_mask(broadcast_256(p), halves_epi8(1 << bit, 2 << bit));
    return add_where(codes, is_set, value);
  }
  static inline __attribute__((always_inline)) Bytes add_where(Bytes codes, uint64_t bits, int value) {
    return _mm512_mask_add_epi8(codes, bits, codes, _mm512_set1_epi8(static_cast<char>(value)));
  }
  static inline __attribute__((always_inline)) Bytes look_up(Bytes codes, const int8_t (&table)[16]) {
    const __m128i values = _mm_load_si128(reinterpret_cast<const __m128i*>(table));
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(values), codes);
  }
  static inline __attribute__((always_inline)) Bytes with_signs(Bytes magnitudes, uint64_t signs,
                                                                int offset) {
    const __m512i zero = _mm512_set1_epi8(static_cast<char>(offset));
    return _mm512_mask_sub_epi8(_mm512_add_epi8(zero, magnitudes), signs, zero, magnitudes);
  }
  template <typename F>
  static inline __attribute__((always_inline)) Bytes words(F&& word) {
    const auto at = [&](int i) __attribute__((always_inline)) { return static_cast<int64_t>(word(i)); };
    return _mm512_set_epi64(at(7), at(6), at(5), at(4), at(3), at(2), at(1), at(0));
  }
  template <size_t count>
  static inline __attribute__((always_inline)) Bytes look_up_fours(const std::array<uint32_t, count>& grid,
                                                                   const uint8_t* q, uint16_t high) {
    const auto at = [&](int i) __attribute__((always_inline)) {
      return static_cast<int>(grid[q[i] | (high >> i & 1) << 8]);
    };
    return _mm512_set_epi32(at(15), at(14), at(13), at(12), at(11), at(10), at(9), at(8), at(7), at(6), at(5),
                            at(4), at(3), at(2), at(1), at(0));
  }
};

}  // namespace

}  // namespace coldstream
