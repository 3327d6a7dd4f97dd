// What is computed of single rows of a draft block; see cuda.py for the launchers.
#include "draft_block/values.cuh"

using namespace coldstream;

constexpr int block_threads = 256;

struct DraftConvolution {
  const float* base;     // [kernel, cols], of one side
  const float* dynamic;  // [rows, dynamic_stride], of one side from [0] on: [kernel, cols / group]
  int kernel, group, dynamic_stride;
};

// grid (ceil(cols / 256), rows): row r is the sum over d < kernel of (base + dynamic of row r) · x of row r −
// d.
__global__ void __launch_bounds__(block_threads)
    draft_convolve(const float* x, const DraftConvolution conv, float* y, int cols) {
  wait_for_previous_grid();
  release_next_grid();
  const int row = blockIdx.y, col = blockIdx.x * block_threads + threadIdx.x, groups = cols / conv.group;
  if (col >= cols) return;
  const float* dynamic = conv.dynamic + int64_t(row) * conv.dynamic_stride + col / conv.group;
  float sum = 0.0f;
  for (int d = 0; d < conv.kernel && d <= row; d++) {
    sum = __fmaf_rn(conv.base[d * cols + col] + dynamic[d * groups], x[int64_t(row - d) * cols + col], sum);
  }
  y[int64_t(row) * cols + col] = sum;
}

// grid (auxiliary layers, rows): the norm of each layer's part of a row of features by its own weights, both
// [layers, cols].
__global__ void __launch_bounds__(block_threads)
    norm_draft_features(const Bfloat16Bits* features, const float* weights, float eps, float* out, int cols) {
  __shared__ float of_warps[block_threads / warp_size];
  wait_for_previous_grid();
  release_next_grid();
  const int warp = threadIdx.x / warp_size, lane = threadIdx.x % warp_size;
  const int64_t at = (int64_t(blockIdx.y) * gridDim.x + blockIdx.x) * cols;
  const float* weight = weights + int64_t(blockIdx.x) * cols;
  float sum = 0.0f;
  for (int i = threadIdx.x; i < cols; i += block_threads) {
    const float x = bfloat16_to_float(features[at + i]);
    sum = __fmaf_rn(x, x, sum);
  }
  sum = sum_of_warp(sum);
  if (lane == 0) of_warps[warp] = sum;
  __syncthreads();
  const float total = sum_of_warp(lane < block_threads / warp_size ? of_warps[lane] : 0.0f);
  const float scale = inverse_sqrt(total / float(cols) + eps);
  for (int i = threadIdx.x; i < cols; i += block_threads) {
    out[at + i] = bfloat16_to_float(features[at + i]) * scale * weight[i];
  }
}

struct DraftRope {
  const double* turns;  // [head_dim / 2], of a position, in whole turns
  float magnitude;      // of cosines and sines
};

// Values of a head as a product leaves them, plus those of its bias.
struct BiasedHead {
  const float* values;
  const float* bias;

  __device__ __forceinline__ float operator[](int i) const { return values[i] + bias[i]; }
};

// The values of a head that is `first` values behind the beginning of its row; without biases a plain
// pointer.
template <bool has_bias>
__device__ __forceinline__ auto head_of(const float* values, const float* bias, int first) {
  if constexpr (has_bias) {
    return BiasedHead{values, bias + first};
  } else {
    return values;
  }
}

__device__ __forceinline__ void store(float* to, float value) { *to = value; }
__device__ __forceinline__ void store(Bfloat16Bits* to, float value) { *to = to_bfloat16(value); }

// A head of `dim` values, normed and rotated by its position, from and to where it may be the same; by a
// warp.
template <typename Head, typename Value>
__device__ __forceinline__ void place_head(const Head from, Value* to, const float* weight, int dim,
                                           float eps, const DraftRope& rope, int position) {
  const int half = dim / 2;
  float sum = 0.0f;
  for (int i = threadIdx.x; i < dim; i += warp_size) sum = __fmaf_rn(from[i], from[i], sum);
  const float scale = inverse_sqrt(sum_of_warp(sum) / float(dim) + eps);
  for (int i = threadIdx.x; i < half; i += warp_size) {
    double turns = double(position) * rope.turns[i];
    turns -= floor(turns);
    const float angle = float(turns) * 6.283185307179586f;
    const float cos = rope.magnitude * cosf(angle), sin = rope.magnitude * sinf(angle);
    const float low = from[i] * scale * weight[i], high = from[half + i] * scale * weight[half + i];
    store(to + i, low * cos - high * sin);
    store(to + half + i, high * cos + low * sin);
  }
}

struct DraftHeads {
  int num_heads, num_kv_heads, dim;
  float eps;
  DraftRope rope;
};

// Rows of the block by layer: what the products say, and where attention reads it.
struct PlacedDraftRows {
  float* queries;             // [rows, num_heads · dim], in place
  const float* keys;          // [rows, num_kv_heads · dim]
  const float* values;        // likewise
  Bfloat16Bits* kv;           // [rows, 2 · num_kv_heads · dim]: keys and then values
  const float* query_weight;  // [dim], of norms
  const float* key_weight;
  const float* query_bias;  // [num_heads · dim]; null, as the other two, where there are none
  const float* key_bias;    // [num_kv_heads · dim]
  const float* value_bias;
};

// grid (rows, heads of queries, keys and values), 32 threads: norms and rotates queries and keys, and rounds
// keys and values. length: of the context, the position of the first row.
template <bool has_bias>
__global__ void __launch_bounds__(warp_size)
    place_draft_rows(const __grid_constant__ PlacedDraftRows rows, const __grid_constant__ DraftHeads heads,
                     const int* length) {
  wait_for_previous_grid();
  release_next_grid();
  const int dim = heads.dim, kv_heads = heads.num_kv_heads, position = *length + blockIdx.x;
  int head = blockIdx.y;
  if (head < heads.num_heads) {
    float* at = rows.queries + (int64_t(blockIdx.x) * heads.num_heads + head) * dim;
    const auto from = head_of<has_bias>(at, rows.query_bias, head * dim);
    place_head(from, at, rows.query_weight, dim, heads.eps, heads.rope, position);
    return;
  }
  head -= heads.num_heads;
  Bfloat16Bits* to = rows.kv + (int64_t(blockIdx.x) * 2 * kv_heads + head) * dim;
  if (head < kv_heads) {
    const float* at = rows.keys + (int64_t(blockIdx.x) * kv_heads + head) * dim;
    const auto from = head_of<has_bias>(at, rows.key_bias, head * dim);
    place_head(from, to, rows.key_weight, dim, heads.eps, heads.rope, position);
    return;
  }
  const float* at = rows.values + (int64_t(blockIdx.x) * kv_heads + head - kv_heads) * dim;
  const auto from = head_of<has_bias>(at, rows.value_bias, (head - kv_heads) * dim);
  for (int i = threadIdx.x; i < dim; i += warp_size) to[i] = to_bfloat16(from[i]);
}

constexpr int max_committed_layers = 4;  // of a launch

struct CommittedDraftLayer {
  const float* keys;  // [rows, num_kv_heads · dim]
  const float* values;
  const float* key_weight;  // [dim], of the norm of keys
  const float* key_bias;    // [num_kv_heads · dim]; null, as the other, where there are none
  const float* value_bias;
};

struct CommittedDraftRows {
  CommittedDraftLayer at[max_committed_layers];
  const int* first;  // the position of the first row, and how many rows there are; null: `start` and all
  const int* count;
  int start, rows;
};

// grid (rows, key heads, layers), 32 threads: rows with the norm and rotation of their keys into the contexts
// of these layers. Of more rows than a context holds, the last ones.
template <bool has_bias>
__global__ void __launch_bounds__(warp_size)
    place_committed_rows(const __grid_constant__ CommittedDraftRows in,
                         const __grid_constant__ DraftHeads heads, const DraftContext* contexts) {
  wait_for_previous_grid();
  release_next_grid();
  const int row = blockIdx.x, head = blockIdx.y, dim = heads.dim;
  const CommittedDraftLayer& layer = in.at[blockIdx.z];
  const DraftContext context = contexts[blockIdx.z];
  const int count = in.count != nullptr ? *in.count : in.rows;
  if (row >= count || row + context.capacity < count) return;
  const int position = (in.first != nullptr ? *in.first : in.start) + row,
            place = position % context.capacity;
  const int64_t from = (int64_t(row) * heads.num_kv_heads + head) * dim;
  const int64_t to = (int64_t(place) * heads.num_kv_heads + head) * dim;
  const auto keys = head_of<has_bias>(layer.keys + from, layer.key_bias, head * dim);
  place_head(keys, context.keys + to, layer.key_weight, dim, heads.eps, heads.rope, position);
  const auto values = head_of<has_bias>(layer.values + from, layer.value_bias, head * dim);
  for (int i = threadIdx.x; i < dim; i += warp_size) context.values[to + i] = to_bfloat16(values[i]);
  if (head == 0 && threadIdx.x == 0) context.positions[place] = position;
}

// grid (ceil(count / 256)): places of rows from position `length` on have no row afterwards.
__global__ void __launch_bounds__(block_threads) forget_draft_rows(int* positions, int count, int length) {
  wait_for_previous_grid();
  release_next_grid();
  const int place = blockIdx.x * block_threads + threadIdx.x;
  if (place < count && positions[place] >= length) positions[place] = -1;
}

constexpr int max_candidates = 16;  // of a position

struct DraftPairs {
  const float* predecessors;  // [positions, ranks, size], of the candidates of the position before
  const float* projected;     // [positions, size]
  const float* successors;    // [positions, ranks, size]
  const float* own;           // [positions, ranks]: log-probabilities without what is before
  int ranks, size;
};

// grid (positions, ranks): the log-probabilities of a position's candidates after one candidate before it,
// over the candidates. `out` is [positions, ranks, ranks].
__global__ void __launch_bounds__(block_threads)
    score_draft_pairs(const __grid_constant__ DraftPairs in, float* out) {
  __shared__ float scores[max_candidates];
  wait_for_previous_grid();
  release_next_grid();
  const int warp = threadIdx.x / warp_size, lane = threadIdx.x % warp_size;
  const int64_t first = int64_t(blockIdx.x) * in.ranks, row = first + blockIdx.y;
  const float* predecessor = in.predecessors + row * in.size;
  const float* projected = in.projected + int64_t(blockIdx.x) * in.size;
  for (int rank = warp; rank < in.ranks; rank += block_threads / warp_size) {
    const float* successor = in.successors + (first + rank) * in.size;
    float sum = 0.0f;
    for (int i = lane; i < in.size; i += warp_size) {
      sum = __fmaf_rn(predecessor[i] * projected[i], successor[i], sum);
    }
    sum = sum_of_warp(sum);
    if (lane == 0) scores[rank] = in.own[first + rank] + sum;
  }
  __syncthreads();
  if (warp != 0) return;
  const bool is_there = lane < in.ranks;
  const float score = is_there ? scores[lane] : 0.0f;
  const float most = max_of_warp(is_there ? score : -1e30f);
  const float total = sum_of_warp(is_there ? exact_exp(score - most) : 0.0f);
  if (is_there) out[row * in.ranks + lane] = (score - most) - logf(total);
}

// One warp: the likeliest chain of so many tokens, of candidates [length, ranks] and their log-probabilities,
// [length, ranks] or, if they are conditional, [length, ranks, ranks] by the rank of the candidate before.
__global__ void __launch_bounds__(warp_size)
    choose_draft_chain(const int* ids, const float* log_probs, int ranks, int is_conditional, int* chain,
                       int length) {
  wait_for_previous_grid();
  release_next_grid();
  int before = 0;
  for (int depth = 0; depth < length; depth++) {
    const float* row =
        log_probs + (is_conditional ? (int64_t(depth) * ranks + before) * ranks : int64_t(depth) * ranks);
    int best = 0;
    float most = row[0];
    for (int rank = threadIdx.x; rank < ranks; rank += warp_size) {
      if (row[rank] > most || (row[rank] == most && rank < best)) most = row[rank], best = rank;
    }
    const float greatest = max_of_warp(most);
    const uint32_t key = most == greatest ? uint32_t(best) : all_lanes;
    before = int(least_of_lanes(key)) % ranks;
    if (threadIdx.x == 0) chain[depth] = ids[depth * ranks + before];
  }
}
