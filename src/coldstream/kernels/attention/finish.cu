// The end of prefill.cu for a cache of turned values: its results turned back and gated, in place. A thread
// takes a column of a row.
#include "attention/turned.cuh"

namespace coldstream {

struct finish_arguments {
  float* out;  // [T, H · D]
  const float* query_gate;
  int32_t query_gate_stride, num_heads;
};

template <int head_dim>
__global__ void attention_finish(const finish_arguments a) {
  static_assert(head_dim % scale_values == 0);
  const int num_columns = a.num_heads * head_dim, column = blockIdx.x * blockDim.x + threadIdx.x;
  if (column >= num_columns) return;  // whole warps
  const int64_t row = blockIdx.y;
  const int head = column / head_dim;
  const float gate = a.query_gate[row * a.query_gate_stride + (2 * head + 1) * head_dim + column % head_dim];
  float* out = a.out + row * num_columns + column;
  *out = turned_back(*out) * exact_sigmoid(gate);
}

}  // namespace coldstream
