// Dequantizes rows of a matrix of any type to float32. A thread computes a run of eight values; see cuda.py
// for the launcher.
#include "dequantize/values.cuh"

namespace coldstream {

constexpr int max_threads = 128;

__device__ __forceinline__ void store_run(float* row, int first, int cols, const float (&values)[8]) {
  float* to = row + first;
  if (first + 8 <= cols && starts_on_16(to)) {
    reinterpret_cast<float4*>(to)[0] = {values[0], values[1], values[2], values[3]};
    reinterpret_cast<float4*>(to)[1] = {values[4], values[5], values[6], values[7]};
    return;
  }
#pragma unroll
  for (int k = 0; k < 8; k++)
    if (first + k < cols) to[k] = values[k];
}

// grid (rows, runs of a row / threads). The rows are `row_ids`, or the first ones if that is null. `Weights`
// are the traits of a type, or Floats.
template <class Weights>
__global__ void __launch_bounds__(max_threads)
    dequantize_rows(const uint8_t* weight, const int* row_ids, float* out, int row_bytes, int cols,
                    int out_stride) {
  wait_for_previous_grid();
  const int first = (blockIdx.y * blockDim.x + threadIdx.x) * run_values;
  if (first >= cols) return;
  const int64_t target = blockIdx.x, source = row_ids == nullptr ? target : row_ids[target];
  float values[8];
  load_values(Weights{}, weight + source * row_bytes, first, cols, values);
  store_run(out + target * out_stride, first, cols, values);
}

}  // namespace coldstream
