// silu(gate) · up of rows or another gated unit, as floats and quantised. One warp per group of 256 columns;
// see cuda.py for the launcher.
#include "cuda/quantize.cuh"
#include "cuda/vectors.cuh"

using namespace coldstream;

constexpr int max_threads = 128;

// What other units than SwiGLU read besides. Rows are places of pairs in the order of their experts.
struct GluOptions {
  float limit;
  const float* gate_bias;  // [experts, cols]; null: none
  const float* up_bias;
  const int* pairs;  // by row; those of rows that nobody computes are undefined
  const int* ids;    // by pair
  int num_pairs;
  int num_experts;
};

// The expert of a row; −1 if nobody computes it.
__device__ __forceinline__ int expert_of(const GluOptions& options, int64_t row) {
  const int pair = options.pairs[row];
  if (pair < 0 || pair >= options.num_pairs) return -1;
  const int expert = options.ids[pair];
  return expert < options.num_experts ? expert : -1;
}

template <bool aligned>
__device__ __forceinline__ Eight with_bias(const Eight& x, const float* bias, int group, int cols) {
  const Eight b = load_eight<aligned>(bias, group, cols);
  return {x.low + b.low, x.high + b.high};
}

// grid (rows, groups / warps); y or q may be null. `scale_elements` values of q share a scale.
template <bool aligned, int scale_elements, int unit = swiglu_unit>
__global__ void __launch_bounds__(max_threads)
    swiglu_rows(const float* gate, int gate_stride, const float* up, int up_stride, int cols, int padded,
                float* y, int8_t* q, float* scales, int16_t* sums,
                const __grid_constant__ GluOptions options) {
  wait_for_previous_grid();
  release_next_grid();
  const int group = (blockIdx.y * blockDim.x + threadIdx.x) / warp_size;
  if (group >= padded / group_elements) return;
  const int64_t row = blockIdx.x;
  Eight g = load_eight<aligned>(gate + row * gate_stride, group, cols);
  Eight u = load_eight<aligned>(up + row * up_stride, group, cols);
  if constexpr (unit != swiglu_unit) {
    const int expert = options.gate_bias == nullptr ? -1 : expert_of(options, row);
    if (expert >= 0) {
      g = with_bias<aligned>(g, options.gate_bias + int64_t(expert) * cols, group, cols);
      u = with_bias<aligned>(u, options.up_bias + int64_t(expert) * cols, group, cols);
    }
  }
  const auto glu = [&](float a, float b) { return exact_glu<unit>(a, b, options.limit); };
  const float result[8] = {glu(g.low.x, u.low.x),   glu(g.low.y, u.low.y),   glu(g.low.z, u.low.z),
                           glu(g.low.w, u.low.w),   glu(g.high.x, u.high.x), glu(g.high.y, u.high.y),
                           glu(g.high.z, u.high.z), glu(g.high.w, u.high.w)};
  if (y) store_eight<aligned>(y + row * cols, group, cols, result);
  if (q) {
    const QuantRow to = quant_row<scale_elements>(q, scales, sums, row, padded);
    store_group<scale_elements>(quantize_group<scale_elements>(result), to, group);
  }
}
