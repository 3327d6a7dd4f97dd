// The largest logit of a row, over many blocks, and how many logits are not finite.
#pragma once

#include "cuda/last_block.cuh"
#include "sample/block.cuh"
#include "sample/weights.cuh"

namespace coldstream {

// What the blocks of a row tell each other; zero between launches.
struct ArgmaxRow {
  uint64_t best;  // the complement of the smallest order key
  uint32_t num_bad;
  uint32_t arrivals;
};

struct Best {
  uint64_t key;
  int num_bad;
};

// One block's share of a row: each thread's four logits from id `begin` on.
__device__ __forceinline__ void add_to_argmax(ArgmaxRow& row, const float (&values)[items_per_thread],
                                              int begin, int vocab, int num_bad) {
  uint64_t best = 0;
#pragma unroll
  for (int i = 0; i < items_per_thread; i++) {
    const uint64_t key = ~order_key(values[i], begin + i);
    if (begin + i < vocab && key > best) best = key;
  }
  best = greatest_in_block(best);
  if (threadIdx.x == 0) atomicMax(&row.best, best);
  const uint32_t bad_in_warp = sum_of_lanes(num_bad);
  if (threadIdx.x % warp_size == 0 && bad_in_warp) atomicAdd(&row.num_bad, bad_in_warp);
}

// Thread 0 of the last block: the row's answer; clears it.
__device__ __forceinline__ Best take_argmax(ArgmaxRow& row) {
  const uint64_t best = atomicExch(&row.best, 0);
  return {~best, int(atomicExch(&row.num_bad, 0))};
}

// 0, or how many logits were not finite, or −1 if they were but the best one now is not.
__device__ __forceinline__ int fault_of(const Best& best) {
  return best.num_bad ? best.num_bad : is_finite(key_logit(best.key)) ? 0 : -1;
}

__device__ __forceinline__ int count_bad(const float (&values)[items_per_thread]) {
  int num_bad = 0;
#pragma unroll
  for (int i = 0; i < items_per_thread; i++) num_bad += !is_finite(values[i]);
  return num_bad;
}

}  // namespace coldstream
