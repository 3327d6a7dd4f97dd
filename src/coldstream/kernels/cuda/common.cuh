// The pieces that every kernel shares.
#pragma once

#include "cuda/instructions.cuh"

namespace coldstream {

constexpr int warp_size = 32;
constexpr uint32_t all_lanes = 0xffffffffu;

// Of integers in all lanes of a warp; every lane gets it.
#if COLDSTREAM_LANE_REDUCTIONS
template <class T>
__device__ __forceinline__ T sum_of_lanes(T x) {
  return __reduce_add_sync(all_lanes, x);
}
template <class T>
__device__ __forceinline__ T least_of_lanes(T x) {
  return __reduce_min_sync(all_lanes, x);
}
template <class T>
__device__ __forceinline__ T greatest_of_lanes(T x) {
  return __reduce_max_sync(all_lanes, x);
}
#else
template <class T>
__device__ __forceinline__ T sum_of_lanes(T x) {
#pragma unroll
  for (int mask = 1; mask < warp_size; mask *= 2) x += __shfl_xor_sync(all_lanes, x, mask);
  return x;
}
template <class T>
__device__ __forceinline__ T least_of_lanes(T x) {
#pragma unroll
  for (int mask = 1; mask < warp_size; mask *= 2) {
    const T other = __shfl_xor_sync(all_lanes, x, mask);
    x = other < x ? other : x;
  }
  return x;
}
template <class T>
__device__ __forceinline__ T greatest_of_lanes(T x) {
#pragma unroll
  for (int mask = 1; mask < warp_size; mask *= 2) {
    const T other = __shfl_xor_sync(all_lanes, x, mask);
    x = other > x ? other : x;
  }
  return x;
}
#endif

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
