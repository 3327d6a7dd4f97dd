// The router; see cuda.py for the launchers.
//
// Loops with one or two iterations are not unrolled: the last block's warp runs its code for the first time,
// and every line that is not in the instruction cache costs it a wait.
#include "cuda/last_block.cuh"
#include "experts/partition.cuh"
#include "router/choose_by_rule.cuh"
#include "router/norms.cuh"

using namespace coldstream;

constexpr int block_threads = 512;
constexpr int choose_threads = 256;
constexpr int row_padding = 16;       // floats, so that the halves of a warp read different banks
constexpr int column_multiple = 128;  // columns are staged so many at a time, with zeros behind the last

extern __shared__ float4 dynamic_shared[];

struct Weights {
  const float* experts;  // [num_experts, cols]
  const float* shared;   // [cols] or null
  int num_experts;
  int cols;
};

struct Results {
  float* logits;       // [tokens, num_experts], written by all blocks and read by the last one
  float* shared_gate;  // [tokens]
  int* ids;            // [tokens, count]
  float* weights;      // [tokens, count]
  int count;
};

// The router of a later layer, of the same shape, applied to this layer's x: its choice is a guess at what it
// will choose in its own layer.
struct Ahead {
  const float* experts;  // [num_experts, cols]; null: no guesses
  float* logits;         // [tokens, num_experts]
  int* ids;              // [tokens, count]
  float* weights;        // [tokens, count]
  ChoiceRule rule;       // read where the layer itself has one
  Hints hints;           // of the only token
};

// Row r of all weights: first the experts, then the shared expert's gate, then the later layer's experts;
// null past the end.
__device__ __forceinline__ const float* weight_row(const Weights& w, const float* later, int row) {
  if (row < w.num_experts) return w.experts + int64_t(row) * w.cols;
  if (row == w.num_experts) return w.shared;
  row -= w.num_experts + 1;
  return later && row < w.num_experts ? later + int64_t(row) * w.cols : nullptr;
}

// Starts copying columns begin … begin + size of a row to shared memory, by the whole block; size is a
// multiple of 16 and columns past the end become 0.
template <bool aligned>
__device__ __forceinline__ void stage(float* shared, const float* row, int begin, int size, int cols) {
  constexpr int width = aligned ? 4 : 1;
#pragma unroll 1
  for (int i = threadIdx.x * width; i < size; i += block_threads * width) {
    const bool exists = row && begin + i < cols;
    if (!exists) {
      for (int j = 0; j < width; j++) shared[i + j] = 0.0f;
    } else if (aligned) {
      copy_async_16(shared + i, row + begin + i);
    } else {
      shared[i] = row[begin + i];
    }
  }
}

// A lane's accumulator over `size` columns in shared memory, a multiple of 128. The next values of the chain
// are read while the previous ones are added.
__device__ __forceinline__ float accumulate(const float* weight, const float* x, int size, float p) {
  constexpr int steps = column_multiple / 16;
  float w[steps], v[steps], next_w[steps], next_v[steps];
#pragma unroll
  for (int j = 0; j < steps; j++) w[j] = weight[j * 16], v[j] = x[j * 16];
#pragma unroll 1
  for (int i = column_multiple; i <= size; i += column_multiple) {
    const int ahead = i < size ? i : 0;
#pragma unroll
    for (int j = 0; j < steps; j++) next_w[j] = weight[ahead + j * 16], next_v[j] = x[ahead + j * 16];
#pragma unroll
    for (int j = 0; j < steps; j++) p = __fmaf_rn(v[j], w[j], p);
#pragma unroll
    for (int j = 0; j < steps; j++) w[j] = next_w[j], v[j] = next_v[j];
  }
  return p;
}

// The shape of a block's work: each warp multiplies one token with two rows of the weight, half a warp for
// each row.
struct Shares {
  int num_tokens;
  int num_rows;  // of the weight, for each block; even, and num_tokens · num_rows ≤ 2 · warps
  int chunk;     // columns at a time

  __device__ __forceinline__ int token() const { return threadIdx.x / warp_size % num_tokens; }
  __device__ __forceinline__ int row() const {  // within the block
    return threadIdx.x / warp_size / num_tokens * 2 + threadIdx.x % warp_size / 16;
  }
};

// What the first thread does besides, once x is available: it notes the time, and looks at a flag that it
// needs when it has multiplied. Either may be null.
struct Beside {
  uint64_t* begins;
  const Mailbox* box;
  LastAnswer last;

  __device__ __forceinline__ void begin() {
    if (begins) *begins = now_ns();
    if (box) last.look(*box);
  }
  __device__ __forceinline__ void end() const {
    if (box) last.wait(*box);
  }
};

// The products of the warp's token with its two rows, each in the lanes of its half. norms: x is what
// `norming` makes, of one chunk.
template <bool aligned, bool norms, bool has_rule>
__device__ __forceinline__ float multiply(const float* x, int x_stride, const Norming& norming,
                                          const Shares& shares, const Weights& weights, const float* later,
                                          Beside& beside) {
  const int column = threadIdx.x % 16, chunk = shares.chunk;
  float* shared_weights = reinterpret_cast<float*>(dynamic_shared);
  float* shared_x = shared_weights + shares.num_rows * (chunk + row_padding);
  float p = 0.0f;
  Eight norm_weights;
  if constexpr (norms) {
    norm_weights = load_eight<true>(norming.norm.weight, first_group(norming.norm), weights.cols);
    if (norming.bias) bring_row_near(norming.bias, weights.cols);
  }
#pragma unroll 1
  for (int begin = 0; begin < weights.cols; begin += chunk) {
    const int left = (weights.cols - begin + column_multiple - 1) / column_multiple * column_multiple;
    const int size = min(chunk, left);
    if (begin > 0) __syncthreads();
#pragma unroll 1
    for (int r = 0; r < shares.num_rows; r++) {
      const float* row = weight_row(weights, later, blockIdx.x * shares.num_rows + r);
      stage<aligned>(shared_weights + r * (chunk + row_padding), row, begin, size, weights.cols);
    }
    if (begin == 0) {
      wait_for_previous_grid();
      beside.begin();
    }
    if constexpr (norms)
      stage_norms<block_threads, has_rule>(norming, shares.num_tokens, shared_x, chunk, norm_weights);
#pragma unroll 1
    for (int t = 0; !norms && t < shares.num_tokens; t++) {
      stage<aligned>(shared_x + t * chunk, x + int64_t(t) * x_stride, begin, size, weights.cols);
    }
    commit_copies();
    wait_for_copies<0>();
    __syncthreads();
    const float* weight = shared_weights + shares.row() * (chunk + row_padding) + column;
    if (shares.row() < shares.num_rows) {
      p = accumulate(weight, shared_x + shares.token() * chunk + column, size, p);
    }
  }
  return sum_of_sixteen_lanes(p, 1);
}

template <int per_lane, bool has_rule>
__device__ __forceinline__ int choose(const ChoiceRule& rule, const float* logits, int num_experts,
                                      uint64_t* scratch, const Choice& out) {
  if constexpr (has_rule) return choose_by_rule<per_lane>(rule, logits, num_experts, scratch, out);
  return choose_experts<per_lane>(logits, num_experts, scratch, out);
}

// Up to 8 tokens. grid (ceil((num_experts + 1) / shares.num_rows)), with 2 · num_experts + 1 where there is a
// later layer. Each block computes the products of its rows; the last one to finish chooses, and shares the
// pairs of a single token out. With `norms`, x is written here, and x_stride is its columns. `has_rule`: the
// choice is by `rule`, and not that of a softmax. `is_alone`: there is nothing to share out and no later
// layer, and the kernel has no code for them, since long code slows down the launches around it.
template <bool aligned, int per_lane, bool norms, bool has_rule = false, bool is_alone = false>
__global__ void __launch_bounds__(block_threads)
    router_gemv(const float* x, int x_stride, Shares shares, Weights weights, Results out, uint32_t* arrivals,
                const __grid_constant__ Sharing sharing, const __grid_constant__ Ahead ahead,
                const __grid_constant__ Norming norming, const __grid_constant__ ChoiceRule rule) {
  release_next_grid();
  const float* const later_experts = is_alone ? nullptr : ahead.experts;
  const bool has_pairs = !is_alone && sharing.request != 0;
  if (!is_alone && blockIdx.x == 0) bring_slots_near(sharing, ahead.hints, weights.num_experts);
  if constexpr (has_rule) {
    if (blockIdx.x == 0) bring_rule_near(rule, weights.num_experts);
    if (blockIdx.x == 0 && later_experts) bring_rule_near(ahead.rule, weights.num_experts);
  }
  const bool is_first = blockIdx.x == 0 && threadIdx.x == 0;
  Beside beside{!is_alone && is_first && sharing.stamps ? &sharing.stamps->router.begins : nullptr,
                is_first && has_pairs ? &sharing.box : nullptr};
  const float product =
      multiply<aligned, norms, has_rule>(x, x_stride, norming, shares, weights, later_experts, beside);
  beside.end();
  const int row = blockIdx.x * shares.num_rows + shares.row(), token = shares.token();
  if (shares.row() < shares.num_rows && threadIdx.x % 16 == 0) {
    if (row < weights.num_experts) out.logits[token * weights.num_experts + row] = product;
    if (row == weights.num_experts && weights.shared) out.shared_gate[token] = product;
    const int later = row - weights.num_experts - 1;
    if (later_experts && later >= 0 && later < weights.num_experts) {
      ahead.logits[token * weights.num_experts + later] = product;
    }
  }
  const int warp = threadIdx.x / warp_size;
  if (!is_last_block(arrivals, gridDim.x)) return;
  bool is_asked = false;
  const bool is_guess = !is_alone && warp >= shares.num_tokens;
  if (warp < (later_experts ? 2 : 1) * shares.num_tokens) {
    uint64_t* scratch = reinterpret_cast<uint64_t*>(dynamic_shared) + warp * scratch_numbers<per_lane>;
    const int place = is_guess ? warp - shares.num_tokens : warp;
    const float* logits = is_guess ? ahead.logits : out.logits;
    int* ids = is_guess ? ahead.ids : out.ids;
    float* kept = is_guess ? ahead.weights : out.weights;
    const Choice choice = {ids + place * out.count, kept + place * out.count, out.count};
    // One call for both choices: the code is long, and a second copy would have to be fetched into the
    // instruction cache.
    const int id =
        choose<per_lane, has_rule>(is_guess ? ahead.rule : rule, logits + place * weights.num_experts,
                                   weights.num_experts, scratch, choice);
    if (!is_guess && has_pairs) is_asked = share_out(sharing, id, out.count);
    if (is_guess && ahead.hints.words) write_hints(ahead.hints, id, out.count);
  } else if (warp == block_threads / warp_size - 1 && has_pairs) {
    // The CPU probably needs it. Once that is known, the layer would wait for the bus.
    send_row(has_rule && sharing.x ? sharing.x : x, sharing.box.x, weights.cols);
    __threadfence_system();
  }
  if (!has_pairs) return;
  if (__syncthreads_or(is_asked) && threadIdx.x == 0) ask_the_cpu(sharing);
  make_room(sharing);
  if (sharing.stamps && threadIdx.x == 0) sharing.stamps->router.ends = now_ns();
}

// Chooses only, from logits that are there. Rows of no sequence, whose positions are negative, choose what
// the first row does: what they compute is not used, and so they want no other experts. grid (ceil(tokens /
// 8)).
template <int per_lane, bool has_rule = false>
__global__ void __launch_bounds__(choose_threads)
    router_choose(const float* logits, int logits_stride, int num_tokens, int num_experts,
                  const int* positions, int* ids, float* weights, int count,
                  const __grid_constant__ ChoiceRule rule) {
  wait_for_previous_grid();
  release_next_grid();
  const int warp = threadIdx.x / warp_size;
  const int64_t token = int64_t(blockIdx.x) * (choose_threads / warp_size) + warp;
  if (token >= num_tokens) return;
  uint64_t* scratch = reinterpret_cast<uint64_t*>(dynamic_shared) + warp * scratch_numbers<per_lane>;
  const int64_t chooser = positions != nullptr && positions[token] < 0 ? 0 : token;
  choose<per_lane, has_rule>(rule, logits + chooser * logits_stride, num_experts, scratch,
                             {ids + token * count, weights + token * count, count});
}
