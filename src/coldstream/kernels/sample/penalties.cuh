// Penalties of recent tokens, which are in the logits' memory while a row's token is chosen.
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

// Applies penalties to the recent tokens among the ids begin … end − 1, which are the block's alone. Returns
// how many more of the thread's logits are finite than before.
__device__ __forceinline__ int penalise(const SampledRow& row, int begin, int end) {
  const RowSettings& settings = row.settings;
  if (settings.num_recent == 0) return 0;
  float* const logits = row.logits.values;
  for (int i = threadIdx.x; i < settings.num_recent; i += block_threads) {
    const int token = row.recent_token(i);
    if (begin <= token && token < end) row.unpenalised[i] = logits[token];
  }
  __syncthreads();
  int more = 0;
  for (int i = threadIdx.x; i < settings.num_recent; i += block_threads) {
    const int token = row.recent_token(i);
    if (token < begin || end <= token) continue;
    const int times = times_recent(row, i, token);
    if (times == 0) continue;
    const float before = logits[token], repetition = settings.repetition_penalty;
    const float seen = before > 0.0f ? before / repetition : before * repetition;
    const float after = seen - (float(times) * settings.frequency_penalty + settings.presence_penalty);
    logits[token] = after;
    more += is_finite(after) - is_finite(before);
  }
  __syncthreads();
  return more;
}

// Restores the logits in memory. All threads of a block, when no other needs penalties.
__device__ __forceinline__ void restore_logits(const SampledRow& row) {
  for (int i = threadIdx.x; i < row.settings.num_recent; i += block_threads) {
    row.logits.values[row.recent_token(i)] = __ldcg(&row.unpenalised[i]);
  }
}

}  // namespace coldstream
