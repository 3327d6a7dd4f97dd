// The end of the prefix of tokens that top-k and top-p keep, found by all blocks of a row.
//
// Both keep a prefix of one order: logit descending, id ascending. A histogram over the distance to the
// largest logit follows that order, and says in which bin the prefix ends. If what lies before that is too
// long for a list, histograms over digits of the order keys follow.
#pragma once

#include "sample/rows.cuh"

namespace coldstream {

constexpr float bins_per_unit = 64.0f;  // of logit: the bins span 32, and beyond 28 nothing has weight
constexpr int digit_bits = 11;
constexpr int key_bits = 64;
static_assert(1 << digit_bits == num_bins, "one histogram serves bins and digits");

// Ascends as logits descend: subtraction and multiplication round monotonically.
__device__ __forceinline__ int bin_of(float logit, float largest) {
  return int(fminf((largest - logit) * bins_per_unit, float(num_bins - 1)));
}

// The weight at which top-p < 1 ends, of a total. At least 1: the first token always stays.
__device__ __forceinline__ uint64_t top_p_target(double top_p, uint64_t total) {
  constexpr double two_to_64 = 18446744073709551616.0;
  return max(uint64_t(1), __umul64hi(uint64_t(top_p * two_to_64), total));
}

// The tokens that are kept, as far as is known. Zero or more of the last may yet be out.
struct Kept {
  uint64_t last_key = never;    // tokens with greater order keys are out
  int last_bin = num_bins - 1;  // as are those of later bins
  uint64_t weight = 0;          // top-p keeps tokens until their weights reach this, if it has been asked
  uint32_t num_tokens = 0;
};

// A row's tiles of 2048 tokens, of which each block has some.
struct Tiles {
  int first, end;

  __device__ __forceinline__ static int number_of(int vocab) {
    return (vocab + block_items - 1) / block_items;
  }
  __device__ __forceinline__ static Tiles of_block(int vocab) {
    const int all = number_of(vocab), each = (all + int(gridDim.x) - 1) / int(gridDim.x);
    return {min(all, int(blockIdx.x) * each), min(all, (int(blockIdx.x) + 1) * each)};
  }
};

// What a block computes in shared memory.
union BlockMemory {
  struct {
    uint32_t counts[num_bins];
    uint32_t low[num_bins], high[num_bins];  // of weights, which are up to 2^40: 20 bits, and the others
    uint64_t weights[num_bins];
  } bins;
  uint64_t keys[block_items];
};

__device__ __forceinline__ BlockMemory& block_memory() {
  __shared__ BlockMemory memory;
  return memory;
}

// One row, as a block sees it that chooses its token with others.
struct RowChoice {
  const SampledRow& row;
  RowBlocks& blocks;
  Tiles own;
  float largest = 0.0f;  // logit
  int num_passes = 0;    // over histograms

  __device__ __forceinline__ bool is_kept(const Kept& kept, uint64_t key) const {
    return key <= kept.last_key && bin_of(key_logit(key), largest) <= kept.last_bin;
  }

  // Four adjacent logits for each thread, of one tile after another, those of tokens that may not follow too;
  // those of the next tile are on their way.
  template <class Visit>
  __device__ __forceinline__ void for_each_whole_tile(Visit visit) const {
    int begin = own.first * block_items + int(threadIdx.x) * items_per_thread;
    float next[items_per_thread];
    load_four(row.logits, begin, next);
#pragma unroll 1
    for (int tile = own.first; tile < own.end; tile++, begin += block_items) {
      float values[items_per_thread];
#pragma unroll
      for (int i = 0; i < items_per_thread; i++) values[i] = next[i];
      if (tile + 1 < own.end) load_four(row.logits, begin + block_items, next);
      visit(tile, begin, values);
    }
  }

  // The same with −∞ for tokens that may not follow.
  template <class Visit>
  __device__ __forceinline__ void for_each_tile(Visit visit) const {
    for_each_whole_tile([&](int tile, int begin, const float (&logits)[items_per_thread]) {
      float values[items_per_thread];
#pragma unroll
      for (int i = 0; i < items_per_thread; i++) values[i] = logits[i];
      row.mask_four(begin, values);
      visit(tile, begin, values);
    });
  }

  // The block's part of the histogram of a pass, before the meeting in front of that pass. It was that of
  // three passes before. A block that is here has met all others behind their last look at that.
  __device__ __forceinline__ void clear_histogram(int pass) const {
    Histogram& histogram = row.state.histograms[pass % num_histograms];
    for (int i = blockIdx.x * block_threads + threadIdx.x; i < num_bins; i += gridDim.x * block_threads) {
      histogram.counts[i] = 0;
      histogram.weights[i] = 0;
    }
  }

  // A call, as it is long and there are four of them a thread.
  __device__ __noinline__ static void add_token(int bin, uint64_t weight, bool with_weights) {
    auto& sums = block_memory().bins;
    uint32_t count = 1, low = uint32_t(weight) & 0xfffffu, high = uint32_t(weight >> 20);
    // Of flat logits a warp's tokens are all in one bin, and its lanes would wait for each other.
    if (!__any_sync(all_lanes, bin != __shfl_sync(all_lanes, bin, 0))) {
      if (bin < 0) return;
      count = warp_size;
      if (with_weights) low = sum_of_lanes(low), high = sum_of_lanes(high);
      if (threadIdx.x % warp_size != 0) return;
    }
    if (bin < 0) return;
    atomicAdd(&sums.counts[bin], count);
    if (!with_weights) return;
    atomicAdd(&sums.low[bin], low);
    atomicAdd(&sums.high[bin], high);
  }

  // Counts, and weights at temperature 1, of the row's tokens by the bins that bin_of_key gives, −1 for none.
  // All blocks have added theirs when it returns.
  template <class BinOfKey>
  __device__ __forceinline__ const Histogram& histogram_of(bool with_weights, BinOfKey bin_of_key) {
    auto& sums = block_memory().bins;
    Histogram& histogram = row.state.histograms[num_passes % num_histograms];
    clear_histogram(++num_passes);
    for (int i = threadIdx.x; i < num_bins; i += block_threads) {
      sums.counts[i] = sums.low[i] = sums.high[i] = 0;
      sums.weights[i] = 0;
    }
    __syncthreads();
    for_each_tile([&](int, int begin, const float (&values)[items_per_thread]) {
#pragma unroll
      for (int i = 0; i < items_per_thread; i++) {
        const int bin = begin + i < row.logits.vocab ? bin_of_key(order_key(values[i], begin + i)) : -1;
        add_token(bin, with_weights && bin >= 0 ? token_weight(values[i], largest) : 0, with_weights);
      }
      if (!with_weights) return;
      // Parts of 2048 weights fit in 32 bits, for which shared memory has atomic additions.
      __syncthreads();
      for (int i = threadIdx.x; i < num_bins; i += block_threads) {
        sums.weights[i] += uint64_t(sums.low[i]) + (uint64_t(sums.high[i]) << 20);
        sums.low[i] = sums.high[i] = 0;
      }
      __syncthreads();
    });
    __syncthreads();
    for (int i = threadIdx.x; i < num_bins; i += block_threads) {
      if (sums.counts[i] == 0) continue;
      atomicAdd(&histogram.counts[i], sums.counts[i]);
      if (with_weights) add_up(&histogram.weights[i], sums.weights[i]);
    }
    blocks.meet();
    return histogram;
  }

  // Where the prefix ends among the bins of a histogram.
  struct End {
    int bin;                         // the last one if none reaches the target
    uint64_t before;                 // count or weight of the bins before
    uint32_t tokens_before, tokens;  // of these, and in the bin
    uint64_t target;
  };

  // The bin at which the running count reaches `target`, or the running weight. A target of 0: the share of
  // all weights that top-p keeps.
  __device__ __forceinline__ End end_in(const Histogram& histogram, bool by_weight, uint64_t target) const {
    uint32_t counts[items_per_thread];
    uint64_t items[items_per_thread];
    const int first = threadIdx.x * items_per_thread;
#pragma unroll
    for (int i = 0; i < items_per_thread; i++) {
      counts[i] = __ldcg(&histogram.counts[first + i]);
      items[i] = by_weight ? __ldcg(&histogram.weights[first + i]) : counts[i];
    }
    if (target == 0) target = top_p_target(row.settings.top_p, find_crossing(items, never).total);
    const Crossing crossing = find_crossing(items, target);
    const int bin = min(crossing.index, num_bins - 1);
    uint64_t before_and_in = 0;  // two counts
#pragma unroll
    for (int i = 0; i < items_per_thread; i++) {
      if (first + i < bin) before_and_in += uint64_t(counts[i]) << 32;
      if (first + i == bin) before_and_in += counts[i];
    }
    before_and_in = sum_in_block(before_and_in);
    return {bin, crossing.before, uint32_t(before_and_in >> 32), uint32_t(before_and_in), target};
  }

  // Narrows what is kept to the tokens up to the one at which their running count reaches `target`, or their
  // running weight top-p's share, or so far that a list holds them. The count is that of all tokens.
  __device__ __noinline__ void narrow(Kept& kept, bool by_weight, uint64_t target) {
    uint64_t prefix = 0;
    uint32_t before = 0,
             pending = 0;             // tokens before those that share bin and prefix with the end, and these
    int above = 0, shift = key_bits;  // of the key's bits, those from `above` on are the prefix's
    bool has_bin = false;
    do {
      const Histogram& histogram = histogram_of(by_weight, [&](uint64_t key) {
        const int bin = bin_of(key_logit(key), largest);
        if (!is_kept(kept, key)) return -1;
        // The last bin has all other tokens, whose weight is 0.
        if (!has_bin) return bin < num_bins - 1 ? bin : -1;
        const bool shares = bin == kept.last_bin && (above == key_bits || key >> above == prefix >> above);
        return shares ? int(key >> shift) & ((1 << (above - shift)) - 1) : -1;
      });
      const End end = end_in(histogram, by_weight, target);
      target = end.target - end.before;
      before += end.tokens_before;
      pending = end.tokens;
      if (has_bin) {
        prefix |= uint64_t(end.bin) << shift;
      } else {
        if (end.bin == num_bins - 1) pending = row.logits.vocab - before;
        kept.last_bin = end.bin;
        kept.weight = end.target;
        has_bin = true;
      }
      above = shift;
      shift = max(0, shift - digit_bits);
    } while (before + pending > list_capacity && pending > 1 && !blocks.has_failed());
    if (above < key_bits) {
      const uint64_t last = prefix | ((uint64_t(1) << above) - 1);
      kept.last_key = last < kept.last_key ? last : kept.last_key;
    }
    kept.num_tokens = before + pending;
  }

  // Lists the row's kept tokens, in any order; those beyond the list's capacity are counted alone.
  __device__ __noinline__ void list_tokens(const Kept& kept, uint32_t& num_listed) const {
    list_and_visit(kept, num_listed, [](uint64_t, float) {});
  }

  // The same with a call of visit(key, logit) for each of the row's tokens.
  template <class Visit>
  __device__ __forceinline__ void list_and_visit(const Kept& kept, uint32_t& num_listed, Visit visit) const {
    __shared__ uint32_t num_found, place;
    uint64_t* const keys = block_memory().keys;
    if (threadIdx.x == 0) num_found = 0;
    __syncthreads();
    for_each_tile([&](int, int begin, const float (&values)[items_per_thread]) {
#pragma unroll
      for (int i = 0; i < items_per_thread; i++) {
        const uint64_t key = order_key(values[i], begin + i);
        if (begin + i >= row.logits.vocab) continue;
        visit(key, values[i]);
        if (!is_kept(kept, key)) continue;
        const uint32_t found = atomicAdd(&num_found, 1u);
        if (found < list_capacity) keys[found] = key;
      }
    });
    __syncthreads();
    if (num_found == 0) return;
    if (threadIdx.x == 0) place = atomicAdd(&num_listed, num_found);
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < min(num_found, uint32_t(list_capacity)); i += block_threads) {
      if (place + i < list_capacity) row.state.numbers[place + i] = keys[i];
    }
  }
};

}  // namespace coldstream
