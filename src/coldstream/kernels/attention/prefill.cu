// Many new rows of a few sequences, causal. A block of threads takes `num_rows` rows of the product of tokens
// and the query heads that share a key/value head, and walks their positions, 64 at a time: half of its
// threads turns keys into weights while the other half adds the values of the block before. Every sum stays
// in one register from its first term to its last, so its order is the written one.
//
// Each half has registers for its own sums and for what they take next, and computes while the other waits.
#include "attention/prefill_scores.cuh"
#include "attention/prefill_values.cuh"

namespace coldstream {

template <class shape>
struct prefiller {
  const prefill_arguments& a;
  typename shape::shared_memory& shared;
  const int group, kv_head, first_pair;

  __device__ __forceinline__ prefiller(const prefill_arguments& arguments, uint8_t* memory)
      : a(arguments),
        shared(*reinterpret_cast<typename shape::shared_memory*>(memory)),
        group(a.num_heads / a.num_kv_heads),
        kv_head(blockIdx.x % a.num_kv_heads),
        // Rows with the longest contexts first.
        first_pair(int(gridDim.x / a.num_kv_heads - 1 - blockIdx.x / a.num_kv_heads) * shape::num_rows) {}

  __device__ __forceinline__ int token_of(int row) const { return (first_pair + row) / group; }

  // Queries and positions of the rows whose tokens are begin … end − 1.
  __device__ __forceinline__ void load_rows(int begin, int end) {
    constexpr int num_rows = shape::num_rows, head_quads = shape::head_quads;
    for (int row = threadIdx.x; row < num_rows; row += 2 * role_threads) {
      const int token = token_of(row), place = min(token, a.num_tokens - 1) * a.num_heads;
      shared.lasts[row] = token >= begin && token < end ? a.positions[token] : -1;
      shared.places[row] = place + kv_head * group + (first_pair + row) % group;
    }
    __syncthreads();
    const float4* from = reinterpret_cast<const float4*>(a.query);
#pragma unroll 8
    for (int i = threadIdx.x; i < num_rows * head_quads; i += 2 * role_threads) {
      // Four rows and eight quads of a warp go to different banks.
      const int row = i / (4 * head_quads) * 4 + i % 4, quad = i / 4 % head_quads;
      const float4 q = from[int64_t{shared.places[row]} * head_quads + quad];
      float* to = shared.queries + quad / 2 * shape::query_floats + quad % 2 * 4 * num_rows + row;
      to[0] = q.x, to[num_rows] = q.y, to[2 * num_rows] = q.z, to[3 * num_rows] = q.w;
    }
    __syncthreads();
  }

  // The rows of tokens begin … end − 1, all of one slot and in the order of their positions.
  __device__ __forceinline__ void attend(int begin, int end) {
    load_rows(begin, end);
    const int64_t offset =
        a.slots[begin] * a.places.slot_bytes + kv_head * int64_t{shape::stage_type::row_bytes};
    const prefill_span span = {a.k_cache + offset, a.v_cache + offset,
                               first_position(a.positions[begin], a.window), a.positions[end - 1] + 1};
    if (threadIdx.x < role_threads) {
      prefill_scorer<shape>(a, shared).run(span);
    } else {
      prefill_mixer<shape>(a, shared).run(span);
    }
    __syncthreads();
  }

  // A tile may hold the end of one sequence and the beginning of another.
  __device__ __forceinline__ void run() {
    const int end = min(token_of(shape::num_rows - 1) + 1, a.num_tokens);
    for (int token = token_of(0); token < end;) {
      int next = token + 1;
      while (next < end && a.slots[next] == a.slots[token]) next++;
      if (a.slots[token] >= 0) attend(token, next);
      token = next;
    }
  }
};

template <class cache, int head_dim, int num_rows, int key_bytes, int value_bytes>
__global__ void __launch_bounds__(2 * role_threads, 1) attention_prefill(const prefill_arguments a) {
  extern __shared__ __align__(128) uint8_t shared[];
  prefiller<prefill_shape<cache, head_dim, num_rows, key_bytes, value_bytes>>(a, shared).run();
}

}  // namespace coldstream
