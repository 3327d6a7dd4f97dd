// The routed experts of many tokens: two products over pairs (token, rank) that group.cu has grouped by
// expert.
#include "cuda/gemm_tiles.cuh"

using namespace coldstream;
using namespace coldstream::gemm;

// gated: rows 16i … 16i + 7 of a tile are gate's and the next eight up's, so that one thread has both of a
// pair.
template <bool gated>
struct ExpertsJob {
  Activations x;
  const int64_t* addresses;
  const int64_t* up_addresses;
  const int4* tiles;
  const int* x_rows;    // of a grouped pair; null: its own place
  const int* out_rows;  // the same
  float* out;
  int num_rows, num_blocks, row_bytes, out_stride;

  template <class T>
  static constexpr int tile_rows = gated ? T::rows / 2 : T::rows;  // of the output

  template <class T>
  __device__ Source open(int index) const {
    const int row_tiles = (num_rows + tile_rows<T> - 1) / tile_rows<T>;
    Source tile = {};
    if (index / row_tiles >= tiles[0].x) return tile;
    const int4 entry = tiles[1 + index / row_tiles];
    tile.head = {entry.x, entry.y, index % row_tiles * tile_rows<T>, 0};
    tile.rows = reinterpret_cast<const uint8_t*>(addresses[entry.z]);
    if (gated) tile.rows_8 = reinterpret_cast<const uint8_t*>(up_addresses[entry.z]);
    return tile;
  }

  // Of row `row` of a tile: its matrix, and its number there, of rows beyond the matrix the last one's.
  template <class T>
  __device__ const uint8_t* weight_matrix(const Source& tile, int row) const {
    return gated && row / 8 % 2 ? tile.rows_8 : tile.rows;
  }
  template <class T>
  __device__ int weight_row(const Source& tile, int row) const {
    return min(tile.head.row + (gated ? row / 16 * 8 + row % 8 : row), num_rows - 1);
  }

  __device__ int activation_row(int place) const { return x_rows ? x_rows[place] : place; }
  __device__ int out_row(int place) const { return out_rows ? out_rows[place] : place; }

  __device__ void store(int64_t out_row, int first_row, int row, float value, float value_8) const {
    float* to = out + out_row * out_stride;
    if constexpr (gated) {
      row = first_row + row / 16 * 8 + row % 8;
      if (row < num_rows) to[row] = exact_swiglu(value, value_8);
    } else {
      row += first_row;
      if (row < num_rows) to[row] = value;
      if (row + 8 < num_rows) to[row + 8] = value_8;
    }
  }
};

template <class T, bool gated>
__global__ void __launch_bounds__(T::threads, T::blocks)
    experts_gemm(const __grid_constant__ ExpertsJob<gated> job) {
  multiply_tiles<T>(job);
}
