// From logits to tokens, as decoding/sampling.py defines it; see cuda.py for the launchers.
//
// Top-k, top-p and min-p each keep a prefix of one order: logit descending, id ascending. So a row's filters
// reduce to one number, the greatest order key that is kept. It is found by a histogram over the distance to
// the largest logit, whose bins follow that order, and a radix selection within the bin where the prefix
// ends.
#include "sample/rows.cuh"

using namespace coldstream;

// How often each of the block's tokens is among the recent ones of the row; keeps their logits.
__device__ void count_recent(const Sampling& sampling, uint32_t (&counts)[block_items]) {
  for (int i = threadIdx.x; i < block_items; i += block_threads) counts[i] = 0;
  __syncthreads();
  const RowSettings& settings = sampling.own_settings();
  const float* logits = sampling.own_logits().values;
  const int end = settings.first_recent + settings.num_recent;
  for (int i = settings.first_recent + threadIdx.x; i < end; i += block_threads) {
    const int token = sampling.recent_token(i);
    const uint32_t place = uint32_t(token) - blockIdx.x * block_items;
    if (place >= block_items) continue;
    atomicAdd(&counts[place], 1u);
    sampling.unpenalised[i] = logits[token];
  }
  __syncthreads();
}

// Applies penalties to recent tokens, also in memory for the next launches.
__device__ void penalise(const Sampling& sampling, float (&values)[items_per_thread]) {
  __shared__ uint32_t counts[block_items];
  const RowSettings& settings = sampling.own_settings();
  if (settings.num_recent == 0) return;
  count_recent(sampling, counts);
#pragma unroll
  for (int i = 0; i < items_per_thread; i++) {
    const uint32_t count = counts[threadIdx.x * items_per_thread + i];
    if (count == 0) continue;
    const float repetition = settings.repetition_penalty;
    const float seen = values[i] > 0.0f ? values[i] / repetition : values[i] * repetition;
    values[i] = seen - (float(count) * settings.frequency_penalty + settings.presence_penalty);
    sampling.own_logits().values[first_id() + i] = values[i];
  }
}

// Restores the logits in memory. All threads of the last block of the row.
__device__ void restore_logits(const Sampling& sampling) {
  const RowSettings& settings = sampling.own_settings();
  float* logits = sampling.own_logits().values;
  const int end = settings.first_recent + settings.num_recent;
  for (int i = settings.first_recent + threadIdx.x; i < end; i += block_threads) {
    logits[sampling.recent_token(i)] = __ldcg(&sampling.unpenalised[i]);
  }
}

// Thread 0 of the last block: the largest logit is known. Returns whether a token is to be drawn.
__device__ bool begin_row(const Sampling& sampling) {
  SamplerRow& row = sampling.own_state();
  const Best best = take_argmax(row.argmax);
  const int fault = fault_of(best);
  sampling.chosen[blockIdx.y] = {key_id(best.key), fault};
  row.is_open = fault == 0 && sampling.own_settings().temperature != 0.0;
  row.largest = key_logit(best.key);
  row.last_key = never;
  row.pending = nothing;
  row.num_listed[0] = row.num_listed[1] = 0;
  return row.is_open;
}

// grid (ceil(vocab / 2048), rows): penalties and the largest logit, which is the answer of a row without a
// draw.
template <int row_bytes>
__global__ void __launch_bounds__(block_threads) sampler_scan(Sampling sampling) {
  static_assert(sizeof(SamplerRow) == row_bytes, "the launcher's workspace");
  wait_for_previous_grid();
  release_next_grid();
  SamplerRow& row = sampling.own_state();
  for (int i = blockIdx.x * block_threads + threadIdx.x; i < num_bins; i += gridDim.x * block_threads) {
    row.bin_counts[i] = 0;
    row.bin_weights[i] = 0;
  }
  const int begin = first_id();
  float values[items_per_thread];
  load_four(sampling.own_logits(), begin, values);
  const int num_bad = count_bad(values);
  penalise(sampling, values);
  add_to_argmax(row.argmax, values, begin, sampling.logits.vocab, num_bad);
  if (!is_last_block(&row.argmax.arrivals, gridDim.x)) return;
  __shared__ bool is_open;
  if (threadIdx.x == 0) is_open = begin_row(sampling);
  __syncthreads();
  if (!is_open) restore_logits(sampling);
}

// One block's share of the histogram. Sums of 2048 weights of up to 2^40 are kept in two parts of 32 bits,
// for which shared memory has atomic additions.
__device__ void add_to_bins(SamplerRow& row, const float (&values)[items_per_thread], int begin, int vocab,
                            bool with_weights) {
  __shared__ uint32_t counts[num_bins], low[num_bins], high[num_bins];
  for (int i = threadIdx.x; i < num_bins; i += block_threads) counts[i] = low[i] = high[i] = 0;
  __syncthreads();
  const float largest = row.largest;
#pragma unroll
  for (int i = 0; i < items_per_thread; i++) {
    const int bin = bin_of(values[i], largest);
    // The last bin has all other tokens, whose weight is 0.
    if (begin + i >= vocab || bin == num_bins - 1) continue;
    atomicAdd(&counts[bin], 1u);
    if (!with_weights) continue;
    const uint64_t weight = token_weight(values[i], largest);
    atomicAdd(&low[bin], uint32_t(weight) & 0xfffffu);
    atomicAdd(&high[bin], uint32_t(weight >> 20));
  }
  __syncthreads();
  for (int i = threadIdx.x; i < num_bins; i += block_threads) {
    if (counts[i] == 0) continue;
    atomicAdd(&row.bin_counts[i], counts[i]);
    if (with_weights) atomicAdd(&row.bin_weights[i], uint64_t(low[i]) + (uint64_t(high[i]) << 20));
  }
}

// grid (ceil(vocab / 2048), rows): the histogram of an open row with top-k or top-p, and where its prefix
// ends.
__global__ void __launch_bounds__(block_threads) sampler_bins(Sampling sampling) {
  wait_for_previous_grid();
  release_next_grid();
  SamplerRow& row = sampling.own_state();
  const int vocab = sampling.logits.vocab;
  const int top_k = sampling.own_settings().top_k;
  const double top_p = sampling.own_settings().top_p;
  const bool has_top_k = 0 < top_k && top_k < vocab;
  if (!row.is_open || (!has_top_k && top_p == 1.0)) return;
  const int begin = first_id();
  float values[items_per_thread];
  load_four(sampling.own_logits(), begin, values);
  add_to_bins(row, values, begin, vocab, top_p != 1.0);
  if (!is_last_block(&row.arrivals, gridDim.x)) return;
  if (has_top_k) {
    plan_top_k(row, top_k);
  } else {
    plan_top_p(row, top_p, num_bins, 0);
  }
}

// grid (ceil(vocab / 2048), rows), twice (`stage` 0 and 1): finds the key at which an open row's prefix ends
// within the pending bin; after top-k comes top-p.
__global__ void __launch_bounds__(block_threads) sampler_truncate(Sampling sampling, int stage) {
  wait_for_previous_grid();
  release_next_grid();
  SamplerRow& row = sampling.own_state();
  const Pending pending = row.pending;
  if (pending == nothing) return;
  const Row logits = sampling.own_logits();
  const int begin = first_id();
  float values[items_per_thread];
  load_four(logits, begin, values);
#pragma unroll
  for (int i = 0; i < items_per_thread; i++) {
    const uint64_t key = order_key(values[i], begin + i);
    if (begin + i >= logits.vocab || !is_candidate(row, key)) continue;
    const uint32_t place = atomicAdd(&row.num_listed[stage], 1u);
    if (place < list_capacity) row.list[place] = key;
  }
  if (!is_last_block(&row.arrivals, gridDim.x)) return;
  const Candidates candidates{row, logits, int(__ldcg(&row.num_listed[stage]))};
  const uint64_t last_key = select_last_key(candidates, pending == top_p_truncation, row.remaining);
  const double top_p = sampling.own_settings().top_p;
  if (pending == top_k_truncation && top_p != 1.0) {
    const uint64_t kept = weight_up_to(candidates, last_key);
    plan_top_p(row, top_p, row.target_bin, kept);
  } else if (threadIdx.x == 0) {
    row.pending = nothing;
  }
  if (threadIdx.x == 0) row.last_key = last_key;
}

// The weights at the row's temperature of the tokens that stay among four, and 0 for others.
__device__ void weigh_four(const Sampling& sampling, int begin, uint64_t (&weights)[items_per_thread]) {
  const SamplerRow& row = sampling.own_state();
  const Row logits = sampling.own_logits();
  const double temperature = sampling.own_settings().temperature;
  const double min_p = sampling.own_settings().min_p;
  const bool drops_weightless = sampling.own_settings().top_p != 1.0 || min_p != 0.0;
  const uint64_t least = max(uint64_t(1), uint64_t(ceil(min_p * weight_one)));
  const float largest = row.largest;
  const uint64_t last_key = row.last_key;
  float values[items_per_thread];
  load_four(logits, begin, values);
#pragma unroll
  for (int i = 0; i < items_per_thread; i++) {
    const bool stays = begin + i < logits.vocab && order_key(values[i], begin + i) <= last_key &&
                       (!drops_weightless || token_weight(values[i], largest) >= least);
    weights[i] = stays ? token_weight(values[i], largest, temperature) : 0;
  }
}

// grid (ceil(vocab / 2048), rows): draws the token of an open row.
__global__ void __launch_bounds__(block_threads) sampler_draw(Sampling sampling) {
  wait_for_previous_grid();
  release_next_grid();
  SamplerRow& row = sampling.own_state();
  if (!row.is_open) return;
  const int own_begin = threadIdx.x * items_per_thread;
  uint64_t weights[items_per_thread];
  weigh_four(sampling, first_id(), weights);
  const uint64_t sum = sum_in_block((weights[0] + weights[1]) + (weights[2] + weights[3]));
  if (threadIdx.x == 0) row.block_sums[blockIdx.x] = sum;
  if (!is_last_block(&row.arrivals, gridDim.x)) return;
  uint64_t sums[items_per_thread];
#pragma unroll
  for (int i = 0; i < items_per_thread; i++) {
    sums[i] = own_begin + i < gridDim.x ? __ldcg(&row.block_sums[own_begin + i]) : 0;
  }
  const uint64_t total = find_crossing(sums, never).total;
  const RowSettings& settings = sampling.own_settings();
  const uint64_t passed = __umul64hi(random_bits(settings.seed, settings.position), total);
  const Crossing block = find_crossing(sums, passed + 1);
  weigh_four(sampling, block.index * block_items + own_begin, weights);
  const Crossing token = find_crossing(weights, passed + 1 - block.before);
  if (threadIdx.x == 0) sampling.chosen[blockIdx.y].token = block.index * block_items + token.index;
  restore_logits(sampling);
}
