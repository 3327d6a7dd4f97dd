// The pieces that every kernel shares.
#pragma once

#include "cuda/instructions.cuh"

namespace coldstream {

constexpr int warp_size = 32;
constexpr uint32_t all_lanes = 0xffffffffu;

// The trees of sum_of_eight and sum_of_sixteen over lanes: accumulator j is held by the lanes whose index has
// j in the bits from `stride` up; every lane of the eight (sixteen) groups gets the sum. Addition commutes,
// so all get the same bits.
__device__ __forceinline__ float sum_of_eight_lanes(float p, int stride) {
  p += __shfl_xor_sync(all_lanes, p, 4 * stride);
  p += __shfl_xor_sync(all_lanes, p, 2 * stride);
  p += __shfl_xor_sync(all_lanes, p, stride);
  return p;
}

__device__ __forceinline__ float sum_of_sixteen_lanes(float p, int stride) {
  p += __shfl_xor_sync(all_lanes, p, 8 * stride);
  return sum_of_eight_lanes(p, stride);
}

}  // namespace coldstream
