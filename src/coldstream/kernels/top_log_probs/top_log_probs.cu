// The likeliest tokens of a row of logits and their log-probabilities, for drafts: one launch, a part of the
// row a block, of which the last one merges what the others found.
#include "cuda/arithmetic.cuh"
#include "cuda/last_block.cuh"
#include "sample/block.cuh"
#include "sample/weights.cuh"

using namespace coldstream;

// A block's share of a row. The complements of order keys, so that the likeliest is the greatest; 0: none.
template <int most_ranks>
struct TopPart {
  uint64_t keys[most_ranks];
  float maximum;
  float sum;  // of exp(logit − maximum)
  uint32_t has_bad;
};

__device__ __forceinline__ float sum_of_block(float x) {
  __shared__ float warp_sums[block_warps];
#pragma unroll
  for (int distance = warp_size / 2; distance > 0; distance /= 2)
    x += __shfl_xor_sync(all_lanes, x, distance);
  __syncthreads();
  if (threadIdx.x % warp_size == 0) warp_sums[threadIdx.x / warp_size] = x;
  __syncthreads();
  float sum = 0.0f;
  for (int w = 0; w < block_warps; w++) sum += warp_sums[w];
  return sum;
}

// The greatest keys of the block's threads, each of which has `count` different ones; zeros after the last.
template <int count, int most_ranks>
__device__ __forceinline__ void greatest_keys(uint64_t (&own)[count], uint64_t (&found)[most_ranks]) {
#pragma unroll 1
  for (int rank = 0; rank < most_ranks; rank++) {
    uint64_t best = 0;
#pragma unroll
    for (int i = 0; i < count; i++) best = own[i] > best ? own[i] : best;
    best = greatest_for_all(best);
#pragma unroll
    for (int i = 0; i < count; i++) own[i] = own[i] == best ? 0 : own[i];
    found[rank] = best;
  }
}

template <int most_ranks>
__device__ __forceinline__ TopPart<most_ranks> part_of(const Row& logits) {
  float values[items_per_thread];
  uint64_t keys[items_per_thread];
  TopPart<most_ranks> part;
  const int begin = first_id();
  load_four(logits, begin, values);
  bool is_bad = false;
#pragma unroll
  for (int i = 0; i < items_per_thread; i++) {
    is_bad |= !is_finite(values[i]);
    keys[i] = begin + i < logits.vocab ? ~order_key(values[i], begin + i) : 0;
  }
  part.has_bad = __syncthreads_or(is_bad);
  greatest_keys(keys, part.keys);
  part.maximum = key_logit(~part.keys[0]);
  float own = 0.0f;
#pragma unroll
  for (int i = 0; i < items_per_thread; i++)
    if (begin + i < logits.vocab) own += exact_exp(values[i] - part.maximum);
  part.sum = sum_of_block(own);
  return part;
}

// Thread t holds the parts t, t + 512, …; their keys compete one part at a time.
template <int most_ranks>
__device__ __forceinline__ TopPart<most_ranks> merged(const TopPart<most_ranks>* parts, int num_parts) {
  TopPart<most_ranks> all = {};
  bool is_bad = false;
#pragma unroll 1
  for (int first = 0; first < num_parts; first += block_threads) {
    uint64_t keys[most_ranks + 1] = {};
    const int index = first + threadIdx.x;
    if (index < num_parts) {
      is_bad |= __ldcg(&parts[index].has_bad) != 0;
      for (int rank = 0; rank < most_ranks; rank++) keys[rank] = __ldcg(&parts[index].keys[rank]);
    }
    if (threadIdx.x < most_ranks) keys[most_ranks] = all.keys[threadIdx.x];
    uint64_t found[most_ranks];
    greatest_keys(keys, found);
    for (int rank = 0; rank < most_ranks; rank++) all.keys[rank] = found[rank];
  }
  all.has_bad = __syncthreads_or(is_bad);
  all.maximum = key_logit(~all.keys[0]);
  float own = 0.0f;
#pragma unroll 1
  for (int index = threadIdx.x; index < num_parts; index += block_threads)
    own += __ldcg(&parts[index].sum) * exact_exp(__ldcg(&parts[index].maximum) - all.maximum);
  all.sum = sum_of_block(own);
  return all;
}

// ids and log_probs: [rows, ranks]. The grid: [parts, rows].
template <int most_ranks>
__global__ void __launch_bounds__(block_threads)
    top_log_probs(const __grid_constant__ Logits logits, int ranks, TopPart<most_ranks>* parts,
                  uint32_t* arrivals, int* ids, float* log_probs) {
  TopPart<most_ranks>* const of_row = parts + int64_t(blockIdx.y) * gridDim.x;
  const TopPart<most_ranks> part = part_of<most_ranks>(logits.row(blockIdx.y));
  if (threadIdx.x == 0) of_row[blockIdx.x] = part;
  if (!is_last_block(arrivals + blockIdx.y, gridDim.x)) return;
  const TopPart<most_ranks> all = merged<most_ranks>(of_row, gridDim.x);
  if (int(threadIdx.x) >= ranks) return;
  const int rank = threadIdx.x;
  const float logit = key_logit(~all.keys[rank]);
  ids[blockIdx.y * ranks + rank] = key_id(~all.keys[rank]);
  log_probs[blockIdx.y * ranks + rank] =
      all.has_bad ? __uint_as_float(0x7fc00000u) : (logit - all.maximum) - logf(all.sum);
}
