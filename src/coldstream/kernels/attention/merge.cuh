// What the kernels that merge the chunks of a row have in common.
#pragma once

#include "attention/grid.cuh"
#include "cuda/quantize.cuh"

namespace coldstream {

struct MergeArguments {
  const float *values, *query_gate;
  const float2* stats;
  const int32_t* positions;
  float* out;     // [T, H · D] or null
  int8_t* codes;  // with the other two: quantised activations, or null
  float* scales;
  int16_t* sums;
  int32_t num_rows, query_gate_stride, num_heads, max_chunks, window;
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

// What is done with a head's values once its chunks are merged and rotated back, for the adjacent columns of
// a thread, which are of one head. Reads what was written before the previous launch began.
template <int head_dim, bool has_gate, int count>
struct HeadEnd {
  float gates[count];

  // column: the thread's first one in the row of all heads.
  __device__ __forceinline__ HeadEnd(const MergeArguments& a, int64_t row, int column) {
    if constexpr (has_gate) {
      const float* const gates_of_row = a.query_gate + row * a.query_gate_stride;
      load_columns(gates_of_row + (2 * (column / head_dim) + 1) * head_dim + column % head_dim, gates);
    }
  }

  __device__ __forceinline__ void apply(float (&x)[count]) const {
    if constexpr (has_gate) {
#pragma unroll
      for (int i = 0; i < count; i++) x[i] *= exact_sigmoid(gates[i]);
    }
  }
};

}  // namespace coldstream
