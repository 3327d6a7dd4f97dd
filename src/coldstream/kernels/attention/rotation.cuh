// Steps of the Walsh–Hadamard transform of heads, which is its own inverse up to a factor:
// docs/arithmetic.md, Attention over integers.
#pragma once

#include "cuda/common.cuh"

namespace coldstream {

// The element after a step that combines it with `other`; the second of the two is subtracted from the first.
__device__ __forceinline__ float rotated_with(float x, float other, bool is_second) {
  return is_second ? other - x : x + other;
}

// A step over elements of one thread that are `stride` apart.
template <int count>
__device__ __forceinline__ void rotate_own(float (&x)[count], int stride) {
#pragma unroll
  for (int i = 0; i < count; i++) {
    if (i & stride) continue;
    const float a = x[i], b = x[i + stride];
    x[i] = rotated_with(a, b, false);
    x[i + stride] = rotated_with(b, a, true);
  }
}

// A step over elements of lanes that are `distance` apart.
template <int count>
__device__ __forceinline__ void rotate_lanes(float (&x)[count], int distance) {
  const bool is_second = threadIdx.x & distance;
#pragma unroll
  for (float& value : x) value = rotated_with(value, __shfl_xor_sync(all_lanes, value, distance), is_second);
}

}  // namespace coldstream
