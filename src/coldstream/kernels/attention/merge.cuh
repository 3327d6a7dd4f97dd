// What the kernels that merge the chunks of a row have in common.
#pragma once

#include "attention/choice.cuh"
#include "cuda/quantize.cuh"

namespace coldstream {

// `OutputGate` of kernels/ops.py.
enum class OutputGate { none, query, head, element };

struct MergeArguments {
  const float* values;
  const float* gates;  // of all heads of a row; null without gates
  const float* sinks;  // [H], or null
  const float2* stats;
  const int32_t* positions;
  float* out;     // [T, H · D] or null
  int8_t* codes;  // with the other two: quantised activations, or null
  float* scales;
  int16_t* sums;
  int32_t num_rows, gate_stride, num_heads, max_chunks, window;
  ChosenWords chosen;  // of kernels with a choice
};

template <int count>
__device__ __forceinline__ void load_columns(const float* from, float (&x)[count]) {
  if constexpr (count == 1) {
    x[0] = *from;
  } else {
    static_assert(count % 4 == 0);
#pragma unroll
    for (int i = 0; i < count; i += 4) {
      const float4 four = reinterpret_cast<const float4*>(from)[i / 4];
      x[i] = four.x, x[i + 1] = four.y, x[i + 2] = four.z, x[i + 3] = four.w;
    }
  }
}

// Groups of columns that are rotated back together: those of heads of 512 are two.
template <int head_dim>
constexpr int groups_together = (head_dim & -head_dim) > group_elements ? 2 : 1;

// What is done with a head's values once its chunks are merged and rotated back, for the adjacent columns of
// a thread, which are of one head. Reads what was written before the previous launch began.
template <int head_dim, OutputGate gate, int count>
struct HeadEnd {
  static constexpr bool is_alike = gate == OutputGate::head;  // one gate for all columns
  float gates[is_alike ? 1 : count];

  // column: the thread's first one in the row of all heads.
  __device__ __forceinline__ void load(const MergeArguments& a, int64_t row, int column) {
    if constexpr (gate == OutputGate::none) return;
    const float* const gates_of_row = a.gates + row * a.gate_stride;
    if constexpr (gate == OutputGate::query)
      load_columns(gates_of_row + (2 * (column / head_dim) + 1) * head_dim + column % head_dim, gates);
    if constexpr (gate == OutputGate::head) gates[0] = gates_of_row[column / head_dim];
    if constexpr (gate == OutputGate::element) load_columns(gates_of_row + column, gates);
  }

  __device__ __forceinline__ void apply(float (&x)[count]) const {
    if constexpr (gate == OutputGate::none) return;
    const float of_all = is_alike ? exact_softplus(gates[0]) : 1.0f;
#pragma unroll
    for (int i = 0; i < count; i++) {
      if constexpr (is_alike)
        x[i] *= of_all;
      else
        x[i] *= gate == OutputGate::query ? exact_sigmoid(gates[i]) : exact_softplus(gates[i]);
    }
  }
};

}  // namespace coldstream
