// How the blocks of a row meet within a launch.
#pragma once

#include "cuda/common.cuh"

namespace coldstream {

// Of the blocks of a row; zero between launches.
struct RowCounts {
  uint32_t arrivals;  // and `waited_in_vain`
  uint32_t departures;
};

constexpr uint32_t waited_in_vain = 1u << 31;  // a bit that some block has set

constexpr uint64_t most_wait_ns = 1'000'000'000;  // far longer than whatever else the device may do first

// The blocks of a row, which should all have a place on the device at once. What a block writes before it
// arrives is visible through __ldcg to the last one that arrives, and to all that have waited. All threads of
// a block call each function, and all blocks of a row arrive equally often.
//
// A block that has waited in vain does not wait again, nor does any that comes later: what they compute is
// not used, and all leave.
class RowBlocks {
 public:
  __device__ __forceinline__ RowBlocks(RowCounts& counts, uint32_t num_blocks)
      : counts_(counts), num_blocks_(num_blocks) {}

  // Whether this block is the last.
  __device__ __forceinline__ bool arrive() {
    __shared__ bool is_last, has_failed;
    expected_ += num_blocks_;
    // The barriers extend what one thread's release and acquire order to its whole block.
    __syncthreads();
    if (threadIdx.x == 0) {
      const uint32_t before = count_up_to(&counts_.arrivals, 0xffffffffu);
      has_failed = before >= waited_in_vain;
      is_last = before == expected_ - 1;
    }
    __syncthreads();
    has_failed_ = has_failed;
    return is_last;
  }

  // Until all blocks have arrived.
  __device__ __forceinline__ void wait() {
    __shared__ bool has_failed;
    if (has_failed_) return;
    if (threadIdx.x == 0) {
      const uint32_t found = wait_for_count(&counts_.arrivals, expected_, most_wait_ns);
      if (found < expected_) set_bits(&counts_.arrivals, waited_in_vain);
      has_failed = found < expected_ || found >= waited_in_vain;
    }
    __syncthreads();
    has_failed_ = has_failed;
    __syncthreads();  // or the next wait would write what others still read
  }

  __device__ __forceinline__ void meet() {
    if (!arrive()) wait();
  }

  // Whether what the block reads of others is of no use, as some have not come.
  __device__ __forceinline__ bool has_failed() const { return has_failed_; }

  // True in thread 0 of the block that leaves last, when no other reads or writes what belongs to the row.
  __device__ __forceinline__ bool leave() {
    __syncthreads();
    return threadIdx.x == 0 && count_up_to(&counts_.departures, num_blocks_ - 1) == num_blocks_ - 1;
  }

  // Whether any of the row's blocks has failed. Thread 0 of the one that leaves last; clears the counts.
  __device__ __forceinline__ bool take_failure() {
    return atomicExch(&counts_.arrivals, 0u) >= waited_in_vain;
  }

 private:
  RowCounts& counts_;
  uint32_t num_blocks_;
  uint32_t expected_ = 0;  // arrivals when all blocks have come so far
  bool has_failed_ = false;
};

}  // namespace coldstream
