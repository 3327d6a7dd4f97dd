// 64 codes at a time in four registers: what traits.h unpacks with on the tiers of AArch64. unpack_generic.h
// says in plain loops what each operation gives.
#pragma once

#include <arm_neon.h>

#include <array>
#include <cstddef>
#include <cstdint>

namespace coldstream {

namespace {

struct UnpackNeon {
  struct Bytes {
    uint8x16_t part[4];
  };

  // The bytes whose registers are value(0) … value(3).
  template <typename F>
  static inline __attribute__((always_inline)) Bytes each(F&& value) {
    return {{value(0), value(1), value(2), value(3)}};
  }

  static inline __attribute__((always_inline)) Bytes halves(const uint8_t* p, const uint8_t* q) {
    return {{vld1q_u8(p), vld1q_u8(p + 16), vld1q_u8(q), vld1q_u8(q + 16)}};
  }
  static inline __attribute__((always_inline)) uint8x16_t low_nibbles(uint8x16_t packed) {
    return vandq_u8(packed, vdupq_n_u8(15));
  }
  static inline __attribute__((always_inline)) Bytes nibbles(const uint8_t* p) {
    const uint8x16_t a = vld1q_u8(p), b = vld1q_u8(p + 16);
    return {{low_nibbles(a), low_nibbles(b), vshrq_n_u8(a, 4), vshrq_n_u8(b, 4)}};
  }
  static inline __attribute__((always_inline)) Bytes nibble_halves(const uint8_t* p, const uint8_t* q) {
    const uint8x16_t a = vld1q_u8(p), b = vld1q_u8(q);
    return {{low_nibbles(a), vshrq_n_u8(a, 4), low_nibbles(b), vshrq_n_u8(b, 4)}};
  }
  static inline __attribute__((always_inline)) uint8x16_t shift_right(uint8x16_t bytes, int count) {
    return vshlq_u8(bytes, vdupq_n_s8(static_cast<int8_t>(-count)));
  }
  static inline __attribute__((always_inline)) Bytes crumbs(const uint8_t* p, int shift) {
    return each([&](int i) {
      return vandq_u8(shift_right(vld1q_u8(p + i % 2 * 16), shift + i / 2 * 2), vdupq_n_u8(3));
    });
  }
  static inline __attribute__((always_inline)) Bytes spread_crumbs_16(const uint8_t* p) {
    static const uint8_t four_times[16] = {0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3};
    static const int8_t shifts[16] = {0, -2, -4, -6, 0, -2, -4, -6, 0, -2, -4, -6, 0, -2, -4, -6};
    const uint8x16_t packed = vld1q_u8(p), places = vld1q_u8(four_times);
    return each([&](int i) {
      const uint8x16_t bytes = vqtbl1q_u8(packed, vaddq_u8(places, vdupq_n_u8(static_cast<uint8_t>(4 * i))));
      return vandq_u8(vshlq_u8(bytes, vld1q_s8(shifts)), vdupq_n_u8(3));
    });
  }
  static inline __attribute__((always_inline)) Bytes nibbles_and_crumbs(const uint8_t* low, int upper,
                                                                        const uint8_t* high) {
    return each([&](int i) {
      const uint8x16_t nibble = low_nibbles(shift_right(vld1q_u8(low + 16 * i), 4 * upper));
      const uint8x16_t crumb = shift_right(vld1q_u8(high + i % 2 * 16), 4 * upper + i / 2 * 2);
      return vorrq_u8(nibble, vshlq_n_u8(vandq_u8(crumb, vdupq_n_u8(3)), 4));
    });
  }
  static inline __attribute__((always_inline)) uint8x16_t add_if(uint8x16_t codes, uint8x16_t has,
                                                                 uint8x16_t bits, int value) {
    const uint8x16_t more = vdupq_n_u8(static_cast<uint8_t>(value));
    return vaddq_u8(codes, vandq_u8(vtstq_u8(has, bits), more));
  }
  static inline __attribute__((always_inline)) Bytes add_bits(Bytes codes, const uint8_t* p, int bit,
                                                              int value) {
    return each([&](int i) {
      const uint8x16_t bits = vdupq_n_u8(static_cast<uint8_t>(1 << (bit + i / 2)));
      return add_if(codes.part[i], vld1q_u8(p + i % 2 * 16), bits, value);
    });
  }
  // All ones in the bytes whose bit of 16 is set, from bit 16 · i on.
  static inline __attribute__((always_inline)) uint8x16_t where_set(uint64_t bits, int i) {
    static const uint8_t one[16] = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
    const uint8x16_t spread = vcombine_u8(vdup_n_u8(static_cast<uint8_t>(bits >> 16 * i)),
                                          vdup_n_u8(static_cast<uint8_t>(bits >> (16 * i + 8))));
    return vtstq_u8(spread, vld1q_u8(one));
  }
  static inline __attribute__((always_inline)) Bytes add_where(Bytes codes, uint64_t bits, int value) {
    const uint8x16_t more = vdupq_n_u8(static_cast<uint8_t>(value));
    return each([&](int i) { return vaddq_u8(codes.part[i], vandq_u8(where_set(bits, i), more)); });
  }
  static inline __attribute__((always_inline)) Bytes look_up(Bytes codes, const int8_t (&table)[16]) {
    const uint8x16_t values = vreinterpretq_u8_s8(vld1q_s8(table));
    return each([&](int i) { return vqtbl1q_u8(values, codes.part[i]); });
  }
  static inline __attribute__((always_inline)) Bytes with_signs(Bytes magnitudes, uint64_t signs,
                                                                int offset) {
    const uint8x16_t zero = vdupq_n_u8(static_cast<uint8_t>(offset));
    return each([&](int i) {
      const uint8x16_t negative = where_set(signs, i);
      return vaddq_u8(vsubq_u8(veorq_u8(magnitudes.part[i], negative), negative), zero);
    });
  }
  template <typename F>
  static inline __attribute__((always_inline)) Bytes words(F&& word) {
    return each([&](int i) {
      return vreinterpretq_u8_u64(vcombine_u64(vcreate_u64(word(2 * i)), vcreate_u64(word(2 * i + 1))));
    });
  }
  template <size_t count>
  static inline __attribute__((always_inline)) Bytes look_up_fours(const std::array<uint32_t, count>& grid,
                                                                   const uint8_t* q, uint16_t high) {
    uint32_t found[16];
    for (int i = 0; i < 16; i++) found[i] = grid[q[i] | (count > 256 ? (high >> i & 1) << 8 : 0)];
    return each([&](int i) { return vreinterpretq_u8_u32(vld1q_u32(found + 4 * i)); });
  }
};

}  // namespace

}  // namespace coldstream
