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
  int first_allowed;             // a bit for each token, there too, whether it may follow,
  int is_masked;                 // unless all may
  int first_ranked;              // among the words of all rows: a RankedRow, and what is behind it,
  int num_ranked;                // so many of the likeliest tokens,
  int is_ranked;                 // if they are wanted
};

constexpr int no_finite = -1, blocks_missed = -2;  // faults

struct SampledToken {
  int token;
  int fault;  // 0, how many logits are not finite, `no_finite`: the best one is not, or `blocks_missed`
};

// By the model's own logits. Behind it are the ids of the likeliest tokens, and then their logits.
struct RankedRow {
  uint32_t total_low, total_high;  // weight of all tokens at temperature 1
  float largest;                   // logit
  float logit;                     // of the chosen token
  int rank;                        // of the chosen token, from 1 on
};

constexpr int mask_bits = 32;  // of a word

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
  const uint32_t* allowed;  // null: all tokens
  RankedRow* ranked;        // null: it is not wanted

  // Makes those of four adjacent logits −∞ whose tokens may not follow.
  __device__ __forceinline__ void mask_four(int begin, float (&values)[items_per_thread]) const {
    static_assert(mask_bits % items_per_thread == 0, "the bits are in one word");
    if (allowed == nullptr || begin >= logits.vocab) return;
    const uint32_t bits = allowed[begin / mask_bits] >> (begin % mask_bits);
#pragma unroll
    for (int i = 0; i < items_per_thread; i++) {
      if ((bits >> i & 1) == 0) values[i] = __uint_as_float(0xff800000u);
    }
  }

  // Whether tokens are chosen from other logits than the model's own.
  __device__ __forceinline__ bool is_changed() const {
    return allowed != nullptr || settings.num_recent != 0 || settings.num_biased != 0;
  }

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
  int* ranked;                  // of all rows that want it
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
            earlier,
            own.is_masked ? reinterpret_cast<const uint32_t*>(recent + own.first_allowed) : nullptr,
            own.is_ranked ? reinterpret_cast<RankedRow*>(ranked + own.first_ranked) : nullptr};
  }
};

}  // namespace coldstream
