// Copies a matrix whose rows may be apart, to another type if asked; see copy_values.py.
#include "cuda/arithmetic.cuh"
#include "cuda/common.cuh"
#include "draft_block/values.cuh"

using namespace coldstream;

template <class To, class From>
__device__ __forceinline__ To converted(From value) {
  if constexpr (sizeof(To) == sizeof(From))
    return value;
  else if constexpr (sizeof(To) < sizeof(From))
    return to_bfloat16(value);
  else
    return bfloat16_to_float(value);
}

// grid (columns / 256, rows), 256 threads. Strides from row to row, in elements. first: the row of the source
// for row 0, null for 0.
template <class To, class From>
__global__ void __launch_bounds__(256) copy_values(const From* source, int source_stride, To* target,
                                                   int target_stride, int cols, const int* first) {
  wait_for_previous_grid();
  release_next_grid();
  const int col = blockIdx.x * blockDim.x + threadIdx.x;
  if (col >= cols) return;
  const int64_t row = blockIdx.y, source_row = row + (first != nullptr ? *first : 0);
  target[row * target_stride + col] = converted<To, From>(source[source_row * source_stride + col]);
}
