// Moves keys and values of a committed path of a draft tree to their positions; see move_rows.py.
#include "attention/grid.cuh"

namespace coldstream {

// The part of `CommittedPath` of kernels/ops.py that is needed here.
struct MovedPath {
  const int32_t *count, *first;    // of one number
  const int32_t *sources, *table;  // [count]; the blocks of the sequence
};

constexpr int most_caches = 64;

// Of keys and of values of several layers, all laid out alike. A launch has as many as its parameters hold.
struct MovedCaches {
  uint8_t* at[most_caches];
};

// grid (pieces of 16 bytes of a position / 128, caches), 128 threads: a piece of a cache a thread. Sources
// ascend and are never before their targets, so that nothing is overwritten before it has been read.
__global__ void __launch_bounds__(128)
    move_rows(const __grid_constant__ MovedCaches caches, const __grid_constant__ MovedPath path,
              const CacheStrides strides) {
  wait_for_previous_grid();
  release_next_grid();
  const int64_t piece = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (piece * 16 >= strides.position_bytes) return;
  uint8_t* const cache = caches.at[blockIdx.y] + piece * 16;
  const int count = *path.count, first = *path.first;
  auto place = [&](int index) {
    return reinterpret_cast<uint4*>(cache + path.table[index / chunk_positions] * strides.block_bytes +
                                    index % chunk_positions * strides.position_bytes);
  };
  for (int i = 0; i < count; i++) {
    const int source = path.sources[i];
    if (source != i) *place(first + i) = *place(first + source);
  }
}

}  // namespace coldstream
