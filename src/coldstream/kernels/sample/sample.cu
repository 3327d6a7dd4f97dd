// From logits to tokens, as decoding/sampling.py defines it; see cuda.py for the launchers.
//
// Top-k, top-p and min-p each keep a prefix of one order: logit descending, id ascending. So a row's filters
// come down to one number, the greatest order key that stays. It is found by a histogram over the distance to
// the largest logit, whose bins follow that order, and a radix selection within the one bin where the prefix
// ends.
#include "sample/cut.cuh"

using namespace coldstream;

// grid (ceil(vocab / 2048), rows): the argmax alone.
template <int row_bytes>
__global__ void __launch_bounds__(block_threads)
    argmax_rows(Logits logits, ArgmaxRow* rows, int* tokens, int* faults) {
  static_assert(sizeof(ArgmaxRow) == row_bytes, "the launcher's workspace");
  wait_for_previous_grid();
  release_next_grid();
  ArgmaxRow& row = rows[blockIdx.y];
  const int begin = first_id();
  float values[items_per_thread];
  load_four(logits, begin, values);
  add_to_argmax(row, values, begin, logits.vocab, count_bad(values));
  if (is_last_block(&row.arrivals, gridDim.x) && threadIdx.x == 0) {
    const Best best = take_argmax(row);
    tokens[blockIdx.y] = key_id(best.key);
    faults[blockIdx.y] = fault_of(best);
  }
}

// How often each of the block's tokens occurs among the last ones of the row's sequence.
__device__ void count_recent(const Settings& settings, int window, uint32_t (&counts)[block_items]) {
  for (int i = threadIdx.x; i < block_items; i += block_threads) counts[i] = 0;
  __syncthreads();
  const int length = settings.position[blockIdx.y] + 1;
  const int* tokens = settings.history + int64_t(settings.slot[blockIdx.y]) * settings.history_size;
  for (int i = max(0, length - window) + threadIdx.x; i < length; i += block_threads) {
    const uint32_t place = uint32_t(tokens[i]) - blockIdx.x * block_items;
    if (place < block_items) atomicAdd(&counts[place], 1u);
  }
  __syncthreads();
}

// Makes recent tokens less likely, in memory too.
__device__ void penalise(const Settings& settings, const Logits& logits, float (&values)[items_per_thread]) {
  __shared__ uint32_t counts[block_items];
  const float repetition = settings.repetition_penalty[blockIdx.y];
  const float presence = settings.presence_penalty[blockIdx.y];
  const float frequency = settings.frequency_penalty[blockIdx.y];
  const int window = settings.penalty_window[blockIdx.y];
  if (window == 0 || (repetition == 1.0f && presence == 0.0f && frequency == 0.0f)) return;
  count_recent(settings, window, counts);
#pragma unroll
  for (int i = 0; i < items_per_thread; i++) {
    const uint32_t count = counts[threadIdx.x * items_per_thread + i];
    if (count == 0) continue;
    const float seen = values[i] > 0.0f ? values[i] / repetition : values[i] * repetition;
    values[i] = seen - (float(count) * frequency + presence);
    logits.row()[first_id() + i] = values[i];
  }
}

__device__ void finish_row(const Settings& settings, int* tokens, int token) {
  tokens[blockIdx.y] = token;
  const int place = settings.position[blockIdx.y] + 1;
  if (place < settings.history_size) {
    settings.history[int64_t(settings.slot[blockIdx.y]) * settings.history_size + place] = token;
  }
}

// grid (ceil(vocab / 2048), rows): penalties and the largest logit; ends the row if that is the answer.
template <int row_bytes>
__global__ void __launch_bounds__(block_threads)
    sampler_scan(Logits logits, Settings settings, SamplerRow* rows, int* tokens, int* faults) {
  static_assert(sizeof(SamplerRow) == row_bytes, "the launcher's workspace");
  wait_for_previous_grid();
  release_next_grid();
  SamplerRow& row = rows[blockIdx.y];
  for (int i = blockIdx.x * block_threads + threadIdx.x; i < num_bins; i += gridDim.x * block_threads) {
    row.bin_counts[i] = 0;
    row.bin_weights[i] = 0;
  }
  const int begin = first_id();
  float values[items_per_thread];
  load_four(logits, begin, values);
  const int num_bad = count_bad(values);
  penalise(settings, logits, values);
  add_to_argmax(row.argmax, values, begin, logits.vocab, num_bad);
  if (!is_last_block(&row.argmax.arrivals, gridDim.x) || threadIdx.x != 0) return;
  const Best best = take_argmax(row.argmax);
  faults[blockIdx.y] = fault_of(best);
  row.is_open = fault_of(best) == 0 && settings.temperature[blockIdx.y] != 0.0;
  row.largest = key_logit(best.key);
  row.cut = never;
  row.pending = nothing;
  row.num_listed[0] = row.num_listed[1] = 0;
  if (!row.is_open) finish_row(settings, tokens, key_id(best.key));
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
    // Whatever is not in another bin is in the last one, and weighs nothing.
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
__global__ void __launch_bounds__(block_threads)
    sampler_bins(Logits logits, Settings settings, SamplerRow* rows) {
  wait_for_previous_grid();
  release_next_grid();
  SamplerRow& row = rows[blockIdx.y];
  const int top_k = settings.top_k[blockIdx.y];
  const double top_p = settings.top_p[blockIdx.y];
  const bool has_top_k = 0 < top_k && top_k < logits.vocab;
  if (!row.is_open || (!has_top_k && top_p == 1.0)) return;
  const int begin = first_id();
  float values[items_per_thread];
  load_four(logits, begin, values);
  add_to_bins(row, values, begin, logits.vocab, top_p != 1.0);
  if (!is_last_block(&row.arrivals, gridDim.x)) return;
  if (has_top_k) {
    plan_top_k(row, top_k);
  } else {
    plan_top_p(row, top_p, num_bins, 0);
  }
}

// grid (ceil(vocab / 2048), rows), twice (`stage` 0 and 1): finds the key at which an open row's prefix ends
// within the pending bin; after top-k comes top-p.
__global__ void __launch_bounds__(block_threads)
    sampler_cut(Logits logits, Settings settings, SamplerRow* rows, int stage) {
  wait_for_previous_grid();
  release_next_grid();
  SamplerRow& row = rows[blockIdx.y];
  const Pending pending = row.pending;
  if (pending == nothing) return;
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
  const uint64_t cut = select_cut(candidates, pending == top_p_cut, row.remaining);
  const double top_p = settings.top_p[blockIdx.y];
  if (pending == top_k_cut && top_p != 1.0) {
    const uint64_t kept = weight_up_to(candidates, cut);
    plan_top_p(row, top_p, row.target_bin, kept);
  } else if (threadIdx.x == 0) {
    row.pending = nothing;
  }
  if (threadIdx.x == 0) row.cut = cut;
}

// The weights at the row's temperature of the tokens that stay among four, and 0 for others.
__device__ void weigh_four(const SamplerRow& row, const Settings& settings, const Logits& logits, int begin,
                           uint64_t (&weights)[items_per_thread]) {
  const double temperature = settings.temperature[blockIdx.y];
  const double min_p = settings.min_p[blockIdx.y];
  const bool drops_weightless = settings.top_p[blockIdx.y] != 1.0 || min_p != 0.0;
  const uint64_t least = max(uint64_t(1), uint64_t(ceil(min_p * weight_one)));
  const float largest = row.largest;
  const uint64_t cut = row.cut;
  float values[items_per_thread];
  load_four(logits, begin, values);
#pragma unroll
  for (int i = 0; i < items_per_thread; i++) {
    const bool stays = begin + i < logits.vocab && order_key(values[i], begin + i) <= cut &&
                       (!drops_weightless || token_weight(values[i], largest) >= least);
    weights[i] = stays ? token_weight(values[i], largest, temperature) : 0;
  }
}

// grid (ceil(vocab / 2048), rows): draws the token of an open row.
__global__ void __launch_bounds__(block_threads)
    sampler_draw(Logits logits, Settings settings, SamplerRow* rows, int* tokens) {
  wait_for_previous_grid();
  release_next_grid();
  SamplerRow& row = rows[blockIdx.y];
  if (!row.is_open) return;
  const int own_begin = threadIdx.x * items_per_thread;
  uint64_t weights[items_per_thread];
  weigh_four(row, settings, logits, first_id(), weights);
  const uint64_t sum = sum_in_block((weights[0] + weights[1]) + (weights[2] + weights[3]));
  if (threadIdx.x == 0) row.block_sums[blockIdx.x] = sum;
  if (!is_last_block(&row.arrivals, gridDim.x)) return;
  uint64_t sums[items_per_thread];
#pragma unroll
  for (int i = 0; i < items_per_thread; i++) {
    sums[i] = own_begin + i < gridDim.x ? __ldcg(&row.block_sums[own_begin + i]) : 0;
  }
  const uint64_t total = find_crossing(sums, never).total;
  const uint64_t position = uint64_t(int64_t(settings.position[blockIdx.y]) + 1);
  const uint64_t passed = __umul64hi(random_bits(settings.seed[blockIdx.y], position), total);
  const Crossing block = find_crossing(sums, passed + 1);
  weigh_four(row, settings, logits, block.index * block_items + own_begin, weights);
  const Crossing token = find_crossing(weights, passed + 1 - block.before);
  if (threadIdx.x == 0) finish_row(settings, tokens, block.index * block_items + token.index);
}
