// What the threads of a block of prefill.cu share: arguments, memory and barriers.
#pragma once

#include "attention/prefill_stage.cuh"

namespace coldstream {

struct prefill_arguments {
  const float *query, *query_gate;
  const uint8_t *k_cache, *v_cache;
  const int32_t *positions, *slots;
  float* out;  // holds merged numerators until a row's last chunk
  cache_places places;
  int32_t query_gate_stride, num_tokens, num_heads, num_kv_heads, window;
};

// Threads that compute scores; as many sum values.
constexpr int role_threads = 128;

// Named barriers. Weights of the blocks of positions go through two places in turn.
constexpr int barrier_of_scores = 1, barrier_of_values = 2, barrier_full = 3, barrier_empty = 5;

__device__ __forceinline__ void wait_at(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

__device__ __forceinline__ void arrive_at(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// What the scores of a block of positions leave for its values.
template <int num_rows>
struct block_weights {
  static constexpr int place_floats = num_rows + 8;  // neighbouring places go to different banks
  float weights[block_positions * place_floats];
  float corrections[num_rows];
  float ours[num_rows], theirs[num_rows], inverses[num_rows];  // at a chunk's end; of the denominators
};

template <class cache, int head_dim_, int num_rows_, int key_bytes, int value_bytes>
struct prefill_shape {
  static constexpr int head_dim = head_dim_, head_quads = head_dim / 4, num_rows = num_rows_;
  static constexpr bool is_turned = cache::is_turned;
  using stage_type = kv_stage<cache, head_dim, role_threads, key_bytes, value_bytes>;
  static_assert(num_rows % 16 == 0);

  static constexpr int query_floats = 8 * num_rows + 4;  // of eight dimensions, like those of keys
  struct shared_memory {
    float queries[head_dim / 8 * query_floats];  // [head_dim, num_rows] but for the gaps
    float keys[2][stage_type::key_floats], values[2][value_bytes / 4];  // one is read, the other written
    block_weights<num_rows> weights[2];
    int lasts[num_rows];   // the row's own position, −1 for a row that is not to be written
    int places[num_rows];  // where the row is in `out`, in heads
  };
};

// The positions that the rows of a block of threads look at, in one slot and for one key/value head.
struct prefill_span {
  const uint8_t *keys, *values;
  int first, end;

  __device__ __forceinline__ int first_block() const { return first / block_positions * block_positions; }
  __device__ __forceinline__ int num_blocks() const {
    return quotient_up(end - first_block(), block_positions);
  }
  __device__ __forceinline__ bool ends_chunk(int begin) const {
    return (begin + block_positions) % chunk_positions == 0 || begin + block_positions >= end;
  }
};

}  // namespace coldstream
