// Dequantizes matrices of any type to float32: chosen rows of one matrix, or all rows of several that are
// given by their addresses. A thread computes a run of eight values; see cuda.py for the launchers.
#include "dequantize/values.cuh"

namespace coldstream {

constexpr int max_threads = 128;

__device__ __forceinline__ bool starts_on_16(const void* p) {
  return (reinterpret_cast<uint64_t>(p) & 15) == 0;
}

// Values first … first + 7 of a row of floats, those past its end 0.
template <int type>
__device__ __forceinline__ void load_floats(const uint8_t* row, int first, int cols, float (&values)[8]) {
  constexpr int value_bytes = type == f32 ? 4 : 2;
  const uint8_t* from = row + int64_t(first) * value_bytes;
  if (first + 8 <= cols && starts_on_16(from)) {
    uint4 raw[value_bytes / 2];
#pragma unroll
    for (int i = 0; i < value_bytes / 2; i++) raw[i] = load_16(from + 16 * i);
#pragma unroll
    for (int k = 0; k < 8; k++) values[k] = load_float<type>(reinterpret_cast<const uint8_t*>(raw), k);
    return;
  }
#pragma unroll
  for (int k = 0; k < 8; k++) values[k] = first + k < cols ? load_float<type>(from, k) : 0.0f;
}

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

// grid (rows, runs of a row / threads, matrices). The matrix is `weight`, or else the one at
// addresses[matrix_ids[z]], which is skipped if that address is 0. Its rows are `row_ids`, or the first ones
// if that is null. Products read their weights before they wait for the kernel in front, and the values
// written here may be such weights. So this kernel doesn't release the next one early, and every value is
// visible to all before a block ends.
template <int type, int block_elements, int block_bytes>
__global__ void __launch_bounds__(max_threads)
    dequantize_rows(const uint8_t* weight, const int64_t* addresses, const int* matrix_ids,
                    const int* row_ids, const int8_t* table, float* out, int row_bytes, int cols,
                    int out_stride) {
  wait_for_previous_grid();
  const int first = (blockIdx.y * blockDim.x + threadIdx.x) * run_values;
  if (first >= cols) return;
  const uint8_t* matrix = weight;
  if (addresses != nullptr) {
    matrix = reinterpret_cast<const uint8_t*>(addresses[matrix_ids[blockIdx.z]]);
    if (matrix == nullptr) return;
  }
  const int64_t source = row_ids == nullptr ? int64_t(blockIdx.x) : row_ids[blockIdx.x];
  const uint8_t* row = matrix + source * row_bytes;
  float values[8];
  if constexpr (block_elements == 1) {
    load_floats<type>(row, first, cols, values);
  } else {
    const uint8_t* block = row + int64_t(first / block_elements) * block_bytes;
    load_run<type, block_elements>(block, first % block_elements / run_values, table, values);
  }
  const int64_t target = int64_t(blockIdx.z) * gridDim.x + blockIdx.x;
  store_run(out + target * out_stride, first, cols, values);
  __threadfence();
}

}  // namespace coldstream
