// A head of a new row before it is attended with: normed, and rotated by its position. Half a warp takes a head.
#pragma once

#include "cuda/common.cuh"

namespace coldstream {

constexpr int lanes_per_head = 16;

// x · (1 / rms) · weight into shared memory: one of the sixteen accumulators a lane.
template <int head_dim>
__device__ __forceinline__ void norm_head(const float* x, const float* weight, float eps, int lane,
                                          float* out) {
  constexpr int steps = (head_dim + lanes_per_head - 1) / lanes_per_head;
  float values[steps];
  float squares = 0.0f;
#pragma unroll
  for (int step = 0; step < steps; step++) {
    const int i = step * lanes_per_head + lane;
    values[step] = i < head_dim ? x[i] : 0.0f;
    squares = __fmaf_rn(values[step], values[step], squares);
  }
  const float mean = sum_of_sixteen_lanes(squares, 1) / float(head_dim);
  const float scale = inverse_sqrt(mean + eps);
#pragma unroll
  for (int step = 0; step < steps; step++) {
    const int i = step * lanes_per_head + lane;
    if (i < head_dim) out[i] = values[step] * scale * weight[i];
  }
}

// Value i of a normed head after the rotation by `angles` [half, 2].
__device__ __forceinline__ float rotated(const float* x, const float* angles, int half, int i) {
  if (i >= 2 * half) return x[i];
  const int pair = i < half ? i : i - half;
  const float first = x[pair], second = x[pair + half], cos = angles[2 * pair], sin = angles[2 * pair + 1];
  return i < half ? __fmaf_rn(first, cos, -(second * sin)) : __fmaf_rn(second, cos, first * sin);
}

}  // namespace coldstream
