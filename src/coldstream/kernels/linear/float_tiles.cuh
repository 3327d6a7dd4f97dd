// Products of float weights with up to 64 rows of activations, as float_gemm.cu in small tiles: there are few
// outputs, so that they take as long as one tile, and the stages of the next inputs are on their way while a
// block multiplies. All threads of a block copy, and some of them multiply.
#pragma once

#include "cuda/products_gemv.cuh"
#include "linear/float_lanes.cuh"

namespace coldstream {

constexpr int float_tile_threads = 256, stage_values = 128;
constexpr int thread_rows = 4, thread_tokens = 4;

constexpr int float_tile_tokens(int slices) { return slices == 1 ? 8 : 16; }

// Fewer rows of weights give more multiprocessors a tile, more leave more blocks for matrices of integers,
// which with more slices of activations have a multiprocessor each. One slice has tiles in a kernel of its
// own, for large matrices.
constexpr int float_tile_rows(int slices) { return slices == 1 ? 32 : slices == 2 ? 4 : 16; }
template <typename Value>
constexpr int float_stages(int slices) {
  return slices == 2 || (slices == 1 && sizeof(Value) == 2) ? 6 : 4;
}

// What a block multiplies: rows of 16 aligned bytes, [num_rows, num_values] of weights, [num_tokens, stride]
// of x.
struct FloatTile {
  const uint8_t* weight;
  const float* x;
  int stride, num_rows, num_tokens, num_values;
  int first_row, first_token;
};

// Inputs of a stage. Of the two groups of a warp, four rows or tokens apart, each reads other banks.
template <typename Value, int slices>
struct FloatStage {
  static constexpr int chunk_values = 16 / sizeof(Value), rows = float_tile_rows(slices);
  float x[float_tile_tokens(slices)][stage_values + 4];
  Value w[rows][stage_values + chunk_values];
};

// Copies `rows` rows of a stage, without what lies past the last one and past the end: nobody reads sums of
// that. Many copies of the last row instead would wait for each other.
template <int rows, typename Value, int pitch>
__device__ __forceinline__ void copy_float_stage(Value (&to)[rows][pitch], const Value* from, int64_t stride,
                                                 int first_row, int num_rows, int first, int num_values) {
  constexpr int chunk = 16 / sizeof(Value), chunks = stage_values / chunk;
#pragma unroll
  for (int i = threadIdx.x; i < rows * chunks; i += float_tile_threads) {
    const int row = i / chunks, at = i % chunks * chunk;
    const Value* source = from + (first_row + row) * stride + first + at;
    copy_if_below(first_row + row < num_rows ? num_values - first : 0, at, shared_address(&to[row][at]),
                  source);
  }
}

// The first `count` inputs of a stage. Those past the end are skipped, as adding 0 would turn a sum of −0
// into 0; in a whole stage, loads need not wait for that decision.
template <bool is_whole, typename Value, int slices>
__device__ __forceinline__ void add_float_stage(const FloatStage<Value, slices>& from, int count, int token,
                                                int row, int lane, float (&p)[thread_tokens][thread_rows]) {
#pragma unroll(is_whole ? stage_values / lanes : 1)
  for (int step = 0; step < stage_values; step += lanes) {
    if (!is_whole && step + lane >= count) break;
    float x[thread_tokens], w[thread_rows];
#pragma unroll
    for (int i = 0; i < thread_tokens; i++) x[i] = from.x[token + i][step + lane];
#pragma unroll
    for (int j = 0; j < thread_rows; j++) w[j] = to_float(from.w[row + j][step + lane]);
#pragma unroll
    for (int i = 0; i < thread_tokens; i++)
#pragma unroll
      for (int j = 0; j < thread_rows; j++) p[i][j] = __fmaf_rn(x[i], w[j], p[i][j]);
  }
}

// One tile by the whole block: finish(row of the matrix, t, sum), also for rows and tokens past the last
// ones. Waits for the previous grid.
template <typename Value, int slices, typename Finish>
__device__ __forceinline__ void multiply_float_tile(const FloatTile& tile, uint8_t* memory, Finish&& finish) {
  constexpr int tile_rows = float_tile_rows(slices), num_stages = float_stages<Value>(slices);
  constexpr int group_columns = tile_rows / thread_rows;
  constexpr int multiplying_threads = lanes * group_columns * (float_tile_tokens(slices) / thread_tokens);
  static_assert(multiplying_threads <= float_tile_threads && multiplying_threads % warp_size == 0);
  using Stage = FloatStage<Value, slices>;
  Stage* const stages = reinterpret_cast<Stage*>(memory);
  const auto copy_w = [&](int stage) {
    copy_float_stage(stages[stage % num_stages].w, reinterpret_cast<const Value*>(tile.weight),
                     tile.num_values, tile.first_row, tile.num_rows, stage * stage_values, tile.num_values);
  };
  const auto copy_x = [&](int stage) {
    copy_float_stage(stages[stage % num_stages].x, tile.x, tile.stride, tile.first_token, tile.num_tokens,
                     stage * stage_values, tile.num_values);
    commit_copies();
  };
  for (int i = 0; i < num_stages - 1; i++) copy_w(i);
  wait_for_previous_grid();
  for (int i = 0; i < num_stages - 1; i++) copy_x(i);

  const int group = threadIdx.x / lanes, lane = threadIdx.x % lanes;
  const int row = group % group_columns * thread_rows, token = group / group_columns * thread_tokens;
  const bool multiplies = threadIdx.x < multiplying_threads;
  float p[thread_tokens][thread_rows] = {};
  for (int i = 0; i * stage_values < tile.num_values; i++) {
    wait_for_copies<num_stages - 2>();
    __syncthreads();
    copy_w(i + num_stages - 1);
    copy_x(i + num_stages - 1);
    if (!multiplies) continue;
    const int count = tile.num_values - i * stage_values;
    const Stage& stage = stages[i % num_stages];
    if (count >= stage_values)
      add_float_stage<true>(stage, count, token, row, lane, p);
    else
      add_float_stage<false>(stage, count, token, row, lane, p);
  }
  if (!multiplies) return;
  float sums[lanes];
#pragma unroll
  for (int k = 0; k < lanes; k++) sums[k] = p[k / thread_rows][k % thread_rows];
  const float sum = sum_of_lanes(sums, lane);
  finish(tile.first_row + row + lane % thread_rows, tile.first_token + token + lane / thread_rows, sum);
}

}  // namespace coldstream
