// How the blocks of a row meet within a launch.
#pragma once

#include "cuda/common.cuh"

namespace coldstream {

// Of the blocks of a row; zero between launches.
struct RowCounts {
  uint32_t arrivals;
  uint32_t departures;
};

// The blocks of a row, which must all have a place on the device at once. What a block writes before it
// arrives is visible through __ldcg to the last one that arrives, and to all that have waited. All threads of
// a block call each function, and all blocks of a row arrive equally often.
class RowBlocks {
 public:
  __device__ __forceinline__ RowBlocks(RowCounts& counts, uint32_t num_blocks)
      : counts_(counts), num_blocks_(num_blocks) {}

  // Whether this block is the last.
  __device__ __forceinline__ bool arrive() {
    __shared__ bool is_last;
    expected_ += num_blocks_;
    // The barriers extend what one thread's release and acquire order to its whole block.
    __syncthreads();
    if (threadIdx.x == 0) is_last = count_up_to(&counts_.arrivals, 0xffffffffu) == expected_ - 1;
    __syncthreads();
    return is_last;
  }

  // Until all blocks have arrived.
  __device__ __forceinline__ void wait() {
    if (threadIdx.x == 0) wait_for_count(&counts_.arrivals, expected_);
    __syncthreads();
  }

  __device__ __forceinline__ void meet() {
    if (!arrive()) wait();
  }

  // True in thread 0 of the block that leaves last, when no other reads or writes what belongs to the row.
  __device__ __forceinline__ bool leave() {
    __syncthreads();
    if (threadIdx.x != 0 || count_up_to(&counts_.departures, num_blocks_ - 1) != num_blocks_ - 1) {
      return false;
    }
    counts_.arrivals = 0;
    return true;
  }

 private:
  RowCounts& counts_;
  uint32_t num_blocks_;
  uint32_t expected_ = 0;  // arrivals when all blocks have come so far
};

}  // namespace coldstream
