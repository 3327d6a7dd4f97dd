// Who computes each (token, expert) pair: the GPU from a slot, the GPU over the bus, or the CPU, which is told
// through the mailbox. See partition.py.
#include "cuda/last_block.cuh"

using namespace coldstream;

constexpr int partition_threads = 256;
constexpr int num_matrices = 3;  // gate, up, down

// The experts of a layer: slots by expert (0: none), and the host's memory as the device sees it, or null.
struct Stack {
  const int64_t* slots;
  int64_t mapped;
  int64_t step;  // bytes from expert to expert of the mapping
};

struct Experts {
  Stack matrix[num_matrices];
  int num_experts;
  // streamed[n]: how many of a token's n missing experts are read over the bus.
  const int* streamed;
};

// By pair: where its matrices are for the GPU (0: the CPU computes it), and which expert the CPU computes (−1:
// none).
struct Places {
  int64_t* addresses[num_matrices];
  int* cpu_ids;
};

// See csrc/hybrid/expert_server.h.
struct Mailbox {
  uint32_t* request;
  uint32_t* done;
  float* x;   // [capacity, cols]
  int* ids;   // [capacity, ranks]
  int* used;  // [capacity, ranks]: all experts of the layer's tokens, for whoever keeps the slots
};

// The lane's pair of the block's token; true if the CPU has to compute it.
__device__ __forceinline__ bool place_pair(const int* ids, int num_ranks, const Experts& experts,
                                           const Places& places, const Mailbox& box) {
  const int lane = threadIdx.x % warp_size;
  const int pair = blockIdx.x * num_ranks + lane;
  const bool exists = lane < num_ranks;
  const int id = exists ? ids[pair] : 0;
  int64_t slots[num_matrices];
  bool is_resident = true;
#pragma unroll
  for (int i = 0; i < num_matrices; i++) {
    slots[i] = experts.matrix[i].slots[id];
    is_resident &= slots[i] != 0;
  }
  const uint32_t missing = __ballot_sync(all_lanes, exists && !is_resident);
  const int before = __popc(missing & ((1u << lane) - 1));
  const bool is_streamed =
      !is_resident && experts.matrix[0].mapped != 0 && before < experts.streamed[__popc(missing)];
  if (!exists) return false;
  const bool is_on_cpu = !is_resident && !is_streamed;
  box.used[pair] = id;
#pragma unroll
  for (int i = 0; i < num_matrices; i++) {
    const Stack& stack = experts.matrix[i];
    places.addresses[i][pair] = is_on_cpu ? 0 : is_streamed ? stack.mapped + id * stack.step : slots[i];
  }
  places.cpu_ids[pair] = box.ids[pair] = is_on_cpu ? id : -1;
  return is_on_cpu;
}

// counters[0]: blocks that have come, counters[1]: whether any token needs the CPU; both zero before and after.
__device__ __forceinline__ bool any_token(uint32_t* counters, bool this_token) {
  if (gridDim.x == 1) return this_token;
  if (this_token && threadIdx.x == 0) atomicOr(counters + 1, 1u);
  if (!is_last_block(counters, gridDim.x)) return false;
  __shared__ bool any;
  if (threadIdx.x == 0) any = atomicExch(counters + 1, 0u) != 0;
  __syncthreads();
  return any;
}

// grid (tokens): the pairs of each token. If the CPU has any, it is sent the rows of their tokens, and the last
// block raises the flag.
extern "C" __global__ void __launch_bounds__(partition_threads)
    partition_experts(const int* ids, int num_ranks, const __grid_constant__ Experts experts,
                      const __grid_constant__ Places places, const float* x, int x_stride, int cols,
                      const __grid_constant__ Mailbox box, uint32_t request, uint32_t* counters) {
  wait_for_previous_grid();
  release_next_grid();
  bool mine = false;
  if (threadIdx.x < warp_size) mine = place_pair(ids, num_ranks, experts, places, box);
  const bool has_cpu_pair = __syncthreads_or(mine);
  if (has_cpu_pair) {
    const float* from = x + int64_t(blockIdx.x) * x_stride;
    float* to = box.x + int64_t(blockIdx.x) * cols;
    for (int i = threadIdx.x; i < cols; i += partition_threads) to[i] = from[i];
  }
  __threadfence_system();
  __syncthreads();
  if (!any_token(counters, has_cpu_pair) || threadIdx.x != 0) return;
  *box.done = 0;
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(__cvta_generic_to_global(box.request)), "r"(request)
               : "memory");
}
