// Routed experts and the shared one for up to 32 tokens: a block reads the weights of an expert once for up
// to eight pairs that chose it. Weights are of integer types.
#include "cuda/products_rows.cuh"
#include "experts/group_rows.cuh"

extern __shared__ float4 dynamic_shared[];

namespace coldstream {

// Blocks on a processor at once, which limit the registers of a thread. Weights in blocks of 32 have a scale
// for each of the blocks that a lane keeps.
constexpr int grouped_blocks(Types types) { return types & block_types ? 3 : 4; }

// The tokens' rows, quantised for weights with super-blocks and as they are for weights in blocks of 32;
// either may be missing.
struct TokenRows {
  const int8_t* q;
  const float* scales;
  const int16_t* sums;
  const float* values;
  int stride;  // of values
  int groups;
};

// A warp's sums of a unit; two turns, so that the warps that read them need not have ended when the next are
// written.
__device__ __forceinline__ RowSums row_sums(uint8_t* memory, const GroupedPlan& plan, int warp, int turn) {
  float* accumulators = reinterpret_cast<float*>(memory + plan.accumulators_at);
  float* sums = reinterpret_cast<float*>(memory + plan.sums_at);
  return {accumulators + warp * plan.item_rows * warp_size,
          sums + (warp * 2 + turn) * plan.item_rows * plan.unit_rows};
}

__device__ __forceinline__ Groups lists_of(uint8_t* memory, const GroupedPlan& plan) {
  return {reinterpret_cast<uint16_t*>(memory + plan.members_at),
          reinterpret_cast<uint16_t*>(memory + plan.items_at)};
}

// The rows of an item for the warp's matrix, in shared memory at `memory`. A matrix of the other kind beside
// it, if there is one, needs another form.
template <Types types>
__device__ __forceinline__ SharedRows stage_item(uint8_t* memory, const Item& item, const TokenRows& x,
                                                 int room, int type, int other_type, int cols) {
  const SharedRows of_blocks = shared_block_rows(memory, room, item.count, x.groups);
  uint8_t* const behind = memory + room * block_row_bytes_of(types) * x.groups;
  const SharedRows of_groups = shared_rows(behind, room, item.count, x.groups);
  const bool is_block = is_block_type<types>(type), is_other_block = is_block_type<types>(other_type);
  if (!is_block || !is_other_block)
    copy_rows(of_groups, x.q, x.scales, x.sums, [&](int t) { return item.token(t); });
  if (is_block || is_other_block)
    quantize_rows<block_elements>(of_blocks, cols,
                                  [&](int t) { return x.values + int64_t(item.token(t)) * x.stride; });
  return is_block ? of_blocks : of_groups;
}

// h = silu(gate x) · (up x) or another gated unit, as `expert_gate_up`.
template <Types types, int unit = swiglu_unit>
__global__ void __launch_bounds__(expert_threads, grouped_blocks(types))
    grouped_gate_up(const __grid_constant__ GateUp matrices, const __grid_constant__ PairRows h,
                    const __grid_constant__ Chosen chosen, const __grid_constant__ TokenRows x,
                    const __grid_constant__ GroupedPlan plan) {
  uint8_t* const memory = reinterpret_cast<uint8_t*>(dynamic_shared);
  const int warp = threadIdx.x / warp_size, team = warp / 2;
  const bool is_up = warp % 2;
  const Scratch scratch(memory, chosen);
  const Groups groups = lists_of(memory, plan);
  clear_scratch(scratch, chosen);
  wait_for_previous_grid();
  // Not earlier: `grouped_down` relies on the ids as soon as it runs.
  release_next_grid();
  const int num_items = group_rows(scratch, chosen, groups, plan.item_rows, matrices.matrix[1].addresses);
  const Ring ring = warp_ring(memory, plan.stage_bytes, plan.stages);
  int turn = 0;
  for_each_part(
      groups, num_items, chosen, plan, matrices.matrix[0].shape, [&](const Item& item, int begin, int end) {
        const MatrixShape& shape = matrices.matrix[is_up].shape[item.is_shared()];
        const uint8_t* gate = item.data_of(matrices.matrix[0], chosen);
        const uint8_t* up = item.data_of(matrices.matrix[1], chosen);
        const bool is_here = gate != nullptr && up != nullptr;
        const Work work = {shape, is_up ? up : gate, is_here ? end : 0, begin + team, expert_warps / 2};
        const SharedRows rows =
            stage_item<types>(memory + plan.rows_at, item, x, plan.item_rows, shape.type,
                              matrices.matrix[!is_up].shape[item.is_shared()].type, shape.num_cols);
        const Cursor ahead = fill_ring(work, ring);
        ring.wait_for_earlier_copies();
        __syncthreads();
        const int expert = unit == swiglu_unit || item.is_shared() ? -1 : chosen.ids[item.members[0]];
        RowSums kept = row_sums(memory, plan, warp, turn);
        multiply_rows<types>(work, ring, ahead, rows, kept, [&](int first_row) {
          sync_pair(team);
          const float* gates = row_sums(memory, plan, warp - 1, turn).sums;
          if (is_up)
            for_each_sum(shape, item.count, first_row, [&](int t, int row, int i) {
              item.row_of(h, t, shape.num_rows)[row] =
                  gated<unit>(matrices, expert, shape.num_rows, row, gates[i], kept.sums[i]);
            });
          turn ^= 1;  // the other warp may still read
          kept = row_sums(memory, plan, warp, turn);
        });
        __syncthreads();
      });
}

// The down projection of every h, which is quantised on the way. Launched right behind `grouped_gate_up`.
template <Types types>
__global__ void __launch_bounds__(expert_threads, grouped_blocks(types))
    grouped_down(const __grid_constant__ Down matrices, const __grid_constant__ PairRows h,
                 const __grid_constant__ PairRows out, const __grid_constant__ Chosen chosen,
                 const __grid_constant__ GroupedPlan plan) {
  uint8_t* const memory = reinterpret_cast<uint8_t*>(dynamic_shared);
  release_next_grid();
  const int warp = threadIdx.x / warp_size;
  const Scratch scratch(memory, chosen);
  const Groups groups = lists_of(memory, plan);
  clear_scratch(scratch, chosen);
  const int num_items = group_rows(scratch, chosen, groups, plan.item_rows, nullptr);
  const Ring ring = warp_ring(memory, plan.stage_bytes, plan.stages);
  bool has_waited = false;
  for_each_part(groups, num_items, chosen, plan, matrices.down.shape,
                [&](const Item& item, int begin, int end) {
                  const MatrixShape& shape = matrices.down.shape[item.is_shared()];
                  const uint8_t* down = item.data_of(matrices.down, chosen);
                  const Work work = {shape, down, down == nullptr ? 0 : end, begin + warp, expert_warps};
                  const Cursor ahead = fill_ring(work, ring);
                  if (!has_waited) wait_for_previous_grid();
                  has_waited = true;
                  const int cols = shape.num_cols, num_groups = (cols + group_elements - 1) / group_elements;
                  const auto row_at = [&](int t) { return item.row_of(h, t, cols); };
                  SharedRows rows;
                  if (is_block_type<types>(shape.type)) {
                    rows = shared_block_rows(memory + plan.rows_at, plan.item_rows, item.count, num_groups);
                    quantize_rows<block_elements>(rows, cols, row_at);
                  } else {
                    rows = shared_rows(memory + plan.rows_at, plan.item_rows, item.count, num_groups);
                    quantize_rows<group_elements>(rows, cols, row_at);
                  }
                  __syncthreads();
                  RowSums kept = row_sums(memory, plan, warp, 0);
                  multiply_rows<types>(work, ring, ahead, rows, kept, [&](int first_row) {
                    for_each_sum(shape, item.count, first_row, [&](int t, int row, int i) {
                      item.row_of(out, t, shape.num_rows)[row] = kept.sums[i];
                    });
                  });
                  __syncthreads();
                });
  // Who waits for this kernel relies on what was before it too.
  if (!has_waited) wait_for_previous_grid();
}

}  // namespace coldstream
