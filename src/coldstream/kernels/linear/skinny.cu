// y = x · Wᵀ for up to 64 rows of x and several matrices in one launch: every weight is read once, or once
// for each part of the rows.
#include "cuda/products_rows.cuh"
#include "linear/skinny.cuh"

extern __shared__ float4 dynamic_shared[];

namespace coldstream {

template <Types types>
__global__ void __launch_bounds__(linear_threads, 3)
    linear_one(const __grid_constant__ LinearMatrices matrices, const __grid_constant__ LinearInputs x,
               int stage_bytes, int stages) {
  uint8_t* const memory = reinterpret_cast<uint8_t*>(dynamic_shared);
  release_next_grid();
  multiply_by_warps<types, 1>(matrices.at[this_matrix(matrices)], x, 0, memory, stage_bytes, stages);
}

// One row with a few long rows of super-blocks: a block takes a unit, and each of its warps one pass. Only
// the sums of floats follow one another, by the first warp. silu_divisor: the results of the first matrix are
// silu(y / divisor); 0 for y.
template <Types types>
__global__ void __launch_bounds__(linear_threads, 2)
    linear_wide(const __grid_constant__ LinearMatrices matrices, const __grid_constant__ LinearInputs x,
                int stage_bytes, int terms_at, float silu_divisor) {
  uint8_t* const memory = reinterpret_cast<uint8_t*>(dynamic_shared);
  release_next_grid();
  const LinearMatrix& matrix = matrices.at[this_matrix(matrices)];
  const MatrixShape& shape = matrix.shape;
  const Work work = share_units(matrix, false);
  const int warp = threadIdx.x / warp_size, lane = threadIdx.x % warp_size,
            first = work.first_unit * shape.unit_rows;
  uint32_t* const grids = reinterpret_cast<uint32_t*>(memory);
  uint8_t* const stages = memory + grid_bytes<types, linear_grid_room>;
  uint8_t* const own = stages + warp * stage_bytes;
  const bool has_pass = warp < shape.num_passes;
  if (has_pass) stage(own, shape, work.data, work.first_unit, warp);
  commit_copies();
  keep_grids<types, linear_grid_room>(grids);
  wait_for_previous_grid();
  const SharedRow row = shared_row(stages + linear_warps * stage_bytes, x.groups);
  copy_row(row, x.q, x.scales, x.sums);
  wait_for_copies<0>();
  __syncthreads();
  SuperBlockTerms* const terms = reinterpret_cast<SuperBlockTerms*>(memory + terms_at);
  const uint64_t from = reinterpret_cast<uint64_t>(work.data) + int64_t(first) * shape.row_bytes;
  const Staged staged = {own, uint32_t(from) + warp * shape.pass_bytes, shape.stage_stride, shape.row_bytes};
  const auto multiply_pass = [&](auto weights) {
    using Weights = decltype(weights);
    if constexpr (Weights::is_super)
      terms[threadIdx.x] = terms_of_pass<Weights>(staged, LanePlace(shape, warp, row.groups), row,
                                                  grid_of<types, Weights, linear_grid_room>(grids));
  };
  if (has_pass) with_weights<types>(shape.type, multiply_pass);
  __syncthreads();
  if (warp > 0) return;
  float p = 0.0f;
  const auto add_passes = [&](auto weights) {
    for (int pass = 0; pass < shape.num_passes; pass++) {
      if (!LanePlace(shape, pass, row.groups).exists) continue;
      p = terms[pass * warp_size + lane].template added_to<decltype(weights)>(p);
    }
  };
  with_weights<types>(shape.type, add_passes);
  p = sum_up_groups(p, shape.spread);
  if (silu_divisor != 0.0f && matrix.first_block == 0) p = exact_silu(p / silu_divisor);
  const LaneRow found(shape);
  if (found.writes && first + found.row < shape.num_rows) matrix.store(0, first + found.row, p);
}

// Up to eight rows, of which a warp multiplies one after the other with the codes that it has unpacked.
template <Types types>
__global__ void __launch_bounds__(linear_threads, 2)
    linear_rows(const __grid_constant__ LinearMatrices matrices, const __grid_constant__ LinearInputs all,
                int stage_bytes, int value_stage_bytes, int stages, int accumulators_at, int sums_at,
                int sums_bytes) {
  uint8_t* const memory = reinterpret_cast<uint8_t*>(dynamic_shared);
  release_next_grid();
  const LinearMatrix& matrix = matrices.at[this_matrix(matrices)];
  const MatrixShape& shape = matrix.shape;
  if (is_float<types>(shape.type)) {
    constexpr Types floats = types & float_types;
    return multiply_by_warps<floats, 8>(matrix, all.part(), all.first_row(), memory, value_stage_bytes,
                                        stages);
  }
  const int warp = threadIdx.x / warp_size;
  const Work work = share_units(matrix, true);
  const Ring ring = {memory + warp * stages * stage_bytes, stage_bytes, stages};
  const Cursor ahead = fill_ring(work, ring);
  wait_for_previous_grid();
  const LinearInputs x = all.part();
  uint8_t* const behind = memory + linear_warps * stages * stage_bytes;
  SharedRows rows = shared_rows(behind, all.part_rows, x.num_rows, x.groups);
  if (is_block_type<types>(shape.type)) {
    rows = shared_block_rows(behind, all.part_rows, x.num_rows, x.groups);
    quantize_rows<block_elements>(rows, shape.num_cols,
                                  [&](int t) { return x.values + int64_t(t) * x.stride; });
  } else {
    copy_rows(rows, x.q, x.scales, x.sums, [](int t) { return t; });
    wait_for_copies<0>();
  }
  __syncthreads();
  RowSums kept = {reinterpret_cast<float*>(memory + accumulators_at) + warp * all.part_rows * warp_size,
                  reinterpret_cast<float*>(memory + sums_at + warp * sums_bytes)};
  multiply_rows<types>(work, ring, ahead, rows, kept, [&](int first_row) {
    for_each_sum(shape, x.num_rows, first_row,
                 [&](int t, int row, int i) { matrix.store(all.first_row() + t, row, kept.sums[i]); });
  });
}

// Matrices of floats, of which one at least is large, with up to eight rows.
template <Types types>
__global__ void __launch_bounds__(linear_threads, 2)
    linear_floats(const __grid_constant__ LinearMatrices matrices, const __grid_constant__ LinearInputs all) {
  release_next_grid();
  multiply_floats<types, 1>(matrices.at[this_matrix(matrices)], all,
                            reinterpret_cast<uint8_t*>(dynamic_shared));
}

// Blocks on a processor at once, which limit the registers of a thread.
constexpr int tile_blocks(int slices, int sets) {
  return sets > 1 ? 1 : slices <= 2 ? 3 : slices <= 4 ? 2 : 1;
}

// Two rows or more, up to `slices` times eight for each set of warps in a part. `value_stage_bytes` is for
// the rings of float matrices with up to eight rows.
template <Types types, int slices, int sets>
__global__ void __launch_bounds__((sets * tile_threads), tile_blocks(slices, sets))
    linear_skinny(const __grid_constant__ LinearMatrices matrices, const __grid_constant__ LinearInputs all,
                  int stage_bytes, int value_stage_bytes, int stages) {
  uint8_t* const memory = reinterpret_cast<uint8_t*>(dynamic_shared);
  release_next_grid();
  const LinearMatrix& matrix = matrices.at[this_matrix(matrices)];
  if (is_float<types>(matrix.shape.type))
    return multiply_any_floats<types, slices * sets>(matrix, all, memory, value_stage_bytes, stages);
  const Work work = share_units(matrix, false);
  const Ring ring = {memory, stage_bytes, stages};
  const Cursor ahead = fill_tile_ring(work, ring);
  wait_for_previous_grid();
  const LinearInputs x = all.part();
  float* partial = reinterpret_cast<float*>(memory + stages * stage_bytes);
  uint8_t* behind = reinterpret_cast<uint8_t*>(partial + slices * sets * 4 * tile_threads);
  TileRows rows = tile_rows(behind, x.num_rows, x.groups);
  if (is_block_type<types>(matrix.shape.type)) {
    rows = tile_block_rows(behind, x.num_rows, x.groups);
    quantize_tile_rows(rows, x.values, x.stride, matrix.shape.num_cols);
  } else {
    copy_tile_rows(rows, x.q, x.scales, x.sums);
  }
  multiply_tiles_skinny<types, slices, sets>(work, ring, ahead, rows, partial, [&](int row, int t, float y) {
    if (row < matrix.shape.num_rows && t < x.num_rows) matrix.store(all.first_row() + t, row, y);
  });
}

}  // namespace coldstream
