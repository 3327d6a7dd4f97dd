// Functions of each value of a matrix and one number, in place; see cuda.py.
#include "cuda/common.cuh"

using namespace coldstream;

// grid (columns / 256, rows), 256 threads. stride: elements from row to row.
template <class Function>
__device__ __forceinline__ void change(float* x, int stride, int cols, Function function) {
  wait_for_previous_grid();
  release_next_grid();
  const int col = blockIdx.x * blockDim.x + threadIdx.x;
  if (col >= cols) return;
  float& value = x[int64_t{blockIdx.y} * stride + col];
  value = function(value);
}

__global__ void __launch_bounds__(256) scale(float* x, int stride, int cols, float factor) {
  change(x, stride, cols, [=](float value) { return value * factor; });
}

__global__ void __launch_bounds__(256) softcap(float* x, int stride, int cols, float cap) {
  const float steepness = 2.0f / cap;
  change(x, stride, cols,
         [=](float value) { return __fmaf_rn(2.0f * cap, exact_sigmoid(value * steepness), -cap); });
}
