// Writes the addresses of a group of experts that lie in adjacent places into a layer's tables. See
// place_group.py.
#include "cuda/common.cuh"

using namespace coldstream;

constexpr int num_matrices = 3, max_group = 64, place_threads = 256;

// Matrix m of the expert numbers[i] is at first[m] + i * size[m].
struct Group {
  int64_t first[num_matrices];
  int64_t size[num_matrices];
  int count;
  uint16_t numbers[max_group];
};

struct Tables {
  int64_t* addresses[num_matrices];
};

// One block. `clears`: every other address of the tables becomes 0, which means not on the device.
extern "C" __global__ void __launch_bounds__(place_threads)
    place_group(const __grid_constant__ Group staged, const __grid_constant__ Tables to, int num_experts,
                int clears) {
#pragma unroll
  for (int m = 0; clears && m < num_matrices; m++)
    for (int e = threadIdx.x; e < num_experts; e += place_threads) to.addresses[m][e] = 0;
  __syncthreads();
  const int i = threadIdx.x;
  if (i >= staged.count) return;
#pragma unroll
  for (int m = 0; m < num_matrices; m++)
    to.addresses[m][staged.numbers[i]] = staged.first[m] + i * staged.size[m];
}
