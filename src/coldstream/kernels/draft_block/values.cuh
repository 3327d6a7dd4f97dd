// Keys and values of a drafter, kept as bfloat16 and computed as floats. Nothing that a text depends on is
// computed with them, so sums have no written order.
#pragma once

#include "cuda/common.cuh"

namespace coldstream {

using Bfloat16Bits = uint16_t;

// To the nearest, ties to even; NaN stays one.
__device__ __forceinline__ Bfloat16Bits to_bfloat16(float x) {
  const uint32_t bits = __float_as_uint(x);
  if (x != x) return uint16_t(bits >> 16 | 0x40u);
  return uint16_t((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

__device__ __forceinline__ float low_half(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_half(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

__device__ __forceinline__ float sum_of_warp(float x) {
#pragma unroll
  for (int distance = warp_size / 2; distance > 0; distance /= 2)
    x += __shfl_xor_sync(all_lanes, x, distance);
  return x;
}

__device__ __forceinline__ float max_of_warp(float x) {
#pragma unroll
  for (int distance = warp_size / 2; distance > 0; distance /= 2) {
    x = fmaxf(x, __shfl_xor_sync(all_lanes, x, distance));
  }
  return x;
}

// The committed rows of one layer, each at its position modulo `capacity`.
struct DraftContext {
  Bfloat16Bits* keys;    // [capacity, num_kv_heads, head_dim]
  Bfloat16Bits* values;  // likewise
  int* positions;        // [capacity], of the row that is there; negative: none
  int capacity;
};

}  // namespace coldstream
