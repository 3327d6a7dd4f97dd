// Adds a bias to each row of a matrix, in place; see add_bias.py.
#include "cuda/common.cuh"

using namespace coldstream;

// grid (columns / 256, rows), 256 threads. stride: elements from row to row.
__global__ void __launch_bounds__(256) add_bias(float* x, int stride, const float* bias, int cols) {
  wait_for_previous_grid();
  release_next_grid();
  const int col = blockIdx.x * blockDim.x + threadIdx.x;
  if (col >= cols) return;
  float& value = x[int64_t{blockIdx.y} * stride + col];
  value = value + bias[col];
}
