// Routed experts and the shared one for few tokens. Every (token, rank) pair has blocks of its own,
// and behind a token's ranks comes its shared expert. Routed experts are found through tables of addresses;
// the pairs of an expert with the address 0 are left out.
#include "experts/gemv.cuh"

extern __shared__ float4 dynamic_shared[];

namespace coldstream {

// Blocks on a processor at once, which limit the registers of a thread. A launch reads one or two types; code
// for more than three needs more registers, and would spill.
constexpr int expert_blocks(Types types, int warps) {
  int num_types = 0;
  for (; types != 0; types &= types - 1) num_types++;
  return (num_types > 3 ? 4 : 6) * expert_warps / warps;
}

struct Pair {
  int token, rank;
  bool is_shared;
};

__device__ __forceinline__ Pair this_pair(int num_ranks, int pairs_per_token) {
  const int token = blockIdx.y / pairs_per_token, rank = blockIdx.y - token * pairs_per_token;
  return {token, rank, rank == num_ranks};
}

__device__ __forceinline__ float* row_of(const PairRows& rows, const Pair& pair, int num_ranks, int width) {
  return pair.is_shared ? rows.shared + int64_t(pair.token) * width
                        : rows.routed + (int64_t(pair.token) * num_ranks + pair.rank) * width;
}

__device__ __forceinline__ const uint8_t* data_of(const ExpertMatrix& matrix, const Pair& pair,
                                                  const int* ids, int num_ranks) {
  if (pair.is_shared) return matrix.shared;
  return reinterpret_cast<const uint8_t*>(matrix.addresses[ids[pair.token * num_ranks + pair.rank]]);
}

// Units of a matrix by teams of warps: team `team` of `num_teams` in the block; whose bytes are not known
// yet. The first blocks of a pair may have a unit more than its last ones. Pairs begin `pair_step` blocks
// apart, so that not all of these are on the same processors.
__device__ __forceinline__ Work share_units(const MatrixShape& shape, int team, int num_teams,
                                            int pair_step) {
  const int num_units = (shape.num_rows + shape.unit_rows - 1) / shape.unit_rows;
  const int num_blocks = gridDim.x, turned = blockIdx.x + pair_step * blockIdx.y;
  const int block = turned < num_blocks ? turned : turned - num_blocks;
  return {shape, nullptr, num_units, team * num_blocks + block, num_blocks * num_teams};
}

// The units of a matrix at `data`; of none if that is null.
__device__ __forceinline__ Work work_at(const uint8_t* data, Work work) {
  work.data = data;
  if (data == nullptr) work.num_units = 0;
  return work;
}

// Has the addresses of a pair's matrices near when its expert is known.
__device__ __forceinline__ void bring_addresses_near(const GateUp& matrices) {
  constexpr int per_line = 128 / sizeof(int64_t);
  const int first = threadIdx.x * per_line;
  if (blockIdx.x != 0 || first >= matrices.num_experts) return;
  bring_near(matrices.matrix[0].addresses + first);
  bring_near(matrices.matrix[1].addresses + first);
}

// Has the biases of the warp's first units near when these are multiplied: of gate by half of the lanes, of
// up by the others.
__device__ __forceinline__ void bring_biases_near(const GateUp& matrices, int expert, const Work& share) {
  if (matrices.gate_bias == nullptr) return;
  const int lane = threadIdx.x % warp_size, unit = share.first_unit + lane % 16 * share.unit_stride;
  if (unit >= share.num_units) return;
  const float* bias = lane < 16 ? matrices.gate_bias : matrices.up_bias;
  bring_near(bias + int64_t(expert) * share.shape.num_rows + unit * share.shape.unit_rows);
}

// A token's row for gate and up, which may need different forms of it. A block asks for the row before it
// asks for its experts' weights, as loads behind those end behind them. Of types that need both forms it only
// asks for the codes so early.
template <Types types>
class TokenRow {
 public:
  // `type`, `other_type`: of the warp's matrix, and of the other one.
  __device__ __forceinline__ TokenRow(int type, int other_type)
      : is_block(is_block_type<types>(type)),
        needs_values(is_block || is_block_type<types>(other_type)),
        needs_codes(!is_block || !is_block_type<types>(other_type)) {}

  __device__ __forceinline__ void ask(const int8_t* q, const float* scales, const int16_t* sums,
                                      const float* values, int groups, int cols) {
    if constexpr (has_super) {
      if (needs_codes) codes = CodesAhead(q, scales, sums, groups);
    } else if constexpr (has_blocks) {
      ahead = GroupsAhead(values, groups, cols);
    }
  }

  // Brings the row into shared memory: codes for super-blocks to `row`, those for blocks of 32 to `behind`,
  // where `row` then has its codes if the warp's matrix needs these.
  __device__ __forceinline__ void keep(SharedRow& row, uint8_t* behind, const float* values, int cols) {
    if constexpr (has_super) {
      if (needs_codes) codes.keep(row);
    }
    if constexpr (has_blocks) {
      if (has_super && needs_values) ahead = GroupsAhead(values, row.groups, cols);
      if (needs_values) quantize_lone_into<types>({behind, row.groups}, ahead);
      if (is_block) row.codes = behind;
    }
  }

 private:
  static constexpr bool has_blocks = types & block_types, has_super = types & ~block_types & ~float_types;

  const bool is_block, needs_values, needs_codes;
  CodesAhead codes;
  GroupsAhead ahead;
};

// h = silu(gate x) · (up x), or another gated unit. Of two neighbouring warps one has the rows of a unit of
// gate, the other those of up.
template <Types types, int unit = swiglu_unit, int warps = expert_warps>
__global__ void __launch_bounds__(warps* warp_size, expert_blocks(types, warps))
    expert_gate_up(const __grid_constant__ GateUp matrices, const __grid_constant__ PairRows h,
                   const int* ids, int num_ranks, int pairs_per_token, const int8_t* q, const float* scales,
                   const int16_t* sums, const float* x, int x_stride, int groups, int pair_step,
                   int stage_bytes, int stages) {
  uint32_t* const grids = reinterpret_cast<uint32_t*>(dynamic_shared);
  uint8_t* const memory = reinterpret_cast<uint8_t*>(dynamic_shared) + grid_bytes<types, expert_grid_room>;
  constexpr int most_rows = expert_max_unit_rows * expert_warps / warps;  // of a unit
  __shared__ float gates[warps / 2][2][most_rows];
  const Pair pair = this_pair(num_ranks, pairs_per_token);
  const int warp = threadIdx.x / warp_size, team = warp / 2;
  const bool is_up = warp % 2;
  const MatrixShape shape = matrices.matrix[is_up].shape[pair.is_shared];
  const Work share = share_units(shape, team, warps / 2, pair_step);
  bring_addresses_near(matrices);
  const float* values = x + int64_t(pair.token) * x_stride;
  TokenRow<types> row(shape.type, matrices.matrix[!is_up].shape[pair.is_shared].type);
  const auto ask_for_row = [&] {
    if (is_float<types>(shape.type)) return;
    const int64_t first = int64_t(pair.token) * groups;
    row.ask(q + first * group_elements, scales + first, sums + first * (group_elements / sum_elements),
            values, groups, shape.num_cols);
  };
  // The previous kernel writes the ids and the row; only the shared expert's weights do not depend on it.
  if (!pair.is_shared) {
    wait_for_previous_grid();
    ask_for_row();
  }
  const uint8_t* gate = data_of(matrices.matrix[0], pair, ids, num_ranks);
  const uint8_t* up = data_of(matrices.matrix[1], pair, ids, num_ranks);
  const int expert = unit == swiglu_unit || pair.is_shared ? -1 : ids[pair.token * num_ranks + pair.rank];
  if constexpr (unit != swiglu_unit) {
    if (is_up && expert >= 0) bring_biases_near(matrices, expert, share);
  }
  const bool is_here = gate != nullptr && up != nullptr;
  const Work work = work_at(!is_here ? nullptr : is_up ? up : gate, share);
  const Ring ring = warp_ring(memory, stage_bytes, stages);
  const Cursor ahead = fill_ring(work, ring);
  if (work.num_units > 0) keep_grids<types, expert_grid_room>(grids);
  if (pair.is_shared) {
    wait_for_previous_grid();
    ask_for_row();
  }
  // Not earlier: `expert_down` relies on the ids as soon as it runs.
  release_next_grid();

  // Gate and up may need different forms of the row.
  uint8_t* const behind = behind_rings<warps>(memory, stage_bytes, stages);
  Inputs inputs = {shared_row(behind + lone_row_bytes<types> * groups, groups), values, 0, 1, grids};
  if (is_here && is_float<types>(shape.type))
    warm_values(values, 0, 1, shape.num_cols);
  else if (is_here)
    row.keep(inputs.quantized, behind, values, shape.num_cols);
  __syncthreads();
  float* out = row_of(h, pair, num_ranks, shape.num_rows);
  int turn = 0;
  multiply<types, 1, expert_grid_room>(work, ring, ahead, inputs, [&](int row, const float (&y)[1]) {
    float* kept = &gates[team][turn][row & (most_rows - 1)];
    const bool exists = row < shape.num_rows;
    if (!is_up && exists) *kept = y[0];
    sync_pair(team);
    if (is_up && exists) out[row] = gated<unit>(matrices, expert, shape.num_rows, row, *kept, y[0]);
    turn ^= 1;  // the other warp may still read
  });
}

// The down projection of every h, which is quantised on the way. Launched right behind `expert_gate_up`.
template <Types types, int warps = expert_warps>
__global__ void __launch_bounds__(warps* warp_size, expert_blocks(types, warps))
    expert_down(const __grid_constant__ Down matrices, const __grid_constant__ PairRows h,
                const __grid_constant__ PairRows out, const int* ids, int num_ranks, int pairs_per_token,
                int pair_step, int stage_bytes, int stages) {
  uint32_t* const grids = reinterpret_cast<uint32_t*>(dynamic_shared);
  uint8_t* const memory = reinterpret_cast<uint8_t*>(dynamic_shared) + grid_bytes<types, expert_grid_room>;
  release_next_grid();
  const Pair pair = this_pair(num_ranks, pairs_per_token);
  const uint8_t* down = data_of(matrices.down, pair, ids, num_ranks);
  const MatrixShape shape = matrices.down.shape[pair.is_shared];
  if (matrices.bias != nullptr && blockIdx.x == 0 && !pair.is_shared) {
    const int64_t expert = ids[pair.token * num_ranks + pair.rank];
    bring_row_near(matrices.bias + expert * shape.num_rows, shape.num_rows);
  }
  const Work work = work_at(down, share_units(shape, threadIdx.x / warp_size, warps, pair_step));
  const Ring ring = warp_ring(memory, stage_bytes, stages);
  const Cursor ahead = fill_ring(work, ring);
  if (work.num_units > 0) keep_grids<types, expert_grid_room>(grids);

  wait_for_previous_grid();
  const int cols = shape.num_cols, groups = (cols + group_elements - 1) / group_elements;
  const float* values = row_of(h, pair, num_ranks, cols);
  Inputs inputs = {shared_row(behind_rings<warps>(memory, stage_bytes, stages), groups), values, 0, 1, grids};
  if (work.num_units > 0 && !is_float<types>(shape.type)) {
    if (is_block_type<types>(shape.type))
      quantize_lone_into<types>({inputs.quantized.codes, groups}, GroupsAhead(values, groups, cols));
    else
      quantize_into(inputs.quantized, values, cols);
  }
  __syncthreads();
  float* y_row = row_of(out, pair, num_ranks, shape.num_rows);
  multiply<types, 1, expert_grid_room>(work, ring, ahead, inputs, [&](int row, const float (&y)[1]) {
    if (row < shape.num_rows) y_row[row] = y[0];
  });
}

}  // namespace coldstream
