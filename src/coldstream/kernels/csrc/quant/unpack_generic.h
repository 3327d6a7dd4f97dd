// 64 codes at a time in plain loops: what traits.h unpacks with where there are no vectors.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>

namespace coldstream {

namespace {

struct UnpackGeneric {
  struct Bytes {
    uint8_t at[64];
  };

  // The value of each byte, of its number.
  template <typename F>
  static Bytes each(F&& value) {
    Bytes out;
    for (int i = 0; i < 64; i++) out.at[i] = static_cast<uint8_t>(value(i));
    return out;
  }

  // 32 bytes, and 32 others.
  static Bytes halves(const uint8_t* p, const uint8_t* q) {
    return each([&](int i) { return i < 32 ? p[i] : q[i - 32]; });
  }
  // Of 32 bytes the low nibbles, then the high ones.
  static Bytes nibbles(const uint8_t* p) {
    return each([&](int i) { return p[i % 32] >> i / 32 * 4 & 15; });
  }
  // Of 16 bytes the low nibbles, then the high ones; then those of 16 others.
  static Bytes nibble_halves(const uint8_t* p, const uint8_t* q) {
    return each([&](int i) {
      const uint8_t* from = i < 32 ? p : q;
      return from[i % 16] >> i % 32 / 16 * 4 & 15;
    });
  }
  // Two bits of each of 32 bytes from bit `shift` (0 or 4), then those above them.
  static Bytes crumbs(const uint8_t* p, int shift) {
    return each([&](int i) { return p[i % 32] >> (shift + i / 32 * 2) & 3; });
  }
  // The four fields of two bits of each of 16 bytes.
  static Bytes spread_crumbs_16(const uint8_t* p) {
    return each([&](int i) { return p[i / 4] >> i % 4 * 2 & 3; });
  }
  // Nibbles of 64 bytes, the high ones if `upper`, and above them the crumbs of 32 bytes from bit 0, or 4.
  static Bytes nibbles_and_crumbs(const uint8_t* low, int upper, const uint8_t* high) {
    return each([&](int i) {
      return (low[i] >> 4 * upper & 15) | (high[i % 32] >> (4 * upper + i / 32 * 2) & 3) << 4;
    });
  }
  // `value` more where bit `bit` of 32 bytes is set, for the second half the bit above it.
  static Bytes add_bits(Bytes codes, const uint8_t* p, int bit, int value) {
    return each([&](int i) { return codes.at[i] + (p[i % 32] >> (bit + i / 32) & 1) * value; });
  }
  // `value` more where a bit is set.
  static Bytes add_where(Bytes codes, uint64_t bits, int value) {
    return each([&](int i) { return codes.at[i] + static_cast<int>(bits >> i & 1) * value; });
  }
  // Values of a table for codes below 16.
  static Bytes look_up(Bytes codes, const int8_t (&table)[16]) {
    return each([&](int i) { return table[codes.at[i]]; });
  }
  // `offset` more than magnitudes that are negative where a bit is set.
  static Bytes with_signs(Bytes magnitudes, uint64_t signs, int offset) {
    return each(
        [&](int i) { return signs >> i & 1 ? offset - magnitudes.at[i] : offset + magnitudes.at[i]; });
  }
  // The bytes of word(0) … word(7), of 64 bits each.
  template <typename F>
  static Bytes words(F&& word) {
    Bytes out;
    for (int i = 0; i < 8; i++) {
      const uint64_t value = word(i);
      std::memcpy(out.at + 8 * i, &value, sizeof value);
    }
    return out;
  }
  // The bytes of sixteen words of `grid`, whose indices have eight bits in q[i] and a ninth in bit i of
  // `high`.
  template <size_t count>
  static Bytes look_up_fours(const std::array<uint32_t, count>& grid, const uint8_t* q, uint16_t high) {
    Bytes out;
    for (int i = 0; i < 16; i++) std::memcpy(out.at + 4 * i, &grid[q[i] | (high >> i & 1) << 8], 4);
    return out;
  }
};

}  // namespace

}  // namespace coldstream
