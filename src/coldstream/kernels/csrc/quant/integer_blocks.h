// The contents of blocks of the integer types, in plain loops: signed codes, sub-block scales and minimums.
#pragma once

#include <cstdint>

#include "quant/blocks.h"

namespace coldstream {

// For each type: its block, whether a block is a super-block of 256, whether it has minimums, and how its
// codes read.
template <QuantType Q>
struct IntegerFormat;

static inline void unpack_nibbles_32(const uint8_t* qs, int offset, int8_t* codes) {
  for (int i = 0; i < 16; i++) {
    codes[i] = static_cast<int8_t>((qs[i] & 15) - offset);
    codes[i + 16] = static_cast<int8_t>((qs[i] >> 4) - offset);
  }
}

template <>
struct IntegerFormat<QuantType::q4_0> {
  using Block = BlockQ4_0;
  static constexpr bool super_block = false, has_mins = false;
  static void codes(const Block& b, int8_t* out) { unpack_nibbles_32(b.qs, 8, out); }
};

template <>
struct IntegerFormat<QuantType::q5_0> {
  using Block = BlockQ5_0;
  static constexpr bool super_block = false, has_mins = false;
  static void codes(const Block& b, int8_t* out) {
    unpack_nibbles_32(b.qs, 16, out);
    for (int i = 0; i < 32; i++) out[i] = static_cast<int8_t>(out[i] + (b.qh[i / 8] >> i % 8 & 1) * 16);
  }
};

template <>
struct IntegerFormat<QuantType::q8_0> {
  using Block = BlockQ8_0;
  static constexpr bool super_block = false, has_mins = false;
  static void codes(const Block& b, int8_t* out) { std::memcpy(out, b.qs, sizeof b.qs); }
};

template <typename B>
struct IntegerFormatK4 {
  using Block = B;
  static constexpr bool super_block = true, has_mins = true;
  // One scale and one minimum for each 16 codes.
  static void scales(const Block& b, int16_t* scales, int16_t* mins) {
    const ScalesK4 bytes = unpack_scales_k4(b.scales);
    for (int j = 0; j < 16; j++) {
      scales[j] = static_cast<int16_t>(bytes.scales >> (j / 2 * 8) & 255);
      mins[j] = static_cast<int16_t>(bytes.mins >> (j / 2 * 8) & 255);
    }
  }
};

template <>
struct IntegerFormat<QuantType::q4_k> : IntegerFormatK4<BlockQ4_K> {
  static void codes(const Block& b, int8_t* out) {
    for (int i = 0; i < 256; i++) {
      out[i] = static_cast<int8_t>(b.qs[i / 64 * 32 + i % 32] >> (i % 64 / 32 * 4) & 15);
    }
  }
};

template <>
struct IntegerFormat<QuantType::q5_k> : IntegerFormatK4<BlockQ5_K> {
  static void codes(const Block& b, int8_t* out) {
    for (int i = 0; i < 256; i++) {
      const int low = b.qs[i / 64 * 32 + i % 32] >> (i % 64 / 32 * 4) & 15;
      out[i] = static_cast<int8_t>(low + (b.qh[i % 32] >> i / 32 & 1) * 16);
    }
  }
};

template <>
struct IntegerFormat<QuantType::q6_k> {
  using Block = BlockQ6_K;
  static constexpr bool super_block = true, has_mins = false;
  static void scales(const Block& b, int16_t* scales, int16_t*) {
    for (int j = 0; j < 16; j++) scales[j] = static_cast<int8_t>(b.scales[j]);
  }
  static void codes(const Block& b, int8_t* out) {
    for (int i = 0; i < 256; i++) {
      const int low = b.ql[i / 128 * 64 + i % 64] >> (i % 128 / 64 * 4) & 15;
      const int high = b.qh[i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3;
      out[i] = static_cast<int8_t>(low + high * 16 - 32);
    }
  }
};

}  // namespace coldstream
