// Who computes each (token, expert) pair: the GPU from a slot, the GPU over the bus, or the CPU, which is told
// through the mailbox. See partition.py.
#pragma once

#include "cuda/common.cuh"

namespace coldstream {

constexpr int num_matrices = 3;  // gate, up, down

// The experts of a layer: slots by expert (0: none), and the host's memory as the device sees it, or 0.
struct Stack {
  const int64_t* slots;
  int64_t mapped;
  int64_t step;  // bytes from expert to expert of the mapping
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

struct Sharing {
  Stack matrix[num_matrices];
  const int* streamed;  // [ranks + 1]: how many of a token's n missing experts are read over the bus
  Places places;
  Mailbox box;
  uint32_t request;  // what to ask: the layer and the number of rows; 0: nothing is shared out
};

// A row by one warp, to memory that is far away.
__device__ __forceinline__ void send_row(const float* from, float* to, int cols) {
  const int lane = threadIdx.x % warp_size;
  const uint64_t alignment = reinterpret_cast<uint64_t>(from) | reinterpret_cast<uint64_t>(to);
  if (alignment % 16 == 0 && cols % 4 == 0) {
#pragma unroll 16
    for (int i = lane; i < cols / 4; i += warp_size) {
      reinterpret_cast<float4*>(to)[i] = reinterpret_cast<const float4*>(from)[i];
    }
  } else {
    for (int i = lane; i < cols; i += warp_size) to[i] = from[i];
  }
}

// Places the pairs of a token by one warp, whose lane k has the id of rank k. If the CPU computes any of them, it
// gets the token's x, and the result is true in all lanes.
__device__ __forceinline__ bool share_out(const Sharing& sharing, int token, int id, int num_ranks,
                                          const float* x, int cols) {
  const int lane = threadIdx.x % warp_size, pair = token * num_ranks + lane;
  const bool exists = lane < num_ranks;
  int64_t slots[num_matrices] = {};
  if (exists) {
#pragma unroll
    for (int i = 0; i < num_matrices; i++) slots[i] = sharing.matrix[i].slots[id];
  }
  const bool is_missing = exists && (slots[0] == 0 || slots[1] == 0 || slots[2] == 0);
  const uint32_t missing = __ballot_sync(all_lanes, is_missing);
  const int before = __popc(missing & ((1u << lane) - 1));
  bool is_on_cpu = is_missing;
  if (missing != 0 && sharing.matrix[0].mapped != 0) {
    is_on_cpu = is_missing && before >= sharing.streamed[__popc(missing)];
  }
  if (exists) {
#pragma unroll
    for (int i = 0; i < num_matrices; i++) {
      const Stack& stack = sharing.matrix[i];
      const int64_t missed = is_on_cpu ? 0 : stack.mapped + id * stack.step;
      sharing.places.addresses[i][pair] = is_missing ? missed : slots[i];
    }
    sharing.places.cpu_ids[pair] = sharing.box.ids[pair] = is_on_cpu ? id : -1;
    sharing.box.used[pair] = id;
  }
  if (!__any_sync(all_lanes, is_on_cpu)) return false;
  send_row(x, sharing.box.x + int64_t(token) * cols, cols);
  __threadfence_system();
  return true;
}

// By one thread, after all warps have shared out their tokens.
__device__ __forceinline__ void ask_the_cpu(const Sharing& sharing) {
  asm volatile("st.relaxed.sys.global.u32 [%0], 0;" ::"l"(__cvta_generic_to_global(sharing.box.done)) : "memory");
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(__cvta_generic_to_global(sharing.box.request)),
               "r"(sharing.request)
               : "memory");
}

}  // namespace coldstream
