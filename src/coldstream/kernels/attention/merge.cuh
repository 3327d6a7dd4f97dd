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

}  // namespace coldstream
