// Top-k, top-p and min-p each keep a prefix of one order: logit descending, id ascending. So a row's filters
// reduce to the greatest key that is kept, and what is kept stays in the order of ids, in which it is drawn
// from.
#include "sample/sampler.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>

#include "sample/weights.h"

namespace coldstream {

namespace {

constexpr double two_to_64 = 18446744073709551616.0;

int64_t num_blocks(int64_t vocab) { return (vocab + order_block - 1) / order_block; }

int32_t count_infinite(const float* logits, int64_t vocab) {
  int32_t count = 0;
  for (int64_t i = 0; i < vocab; i++) count += !is_finite(logits[i]);
  return count;
}

bool has_nan(const float* logits, int64_t vocab) {
  int32_t count = 0;
  for (int64_t i = 0; i < vocab; i++) count += logits[i] != logits[i];
  return count > 0;
}

void forbid_others(const uint32_t* allowed, float* logits, int64_t vocab) {
  for (int64_t begin = 0; begin < vocab; begin += mask_bits) {
    const uint32_t bits = allowed[begin / mask_bits];
    if (bits == ~uint32_t{0}) continue;
    const int64_t count = std::min(mask_bits, vocab - begin);
    for (int64_t i = 0; i < count; i++) {
      if ((bits >> i & 1) == 0) logits[begin + i] = -std::numeric_limits<float>::infinity();
    }
  }
}

// The logits after biases, penalties and masks: those that are given, or a changed copy.
const float* changed_logits(const float* logits, int64_t vocab, const TokenSettings& settings, float* copy) {
  if (settings.biased.empty() && settings.recent.empty() && settings.allowed == nullptr) return logits;
  std::memcpy(copy, logits, vocab * sizeof(float));
  for (size_t i = 0; i < settings.biased.size(); i++) copy[settings.biased[i]] += settings.biases[i];
  const std::vector<int32_t>& recent = settings.recent;
  for (size_t i = 0, next = 0; i < recent.size(); i = next) {
    while (next < recent.size() && recent[next] == recent[i]) next++;
    float& logit = copy[recent[i]];
    const float repetition = settings.repetition_penalty;
    const float seen = logit > 0.0f ? logit / repetition : logit * repetition;
    logit = seen - (float(next - i) * settings.frequency_penalty + settings.presence_penalty);
  }
  if (settings.allowed != nullptr) forbid_others(settings.allowed, copy, vocab);
  return copy;
}

// The orders of the largest logit of each block, and of all.
int32_t find_largest(const float* logits, int64_t vocab, int32_t* largest) {
  constexpr int num_lanes = 8;
  int32_t best = std::numeric_limits<int32_t>::min();
  for (int64_t begin = 0; begin < vocab; begin += order_block) {
    float lanes[num_lanes];
    std::fill_n(lanes, num_lanes, logits[begin]);
    const int64_t size = std::min(order_block, vocab - begin), whole = size / num_lanes * num_lanes;
    for (int64_t i = 0; i < whole; i += num_lanes) {
      for (int lane = 0; lane < num_lanes; lane++) {
        const float logit = logits[begin + i + lane];
        lanes[lane] = lanes[lane] < logit ? logit : lanes[lane];
      }
    }
    for (int64_t i = whole; i < size; i++) lanes[0] = std::max(lanes[0], logits[begin + i]);
    largest[begin / order_block] = order_of(*std::max_element(lanes, lanes + num_lanes));
    best = std::max(best, largest[begin / order_block]);
  }
  return best;
}

// The keys of all tokens whose order is at least `least`, by id. Returns their number.
int64_t collect_keys(const float* logits, int64_t vocab, const int32_t* largest, int32_t least,
                     uint64_t* keys) {
  int64_t count = 0;
  for (int64_t begin = 0; begin < vocab; begin += order_block) {
    if (largest[begin / order_block] < least) continue;
    for (int64_t i = begin; i < std::min(begin + order_block, vocab); i++) {
      const int32_t order = order_of(logits[i]);
      keys[count] = rank_key(order, int32_t(i));
      count += order >= least;
    }
  }
  return count;
}

// An order that at least k tokens reach, as the largest of k blocks do; all tokens reach it if there are
// fewer blocks. copy: [blocks].
int32_t order_of_at_least(int64_t k, const int32_t* largest, int64_t blocks, int32_t* copy) {
  if (k > blocks) return std::numeric_limits<int32_t>::min();
  std::copy(largest, largest + blocks, copy);
  std::nth_element(copy, copy + (k - 1), copy + blocks, std::greater<>());
  return copy[k - 1];
}

// Keeps, in their order, the keys up to `last_key`. Returns their number.
int64_t keep_up_to(uint64_t last_key, uint64_t* keys, int64_t count) {
  int64_t kept = 0;
  for (int64_t i = 0; i < count; i++) {
    const uint64_t key = keys[i];
    keys[kept] = key;
    kept += key <= last_key;
  }
  return kept;
}

// The keys of the k likeliest tokens, by id. Returns their number, k.
int64_t collect_likeliest(const float* logits, int64_t vocab, int64_t k, const RowMemory& memory) {
  auto* copy = reinterpret_cast<int32_t*>(memory.sorted);
  const int32_t least = order_of_at_least(k, memory.largest, num_blocks(vocab), copy);
  const int64_t count = collect_keys(logits, vocab, memory.largest, least, memory.keys);
  std::copy(memory.keys, memory.keys + count, memory.sorted);
  std::nth_element(memory.sorted, memory.sorted + (k - 1), memory.sorted + count);
  return keep_up_to(memory.sorted[k - 1], memory.keys, count);
}

uint64_t weigh(const uint64_t* keys, int64_t count, float largest, double temperature, uint64_t* weights) {
  uint64_t total = 0;
  for (int64_t i = 0; i < count; i++) {
    weights[i] = token_weight(logit_of(order_of_key(keys[i])), largest, temperature);
    total += weights[i];
  }
  return total;
}

int64_t keep_heavy(uint64_t least, uint64_t* keys, uint64_t* weights, int64_t count) {
  int64_t kept = 0;
  for (int64_t i = 0; i < count; i++) {
    const uint64_t key = keys[i], weight = weights[i];
    keys[kept] = key;
    weights[kept] = weight;
    kept += weight >= least;
  }
  return kept;
}

struct WeightedKey {
  uint64_t key, weight;
};

// The first key, by rank, at which the running sum of weights reaches `bound`; the last one if none does.
uint64_t weighted_last_key(WeightedKey* first, WeightedKey* last, uint64_t bound) {
  const auto is_before = [](const WeightedKey& a, const WeightedKey& b) { return a.key < b.key; };
  while (last - first > 1) {
    WeightedKey* middle = first + (last - first) / 2;
    std::nth_element(first, middle, last, is_before);
    uint64_t sum = 0;
    for (const WeightedKey* each = first; each < middle; each++) sum += each->weight;
    if (sum >= bound) {
      last = middle;
    } else {
      bound -= sum;
      first = middle;
    }
  }
  return first->key;
}

// Keeps of `count` keys what top-p and min-p keep. Returns their number.
int64_t keep_by_weight(const TokenSettings& settings, float largest, int64_t count, const RowMemory& memory) {
  uint64_t *keys = memory.keys, *weights = memory.weights;
  const uint64_t total = weigh(keys, count, largest, 1.0, weights);
  const auto least = std::max(uint64_t{1}, uint64_t(std::ceil(settings.min_p * weight_one)));
  count = keep_heavy(least, keys, weights, count);
  if (settings.top_p == 1.0) return count;
  auto* sorted = reinterpret_cast<WeightedKey*>(memory.sorted);
  for (int64_t i = 0; i < count; i++) sorted[i] = {keys[i], weights[i]};
  // At least 1: the first token always stays.
  const uint64_t bound = std::max(uint64_t{1}, high64(uint64_t(settings.top_p * two_to_64), total));
  return keep_up_to(weighted_last_key(sorted, sorted + count, bound), keys, count);
}

int32_t draw(const TokenSettings& settings, float largest, int64_t count, const RowMemory& memory) {
  const uint64_t total = weigh(memory.keys, count, largest, settings.temperature, memory.weights);
  const uint64_t passed = high64(random_bits(settings.seed, settings.position), total);
  uint64_t sum = 0;
  int64_t i = 0;
  while ((sum += memory.weights[i]) <= passed) i++;
  return id_of_key(memory.keys[i]);
}

}  // namespace

size_t RowMemory::num_bytes(int64_t vocab) {
  // Two numbers of 8 bytes more: the blocks' orders are an odd number, and the logits may be.
  return (4 * vocab + 2) * sizeof(uint64_t) + (vocab + num_blocks(vocab)) * sizeof(float);
}

RowMemory::RowMemory(std::byte* memory, int64_t vocab)
    : keys(reinterpret_cast<uint64_t*>(memory)), weights(keys + vocab), sorted(weights + vocab) {
  changed = reinterpret_cast<float*>(sorted + 2 * vocab);
  largest = reinterpret_cast<int32_t*>(changed + vocab);
}

ChosenToken choose_token(const float* logits, int64_t vocab, const TokenSettings& settings,
                         const RowMemory& memory) {
  if (settings.may_be_infinite) {
    if (has_nan(logits, vocab)) return {0, -1};
  } else if (const int32_t num_bad = count_infinite(logits, vocab)) {
    return {0, num_bad};
  }
  const float* values = changed_logits(logits, vocab, settings, memory.changed);
  const int32_t best = find_largest(values, vocab, memory.largest);
  const float largest = logit_of(best);
  if (!is_finite(largest)) return {0, -1};
  if (settings.temperature == 0.0) {
    int64_t block = 0;
    while (memory.largest[block] != best) block++;
    int64_t token = block * order_block;
    while (order_of(values[token]) != best) token++;
    return {int32_t(token), 0};
  }
  int64_t count = 0;
  if (0 < settings.top_k && settings.top_k < vocab) {
    count = collect_likeliest(values, vocab, settings.top_k, memory);
  } else {
    count = collect_keys(values, vocab, memory.largest, std::numeric_limits<int32_t>::min(), memory.keys);
  }
  if (settings.top_p != 1.0 || settings.min_p != 0.0) {
    count = keep_by_weight(settings, largest, count, memory);
  }
  return {draw(settings, largest, count, memory), 0};
}

void rank_tokens(const float* logits, int64_t vocab, int32_t chosen, RankedTokens& ranked,
                 const RowMemory& memory) {
  const float largest = logit_of(find_largest(logits, vocab, memory.largest));
  ranked.total = 0;
  for (int64_t i = 0; i < vocab; i++) ranked.total += token_weight(logits[i], largest, 1.0);
  const auto count = int64_t(ranked.likeliest.size());
  if (count > 0) collect_likeliest(logits, vocab, count, memory);
  std::sort(memory.keys, memory.keys + count);
  for (int64_t i = 0; i < count; i++) ranked.likeliest[i] = id_of_key(memory.keys[i]);
  const int32_t own = order_of(logits[chosen]);
  ranked.rank = 1;
  for (int64_t i = 0; i < vocab; i++) {
    const int32_t order = order_of(logits[i]);
    ranked.rank += order > own || (order == own && i < chosen);
  }
}

void finish_row(const TokenRow& row, int64_t vocab, const RowMemory& memory) {
  *row.chosen = choose_token(row.changed ? row.changed : row.logits, vocab, *row.settings, memory);
  if (row.ranked && row.chosen->fault == 0) {
    rank_tokens(row.logits, vocab, row.chosen->token, *row.ranked, memory);
  }
}

}  // namespace coldstream
