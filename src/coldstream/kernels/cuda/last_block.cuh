// How the blocks of a grid agree on which of them ends last and may read what all have written.
#pragma once

#include "cuda/common.cuh"

namespace coldstream {

// True in every thread of the last of `num_blocks` blocks to come here; what the blocks wrote before it is
// then visible through __ldcg. `arrivals` must be zero at first and is zero again afterwards. All threads
// must call it.
__device__ __forceinline__ bool is_last_block(uint32_t* arrivals, uint32_t num_blocks) {
  __shared__ bool is_last;
  // The barriers extend what one thread's release and acquire order to its whole block.
  __syncthreads();
  if (threadIdx.x == 0) is_last = count_up_to(arrivals, num_blocks - 1) == num_blocks - 1;
  __syncthreads();
  return is_last;
}

}  // namespace coldstream
