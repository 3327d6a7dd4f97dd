// The first token of each tile of a row, and the first of all.
#pragma once

#include "sample/truncate.cuh"

namespace coldstream {

// All threads of a block, of whose four logits each the tile is made.
__device__ __forceinline__ void keep_first_of_tile(const RowChoice& choice, int tile, int begin,
                                                   const float (&values)[items_per_thread]) {
  uint64_t best = 0;
#pragma unroll
  for (int i = 0; i < items_per_thread; i++) {
    const uint64_t key = ~order_key(values[i], begin + i);
    if (begin + i < choice.row.logits.vocab && key > best) best = key;
  }
  best = greatest_in_block(best);
  if (threadIdx.x == 0) choice.row.state.tile_keys[tile] = ~best;
  __syncthreads();
}

// The row's first token by the order, and the key of its k-th tile by it, up to which at least k tokens come:
// `never` where k is 0, or there are fewer tiles, or more than a block compares.
__device__ __forceinline__ Best compare_tiles(const SampledRow& row, int k, uint64_t& key_of_k) {
  __shared__ uint64_t found;
  uint64_t* const keys = block_memory().keys;
  const int num_tiles = Tiles::number_of(row.logits.vocab);
  uint64_t best = 0;
  if (threadIdx.x == 0) found = never;
  for (int tile = threadIdx.x; tile < num_tiles; tile += block_threads) {
    const uint64_t key = __ldcg(&row.state.tile_keys[tile]);
    keys[tile] = key;
    best = ~key > best ? ~key : best;
  }
  best = greatest_for_all(best);
  if (0 < k && k <= num_tiles && num_tiles <= block_threads) {
    if (int(threadIdx.x) < num_tiles) {
      int rank = 0;
      const uint64_t own = keys[threadIdx.x];
      for (int tile = 0; tile < num_tiles; tile++) rank += keys[tile] < own;
      if (rank == k - 1) found = own;
    }
    __syncthreads();
  }
  key_of_k = found;
  __syncthreads();
  return {~best, int(__ldcg(&row.state.argmax.num_bad))};
}

}  // namespace coldstream
