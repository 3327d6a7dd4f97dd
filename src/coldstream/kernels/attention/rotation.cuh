// Values that are rotated together by a Walsh–Hadamard matrix: turn.py on the GPU.
#pragma once

#include "cuda/common.cuh"

namespace coldstream {

constexpr uint32_t turn_signs = 0x48280955u;  // turn.py says why these
constexpr int turn_length = 32;               // values of a block, and what turning there and back multiplies by

// Of value i of a block before it is turned, and of its last step back.
__device__ __forceinline__ float changed_sign(float x, int i) {
  return __uint_as_float(__float_as_uint(x) ^ (turn_signs >> i << 31));
}

// One step of the transformation, of a pair of which this thread holds `x` and another one `other`.
__device__ __forceinline__ float butterfly(float x, float other, bool is_second) {
  return is_second ? other - x : x + other;
}

// The lanes of a warp hold a block, value i by lane i: what it was before it was turned.
__device__ __forceinline__ float turned_back(float x) {
  const int lane = threadIdx.x % warp_size;
#pragma unroll
  for (int stride = 1; stride < warp_size; stride *= 2) {
    x = butterfly(x, __shfl_xor_sync(all_lanes, x, stride), lane & stride);
  }
  return changed_sign(x, lane) * (1.0f / turn_length);
}

}  // namespace coldstream
