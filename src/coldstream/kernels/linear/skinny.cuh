// What the kernels of products with up to 64 rows are given, and their products with matrices of floats.
#pragma once

#include "cuda/products_tiles.cuh"
#include "linear/float_tiles.cuh"

namespace coldstream {

constexpr int linear_warps = 8;
constexpr int linear_threads = linear_warps * warp_size;
constexpr int linear_max_matrices = 8;
constexpr int linear_grid_room = 32 << 10;  // most bytes for the copies of a grid

// One matrix, and its blocks of the grid.
struct LinearMatrix {
  const uint8_t* weight;
  float* out;  // [T, out_stride]
  int out_stride;
  int first_block;
  int num_blocks;
  MatrixShape shape;

  __device__ __forceinline__ void store(int t, int row, float y) const {
    out[int64_t(t) * out_stride + row] = y;
  }
};

struct LinearMatrices {
  LinearMatrix at[linear_max_matrices];
  int count;
};

// The rows of x, quantised for types with super-blocks and as they are, for all others; either may be
// missing.
struct LinearInputs {
  const int8_t* q;
  const float* scales;
  const int16_t* sums;
  const float* values;
  int stride;  // of values
  int num_rows;
  int groups;
  int part_rows;  // that a block takes: those from blockIdx.y * part_rows on

  __device__ __forceinline__ int first_row() const { return blockIdx.y * part_rows; }

  // The block's part.
  __device__ __forceinline__ LinearInputs part() const {
    const int64_t first = first_row(), first_group = first * groups;
    LinearInputs own = *this;
    own.q += first_group * group_elements;
    own.scales += first_group;
    own.sums += first_group * (group_elements / sum_elements);
    own.values += first * stride;
    own.num_rows = min(part_rows, num_rows - int(first));
    return own;
  }
};

__device__ __forceinline__ int this_matrix(const LinearMatrices& matrices) {
  int which = 0;
  while (which + 1 < matrices.count && int(blockIdx.x) >= matrices.at[which + 1].first_block) which++;
  return which;
}

// Units by warps of all blocks of the matrix, or by blocks.
__device__ __forceinline__ Work share_units(const LinearMatrix& matrix, bool by_warps) {
  Work work;
  work.shape = matrix.shape;
  work.data = matrix.weight;
  work.num_units = (matrix.shape.num_rows + matrix.shape.unit_rows - 1) / matrix.shape.unit_rows;
  work.first_unit = blockIdx.x - matrix.first_block;
  work.unit_stride = matrix.num_blocks;
  if (by_warps) {
    work.first_unit += threadIdx.x / warp_size * matrix.num_blocks;
    work.unit_stride *= linear_warps;
  }
  return work;
}

// One warp a unit: all types for one row, and float types for up to T, of which the first is row `first_row`.
template <Types types, int T>
__device__ __forceinline__ void multiply_by_warps(const LinearMatrix& matrix, const LinearInputs& x,
                                                  int first_row, uint8_t* memory, int stage_bytes,
                                                  int stages) {
  constexpr Types kept = T == 1 ? types : 0;
  uint32_t* const grids = reinterpret_cast<uint32_t*>(memory);
  memory += grid_bytes<kept, linear_grid_room>;
  const Work work = share_units(matrix, true);
  const Ring ring = {memory + threadIdx.x / warp_size * stages * stage_bytes, stage_bytes, stages};
  const Cursor ahead = fill_ring(work, ring);
  keep_grids<kept, linear_grid_room>(grids);
  wait_for_previous_grid();
  uint8_t* behind = memory + linear_warps * stages * stage_bytes;
  const int type = matrix.shape.type, cols = matrix.shape.num_cols;
  const bool is_block = is_block_type<types>(type);
  const Inputs inputs = {shared_row(behind, x.groups), x.values, x.stride, x.num_rows, grids};
  if (is_float<types>(type)) {
    warm_values(x.values, x.stride, x.num_rows, cols);
  } else if (is_block) {
    quantize_lone_into<types>({behind, x.groups}, GroupsAhead(x.values, x.groups, cols));
  } else {
    copy_row(inputs.quantized, x.q, x.scales, x.sums);
  }
  __syncthreads();
  multiply<types, T, linear_grid_room>(work, ring, ahead, inputs, [&](int row, const float (&y)[T]) {
    if (row >= matrix.shape.num_rows) return;
#pragma unroll
    for (int t = 0; t < T; t++)
      if (t < x.num_rows) matrix.store(first_row + t, row, y[t]);
  });
}

// A tile of a matrix of floats, whose blocks take the tiles of the part's rows side by side.
template <Types types, int slices>
__device__ __forceinline__ void multiply_floats(const LinearMatrix& matrix, const LinearInputs& all,
                                                uint8_t* memory) {
  const MatrixShape& shape = matrix.shape;
  const LinearInputs x = all.part();
  constexpr int tile_rows = float_tile_rows(slices);
  const int row_tiles = (shape.num_rows + tile_rows - 1) / tile_rows;
  const int index = blockIdx.x - matrix.first_block;
  const FloatTile tile = {matrix.weight,
                          x.values,
                          x.stride,
                          shape.num_rows,
                          x.num_rows,
                          shape.num_cols,
                          index % row_tiles * tile_rows,
                          index / row_tiles * float_tile_tokens(slices)};
  const auto finish = [&](int row, int t, float y) {
    if (row < shape.num_rows && t < x.num_rows) matrix.store(all.first_row() + t, row, y);
  };
  if (is_type<types, f32>(shape.type)) multiply_float_tile<float, slices>(tile, memory, finish);
  if (is_type<types, f16>(shape.type)) multiply_float_tile<Half, slices>(tile, memory, finish);
  if (is_type<types, bf16>(shape.type)) multiply_float_tile<Bfloat16, slices>(tile, memory, finish);
}

// A block's part of a matrix of floats, by its first eight warps.
template <Types types, int slices>
__device__ __forceinline__ void multiply_any_floats(const LinearMatrix& matrix, const LinearInputs& all,
                                                    uint8_t* memory, int value_stage_bytes, int stages) {
  constexpr Types floats = types & float_types;
  if (threadIdx.x >= linear_threads) return;
  if constexpr (slices == 1)
    multiply_by_warps<floats, 8>(matrix, all.part(), all.first_row(), memory, value_stage_bytes, stages);
  else
    multiply_floats<types, slices>(matrix, all, memory);
}

}  // namespace coldstream
