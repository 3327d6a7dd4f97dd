// How many lanes of a warp say that it has read, and for how many a barrier waits; see test_host_gemm.py.
#include "cuda/gemm_tiles.cuh"

using namespace coldstream;

__global__ void count_arrivals(int* counts) {
  const uint32_t barrier = shared_address(dynamic_shared);
  if (threadIdx.x == 0) init_barrier(barrier, 1 + warp_size);
  __syncthreads();
  gemm::arrive_after_reads(barrier, threadIdx.x);
  __syncthreads();
  if (threadIdx.x > 0) return;
  counts[0] = 1 + warp_size - *reinterpret_cast<const int*>(shared_at(barrier));  // those missing
  counts[1] = gemm::warp_arrivals;
}
