// Four adjacent floats at a time, from rows that need not be aligned for it.
#pragma once

#include "cuda/common.cuh"

namespace coldstream {

// The floats begin … begin + 3 of a row of n > begin; those past its end are 0. `aligned`: the row starts at
// 16 bytes and n is a multiple of 4.
template <bool aligned>
__device__ __forceinline__ float4 load_four(const float* row, int begin, int n) {
  if constexpr (aligned) return *reinterpret_cast<const float4*>(row + begin);
  float4 v = {row[begin], 0.0f, 0.0f, 0.0f};
  if (begin + 1 < n) v.y = row[begin + 1];
  if (begin + 2 < n) v.z = row[begin + 2];
  if (begin + 3 < n) v.w = row[begin + 3];
  return v;
}

template <bool aligned>
__device__ __forceinline__ void store_four(float* row, int begin, int n, float4 v) {
  if constexpr (aligned) {
    *reinterpret_cast<float4*>(row + begin) = v;
    return;
  }
  row[begin] = v.x;
  if (begin + 1 < n) row[begin + 1] = v.y;
  if (begin + 2 < n) row[begin + 2] = v.z;
  if (begin + 3 < n) row[begin + 3] = v.w;
}

// Prefetches a row of floats into the second-level cache by the whole block.
__device__ __forceinline__ void bring_row_near(const float* row, int n) {
  constexpr int per_line = 128 / sizeof(float);
  for (int i = threadIdx.x * per_line; i < n; i += blockDim.x * per_line) bring_near(row + i);
}

// A lane's eight of a group of 256 columns.
struct Eight {
  float4 low, high;
};

// The lane's columns of group `group` of a row of n, those past its end 0.
template <bool aligned>
__device__ __forceinline__ Eight load_eight(const float* row, int group, int n) {
  const int first = group * 256 + 8 * (threadIdx.x % warp_size);
  Eight v = {{0.0f, 0.0f, 0.0f, 0.0f}, {0.0f, 0.0f, 0.0f, 0.0f}};
  if (first < n) v.low = load_four<aligned>(row, first, n);
  if (first + 4 < n) v.high = load_four<aligned>(row, first + 4, n);
  return v;
}

template <bool aligned>
__device__ __forceinline__ void store_eight(float* row, int group, int n, const float (&v)[8]) {
  const int first = group * 256 + 8 * (threadIdx.x % warp_size);
  if (first < n) store_four<aligned>(row, first, n, {v[0], v[1], v[2], v[3]});
  if (first + 4 < n) store_four<aligned>(row, first + 4, n, {v[4], v[5], v[6], v[7]});
}

__device__ __forceinline__ float4 operator+(float4 a, float4 b) {
  return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w};
}

// a · b + c, each rounded once.
__device__ __forceinline__ float4 fma_four(float a, float4 b, float4 c) {
  return {__fmaf_rn(a, b.x, c.x), __fmaf_rn(a, b.y, c.y), __fmaf_rn(a, b.z, c.z), __fmaf_rn(a, b.w, c.w)};
}

}  // namespace coldstream
