// Quantises rows of activations that their producer did not quantise, or for weights in blocks of 32: one
// warp per group of 256 inputs.
#include "cuda/quantize.cuh"

namespace coldstream {

constexpr int quantize_threads = 128;

template <int scale_elements>
__global__ void __launch_bounds__(quantize_threads)
    quantize(const float* x, int x_stride, int cols, int padded, int8_t* q, float* scales, int16_t* sums) {
  release_next_grid();
  wait_for_previous_grid();
  const int group = blockIdx.y * (quantize_threads / warp_size) + threadIdx.x / warp_size;
  if (group >= padded / group_elements) return;
  const int64_t row = blockIdx.x;
  const QuantRow to = quant_row<scale_elements>(q, scales, sums, row, padded);
  quantize_group_of<scale_elements>(x + row * x_stride, cols, group, to);
}

}  // namespace coldstream
