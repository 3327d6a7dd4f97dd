// Rows of a table of n-grams that the host has written as the file has them. Blocks of a row of a step lie
// one behind the other, so they are a row of a matrix. See cuda.py for the launcher.
#include "cuda/answer.cuh"
#include "cuda/quantize.cuh"
#include "cuda/vectors.cuh"
#include "dequantize/values.cuh"
#include "rms_norm/norm_row.cuh"

namespace coldstream {

constexpr int take_threads = 128;

// Their values, also quantised: a warp for each group of 256 columns. `done` is null if an earlier launch has
// waited. grid (rows, groups / warps). `Weights` are the traits of a type, or Floats.
template <class Weights>
__global__ void __launch_bounds__(take_threads)
    ngram_take_rows(const uint8_t* found, int row_bytes, int cols, int padded,
                    const __grid_constant__ Answer answer, NormOutputs out) {
  wait_for_previous_grid();
  release_next_grid();
  if (answer.done) {
    if (threadIdx.x == 0) wait_for_answer(answer);
    __syncthreads();
  }
  const int group = (blockIdx.y * blockDim.x + threadIdx.x) / warp_size;
  if (group >= padded / group_elements) return;
  const int64_t row = blockIdx.x;
  const int first = group * group_elements + run_values * (threadIdx.x % warp_size);
  float values[run_values] = {};
  if (first < cols) load_values(Weights{}, found + row * row_bytes, first, cols, values);
  store_eight<true>(out.y + row * cols, group, cols, values);
  store_group(quantize_group(values), quant_row(out.q, out.scales, out.sums, row, padded), group);
}

}  // namespace coldstream
