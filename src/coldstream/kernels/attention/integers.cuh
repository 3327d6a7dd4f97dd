// Numbers as planes of signed bytes with one float32 scale, and what rows see of a cache of them: docs/arithmetic.md,
// Planes of bytes and Attention over integers.
#pragma once

#include "cuda/common.cuh"

namespace coldstream {

constexpr int low_unit = 256;  // units of the low plane are one of the high plane
constexpr int plane_limit = 127, two_plane_limit = low_unit * plane_limit + plane_limit;
constexpr float smallest_maximum = 0x1p-100f;
constexpr int scale_bytes_of_row = 16;  // behind the planes: the scale, and zeros

// How the numbers that share a scale are rounded.
struct plane_scale {
  float factor, scale;  // what numbers are multiplied by, and codes
};

// Of the greatest magnitude, as bits: those of NaN are greater than any other's.
template <int planes>
__device__ __forceinline__ plane_scale scale_of_planes(uint32_t max_bits) {
  constexpr float limit = planes == 1 ? plane_limit : two_plane_limit;
  constexpr float greatest = planes == 1 ? limit : limit / low_unit;
  const float maximum = __uint_as_float(max_bits);
  if (max_bits >= 0x7f800000u) return {0.0f, __uint_as_float(0x7fc00000u)};
  if (maximum < smallest_maximum) return {0.0f, 0.0f};
  return {limit / maximum, maximum / greatest};
}

// The code of a number; 0 where the scale is 0 or NaN.
__device__ __forceinline__ int code_of(float x, const plane_scale& scale) {
  return scale.factor == 0.0f ? 0 : __float2int_rn(x * scale.factor);
}

__device__ __forceinline__ int high_plane(int code) { return (code + low_unit / 2) >> 8; }
__device__ __forceinline__ int low_plane(int code) { return code - low_unit * high_plane(code); }

__device__ __forceinline__ uint32_t magnitude(float x) { return __float_as_uint(x) & 0x7fffffffu; }

}  // namespace coldstream
