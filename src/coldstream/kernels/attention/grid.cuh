// The grid of positions: blocks of 64, with common softmax maxima, in chunks of 256.
#pragma once

#include "cuda/common.cuh"

namespace coldstream {

constexpr int block_positions = 64;
constexpr int chunk_positions = 256;
constexpr int chunk_blocks = chunk_positions / block_positions;

__device__ __forceinline__ float negative_infinity() { return __uint_as_float(0xff800000u); }

// The first position that a row at `position` attends to; window: positions that it sees, 0 for all.
__device__ __forceinline__ int first_position(int position, int window) {
  return window > 0 ? max(0, position - window + 1) : 0;
}

// Bytes between blocks of 256 positions, and between positions.
struct CacheStrides {
  int64_t block_bytes, position_bytes;
};

}  // namespace coldstream
