// y = x · Wᵀ as skinny.cu has it, for rows of x too wide for the shared memory of a block.
#include "cuda/products_parts.cuh"
#include "linear/skinny.cuh"

extern __shared__ float4 dynamic_shared[];

namespace coldstream {

// The rows quantised for weights in blocks of 32.
struct BlockRows {
  const int8_t* q;
  const float* scales;
};

// Blocks on a processor at once, which limit the registers of a thread.
constexpr int part_blocks(int slices, int sets) { return sets > 1 ? 1 : slices == 1 ? 3 : 2; }

template <Types types, int slices, int sets>
__global__ void __launch_bounds__((sets * tile_threads), part_blocks(slices, sets))
    linear_parts(const __grid_constant__ LinearMatrices matrices, const __grid_constant__ LinearInputs all,
                 const __grid_constant__ BlockRows of_blocks, int stage_bytes, int rows_at,
                 int value_stage_bytes, int stages) {
  uint8_t* const memory = reinterpret_cast<uint8_t*>(dynamic_shared);
  release_next_grid();
  const LinearMatrix& matrix = matrices.at[this_matrix(matrices)];
  if (is_float<types>(matrix.shape.type))
    return multiply_any_floats<types, slices * sets>(matrix, all, memory, value_stage_bytes, stages);
  const Work work = share_units(matrix, false);
  const Ring ring = {memory, stage_bytes, stages};
  float* partial = reinterpret_cast<float*>(memory + stages * stage_bytes);
  const auto source = [&]() -> PartSource {
    const LinearInputs x = all.part();
    if (is_block_type<types>(matrix.shape.type)) {
      const int64_t first = int64_t(all.first_row()) * x.groups;
      return {of_blocks.q + first * group_elements,
              reinterpret_cast<const uint8_t*>(of_blocks.scales + first * scales_in_group), nullptr, x.groups,
              x.num_rows};
    }
    return {x.q, reinterpret_cast<const uint8_t*>(x.sums), x.scales, x.groups, x.num_rows};
  };
  multiply_parts<types, slices, sets>(work, ring, rows_at, partial, source, [&](int row, int t, float y) {
    if (row < matrix.shape.num_rows && t < all.num_rows - all.first_row() && t < all.part_rows)
      matrix.store(all.first_row() + t, row, y);
  });
}

}  // namespace coldstream
