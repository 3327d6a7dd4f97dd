// The draw, from a list of tokens or from all of a row.
#pragma once

#include "sample/truncate.cuh"

namespace coldstream {

constexpr int weight_bits = 41;  // an id and a weight are one number of 63 bits

// The weights of tokens, and which of them are too small to be drawn.
struct Weighing {
  double temperature;
  float largest;
  bool drops_weightless;
  uint64_t least;  // at temperature 1

  __device__ __forceinline__ explicit Weighing(const RowSettings& settings, float largest_logit)
      : temperature(settings.temperature),
        largest(largest_logit),
        drops_weightless(settings.top_p != 1.0 || settings.min_p != 0.0),
        least(max(uint64_t(1), uint64_t(ceil(settings.min_p * weight_one)))) {}

  // At the row's temperature; 0 for one that is not drawn.
  __device__ __forceinline__ uint64_t of(float logit) const {
    if (drops_weightless && token_weight(logit, largest) < least) return 0;
    return token_weight(logit, largest, temperature);
  }
};

// The number of the weights' units before the token that is drawn.
__device__ __forceinline__ uint64_t units_passed(const RowSettings& settings, uint64_t total) {
  return __umul64hi(random_bits(settings.seed, settings.position), total);
}

// Sorts `size` numbers of shared memory, a power of two from 2 on, in ascending order.
__device__ __noinline__ void sort_in_block(uint64_t* numbers, int size) {
  for (int width = 2; width <= size; width *= 2) {
    for (int distance = width / 2; distance > 0; distance /= 2) {
      __syncthreads();
      for (int i = threadIdx.x; i < size / 2; i += block_threads) {
        const int low = 2 * i - (i & (distance - 1)), high = low + distance;
        const uint64_t first = numbers[low], second = numbers[high];
        if ((first > second) == ((low & width) == 0)) {
          numbers[low] = second;
          numbers[high] = first;
        }
      }
    }
  }
  __syncthreads();
}

// Draws the row's token from the `count` tokens of the list, as one block. Of these top-k keeps as many as it
// says, if the list is for top-k.
__device__ __noinline__ void draw_from_list(const RowChoice& choice, const Kept& kept, int count,
                                            bool is_for_top_k) {
  const RowSettings& settings = choice.row.settings;
  uint64_t* const numbers = block_memory().keys;
  const int first = threadIdx.x * items_per_thread;
  int size = 2;
  while (size < count) size *= 2;
  __syncthreads();
  for (int i = threadIdx.x; i < size; i += block_threads) {
    numbers[i] = i < count ? __ldcg(&choice.row.state.numbers[i]) : never;
  }
  sort_in_block(numbers, size);
  if (is_for_top_k) count = min(count, settings.top_k);
  if (settings.top_p != 1.0) {
    uint64_t weights[items_per_thread];
#pragma unroll
    for (int i = 0; i < items_per_thread; i++) {
      weights[i] = first + i < count ? token_weight(key_logit(numbers[first + i]), choice.largest) : 0;
    }
    uint64_t target = kept.weight;
    if (is_for_top_k) {
      target = top_p_target(settings.top_p, find_crossing(weights, never).total);
    }
    count = min(count, find_crossing(weights, target).index + 1);
  }
  const Weighing weighing(settings, choice.largest);
  uint64_t drawn[items_per_thread];
#pragma unroll
  for (int i = 0; i < items_per_thread; i++) {
    const uint64_t key = first + i < count ? numbers[first + i] : never;
    const uint64_t weight = first + i < count ? weighing.of(key_logit(key)) : 0;
    drawn[i] = weight == 0 ? never : uint64_t(key_id(key)) << weight_bits | weight;
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < items_per_thread; i++) {
    if (first + i < size) numbers[first + i] = drawn[i];
  }
  sort_in_block(numbers, size);
#pragma unroll
  for (int i = 0; i < items_per_thread; i++) {
    const uint64_t number = first + i < size ? numbers[first + i] : never;
    drawn[i] = number == never ? 0 : number & ((uint64_t(1) << weight_bits) - 1);
  }
  const uint64_t passed = units_passed(settings, find_crossing(drawn, never).total);
  const Crossing token = find_crossing(drawn, passed + 1);
  if (threadIdx.x == 0) choice.row.chosen = {int(numbers[token.index] >> weight_bits), 0};
}

// The weights at the row's temperature of the tokens that stay among four, and 0 for others.
__device__ __forceinline__ void weigh_four(const RowChoice& choice, const Kept& kept,
                                           const Weighing& weighing, int begin,
                                           const float (&values)[items_per_thread],
                                           uint64_t (&weights)[items_per_thread]) {
#pragma unroll
  for (int i = 0; i < items_per_thread; i++) {
    const bool stays =
        begin + i < choice.row.logits.vocab && choice.is_kept(kept, order_key(values[i], begin + i));
    weights[i] = stays ? weighing.of(values[i]) : 0;
  }
}

// Draws the row's token from all that are kept. Returns whether this block, the last, has done so.
__device__ __noinline__ bool draw_from_row(const RowChoice& choice, const Kept& kept) {
  const Weighing weighing(choice.row.settings, choice.largest);
  uint64_t weights[items_per_thread];
  choice.for_each_tile([&](int tile, int begin, const float (&values)[items_per_thread]) {
    weigh_four(choice, kept, weighing, begin, values, weights);
    const uint64_t sum = sum_in_block((weights[0] + weights[1]) + (weights[2] + weights[3]));
    if (threadIdx.x == 0) choice.row.state.numbers[tile] = sum;
  });
  if (!choice.blocks.arrive()) return false;
  const int first = threadIdx.x * items_per_thread, num_tiles = Tiles::number_of(choice.row.logits.vocab);
  uint64_t sums[items_per_thread];
#pragma unroll
  for (int i = 0; i < items_per_thread; i++) {
    sums[i] = first + i < num_tiles ? __ldcg(&choice.row.state.numbers[first + i]) : 0;
  }
  const uint64_t passed = units_passed(choice.row.settings, find_crossing(sums, never).total);
  const Crossing tile = find_crossing(sums, passed + 1);
  const int begin = tile.index * block_items;
  float values[items_per_thread];
  load_four(choice.row.logits, begin + first, values);
  choice.row.mask_four(begin + first, values);
  weigh_four(choice, kept, weighing, begin + first, values, weights);
  const Crossing token = find_crossing(weights, passed + 1 - tile.before);
  if (threadIdx.x == 0) choice.row.chosen = {begin + token.index, 0};
  return true;
}

}  // namespace coldstream
