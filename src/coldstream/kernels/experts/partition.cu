// The partition alone, for more tokens than the router's single launch takes; see partition.py.
#include "experts/partition.cuh"

using namespace coldstream;

constexpr int partition_threads = 1024;

// grid (1): a warp for each token in turn.
extern "C" __global__ void __launch_bounds__(partition_threads, 1)
    partition_experts(const int* ids, int num_tokens, int num_ranks, const float* x, int x_stride, int cols,
                      const __grid_constant__ Sharing sharing) {
  wait_for_previous_grid();
  release_next_grid();
  const int lane = threadIdx.x % warp_size;
  bool is_asked = false;
  for (int token = threadIdx.x / warp_size; token < num_tokens; token += partition_threads / warp_size) {
    const int id = lane < num_ranks ? ids[token * num_ranks + lane] : 0;
    is_asked |= share_out(sharing, token, id, num_ranks, x + int64_t(token) * x_stride, cols);
  }
  if (__syncthreads_or(is_asked) && threadIdx.x == 0) ask_the_cpu(sharing);
}
