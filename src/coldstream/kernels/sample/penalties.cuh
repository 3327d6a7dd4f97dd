// Biases, and penalties of recent tokens: both are in the logits' memory while a row's token is chosen.
#pragma once

#include "sample/rows.cuh"

namespace coldstream {

// The first of the row's recent tokens from `from` on that is at least `token`.
__device__ __forceinline__ int first_recent_from(const SampledRow& row, int from, int token) {
  int end = row.settings.num_recent;
  while (from < end) {
    const int middle = from + (end - from) / 2;
    if (row.recent[middle] < token) {
      from = middle + 1;
    } else {
      end = middle;
    }
  }
  return from;
}

// How often the token of entry i is among the recent ones; 0 unless the entry is the first of them. Tokens of
// other results are in front, as their entries are negative.
__device__ __forceinline__ int times_recent(const SampledRow& row, int i, int token) {
  int times = 0, known = 0;
  for (; known < row.settings.num_recent && row.recent[known] < 0; known++) {
    if (row.earlier[~row.recent[known]].token != token) continue;
    if (known < i) return 0;
    times++;
  }
  if (i > known && row.recent[i - 1] == token) return 0;
  const int first = i >= known ? i : first_recent_from(row, known, token);
  return times + first_recent_from(row, first, token + 1) - first;
}

// Calls visit(i, token) for the recent tokens and those with biases among the ids begin … end − 1.
template <class Recent, class Biased>
__device__ __forceinline__ void for_changed(const SampledRow& row, int begin, int end, Recent recent,
                                            Biased biased) {
  for (int i = threadIdx.x; i < row.settings.num_recent; i += block_threads) {
    const int token = row.recent_token(i);
    if (begin <= token && token < end) recent(i, token);
  }
  for (int i = threadIdx.x; i < row.settings.num_biased; i += block_threads) {
    const int token = row.biased[i];
    if (begin <= token && token < end) biased(i, token);
  }
}

// Applies biases and then penalties to the ids begin … end − 1, which are the block's alone. Returns how many
// more of the thread's logits are finite than before.
__device__ __forceinline__ int change_logits(const SampledRow& row, int begin, int end) {
  const RowSettings& settings = row.settings;
  if (settings.num_recent == 0 && settings.num_biased == 0) return 0;
  float* const logits = row.logits.values;
  int more = 0;
  const auto change = [&](int token, float after) {
    more += is_finite(after) - is_finite(logits[token]);
    logits[token] = after;
  };
  for_changed(
      row, begin, end, [&](int i, int token) { row.unchanged_recent[i] = logits[token]; },
      [&](int i, int token) { row.unchanged_biased[i] = logits[token]; });
  __syncthreads();
  for_changed(
      row, begin, end, [](int, int) {},
      [&](int i, int token) {
        change(token, logits[token] + __int_as_float(row.biased[settings.num_biased + i]));
      });
  __syncthreads();
  for_changed(
      row, begin, end,
      [&](int i, int token) {
        const int times = times_recent(row, i, token);
        if (times == 0) return;
        const float before = logits[token], repetition = settings.repetition_penalty;
        const float seen = before > 0.0f ? before / repetition : before * repetition;
        change(token, seen - (float(times) * settings.frequency_penalty + settings.presence_penalty));
      },
      [](int, int) {});
  __syncthreads();
  return more;
}

// Restores the logits in memory. All threads of a block, when no other needs the changed ones.
__device__ __forceinline__ void restore_logits(const SampledRow& row) {
  float* const logits = row.logits.values;
  for_changed(
      row, 0, row.logits.vocab, [&](int i, int token) { logits[token] = __ldcg(&row.unchanged_recent[i]); },
      [&](int i, int token) { logits[token] = __ldcg(&row.unchanged_biased[i]); });
}

}  // namespace coldstream
