// As merge.cu, with the same bits, for rows whose chunks are already merged, such as those of prompts. A warp
// takes 256 columns of a row, or of heads of 512 twice as many, and a lane eight adjacent ones of each 256,
// so that no warp waits for another.
#include "attention/merge.cuh"
#include "attention/rotation.cuh"

namespace coldstream {

constexpr int finish_warps = 4;
constexpr int lane_columns = group_elements / warp_size;

// `rotate_head` undone for the lane's columns of all groups, and its factor.
template <int head_dim, int groups>
__device__ __forceinline__ void rotate_back(float (&x)[groups][lane_columns]) {
  constexpr int size = head_dim & -head_dim;
#pragma unroll
  for (int group = 0; group < groups; group++) {
#pragma unroll
    for (int stride = 1; stride < size && stride < lane_columns; stride *= 2) rotate_own(x[group], stride);
#pragma unroll
    for (int stride = lane_columns; stride < size && stride < group_elements; stride *= 2)
      rotate_lanes(x[group], stride / lane_columns);
  }
  if constexpr (size > group_elements) {
#pragma unroll
    for (int i = 0; i < lane_columns; i++) {
      float pair[2] = {x[0][i], x[1][i]};
      rotate_own(pair, 1);
      x[0][i] = pair[0], x[1][i] = pair[1];
    }
  }
#pragma unroll
  for (int group = 0; group < groups; group++) {
#pragma unroll
    for (float& value : x[group]) value *= 1.0f / size;
  }
}

__device__ __forceinline__ void store_columns(float* to, const float (&x)[lane_columns]) {
  reinterpret_cast<float4*>(to)[0] = make_float4(x[0], x[1], x[2], x[3]);
  reinterpret_cast<float4*>(to)[1] = make_float4(x[4], x[5], x[6], x[7]);
}

// Gates and positions were written before the previous launch began, so that they may be read before that
// launch has ended.
template <int head_dim, OutputGate gate, bool has_sinks>
__global__ void __launch_bounds__((finish_warps * warp_size)) attention_finish(const MergeArguments a) {
  constexpr int groups = groups_together<head_dim>, warp_columns = groups * group_elements;
  const int num_columns = a.num_heads * head_dim,
            num_items = (num_columns + warp_columns - 1) / warp_columns;  // of a row
  const int warp = threadIdx.x / warp_size, lane = threadIdx.x % warp_size;
  const int item = blockIdx.x * finish_warps + warp, row = item / num_items, of_row = item % num_items;
  const bool is_item = row < a.num_rows;
  // The lane's first one; those of the other groups follow at distances of a group.
  const int first_column = of_row * warp_columns,
            column = min(first_column + lane * lane_columns, num_columns - lane_columns);
  const int position = is_item ? a.positions[row] : -1;
  HeadEnd<head_dim, gate, lane_columns> ends[groups];
#pragma unroll
  for (int group = 0; group < groups; group++)
    ends[group].load(a, is_item ? row : 0, column + group * group_elements);
  wait_for_previous_grid();
  release_next_grid();
  if (!is_item) return;
  float results[groups][lane_columns] = {};
  if (position >= 0) {
    const int64_t head = int64_t{row} * a.num_heads + column / head_dim;
    float2 stats = a.stats[head];
#pragma unroll
    for (int group = 0; group < groups; group++)
      load_columns(a.values + head * head_dim + column % head_dim + group * group_elements, results[group]);
    if constexpr (has_sinks) {
      const float sink = a.sinks[column / head_dim], greatest = fmaxf(stats.x, sink);
      const float ours = exact_exp(stats.x - greatest);
      stats.y = stats.y * ours + exact_exp(sink - greatest);
#pragma unroll
      for (int i = 0; i < groups * lane_columns; i++) results[i / lane_columns][i % lane_columns] *= ours;
    }
    const float factor = 1.0f / stats.y;
#pragma unroll
    for (int i = 0; i < groups * lane_columns; i++) results[i / lane_columns][i % lane_columns] *= factor;
  }
  rotate_back<head_dim>(results);
#pragma unroll
  for (int group = 0; group < groups; group++) ends[group].apply(results[group]);
  const bool exists = first_column + lane * lane_columns < num_columns;
#pragma unroll
  for (int group = 0; group < groups; group++) {
    float (&result)[lane_columns] = results[group];
    const int own_column = column + group * group_elements;
    if (a.out && exists) store_columns(a.out + int64_t{row} * num_columns + own_column, result);
    if (!a.codes) continue;
#pragma unroll
    for (float& value : result) value = exists ? value : 0.0f;
    store_group(quantize_group(result), quant_row(a.codes, a.scales, a.sums, row, num_items * warp_columns),
                of_row * groups + group);
  }
}

}  // namespace coldstream
