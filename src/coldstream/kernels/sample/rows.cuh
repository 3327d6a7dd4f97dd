// Inputs and outputs of a launch of the sampler, by row.
#pragma once

#include "sample/state.cuh"

namespace coldstream {

// The settings for the token after one row of logits.
struct RowSettings {
  double temperature;
  double top_p;
  double min_p;
  uint64_t seed;
  float repetition_penalty;
  float presence_penalty;
  float frequency_penalty;
  int top_k;
  int position;                  // of the new token in its sequence
  int row;                       // of the logits
  int first_recent, num_recent;  // the tokens that penalties apply to, among those of all rows
  int first_biased, num_biased;  // the tokens that have biases, there too; behind them their biases' bits
};

struct SampledToken {
  int token;
  int fault;
};

// What belongs to one of the rows that a launch chooses for.
struct SampledRow {
  Row logits;
  const RowSettings& settings;
  SamplerRow& state;
  SampledToken& chosen;
  const int* recent;        // of the row, ascending
  float* unchanged_recent;  // their logits
  const int* biased;        // of the row, and behind them the bits of their biases
  float* unchanged_biased;
  const SampledToken* earlier;

  __device__ __forceinline__ int recent_token(int i) const {
    return recent[i] < 0 ? earlier[~recent[i]].token : recent[i];
  }
};

// By rows of `settings`, `states` and `chosen`.
struct Sampling {
  Logits logits;
  const RowSettings* settings;
  const int* recent;  // tokens of all rows, of each row ascending; −1 − i: the token of earlier[i]
  float* unchanged;   // their logits, while penalties and biases are in the logits' memory
  SamplerRow* states;
  SampledToken* chosen;
  const SampledToken* earlier;  // results of other launches
  int num_rows;

  __device__ __forceinline__ SampledRow row(int index) const {
    const RowSettings& own = settings[index];
    return {logits.row(own.row),
            own,
            states[index],
            chosen[index],
            recent + own.first_recent,
            unchanged + own.first_recent,
            recent + own.first_biased,
            unchanged + own.first_biased,
            earlier};
  }
};

}  // namespace coldstream
