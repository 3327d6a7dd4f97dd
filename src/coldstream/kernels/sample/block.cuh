// Operations of a whole block of the sampler, over 2048 adjacent items, four a thread.
#pragma once

#include "cuda/common.cuh"

namespace coldstream {

constexpr int block_threads = 512;
constexpr int items_per_thread = 4;
constexpr int block_items = block_threads * items_per_thread;
constexpr int block_warps = block_threads / warp_size;
constexpr uint64_t never = ~uint64_t(0);

struct Crossing {
  int index;        // of the first item at which the running sum reaches the target; block_items if none does
  uint64_t before;  // the sum of the items before it
  uint64_t total;   // of all items
};

__device__ __forceinline__ uint64_t inclusive_sum_in_warp(uint64_t x) {
  const int lane = threadIdx.x % warp_size;
#pragma unroll
  for (int distance = 1; distance < warp_size; distance *= 2) {
    const uint64_t left = __shfl_up_sync(all_lanes, x, distance);
    if (lane >= distance) x += left;
  }
  return x;
}

// The first item, of four a thread, at which the running sum reaches the target. A call, as it is long and a
// kernel needs it often; the answer is in shared memory until the next one.
__device__ __noinline__ const Crossing& find_crossing_of(uint64_t first, uint64_t second, uint64_t third,
                                                         uint64_t fourth, uint64_t target) {
  __shared__ uint64_t warp_sums[block_warps];
  __shared__ Crossing result;
  const uint64_t items[items_per_thread] = {first, second, third, fourth};
  const int warp = threadIdx.x / warp_size;
  const uint64_t own = (items[0] + items[1]) + (items[2] + items[3]);
  uint64_t running = inclusive_sum_in_warp(own);
  if (threadIdx.x % warp_size == warp_size - 1) warp_sums[warp] = running;
  __syncthreads();
  uint64_t total = 0;
  running -= own;
#pragma unroll
  for (int w = 0; w < block_warps; w++) {
    if (w < warp) running += warp_sums[w];
    total += warp_sums[w];
  }
  if (threadIdx.x == 0) result = {block_items, total, total};
  __syncthreads();
#pragma unroll
  for (int i = 0; i < items_per_thread; i++) {
    if (running < target && target <= running + items[i]) {
      result = {int(threadIdx.x) * items_per_thread + i, running, total};
    }
    running += items[i];
  }
  __syncthreads();
  return result;
}

// Thread t holds the items 4t … 4t + 3; all threads get the answer.
__device__ __forceinline__ Crossing find_crossing(const uint64_t (&items)[items_per_thread],
                                                  uint64_t target) {
  return find_crossing_of(items[0], items[1], items[2], items[3], target);
}

__device__ __forceinline__ uint64_t sum_in_block(uint64_t x) {
  const uint64_t items[items_per_thread] = {x, 0, 0, 0};
  return find_crossing(items, never).total;
}

// The greatest x of the block, in thread 0.
__device__ __forceinline__ uint64_t greatest_in_block(uint64_t x) {
  __shared__ uint64_t warp_results[block_warps];
#pragma unroll
  for (int distance = warp_size / 2; distance > 0; distance /= 2) {
    const uint64_t other = __shfl_xor_sync(all_lanes, x, distance);
    x = other > x ? other : x;
  }
  if (threadIdx.x % warp_size == 0) warp_results[threadIdx.x / warp_size] = x;
  __syncthreads();
  for (int w = 0; threadIdx.x == 0 && w < block_warps; w++) x = warp_results[w] > x ? warp_results[w] : x;
  return x;
}

// The same in all threads.
__device__ __forceinline__ uint64_t greatest_for_all(uint64_t x) {
  __shared__ uint64_t greatest;
  x = greatest_in_block(x);
  if (threadIdx.x == 0) greatest = x;
  __syncthreads();
  x = greatest;
  __syncthreads();
  return x;
}

// float32 [vocab].
struct Row {
  float* values;
  int vocab;
  int aligned;  // whether they start at 16 bytes
};

struct Logits {
  float* first;
  int row_stride;
  int vocab;
  int aligned;  // whether all rows start at 16 bytes

  __device__ __forceinline__ Row row(int index) const {
    return {first + int64_t(index) * row_stride, vocab, aligned};
  }
};

// Four adjacent logits of a row; 0 past its end.
__device__ __forceinline__ void load_four(const Row& logits, int begin, float (&values)[items_per_thread]) {
  if (logits.aligned && begin + items_per_thread <= logits.vocab) {
    const float4 loaded = *reinterpret_cast<const float4*>(logits.values + begin);
    values[0] = loaded.x, values[1] = loaded.y, values[2] = loaded.z, values[3] = loaded.w;
    return;
  }
#pragma unroll
  for (int i = 0; i < items_per_thread; i++) {
    values[i] = begin + i < logits.vocab ? logits.values[begin + i] : 0.0f;
  }
}

// The first of the thread's four ids.
__device__ __forceinline__ int first_id() {
  return blockIdx.x * block_items + threadIdx.x * items_per_thread;
}

}  // namespace coldstream
