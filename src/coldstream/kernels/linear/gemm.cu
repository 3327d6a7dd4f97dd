// GEMM: y = x W^T.
#include "cuda/gemm_tiles.cuh"

using namespace coldstream;
using namespace coldstream::gemm;

struct LinearJob {
  Activations x;
  const uint8_t* weights;
  float* out;
  int num_tokens, num_rows, num_blocks, row_bytes;
  int out_stride;  // in floats

  template <class T>
  __device__ Source open(int index) const {
    const int row_tiles = (num_rows + T::rows - 1) / T::rows;
    const int first = index / row_tiles * T::tokens, first_row = index % row_tiles * T::rows;
    return {{min(max(num_tokens - first, 0), T::tokens), first, first_row, 0}, weights, weights};
  }

  // Of row `row` of a tile: its matrix, and its number there, of rows beyond the matrix the last one's.
  template <class T>
  __device__ const uint8_t* weight_matrix(const Source& tile, int row) const {
    return weights;
  }
  template <class T>
  __device__ int weight_row(const Source& tile, int row) const {
    return min(tile.head.row + row, num_rows - 1);
  }

  __device__ int activation_row(int token) const { return token; }
  __device__ int out_row(int token) const { return token; }

  __device__ void store(int64_t token, int first_row, int row, float value, float value_8) const {
    row += first_row;
    float* to = out + token * out_stride + row;
    if (row < num_rows) to[0] = value;
    if (row + 8 < num_rows) to[8] = value_8;
  }
};

template <class T>
__global__ void __launch_bounds__(T::threads, T::blocks) linear_gemm(const __grid_constant__ LinearJob job) {
  multiply_tiles<T>(job);
}
