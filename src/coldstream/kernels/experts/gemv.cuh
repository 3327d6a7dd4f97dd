// What the kernels of a few tokens' experts are given, by pairs and by groups.
#pragma once

#include "cuda/products_gemv.cuh"
#include "cuda/vectors.cuh"

namespace coldstream {

constexpr int expert_warps = 4;
constexpr int expert_threads = expert_warps * warp_size;
constexpr int expert_max_unit_rows = 32;    // of blocks of so many warps
constexpr int expert_grid_room = 16 << 10;  // most bytes for the copies of a grid

// Shared memory for each group of a row that weights in blocks of 32 read.
constexpr int block_row_bytes_of(Types types) { return types & block_types ? block_row_bytes : 0; }
// The same of a single row.
template <Types types>
constexpr int lone_row_bytes = types & block_types ? LoneRowOf<types>::group_bytes : 0;

// A matrix of every routed expert and of the shared one: shapes in that order.
struct ExpertMatrix {
  const int64_t* addresses;
  const uint8_t* shared;
  MatrixShape shape[2];
};

struct GateUp {
  ExpertMatrix matrix[2];  // gate, up
  const float* gate_bias;  // of the routed experts, [experts, rows]; null: none
  const float* up_bias;    // likewise
  float limit;             // of a clamped unit
  int num_experts;         // routed ones
};

struct Down {
  ExpertMatrix down;
  const float* bias;  // of the routed experts' outputs, [experts, rows], which their sum reads; null: none
};

// Activations of one launch: of routed experts [T, ranks, width], of the shared one [T, shared width].
struct PairRows {
  float* routed;
  float* shared;
};

// Of products of gate and up at a row, of the routed expert `expert` or, if that is negative, the shared one.
template <int unit>
__device__ __forceinline__ float gated(const GateUp& matrices, int expert, int num_rows, int row, float gate,
                                       float up) {
  if constexpr (unit != swiglu_unit) {
    if (matrices.gate_bias != nullptr && expert >= 0) {
      gate += matrices.gate_bias[int64_t(expert) * num_rows + row];
      up += matrices.up_bias[int64_t(expert) * num_rows + row];
    }
  }
  return exact_glu<unit>(gate, up, matrices.limit);
}

__device__ __forceinline__ Ring warp_ring(uint8_t* memory, int stage_bytes, int stages) {
  return {memory + threadIdx.x / warp_size * stages * stage_bytes, stage_bytes, stages};
}

template <int warps = expert_warps>
__device__ __forceinline__ uint8_t* behind_rings(uint8_t* memory, int stage_bytes, int stages) {
  return memory + warps * stages * stage_bytes;
}

// Waits for the other warp of a pair of warps: barrier 0 is the block's.
__device__ __forceinline__ void sync_pair(int pair) { meet_at<2 * warp_size>(pair + 1); }

}  // namespace coldstream
