// Scales and minimums of a super-block's sub-blocks as bytes, by operations on whole words.
#pragma once

#include <cstdint>

namespace coldstream {

// Int8 scales of sixteen sub-blocks of 16 inputs, or of eight of 32 in `low`; lowest byte first.
struct ScaleBytes {
  uint64_t low, high = 0;
};

// Byte i of a word whose bytes are all the same.
static constexpr uint64_t every_byte(uint8_t value) { return value * 0x0101010101010101u; }

// The same of four words of 16 bits.
static constexpr uint64_t every_word(uint16_t value) { return value * 0x0001000100010001u; }

// Four words below 256 as bytes.
static inline uint64_t narrow_words(uint64_t words) {
  const uint64_t pairs = (words | words >> 8) & 0x0000ffff0000ffff;
  return (pairs | pairs >> 16) & 0xffffffff;
}

// The eight nibbles of a word, one per byte, lowest first.
static inline uint64_t spread_nibbles(uint32_t packed) {
  uint64_t x = packed;
  x = (x | x << 16) & 0x0000ffff0000ffff;
  x = (x | x << 8) & 0x00ff00ff00ff00ff;
  return (x | x << 4) & 0x0f0f0f0f0f0f0f0f;
}

// The eight fields of two bits of 16 bits, one per byte, lowest first.
static inline uint64_t spread_crumbs(uint16_t packed) {
  uint64_t x = packed;
  x = (x | x << 24) & 0x000000ff000000ff;
  x = (x | x << 12) & 0x000f000f000f000f;
  return (x | x << 6) & 0x0303030303030303;
}

// Bytes below 64, less 32 each, as int8. Adding 96 and turning the top bit does not carry into other bytes.
static inline uint64_t minus_32(uint64_t bytes) { return (bytes + every_byte(96)) ^ every_byte(128); }

// 1 + 2 x of bytes x below 127.
static inline uint64_t odd(uint64_t bytes) { return bytes << 1 | every_byte(1); }

// Eight bytes that lie `step` apart.
template <int step>
static inline uint64_t gather_bytes(const uint8_t* from) {
  uint64_t bytes = 0;
  for (int j = 0; j < 8; j++) bytes |= static_cast<uint64_t>(from[step * j]) << 8 * j;
  return bytes;
}

// 1 + 2 x of sixteen nibbles x.
static inline ScaleBytes odd_nibbles(const uint8_t* packed) {
  return {odd(spread_nibbles(load_u32(packed))), odd(spread_nibbles(load_u32(packed + 4)))};
}

// Sub-block scales (6 bits) and minimums (6 bits) of Q4_K and Q5_K, eight of each.
struct ScalesK4 {
  uint64_t scales;
  uint64_t mins;
};

static inline ScalesK4 unpack_scales_k4(const uint8_t* packed) {
  const uint32_t a = load_u32(packed), b = load_u32(packed + 4), c = load_u32(packed + 8);
  const uint32_t scales_high = (c & 0x0f0f0f0f) | ((a >> 6) & 0x03030303) << 4;
  const uint32_t mins_high = ((c >> 4) & 0x0f0f0f0f) | ((b >> 6) & 0x03030303) << 4;
  return {(a & 0x3f3f3f3f) | uint64_t(scales_high) << 32, (b & 0x3f3f3f3f) | uint64_t(mins_high) << 32};
}

// The sixteen scales of Q3_K: low nibbles in eight bytes, then the four fields of two bits of four bytes.
static inline ScaleBytes unpack_scales_k3(const uint8_t* packed) {
  const uint64_t nibbles = load_u64(packed);
  const uint32_t top = load_u32(packed + 8);
  const auto high_bits = [&](int shift) {
    const uint32_t first = top >> shift & 0x03030303, second = top >> (shift + 2) & 0x03030303;
    return (first | uint64_t(second) << 32) << 4;
  };
  return {minus_32((nibbles & every_byte(15)) | high_bits(0)),
          minus_32((nibbles >> 4 & every_byte(15)) | high_bits(4))};
}

// Signs of 64 values, of which eight at a time have seven stored bits, in the low bits of each byte, and an
// even number set.
static inline uint64_t even_signs(uint64_t stored) {
  uint64_t parity = stored ^ stored >> 4;
  parity ^= parity >> 2;
  parity ^= parity >> 1;
  return stored | (parity & every_byte(1)) << 7;
}

// Two words, of each the four lowest fields of seven bits, one per byte.
static inline uint64_t spread_sevens(uint32_t first, uint32_t second) {
  const uint64_t x = first | uint64_t(second) << 32;
  return (x & 0x0000007f0000007f) | (x << 1 & 0x00007f0000007f00) | (x << 2 & 0x007f0000007f0000) |
         (x << 3 & 0x7f0000007f000000);
}

}  // namespace coldstream
