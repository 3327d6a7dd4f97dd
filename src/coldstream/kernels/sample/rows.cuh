// Inputs and outputs of a launch of the sampler, by row.
#pragma once

#include "sample/truncate.cuh"

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
};

struct SampledToken {
  int token;
  int fault;
};

// A block works on row blockIdx.y of `settings`, `states` and `chosen`.
struct Sampling {
  Logits logits;
  const RowSettings* settings;
  const int* recent;   // tokens of all rows; −1 − i: the token of earlier[i]
  float* unpenalised;  // their logits, while penalties are in the logits' memory
  SamplerRow* states;
  SampledToken* chosen;
  const SampledToken* earlier;  // results of other launches

  __device__ __forceinline__ int recent_token(int i) const {
    return recent[i] < 0 ? earlier[~recent[i]].token : recent[i];
  }
  __device__ __forceinline__ const RowSettings& own_settings() const { return settings[blockIdx.y]; }
  __device__ __forceinline__ SamplerRow& own_state() const { return states[blockIdx.y]; }
  __device__ __forceinline__ Row own_logits() const { return logits.row(own_settings().row); }
};

}  // namespace coldstream
