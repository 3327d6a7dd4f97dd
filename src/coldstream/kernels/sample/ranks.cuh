// What log-probabilities are made of: by the model's own logits, the likeliest tokens, the rank of the chosen
// one, and the weight of all.
#pragma once

#include "sample/draw.cuh"
#include "sample/tiles.cuh"

namespace coldstream {

// Of the logits that the model has given, without what forbids tokens.
__device__ __forceinline__ SampledRow as_given(const SampledRow& row) {
  SampledRow given = row;
  given.allowed = nullptr;
  return given;
}

// The block's part of the weight of all tokens, and of those before the chosen one, with a list of the kept.
__device__ __noinline__ void weigh_and_list(const RowChoice& choice, const Kept& kept, uint64_t chosen_key) {
  SamplerRow& state = choice.row.state;
  uint64_t weight = 0, num_before = 0;
  choice.list_and_visit(kept, state.num_listed[2], [&](uint64_t key, float logit) {
    weight += token_weight(logit, choice.largest);
    num_before += key < chosen_key;
  });
  weight = sum_in_block(weight);
  num_before = sum_in_block(num_before);
  if (threadIdx.x != 0) return;
  add_up(&state.total, weight);
  atomicAdd(&state.num_before, uint32_t(num_before));
}

// Writes the first of the `num_listed` tokens of the list, by the order, as one block.
__device__ __noinline__ void write_ranked(const RowChoice& choice, int num_ranked, int num_listed,
                                          uint64_t chosen_key) {
  const SampledRow& row = choice.row;
  uint64_t* const keys = block_memory().keys;
  int size = 2;
  while (size < num_listed) size *= 2;
  __syncthreads();
  for (int i = threadIdx.x; i < size; i += block_threads) {
    keys[i] = i < num_listed ? __ldcg(&row.state.numbers[i]) : never;
  }
  sort_in_block(keys, size);
  int* const ids = reinterpret_cast<int*>(row.ranked + 1);
  float* const logits = reinterpret_cast<float*>(ids + row.settings.num_ranked);
  for (int i = threadIdx.x; i < num_ranked; i += block_threads) {
    ids[i] = key_id(keys[i]);
    logits[i] = row.logits.values[key_id(keys[i])];
  }
  if (threadIdx.x != 0) return;
  const uint64_t total = __ldcg(&row.state.total);
  *row.ranked = {uint32_t(total), uint32_t(total >> 32), choice.largest,
                 row.logits.values[key_id(chosen_key)], int(1 + __ldcg(&row.state.num_before))};
}

// All blocks of a row, once its token is chosen and its logits are as the model has given them. num_passes:
// over histograms so far.
__device__ __forceinline__ void rank_tokens(const SampledRow& row, RowBlocks& blocks, int num_passes) {
  if (blocks.has_failed() || __ldcg(&row.chosen.fault) != 0) return;
  const SampledRow given = as_given(row);
  RowChoice choice{given, blocks, Tiles::of_block(row.logits.vocab)};
  choice.num_passes = num_passes;
  if (row.is_changed()) {  // the tiles' first tokens are those of the changed logits
    choice.for_each_tile([&](int tile, int begin, const float (&values)[items_per_thread]) {
      keep_first_of_tile(choice, tile, begin, values);
    });
    blocks.meet();
  }
  const int num_ranked = min(row.settings.num_ranked, row.logits.vocab);
  uint64_t key_of_last;
  choice.largest = key_logit(compare_tiles(given, num_ranked, key_of_last).key);
  const int token = __ldcg(&row.chosen.token);
  const uint64_t chosen_key = order_key(row.logits.values[token], token);
  Kept kept;
  kept.last_key = num_ranked == 0 ? 0 : key_of_last;
  bool is_narrowed = false;
  if (num_ranked > 0 && key_of_last == never) {
    choice.narrow(kept, false, num_ranked);
    is_narrowed = true;
  }
  weigh_and_list(choice, kept, chosen_key);
  bool is_last = blocks.arrive();
  if (!is_narrowed && !is_last) blocks.wait();
  uint32_t num_listed = is_narrowed ? kept.num_tokens : __ldcg(&row.state.num_listed[2]);
  if (!is_narrowed && num_listed > list_capacity) {
    kept.last_key = never;
    choice.narrow(kept, false, num_ranked);
    choice.list_tokens(kept, row.state.num_listed[3]);
    is_last = blocks.arrive();
    num_listed = kept.num_tokens;
  }
  if (is_last) write_ranked(choice, num_ranked, int(num_listed), chosen_key);
}

}  // namespace coldstream
