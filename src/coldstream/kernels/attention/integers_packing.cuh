// Values of three or four bits in a row of a cache: cache_layout.py has the order of bits.
#pragma once

#include "attention/integers.cuh"

namespace coldstream {

// The levels of three bits, by code; levels.py says where they and their thresholds are from.
constexpr uint32_t positive_levels = 0x7247280d, negative_levels = 0x8eb9d8f3;

template <int bits>
__device__ __forceinline__ uint8_t packed_code(float x, const PlaneScale& by) {
  if (bits == 4) return uint8_t(code_of(x, by) + 8);
  const float scaled = by.factor == 0.0f ? 0.0f : x * by.factor;
  const float size = fabsf(scaled);
  return uint8_t((scaled < 0.0f ? 4 : 0) + (size >= 26.5f) + (size >= 55.5f) + (size >= 92.5f));
}

// Word `number` of a row, of the codes of its head.
template <int bits, int head_dim>
__device__ __forceinline__ uint32_t packed_word(const uint8_t* codes, int number) {
  constexpr int low_words = head_dim / 16;  // of three bits
  uint32_t word = 0;
  if (bits == 4) {
#pragma unroll
    for (int r = 0; r < 8; r++) word |= uint32_t{codes[8 * number + r]} << (4 * r);
  } else if (number < low_words) {
#pragma unroll
    for (int i = 0; i < 16; i++) word |= uint32_t{codes[16 * number + i]} % 4 << (4 * (i % 8) + 2 * (i / 8));
  } else {
#pragma unroll
    for (int i = 0; i < 32; i++)
      word |= uint32_t{codes[32 * (number - low_words) + i]} / 4 << (4 * (i % 8) + i / 8);
  }
  return word;
}

constexpr int unit_values = 32;  // that a thread unpacks at once

// The bits of a unit, and the scale of its row if it is the row's first.
template <int bits>
struct PackedUnit {
  uint32_t words[bits];
  float scale;
};

template <int bits, int head_dim>
__device__ __forceinline__ void read_unit(PackedUnit<bits>& unit, const uint8_t* row, int number) {
  constexpr int units = head_dim / unit_values;
  if constexpr (bits == 4) {
    const uint4 words = reinterpret_cast<const uint4*>(row)[number];
    unit.words[0] = words.x;
    unit.words[1] = words.y;
    unit.words[2] = words.z;
    unit.words[3] = words.w;
  } else {
    const uint2 low = reinterpret_cast<const uint2*>(row)[number];
    unit.words[0] = low.x;
    unit.words[1] = low.y;
    unit.words[2] = reinterpret_cast<const uint32_t*>(row)[2 * units + number];
  }
  if (number == 0) unit.scale = *reinterpret_cast<const float*>(row + CacheRow<bits, head_dim>::code_bytes);
}

// Eight values, as two words of bytes: number `part` of a unit.
template <int bits>
__device__ __forceinline__ uint2 unpack_eight(const PackedUnit<bits>& unit, int part) {
  if constexpr (bits == 4) {
    // Codes are kept with 8 added; the highest bit keeps the difference from borrowing of the next byte.
    const uint32_t even = unit.words[part] & 0x0f0f0f0fu, odd = unit.words[part] >> 4 & 0x0f0f0f0fu;
    const uint32_t first = __byte_perm(even, odd, 0x5140), second = __byte_perm(even, odd, 0x7362);
    return make_uint2(((first | 0x80808080u) - 0x08080808u) ^ 0x80808080u,
                      ((second | 0x80808080u) - 0x08080808u) ^ 0x80808080u);
  } else {
    const uint32_t low = unit.words[part / 2] >> (2 * (part % 2)) & 0x33333333u;
    const uint32_t codes = low | (unit.words[2] >> part & 0x11111111u) << 2;
    return make_uint2(__byte_perm(positive_levels, negative_levels, codes),
                      __byte_perm(positive_levels, negative_levels, codes >> 16));
  }
}

}  // namespace coldstream
