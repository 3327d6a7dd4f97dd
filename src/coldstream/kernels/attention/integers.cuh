// Numbers as planes of signed bytes with one float32 scale, and their layout in a row of a cache:
// docs/arithmetic.md, Planes of bytes and Attention over integers.
#pragma once

#include "cuda/common.cuh"

namespace coldstream {

constexpr int low_unit = 256;  // units of the low plane are one of the high plane
constexpr float smallest_maximum = 0x1p-100f;

// A row of a cache: a head's values of `bits` bits (16, in two planes, 8, 4, or 3), a float32 scale, and
// zeros; cache_layout.py has the order of bits.
template <int bits, int head_dim>
struct CacheRow {
  static constexpr int planes = bits == 16 ? 2 : 1;
  static constexpr bool is_packed = bits < 8;
  static constexpr int code_bytes = head_dim * bits / 8;
  static constexpr int bytes = (code_bytes + int(sizeof(float)) + 15) / 16 * 16;
};

// The greatest magnitude in units of codes; with 3 bits in units of levels.
template <int bits>
constexpr int code_limit = bits == 16  ? low_unit * 127 + 127
                           : bits == 8 ? 127
                           : bits == 4 ? 7
                                       : 140;

// The rounding of numbers that share a scale.
struct PlaneScale {
  float factor, scale;  // factors of numbers, and of codes
};

// From the bits of the greatest magnitude; those of NaN are greater than all others.
template <int bits>
__device__ __forceinline__ PlaneScale scale_of_codes(uint32_t max_bits) {
  constexpr float limit = code_limit<bits>, greatest = bits == 16 ? limit / low_unit : limit;
  const float maximum = __uint_as_float(max_bits);
  if (max_bits >= 0x7f800000u) return {0.0f, __uint_as_float(0x7fc00000u)};
  if (maximum < smallest_maximum) return {0.0f, 0.0f};
  return {limit / maximum, maximum / greatest};
}

// The code of a number; 0 if the scale is 0 or NaN.
__device__ __forceinline__ int code_of(float x, const PlaneScale& scale) {
  return scale.factor == 0.0f ? 0 : __float2int_rn(x * scale.factor);
}

__device__ __forceinline__ int high_plane(int code) { return (code + low_unit / 2) >> 8; }
__device__ __forceinline__ int low_plane(int code) { return code - low_unit * high_plane(code); }

__device__ __forceinline__ uint32_t magnitude(float x) { return __float_as_uint(x) & 0x7fffffffu; }

}  // namespace coldstream
