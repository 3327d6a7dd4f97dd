// What a token's layers cost as launches that follow each other and as one launch with barriers between its phases; see
// persistent_layers.py. A phase multiplies 4-bit codes by what the phase before wrote.
#include "cuda/common.cuh"

using namespace coldstream;

constexpr int threads = 512, stages = 12, inputs = 1024;  // inputs: words of a phase that the next one reads
constexpr int warps = threads / warp_size;

struct Phase {
  const uint4* weights;
  int64_t count;  // of 16 bytes
};

struct Ring {
  uint4 slots[stages][threads];
};

// What this thread reads of a phase: every gridDim · threads-th piece, so that a block's loads are adjacent.
__device__ __forceinline__ int64_t piece(int step) {
  return (int64_t(step) * gridDim.x + blockIdx.x) * threads + threadIdx.x;
}

__device__ __forceinline__ void fetch(const Phase& phase, int step, Ring& ring) {
  if (piece(step) < phase.count) copy_async_16(&ring.slots[step % stages][threadIdx.x], phase.weights + piece(step));
  asm volatile("cp.async.commit_group;");
}

// Begins to load the first weights of a phase, which depend on nothing.
__device__ __forceinline__ void begin(const Phase& phase, Ring& ring) {
#pragma unroll
  for (int step = 0; step < stages; step++) fetch(phase, step, ring);
}

// Behind `begin` and the end of the phase before.
__device__ __forceinline__ void run(const Phase& phase, const int* from, int* to, Ring& ring, int* x) {
  for (int i = threadIdx.x; i < inputs; i += threads) {
    asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(x[i]) : "l"(from + i));
  }
  __syncthreads();
  int sum = 0;
#pragma unroll 1
  for (int step = 0; piece(step) < phase.count; step++) {
    asm volatile("cp.async.wait_group %0;" ::"n"(stages - 1) : "memory");
    const uint4 four = ring.slots[step % stages][threadIdx.x];
    const int* of_piece = x + piece(step) * 8 % inputs;
    const uint32_t words[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      sum = __dp4a(int(words[i] & 0x0f0f0f0fu), of_piece[2 * i], sum);
      sum = __dp4a(int(words[i] >> 4 & 0x0f0f0f0fu), of_piece[2 * i + 1], sum);
    }
    fetch(phase, step + stages, ring);
  }
  asm volatile("cp.async.wait_all;" ::: "memory");
#pragma unroll
  for (int step = warp_size / 2; step > 0; step /= 2) sum += __shfl_xor_sync(all_lanes, sum, step);
  const int warp = blockIdx.x * warps + threadIdx.x / warp_size;
  if (threadIdx.x % warp_size == 0 && warp < inputs) to[warp] = sum;
}

// One phase a launch; the next one's blocks begin beside this one's.
extern "C" __global__ void __launch_bounds__(threads) one_phase(Phase phase, const int* from, int* to) {
  extern __shared__ __align__(16) unsigned char memory[];
  Ring& ring = *reinterpret_cast<Ring*>(memory);
  __shared__ int x[inputs];
  release_next_grid();
  begin(phase, ring);
  wait_for_previous_grid();
  run(phase, from, to, ring, x);
}

// All phases in one launch of as many blocks as there are multiprocessors. `arrivals` is 0 before and after.
extern "C" __global__ void __launch_bounds__(threads)
    all_phases(const Phase* phases, int num_phases, int* outputs, uint32_t* arrivals, uint32_t* turn) {
  extern __shared__ __align__(16) unsigned char memory[];
  Ring& ring = *reinterpret_cast<Ring*>(memory);
  __shared__ int x[inputs];
  const uint32_t first_turn = load_acquire(turn);
  begin(phases[0], ring);
#pragma unroll 1
  for (int i = 0; i < num_phases; i++) {
    run(phases[i], outputs + i % 2 * inputs, outputs + (i + 1) % 2 * inputs, ring, x);
    if (i + 1 < num_phases) begin(phases[i + 1], ring);
    __syncthreads();
    if (threadIdx.x == 0) {
      const uint32_t next = first_turn + i + 1;
      if (count_up_to(arrivals, gridDim.x - 1) == gridDim.x - 1) {
        store_release(turn, next);
      } else {
        while (load_acquire(turn) != next) {
        }
      }
    }
    __syncthreads();
  }
}
