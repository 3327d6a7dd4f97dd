// y = x Wᵀ of float weights for 9 to 64 rows of x and several matrices in one launch, as float_many.cu.
//
// There are few outputs, so that a launch takes as long as one block: tiles are small, and the stages of the next
// inputs are on their way while a block multiplies.
#include "linear/float_weights.cuh"

extern __shared__ float4 dynamic_shared[];

namespace coldstream {

constexpr int float_few_threads = 128, float_max_matrices = 8;
constexpr int tile_rows = 16, tile_tokens = 8, stage_values = 128, num_stages = 4;
constexpr int thread_rows = 4, thread_tokens = 4, group_columns = tile_rows / thread_rows;
static_assert(float_few_threads == lanes * group_columns * (tile_tokens / thread_tokens));

// One matrix with adjacent rows of 16 aligned bytes, and its first tile in the grid.
struct FloatMatrix {
  const void* w;
  float* out;  // [tokens, out_stride]
  int out_stride, num_rows, first_tile;
};

struct FloatMatrices {
  FloatMatrix at[float_max_matrices];
  int count;
};

// Rows of 16 aligned bytes.
struct FloatInputs {
  const float* x;
  int stride, num_tokens, num_values;
};

// Inputs of a stage. Of the two groups of a warp, four rows apart, each reads other banks.
template <class weights>
struct FloatStage {
  using storage = typename weights::storage;
  static constexpr int chunk_values = 16 / sizeof(storage);
  float x[tile_tokens][stage_values + 4];
  storage w[tile_rows][stage_values + chunk_values];
};

// Copies `rows` rows of a stage, those past the last one as the last one, without what lies past the end.
template <int rows, typename Value, int pitch>
__device__ __forceinline__ void copy_stage(Value (&to)[rows][pitch], const Value* from, int64_t stride, int first_row,
                                           int num_rows, int first, int num_values) {
  constexpr int chunk = 16 / sizeof(Value), chunks = stage_values / chunk;
#pragma unroll
  for (int i = threadIdx.x; i < rows * chunks; i += float_few_threads) {
    const int row = i / chunks, at = i % chunks * chunk;
    const Value* source = from + min(first_row + row, num_rows - 1) * stride + first + at;
    copy_if_below(num_values - first, at, shared_address(&to[row][at]), source);
  }
}

// The first `count` inputs of a stage. Those past the end are skipped, as adding 0 would turn a sum of −0 into 0;
// in a whole stage, loads need not wait for that decision.
template <class weights, bool is_whole>
__device__ __forceinline__ void add_stage(const FloatStage<weights>& from, int count, int token, int row, int lane,
                                          float (&p)[thread_tokens][thread_rows]) {
#pragma unroll(is_whole ? stage_values / lanes : 1)
  for (int step = 0; step < stage_values; step += lanes) {
    if (!is_whole && step + lane >= count) break;
    float x[thread_tokens], w[thread_rows];
#pragma unroll
    for (int i = 0; i < thread_tokens; i++) x[i] = from.x[token + i][step + lane];
#pragma unroll
    for (int j = 0; j < thread_rows; j++) w[j] = weights::value(from.w[row + j][step + lane]);
#pragma unroll
    for (int i = 0; i < thread_tokens; i++)
#pragma unroll
      for (int j = 0; j < thread_rows; j++) p[i][j] = __fmaf_rn(x[i], w[j], p[i][j]);
  }
}

template <class weights>
__global__ void __launch_bounds__(float_few_threads)
    float_few(const __grid_constant__ FloatMatrices matrices, const __grid_constant__ FloatInputs inputs) {
  using storage = typename weights::storage;
  FloatStage<weights>* const stages = reinterpret_cast<FloatStage<weights>*>(dynamic_shared);
  release_next_grid();
  int which = 0;
  while (which + 1 < matrices.count && int(blockIdx.x) >= matrices.at[which + 1].first_tile) which++;
  const FloatMatrix& matrix = matrices.at[which];
  const int first_row = (blockIdx.x - matrix.first_tile) * tile_rows, first_token = blockIdx.y * tile_tokens;
  const auto copy_w = [&](int stage) {
    copy_stage(stages[stage % num_stages].w, static_cast<const storage*>(matrix.w), inputs.num_values, first_row,
               matrix.num_rows, stage * stage_values, inputs.num_values);
  };
  const auto copy_x = [&](int stage) {
    copy_stage(stages[stage % num_stages].x, inputs.x, inputs.stride, first_token, inputs.num_tokens,
               stage * stage_values, inputs.num_values);
    commit_copies();
  };
  for (int i = 0; i < num_stages - 1; i++) copy_w(i);
  wait_for_previous_grid();
  for (int i = 0; i < num_stages - 1; i++) copy_x(i);

  const int group = threadIdx.x / lanes, lane = threadIdx.x % lanes;
  const int row = group % group_columns * thread_rows, token = group / group_columns * thread_tokens;
  float p[thread_tokens][thread_rows] = {};
  for (int i = 0; i * stage_values < inputs.num_values; i++) {
    wait_for_copies<num_stages - 2>();
    __syncthreads();
    copy_w(i + num_stages - 1);
    copy_x(i + num_stages - 1);
    const int count = inputs.num_values - i * stage_values;
    const FloatStage<weights>& stage = stages[i % num_stages];
    if (count >= stage_values)
      add_stage<weights, true>(stage, count, token, row, lane, p);
    else
      add_stage<weights, false>(stage, count, token, row, lane, p);
  }
  float sums[lanes];
#pragma unroll
  for (int k = 0; k < lanes; k++) sums[k] = p[k / thread_rows][k % thread_rows];
  const float sum = sum_of_lanes(sums, lane);
  const int out_token = first_token + token + lane / thread_rows, out_row = first_row + row + lane % thread_rows;
  if (out_token < inputs.num_tokens && out_row < matrix.num_rows)
    matrix.out[int64_t(out_token) * matrix.out_stride + out_row] = sum;
}

}  // namespace coldstream
