// From logits to tokens on the CPU, as decoding/sampling.py defines it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace coldstream {

// Everything but the logits that determines a token. Ids are of the vocabulary.
struct TokenSettings {
  double temperature;  // 0: the largest logit
  double top_p;        // 1: off
  double min_p;        // 0: off
  uint64_t seed;
  uint64_t position;  // of the new token in its sequence
  float repetition_penalty, presence_penalty, frequency_penalty;
  int64_t top_k;         // 0: off
  bool may_be_infinite;  // whether the logits have been changed, so that only the best one must be finite
  std::vector<int32_t> recent;  // tokens that penalties apply to, ascending
  std::vector<int32_t> biased;  // tokens whose logits are changed before penalties
  std::vector<float> biases;    // what is added to each; −∞ forbids the token
  const uint32_t* allowed;      // null, or a bit for each token: 0 forbids it
};

constexpr int64_t mask_bits = 32;  // of a word

struct ChosenToken {
  int32_t token;
  int32_t fault;  // 0, or how many logits are not finite, or −1 if the best one is not once all are changed
};

// Of the model's own logits of a row, all finite.
struct RankedTokens {
  uint64_t total;                  // weight of all tokens at temperature 1
  std::vector<int32_t> likeliest;  // by rank, which begins at 1; its size, at most the vocabulary's, is given
  int32_t rank;                    // of the chosen token
};

// Whose pointers outlive the work.
struct TokenRow {
  const float* logits;   // [vocab]
  const float* changed;  // [vocab] to choose from instead, or null
  const TokenSettings* settings;
  ChosenToken* chosen;
  RankedTokens* ranked;  // null unless it is wanted; left as it is if no token is chosen
};

// What choosing from a row takes, for rows of `vocab` logits.
class RowMemory {
 public:
  static size_t num_bytes(int64_t vocab);
  RowMemory(std::byte* memory, int64_t vocab);

  float* changed;     // [vocab] logits
  int32_t* largest;   // [blocks] orders
  uint64_t* keys;     // [vocab]
  uint64_t* weights;  // [vocab]
  uint64_t* sorted;   // [2 · vocab]
};

constexpr int64_t order_block = 32;  // tokens that a search for the largest logits passes over together

ChosenToken choose_token(const float* logits, int64_t vocab, const TokenSettings& settings,
                         const RowMemory& memory);

void rank_tokens(const float* logits, int64_t vocab, int32_t chosen, RankedTokens& ranked,
                 const RowMemory& memory);

// Writes what `row` wants.
void finish_row(const TokenRow& row, int64_t vocab, const RowMemory& memory);

}  // namespace coldstream
