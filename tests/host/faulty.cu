// Kernels with the faults that running them on the host is to show; see test_host_device.py.
#include "cuda/last_block.cuh"
#include "cuda/tensor_cores.cuh"

using namespace coldstream;

// Every thread gets what the thread behind it wrote, with a barrier between them or without.
template <bool meets>
__global__ void pass_on(const int* in, int* out) {
  __shared__ int values[256];
  values[threadIdx.x] = in[threadIdx.x];
  if (meets) __syncthreads();
  out[threadIdx.x] = values[(threadIdx.x + warp_size) % 256];
}

// The same within a warp.
template <bool meets>
__global__ void pass_on_in_warp(const int* in, int* out) {
  __shared__ int values[256];
  values[threadIdx.x] = in[threadIdx.x];
  if (meets) __syncwarp();
  out[threadIdx.x] = values[threadIdx.x ^ 1];
}

// One warp reads what the other then overwrites, as soon as the first lane says that all have read, after its
// lanes have met or without.
template <bool meets>
__global__ void overwrite(const int* in, int* out) {
  extern __shared__ float4 dynamic_shared[];
  int* const values = reinterpret_cast<int*>(dynamic_shared) + 4;
  const uint32_t barrier = shared_address(dynamic_shared);
  const int lane = threadIdx.x % warp_size;
  if (threadIdx.x == 0) init_barrier(barrier, 1);
  values[lane] = in[lane];
  __syncthreads();
  if (threadIdx.x < warp_size) {
    out[lane] = values[lane];
    if (meets) __syncwarp();
    if (lane == 0) arrive_barrier(barrier);
  } else {
    wait_barrier(barrier, 0);
    values[lane] = -1;
  }
}

// The last block adds up what all blocks wrote, before they said so or behind it.
template <bool is_late>
__global__ void add_blocks(int* parts, int* sum, uint32_t* arrivals) {
  if (!is_late && threadIdx.x == 100) parts[blockIdx.x] = 1;
  const bool is_last = is_last_block(arrivals, gridDim.x);
  if (is_late && threadIdx.x == 100) parts[blockIdx.x] = 1;
  __syncthreads();
  if (!is_last || threadIdx.x != 0) return;
  for (int i = 0; i < int(gridDim.x); i++) *sum += parts[i];
}

// Every block waits until all have come.
__global__ void wait_for_blocks(uint32_t* arrivals) {
  if (threadIdx.x == 0) {
    count_up_to(arrivals, 0xffffffffu);
    while (wait_for_count(arrivals, gridDim.x, 1'000'000'000) < gridDim.x) {
    }
  }
  __syncthreads();
}

// Half a warp meets, of which all lanes were to.
__global__ void leave_half() {
  if (threadIdx.x % warp_size < 16) return;
  __syncwarp();
}

__global__ void meet_differently(int* out) {
  if (threadIdx.x % 2)
    out[threadIdx.x] = __any_sync(all_lanes, true);
  else
    out[threadIdx.x] = __reduce_add_sync(all_lanes, 1);
}

// Reads a copy that it has waited for, or has not.
template <bool waits>
__global__ void copy(const float* in, float* out) {
  extern __shared__ float4 dynamic_shared[];
  copy_async_16(dynamic_shared, in);
  commit_copies();
  if (waits) wait_for_copies<0>();
  *out = dynamic_shared[0].x;
}

// Writes one float behind what the launch has given it.
__global__ void write_behind(int num_floats) {
  extern __shared__ float4 dynamic_shared[];
  reinterpret_cast<float*>(dynamic_shared)[num_floats] = 1.0f;
}
