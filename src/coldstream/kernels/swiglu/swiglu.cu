// silu(gate) · up of rows, as floats and quantised. One warp per group of 256 columns; see cuda.py for the
// launcher.
#include "cuda/quantize.cuh"
#include "cuda/vectors.cuh"

using namespace coldstream;

constexpr int max_threads = 128;

// grid (rows, groups / warps); y or q may be null. `scale_elements` values of q share a scale.
template <bool aligned, int scale_elements>
__global__ void __launch_bounds__(max_threads)
    swiglu_rows(const float* gate, int gate_stride, const float* up, int up_stride, int cols, int padded,
                float* y, int8_t* q, float* scales, int16_t* sums) {
  wait_for_previous_grid();
  release_next_grid();
  const int group = (blockIdx.y * blockDim.x + threadIdx.x) / warp_size;
  if (group >= padded / group_elements) return;
  const int64_t row = blockIdx.x;
  const Eight g = load_eight<aligned>(gate + row * gate_stride, group, cols);
  const Eight u = load_eight<aligned>(up + row * up_stride, group, cols);
  const float result[8] = {exact_swiglu(g.low.x, u.low.x),   exact_swiglu(g.low.y, u.low.y),
                           exact_swiglu(g.low.z, u.low.z),   exact_swiglu(g.low.w, u.low.w),
                           exact_swiglu(g.high.x, u.high.x), exact_swiglu(g.high.y, u.high.y),
                           exact_swiglu(g.high.z, u.high.z), exact_swiglu(g.high.w, u.high.w)};
  if (y) store_eight<aligned>(y + row * cols, group, cols, result);
  if (q) {
    const QuantRow to = quant_row<scale_elements>(q, scales, sums, row, padded);
    store_group<scale_elements>(quantize_group<scale_elements>(result), to, group);
  }
}
