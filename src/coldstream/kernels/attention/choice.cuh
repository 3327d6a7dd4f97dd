// Which blocks of positions rows see, where an indexer has chosen them: `ChosenBlocks` of
// kernels/indexer/records.py. Kernels without a choice have nothing of this.
#pragma once

#include "attention/grid.cuh"

namespace coldstream {

// A block has 4 to 64 positions, so that those of a tile of 64 positions are bits of one word.
struct ChosenWords {
  const uint32_t* words;  // [T, num_words]
  int32_t num_words, block_shift;
};

// A bit for each block in a tile of 64 positions: whether the row sees it.
__device__ __forceinline__ uint32_t chosen_in(const ChosenWords& chosen, int64_t row, int tile) {
  const int count = block_positions >> chosen.block_shift, first = tile * count;
  return chosen.words[row * chosen.num_words + first / 32] >> first % 32 & ((1u << count) - 1);
}

// Whether the row sees positions of a chunk of 256.
__device__ __forceinline__ bool sees_chunk(const ChosenWords& chosen, int64_t row, int chunk) {
  uint32_t any = 0;
#pragma unroll
  for (int i = 0; i < chunk_blocks; i++) any |= chosen_in(chosen, row, chunk * chunk_blocks + i);
  return any != 0;
}

// The tiles of positions that some row of a run sees, found by a warp, 32 at a time.
template <bool is_chosen>
struct SeenTiles {
  __device__ __forceinline__ int from(const ChosenWords&, int, int, int tile, int) { return tile; }
};

template <>
struct SeenTiles<true> {
  int found = -1;  // which 32 tiles
  uint32_t seen = 0;

  // The first from `tile` on that rows begin … end − 1 see; last + 1 without one up to the last.
  __device__ int from(const ChosenWords& chosen, int begin, int end, int tile, int last) {
    while (tile <= last) {
      if (tile / warp_size != found) find(chosen, begin, end, tile / warp_size);
      const uint32_t left = seen >> tile % warp_size;
      if (left) return min(tile + __ffs(int(left)) - 1, last + 1);
      tile = (found + 1) * warp_size;
    }
    return last + 1;
  }

 private:
  __device__ void find(const ChosenWords& chosen, int begin, int end, int number) {
    found = number;
    const int tile = number * warp_size + threadIdx.x % warp_size;
    const bool exists = (tile + 1) * (block_positions >> chosen.block_shift) <= 32 * chosen.num_words;
    uint32_t any = 0;
    for (int row = begin; exists && row < end; row++) any |= chosen_in(chosen, row, tile);
    seen = __ballot_sync(all_lanes, any != 0);
  }
};

}  // namespace coldstream
