// 64 codes at a time in two registers: what traits.h unpacks with on the avx2 tier. unpack_generic.h says in
// plain loops what each operation gives.
#pragma once

#include <immintrin.h>

#include <array>
#include <bit>
#include <cstdint>
#include <cstring>

namespace coldstream {

static inline __m256i load_256(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }

namespace {

struct UnpackAvx2 {
  struct Bytes {
    __m256i half[2];
  };

  static inline __attribute__((always_inline)) Bytes halves(const uint8_t* p, const uint8_t* q) {
    return {load_256(p), load_256(q)};
  }
  static inline __attribute__((always_inline)) Bytes nibbles(const uint8_t* p) {
    const __m256i packed = load_256(p), mask = _mm256_set1_epi8(15);
    return {_mm256_and_si256(packed, mask), _mm256_and_si256(_mm256_srli_epi16(packed, 4), mask)};
  }
  static inline __attribute__((always_inline)) __m256i nibbles_16(const uint8_t* p) {
    const __m128i packed = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_and_si256(_mm256_set_m128i(_mm_srli_epi16(packed, 4), packed), _mm256_set1_epi8(15));
  }
  static inline __attribute__((always_inline)) Bytes nibble_halves(const uint8_t* p, const uint8_t* q) {
    return {nibbles_16(p), nibbles_16(q)};
  }
  static inline __attribute__((always_inline)) Bytes crumbs(const uint8_t* p, int shift) {
    const __m256i packed = load_256(p), mask = _mm256_set1_epi8(3);
    return {_mm256_and_si256(_mm256_srli_epi16(packed, shift), mask),
            _mm256_and_si256(_mm256_srli_epi16(packed, shift + 2), mask)};
  }
  static inline __attribute__((always_inline)) Bytes spread_crumbs_16(const uint8_t* p) {
    const __m256i packed = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    const __m256i four_times = _mm256_setr_epi8(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 5,
                                                5, 5, 5, 6, 6, 6, 6, 7, 7, 7, 7);
    Bytes out;
    for (int h = 0; h < 2; h++) {
      const __m256i bytes = _mm256_shuffle_epi8(
          packed, _mm256_add_epi8(four_times, _mm256_set1_epi8(static_cast<char>(8 * h))));
      // Byte 2 of each four, and byte 3, move down by four bits, then bytes 1 and 3 by two.
      const __m256i by_four = _mm256_blend_epi16(bytes, _mm256_srli_epi16(bytes, 4), 0xaa);
      const __m256i by_two =
          _mm256_blendv_epi8(by_four, _mm256_srli_epi16(by_four, 2), _mm256_set1_epi16(-256));
      out.half[h] = _mm256_and_si256(by_two, _mm256_set1_epi8(3));
    }
    return out;
  }
  static inline __attribute__((always_inline)) Bytes nibbles_and_crumbs(const uint8_t* low, int upper,
                                                                        const uint8_t* high) {
    const __m256i low_mask = _mm256_set1_epi8(15), high_mask = _mm256_set1_epi8(48), top = load_256(high);
    Bytes out;
    for (int h = 0; h < 2; h++) {
      const __m256i nibble = _mm256_srli_epi16(load_256(low + 32 * h), 4 * upper);
      const int up = 4 - 4 * upper - 2 * h;
      const __m256i crumb = up >= 0 ? _mm256_slli_epi16(top, up) : _mm256_srli_epi16(top, -up);
      out.half[h] = _mm256_or_si256(_mm256_and_si256(nibble, low_mask), _mm256_and_si256(crumb, high_mask));
    }
    return out;
  }
  static inline __attribute__((always_inline)) __m256i add_if(__m256i codes, __m256i has, __m256i bits,
                                                              int value) {
    const __m256i is_set = _mm256_cmpeq_epi8(_mm256_and_si256(has, bits), bits);
    return _mm256_add_epi8(codes, _mm256_and_si256(is_set, _mm256_set1_epi8(static_cast<char>(value))));
  }
  // Bit `from` of each byte as bit `to`, alone.
  static inline __attribute__((always_inline)) __m256i move_bit(__m256i bytes, int from, int to) {
    const __m256i moved =
        from > to ? _mm256_srli_epi16(bytes, from - to) : _mm256_slli_epi16(bytes, to - from);
    return _mm256_and_si256(moved, _mm256_set1_epi8(static_cast<char>(1 << to)));
  }
  static inline __attribute__((always_inline)) Bytes add_bits(Bytes codes, const uint8_t* p, int bit,
                                                              int value) {
    const __m256i has = load_256(p);
    const int to = std::countr_zero(static_cast<unsigned>(value));
    return {_mm256_or_si256(codes.half[0], move_bit(has, bit, to)),
            _mm256_or_si256(codes.half[1], move_bit(has, bit + 1, to))};
  }
  // Each of 32 bits to a byte that is not 0 where it is set; `one` has the bits to compare with.
  static inline __attribute__((always_inline)) __m256i spread_bits(uint32_t bits, __m256i& one) {
    // Byte i of the 32 bits to lanes 8i … 8i + 7, then bit k of it to lane 8i + k.
    const __m256i spread = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
    one = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201));
    return _mm256_shuffle_epi8(_mm256_set1_epi32(static_cast<int>(bits)), spread);
  }
  static inline __attribute__((always_inline)) Bytes add_where(Bytes codes, uint64_t bits, int value) {
    for (int h = 0; h < 2; h++) {
      __m256i one;
      const __m256i has = spread_bits(static_cast<uint32_t>(bits >> 32 * h), one);
      codes.half[h] = add_if(codes.half[h], has, one, value);
    }
    return codes;
  }
  static inline __attribute__((always_inline)) Bytes look_up(Bytes codes, const int8_t (&table)[16]) {
    const __m256i values =
        _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(table)));
    return {_mm256_shuffle_epi8(values, codes.half[0]), _mm256_shuffle_epi8(values, codes.half[1])};
  }
  static inline __attribute__((always_inline)) Bytes with_signs(Bytes magnitudes, uint64_t signs,
                                                                int offset) {
    const __m256i zero = _mm256_set1_epi8(static_cast<char>(offset));
    for (int h = 0; h < 2; h++) {
      __m256i one;
      const __m256i has = spread_bits(static_cast<uint32_t>(signs >> 32 * h), one);
      const __m256i negative = _mm256_cmpeq_epi8(_mm256_and_si256(has, one), one);
      const __m256i turned = _mm256_sub_epi8(_mm256_xor_si256(magnitudes.half[h], negative), negative);
      magnitudes.half[h] = _mm256_add_epi8(turned, zero);
    }
    return magnitudes;
  }
  template <typename F>
  static inline __attribute__((always_inline)) Bytes words(F&& word) {
    const auto four = [&](int i) __attribute__((always_inline)) {
      return _mm256_set_epi64x(static_cast<int64_t>(word(i + 3)), static_cast<int64_t>(word(i + 2)),
                               static_cast<int64_t>(word(i + 1)), static_cast<int64_t>(word(i)));
    };
    return {four(0), four(4)};
  }
  template <size_t count>
  static inline __attribute__((always_inline)) Bytes look_up_fours(const std::array<uint32_t, count>& grid,
                                                                   const uint8_t* q, uint16_t high) {
    __m256i index = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(q)));
    if constexpr (count > 256) {
      const __m256i one =
          _mm256_setr_epi16(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, -32768);
      const __m256i bits = _mm256_and_si256(_mm256_set1_epi16(static_cast<short>(high)), one);
      index = _mm256_or_si256(index, _mm256_and_si256(_mm256_cmpeq_epi16(bits, one), _mm256_set1_epi16(256)));
    }
    alignas(32) uint16_t at[16];
    _mm256_store_si256(reinterpret_cast<__m256i*>(at), index);
    const auto word = [&](int i) __attribute__((always_inline)) { return static_cast<int>(grid[at[i]]); };
    const auto eight = [&](int i) __attribute__((always_inline)) {
      return _mm256_setr_epi32(word(i), word(i + 1), word(i + 2), word(i + 3), word(i + 4), word(i + 5),
                               word(i + 6), word(i + 7));
    };
    return {eight(0), eight(8)};
  }
};

}  // namespace

}  // namespace coldstream
