// As merge.cu, with the same bits, for rows whose chunks are already merged, such as those of prompts. A warp
// takes 256 columns of a row and a lane eight adjacent ones, so that no warp waits for another.
#include "attention/merge.cuh"
#include "attention/rotation.cuh"

namespace coldstream {

constexpr int finish_warps = 4;
constexpr int lane_columns = group_elements / warp_size;

// `rotate_head` undone for the lane's columns, and its factor.
template <int head_dim>
__device__ __forceinline__ void rotate_back(float (&x)[lane_columns]) {
  constexpr int size = head_dim & -head_dim;
#pragma unroll
  for (int stride = 1; stride < size && stride < lane_columns; stride *= 2) rotate_own(x, stride);
#pragma unroll
  for (int stride = lane_columns; stride < size; stride *= 2) rotate_lanes(x, stride / lane_columns);
#pragma unroll
  for (float& value : x) value *= 1.0f / size;
}

__device__ __forceinline__ void store_columns(float* to, const float (&x)[lane_columns]) {
  reinterpret_cast<float4*>(to)[0] = make_float4(x[0], x[1], x[2], x[3]);
  reinterpret_cast<float4*>(to)[1] = make_float4(x[4], x[5], x[6], x[7]);
}

// Gates and positions were written before the previous launch began, so that they may be read before that
// launch has ended.
template <int head_dim, OutputGate gate, bool has_sinks>
__global__ void __launch_bounds__((finish_warps * warp_size)) attention_finish(const MergeArguments a) {
  const int num_columns = a.num_heads * head_dim,
            num_groups = (num_columns + group_elements - 1) / group_elements;
  const int warp = threadIdx.x / warp_size, lane = threadIdx.x % warp_size;
  const int item = blockIdx.x * finish_warps + warp, row = item / num_groups, group = item % num_groups;
  const bool is_item = row < a.num_rows;
  const int first_column = group * group_elements,
            column = min(first_column + lane * lane_columns, num_columns - lane_columns);
  const int position = is_item ? a.positions[row] : -1;
  const HeadEnd<head_dim, gate, lane_columns> end(a, is_item ? row : 0, column);
  wait_for_previous_grid();
  release_next_grid();
  if (!is_item) return;
  float result[lane_columns] = {};
  if (position >= 0) {
    const int64_t head = int64_t{row} * a.num_heads + column / head_dim;
    float2 stats = a.stats[head];
    load_columns(a.values + head * head_dim + column % head_dim, result);
    if constexpr (has_sinks) {
      const float sink = a.sinks[column / head_dim], greatest = fmaxf(stats.x, sink);
      const float ours = exact_exp(stats.x - greatest);
      stats.y = stats.y * ours + exact_exp(sink - greatest);
#pragma unroll
      for (float& value : result) value *= ours;
    }
    const float factor = 1.0f / stats.y;
#pragma unroll
    for (float& value : result) value *= factor;
  }
  rotate_back<head_dim>(result);
  end.apply(result);
  const bool exists = first_column + lane * lane_columns < num_columns;
  if (a.out && exists) store_columns(a.out + int64_t{row} * num_columns + column, result);
  if (!a.codes) return;
#pragma unroll
  for (float& value : result) value = exists ? value : 0.0f;
  store_group(quantize_group(result), quant_row(a.codes, a.scales, a.sums, row, num_groups * group_elements),
              group);
}

}  // namespace coldstream
