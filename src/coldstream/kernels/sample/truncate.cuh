// The end of the prefix of tokens that top-k and top-p keep.
#pragma once

#include "sample/argmax.cuh"

namespace coldstream {

constexpr int num_bins = block_items;
constexpr float bins_per_unit = 64.0f;  // of logit: the bins span 32, and beyond 28 nothing has weight
constexpr int list_capacity = 8192;
constexpr int digit_bits = 11;
static_assert(1 << digit_bits == num_bins, "one histogram serves bins and digits");

enum Pending : uint32_t { nothing, top_k_truncation, top_p_truncation };

// A row's state between the launches. Zero at first.
struct SamplerRow {
  ArgmaxRow argmax;
  uint64_t last_key;   // tokens with greater order keys are out
  uint64_t remaining;  // of the pending truncation: the part of the target bin's count or weight that is kept
  float largest;       // logit
  uint32_t is_open;    // whether a token must be drawn
  Pending pending;
  int target_bin;
  uint32_t num_listed[2];  // tokens of the target bin, per stage
  uint32_t arrivals;
  uint32_t padding;
  uint32_t bin_counts[num_bins];
  uint64_t bin_weights[num_bins];
  uint64_t block_sums[block_items];
  uint64_t list[list_capacity];  // order keys
};

// Ascends as logits descend: subtraction and multiplication round monotonically.
__device__ __forceinline__ int bin_of(float logit, float largest) {
  return int(fminf((largest - logit) * bins_per_unit, float(num_bins - 1)));
}

__device__ __forceinline__ bool is_candidate(const SamplerRow& row, uint64_t key) {
  return key <= row.last_key && bin_of(key_logit(key), row.largest) == row.target_bin;
}

// The tokens of the target bin up to the last key: from the list, or from the logits if the list is too
// short.
struct Candidates {
  const SamplerRow& row;
  const Row& logits;
  int num_listed;

  template <typename Visit>
  __device__ __forceinline__ void for_each(Visit visit) const {
    if (num_listed <= list_capacity) {
      for (int i = threadIdx.x; i < num_listed; i += block_threads) visit(__ldcg(&row.list[i]));
      return;
    }
    for (int i = threadIdx.x; i < logits.vocab; i += block_threads) {
      const uint64_t key = order_key(logits.values[i], i);
      if (is_candidate(row, key)) visit(key);
    }
  }
};

__device__ __forceinline__ uint64_t weight_up_to(const Candidates& candidates, uint64_t last_key) {
  uint64_t sum = 0;
  const float largest = candidates.row.largest;
  candidates.for_each([&](uint64_t key) {
    if (key <= last_key) sum += token_weight(key_logit(key), largest);
  });
  return sum_in_block(sum);
}

// The key at which the running sum, in ascending order of keys, of counts or weights reaches `remaining`.
__device__ uint64_t select_last_key(const Candidates& candidates, bool by_weight, uint64_t remaining) {
  __shared__ uint32_t counts[num_bins];
  __shared__ uint64_t weights[num_bins];
  __shared__ uint64_t found;
  const float largest = candidates.row.largest;
  uint64_t prefix = 0;
  int shift = 64;
  while (shift > 0) {
    const int above = shift;
    shift = shift > digit_bits ? shift - digit_bits : 0;
    for (int i = threadIdx.x; i < num_bins; i += block_threads) counts[i] = weights[i] = 0;
    __syncthreads();
    candidates.for_each([&](uint64_t key) {
      if (above < 64 && key >> above != prefix >> above) return;
      const int digit = int(key >> shift) & ((1 << (above - shift)) - 1);
      atomicAdd(&counts[digit], 1u);
      if (by_weight) atomicAdd(&weights[digit], token_weight(key_logit(key), largest));
    });
    __syncthreads();
    uint64_t items[items_per_thread];
#pragma unroll
    for (int i = 0; i < items_per_thread; i++) {
      const int digit = threadIdx.x * items_per_thread + i;
      items[i] = by_weight ? weights[digit] : counts[digit];
    }
    const Crossing crossing = find_crossing(items, remaining);
    remaining -= crossing.before;
    prefix |= uint64_t(crossing.index) << shift;
    const bool is_alone = counts[crossing.index] == 1;
    __syncthreads();
    if (is_alone) break;
  }
  candidates.for_each([&](uint64_t key) {
    if (key >> shift == prefix >> shift) found = key;
  });
  __syncthreads();
  return found;
}

// Sets the bin in which top-k's prefix ends; tokens of no other bin count in the last. All threads of a
// block.
__device__ __forceinline__ void plan_top_k(SamplerRow& row, int top_k) {
  uint64_t items[items_per_thread];
#pragma unroll
  for (int i = 0; i < items_per_thread; i++) {
    items[i] = __ldcg(&row.bin_counts[threadIdx.x * items_per_thread + i]);
  }
  const Crossing crossing = find_crossing(items, top_k);
  if (threadIdx.x != 0) return;
  row.target_bin = min(crossing.index, num_bins - 1);
  row.remaining = top_k - crossing.before;
  row.pending = top_k_truncation;
}

// The same for top-p < 1, of the tokens that top-k left: all of the bins before `last_bin`, and `last_weight`
// of it.
__device__ __forceinline__ void plan_top_p(SamplerRow& row, double top_p, int last_bin,
                                           uint64_t last_weight) {
  uint64_t items[items_per_thread];
#pragma unroll
  for (int i = 0; i < items_per_thread; i++) {
    const int bin = threadIdx.x * items_per_thread + i;
    items[i] = bin < last_bin ? __ldcg(&row.bin_weights[bin]) : bin == last_bin ? last_weight : 0;
  }
  const uint64_t total = find_crossing(items, never).total;
  constexpr double two_to_64 = 18446744073709551616.0;
  // At least 1: the first token always stays.
  const uint64_t bound = max(uint64_t(1), __umul64hi(uint64_t(top_p * two_to_64), total));
  const Crossing crossing = find_crossing(items, bound);
  if (threadIdx.x != 0) return;
  row.target_bin = crossing.index;
  row.remaining = bound - crossing.before;
  row.pending = top_p_truncation;
}

}  // namespace coldstream
