// From logits to tokens, as decoding/sampling.py defines it; see cuda.py for the launchers.
//
// Every sum is one of integers, so that blocks may add in any order.
#include "sample/penalties.cuh"
#include "sample/ranks.cuh"

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
  const int num_bad = count_bad(values) + more_finite;
  row.mask_four(begin, values);
  add_to_argmax(argmax, values, begin, vocab, num_bad);
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
  choice.for_each_whole_tile([&](int tile, int begin, const float (&logits)[items_per_thread]) {
    float values[items_per_thread];
#pragma unroll
    for (int i = 0; i < items_per_thread; i++) values[i] = logits[i];
    num_bad += count_bad(values);
    row.mask_four(begin, values);
    keep_first_of_tile(choice, tile, begin, values);
  });
  const uint32_t bad_in_warp = sum_of_lanes(uint32_t(num_bad));
  if (threadIdx.x % warp_size == 0 && bad_in_warp) atomicAdd(&row.state.argmax.num_bad, bad_in_warp);
}

// Chooses a row's token with the other blocks of the row. Returns whether this block ends the choice.
__device__ __forceinline__ bool choose_token(RowChoice& choice) {
  const SampledRow& row = choice.row;
  const RowSettings& settings = row.settings;
  const bool has_top_k = 0 < settings.top_k && settings.top_k < row.logits.vocab;
  const bool draws = settings.temperature != 0.0;
  scan_tiles(choice);
  if (draws || row.ranked != nullptr) choice.clear_histogram(0);
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
// after another. The first meeting is behind the largest logit, the others behind histograms and the list,
// and behind the choice where the row is ranked.
__global__ void __launch_bounds__(block_threads) sampler_choose(Sampling sampling) {
  wait_for_previous_grid();
  release_next_grid();
  for (int index = blockIdx.y; index < sampling.num_rows; index += gridDim.y) {
    const SampledRow row = sampling.row(index);
    RowBlocks blocks(row.state.blocks, gridDim.x);
    RowChoice choice{row, blocks, Tiles::of_block(row.logits.vocab)};
    const bool has_chosen = choose_token(choice);
    if (has_chosen) restore_logits(row);
    if (row.ranked != nullptr) {
      // A block that has not waited for the last meeting could arrive at this one before others at that.
      if (!has_chosen) blocks.wait();
      blocks.meet();
      rank_tokens(row, blocks, choice.num_passes);
    }
    if (!blocks.leave()) continue;
    row.state.argmax.num_bad = 0;
    for (uint32_t& count : row.state.num_listed) count = 0;
    row.state.total = 0;
    row.state.num_before = 0;
    if (blocks.take_failure()) row.chosen = {0, blocks_missed};
  }
}
