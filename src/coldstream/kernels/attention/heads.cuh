// Prepares a head of a new row for attention: norm, then rotation by its position. Half a warp takes a head.
#pragma once

#include "cuda/common.cuh"

namespace coldstream {

constexpr int lanes_per_head = 16;

// The head that half a warp takes of a row: queries come first, then keys, then values.
struct NewHead {
  int unit, kv_head;  // spare lanes repeat the last one, and write nothing
  bool is_spare, is_query, is_value;
  const float* x;

  // query_width: numbers of each query head, a gate behind it or not.
  template <int head_dim, int query_width, class Arguments>
  static __device__ __forceinline__ NewHead of(const Arguments& a, int64_t row, int wanted) {
    const int num_units = a.num_heads + 2 * a.num_kv_heads, unit = min(wanted, num_units - 1);
    const bool is_query = unit < a.num_heads, is_value = unit >= a.num_heads + a.num_kv_heads;
    const int kv_head = is_value ? unit - a.num_heads - a.num_kv_heads : unit - a.num_heads;
    const float* x = is_query   ? a.query_gate + row * a.query_gate_stride + unit * query_width
                     : is_value ? a.value + row * a.value_stride + kv_head * head_dim
                                : a.key + row * a.key_stride + kv_head * head_dim;
    return {unit, kv_head, wanted >= num_units, is_query, is_value, x};
  }
};

// What is done with a head before its rotation.
struct NewNorm {
  const float* bias;  // added first; null for none
  bool has_norm;
  const float* weight;  // of the norm; null for ones
  float eps;
};

// (x + bias) · (1 / rms) · weight into shared memory: one of the sixteen accumulators a lane.
template <int head_dim>
__device__ __forceinline__ void norm_head(const float* x, const NewNorm& norm, int lane, float* out) {
  constexpr int steps = (head_dim + lanes_per_head - 1) / lanes_per_head;
  float values[steps];
  float squares = 0.0f;
#pragma unroll
  for (int step = 0; step < steps; step++) {
    const int i = step * lanes_per_head + lane;
    values[step] = i < head_dim ? x[i] : 0.0f;
    if (norm.bias && i < head_dim) values[step] += norm.bias[i];
    squares = __fmaf_rn(values[step], values[step], squares);
  }
  const float mean = sum_of_sixteen_lanes(squares, 1) / float(head_dim);
  const float scale = norm.has_norm ? inverse_sqrt(mean + norm.eps) : 1.0f;
#pragma unroll
  for (int step = 0; step < steps; step++) {
    const int i = step * lanes_per_head + lane;
    if (i < head_dim) out[i] = values[step] * scale * (norm.weight ? norm.weight[i] : 1.0f);
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
