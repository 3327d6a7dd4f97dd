// From logits to tokens, as decoding/sampling.py defines it; see cuda.py for the launchers.
//
// Every sum is one of integers, so that blocks may add in any order.
#include "sample/draw.cuh"
#include "sample/penalties.cuh"

using namespace coldstream;

// grid (ceil(vocab / 2048), rows): biases, penalties and the largest logit, which is the answer of a row
// without a draw.
template <int row_bytes>
__global__ void __launch_bounds__(block_threads) sampler_scan(Sampling sampling) {
  static_assert(sizeof(SamplerRow) == row_bytes, "the launcher's workspace");
  wait_for_previous_grid();
  release_next_grid();
  const SampledRow row = sampling.row(blockIdx.y);
  ArgmaxRow& argmax = row.state.argmax;
  const int vocab = row.logits.vocab, begin = first_id();
  const int first = blockIdx.x * block_items;
  const int more_finite = change_logits(row, first, min(first + block_items, vocab));
  float values[items_per_thread];
  load_four(row.logits, begin, values);
  add_to_argmax(argmax, values, begin, vocab, count_bad(values) + more_finite);
  if (!is_last_block(&argmax.arrivals, gridDim.x)) return;
  if (threadIdx.x == 0) {
    const Best best = take_argmax(argmax);
    row.chosen = {key_id(best.key), fault_of(best)};
  }
  restore_logits(row);
}

// A block's biases and penalties, and the first of the order in each of its tiles.
__device__ __forceinline__ void scan_tiles(const RowChoice& choice) {
  const SampledRow& row = choice.row;
  const int vocab = row.logits.vocab;
  int num_bad = change_logits(row, choice.own.first * block_items, min(choice.own.end * block_items, vocab));
  choice.for_each_tile([&](int tile, int begin, const float (&values)[items_per_thread]) {
    uint64_t best = 0;
#pragma unroll
    for (int i = 0; i < items_per_thread; i++) {
      const uint64_t key = ~order_key(values[i], begin + i);
      if (begin + i < vocab && key > best) best = key;
    }
    num_bad += count_bad(values);
    best = greatest_in_block(best);
    if (threadIdx.x == 0) row.state.tile_keys[tile] = ~best;
    __syncthreads();
  });
  const uint32_t bad_in_warp = sum_of_lanes(uint32_t(num_bad));
  if (threadIdx.x % warp_size == 0 && bad_in_warp) atomicAdd(&row.state.argmax.num_bad, bad_in_warp);
}

// The row's first token by the order, and the key of its k-th tile by it, up to which at least k tokens come:
// `never` where k is 0, or there are fewer tiles, or more than a block compares.
__device__ __forceinline__ Best compare_tiles(const SampledRow& row, int k, uint64_t& key_of_k) {
  __shared__ uint64_t found;
  uint64_t* const keys = block_memory().keys;
  const int num_tiles = Tiles::number_of(row.logits.vocab);
  uint64_t best = 0;
  if (threadIdx.x == 0) found = never;
  for (int tile = threadIdx.x; tile < num_tiles; tile += block_threads) {
    const uint64_t key = __ldcg(&row.state.tile_keys[tile]);
    keys[tile] = key;
    best = ~key > best ? ~key : best;
  }
  best = greatest_for_all(best);
  if (0 < k && k <= num_tiles && num_tiles <= block_threads) {
    if (int(threadIdx.x) < num_tiles) {
      int rank = 0;
      const uint64_t own = keys[threadIdx.x];
      for (int tile = 0; tile < num_tiles; tile++) rank += keys[tile] < own;
      if (rank == k - 1) found = own;
    }
    __syncthreads();
  }
  key_of_k = found;
  __syncthreads();
  return {~best, int(__ldcg(&row.state.argmax.num_bad))};
}

// Chooses a row's token with the other blocks of the row. Returns whether this block ends the choice.
__device__ __forceinline__ bool choose_token(RowChoice& choice) {
  const SampledRow& row = choice.row;
  const RowSettings& settings = row.settings;
  const bool has_top_k = 0 < settings.top_k && settings.top_k < row.logits.vocab;
  const bool draws = settings.temperature != 0.0;
  scan_tiles(choice);
  if (draws) choice.clear_histogram(0);
  const bool is_last = choice.blocks.arrive();
  if (!draws && !is_last) return false;
  if (!is_last) choice.blocks.wait();
  uint64_t key_of_k;
  const Best best = compare_tiles(row, has_top_k ? settings.top_k : 0, key_of_k);
  const int fault = fault_of(best);
  if (!draws || fault != 0) {
    if (is_last && threadIdx.x == 0) row.chosen = {key_id(best.key), fault};
    return is_last;
  }
  choice.largest = key_logit(best.key);
  Kept kept;
  if (key_of_k != never) {
    kept.last_key = key_of_k;
    choice.list_tokens(kept, row.state.num_listed[0]);
    const bool is_last_to_list = choice.blocks.arrive();
    if (!is_last_to_list) choice.blocks.wait();
    const uint32_t count = __ldcg(&row.state.num_listed[0]);
    if (count <= list_capacity) {
      if (is_last_to_list) draw_from_list(choice, kept, count, true);
      return is_last_to_list;
    }
    kept.last_key = never;
  }
  bool is_listed = false, is_for_top_k = has_top_k;
  if (has_top_k) {
    choice.narrow(kept, false, settings.top_k);
    is_listed = kept.num_tokens <= list_capacity;
  }
  if (!is_listed && settings.top_p != 1.0) {
    choice.narrow(kept, true, 0);
    is_listed = kept.num_tokens <= list_capacity;
    is_for_top_k = false;
  }
  if (!is_listed) return draw_from_row(choice, kept);
  choice.list_tokens(kept, row.state.num_listed[1]);
  if (!choice.blocks.arrive()) return false;
  draw_from_list(choice, kept, kept.num_tokens, is_for_top_k);
  return true;
}

// grid (blocks of a row, rows at once), all of which have a place on the device: the tokens of all rows, one
// after another. The first meeting is behind the largest logit, the others behind histograms and the list.
__global__ void __launch_bounds__(block_threads) sampler_choose(Sampling sampling) {
  wait_for_previous_grid();
  release_next_grid();
  for (int index = blockIdx.y; index < sampling.num_rows; index += gridDim.y) {
    const SampledRow row = sampling.row(index);
    RowBlocks blocks(row.state.blocks, gridDim.x);
    RowChoice choice{row, blocks, Tiles::of_block(row.logits.vocab)};
    if (choose_token(choice)) restore_logits(row);
    if (!blocks.leave()) continue;
    row.state.argmax.num_bad = 0;
    row.state.num_listed[0] = row.state.num_listed[1] = 0;
  }
}
