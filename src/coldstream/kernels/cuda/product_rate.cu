// How fast tensor cores multiply bytes that are in registers; see link.py for the launcher.
#include "cuda/tensor_cores.cuh"

using namespace coldstream;

constexpr int block_threads = 256;
constexpr int chains = 8;  // of products that do not wait for each other

// Any grid: each warp adds `steps` products of 16 x 32 by 32 x 8 bytes in each chain. out: a sum of each
// thread, so that no product is left out.
__global__ void __launch_bounds__(block_threads) multiply_fragments(int* out, int steps) {
  wait_for_previous_grid();
  release_next_grid();
  const uint32_t seed = 0x01010101u * (threadIdx.x & 3);
  const uint32_t a[4] = {seed, seed + 0x01010101u, seed, seed + 0x01010101u};
  int sums[chains][4] = {};
  for (int step = 0; step < steps; step++) {
#pragma unroll
    for (int chain = 0; chain < chains; chain++) add_product(sums[chain], a, seed ^ chain, uint32_t(step));
  }
  int sum = 0;
#pragma unroll
  for (int chain = 0; chain < chains; chain++) {
    for (int i = 0; i < 4; i++) sum += sums[chain][i];
  }
  out[blockIdx.x * block_threads + threadIdx.x] = sum;
}
