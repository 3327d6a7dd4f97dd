// What is computed of single rows of a draft block; see cuda.py for the launchers.
#include "draft_block/values.cuh"

using namespace coldstream;

constexpr int block_threads = 256;

constexpr int eight = 8;  // values of 16 bytes

__device__ __forceinline__ void load_eight_values(const Bfloat16Bits* from, float (&v)[eight]) {
  const uint4 loaded = *reinterpret_cast<const uint4*>(from);
  const uint32_t words[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
#pragma unroll
  for (int w = 0; w < 4; w++) v[2 * w] = low_half(words[w]), v[2 * w + 1] = high_half(words[w]);
}

__device__ __forceinline__ void store_eight_values(Bfloat16Bits* to, const float (&v)[eight]) {
  uint32_t words[4];
#pragma unroll
  for (int w = 0; w < 4; w++) words[w] = to_bfloat16(v[2 * w]) | uint32_t(to_bfloat16(v[2 * w + 1])) << 16;
  *reinterpret_cast<uint4*>(to) = {words[0], words[1], words[2], words[3]};
}

// grid (rows): y = x / rms(x) · weight, of rows of whole eights.
__global__ void __launch_bounds__(block_threads)
    draft_norm(const Bfloat16Bits* x, const float* weight, Bfloat16Bits* y, int cols, float eps) {
  __shared__ float warp_sums[block_threads / warp_size];
  wait_for_previous_grid();
  release_next_grid();
  const int64_t begin = int64_t(blockIdx.x) * cols;
  float v[eight], sum = 0.0f;
  for (int i = eight * threadIdx.x; i < cols; i += eight * block_threads) {
    load_eight_values(x + begin + i, v);
#pragma unroll
    for (int j = 0; j < eight; j++) sum = __fmaf_rn(v[j], v[j], sum);
  }
  sum = sum_of_warp(sum);
  if (threadIdx.x % warp_size == 0) warp_sums[threadIdx.x / warp_size] = sum;
  __syncthreads();
  float total = 0.0f;
#pragma unroll
  for (int w = 0; w < block_threads / warp_size; w++) total += warp_sums[w];
  const float scale = inverse_sqrt(total / float(cols) + eps);
  for (int i = eight * threadIdx.x; i < cols; i += eight * block_threads) {
    load_eight_values(x + begin + i, v);
#pragma unroll
    for (int j = 0; j < eight; j++) v[j] = v[j] * scale * weight[i + j];
    store_eight_values(y + begin + i, v);
  }
}

struct DraftConvolution {
  const Bfloat16Bits* base;     // [kernel, cols], of one side
  const Bfloat16Bits* dynamic;  // [rows, dynamic_stride], of one side from [0] on: [kernel, cols / group]
  int kernel, group, dynamic_stride;
};

// grid (ceil(cols / 256), rows): row r is the sum over d < kernel of (base + dynamic of row r) · x of row r −
// d, and `added` of row r, where given.
__global__ void __launch_bounds__(block_threads)
    draft_convolve(const Bfloat16Bits* x, const DraftConvolution conv, const Bfloat16Bits* added,
                   Bfloat16Bits* y, int cols) {
  wait_for_previous_grid();
  release_next_grid();
  const int row = blockIdx.y, col = blockIdx.x * block_threads + threadIdx.x, groups = cols / conv.group;
  if (col >= cols) return;
  const Bfloat16Bits* dynamic = conv.dynamic + int64_t(row) * conv.dynamic_stride + col / conv.group;
  float sum = 0.0f;
  for (int d = 0; d < conv.kernel && d <= row; d++) {
    const float weight =
        bfloat16_to_float(conv.base[d * cols + col]) + bfloat16_to_float(dynamic[d * groups]);
    sum = __fmaf_rn(weight, bfloat16_to_float(x[int64_t(row - d) * cols + col]), sum);
  }
  const int64_t at = int64_t(row) * cols + col;
  y[at] = to_bfloat16(added != nullptr ? bfloat16_to_float(added[at]) + sum : sum);
}

// grid (ceil(size / 256), rows): y = silu(gate) · up of rows [gate, up].
__global__ void __launch_bounds__(block_threads)
    draft_swiglu(const Bfloat16Bits* x, Bfloat16Bits* y, int size) {
  wait_for_previous_grid();
  release_next_grid();
  const int col = blockIdx.x * block_threads + threadIdx.x;
  if (col >= size) return;
  const Bfloat16Bits* row = x + int64_t(blockIdx.y) * 2 * size;
  y[int64_t(blockIdx.y) * size + col] =
      to_bfloat16(exact_swiglu(bfloat16_to_float(row[col]), bfloat16_to_float(row[size + col])));
}

struct DraftRope {
  const double* turns;  // [head_dim / 2], of a position, in whole turns
  float magnitude;      // of cosines and sines
};

// A head of `dim` values, normed and rotated by its position, from and to where it may be the same; by a
// warp.
__device__ __forceinline__ void place_head(const Bfloat16Bits* from, Bfloat16Bits* to, const float* weight,
                                           int dim, float eps, const DraftRope& rope, int position) {
  const int half = dim / 2;
  float sum = 0.0f;
  for (int i = threadIdx.x; i < dim; i += warp_size) {
    const float v = bfloat16_to_float(from[i]);
    sum = __fmaf_rn(v, v, sum);
  }
  const float scale = inverse_sqrt(sum_of_warp(sum) / float(dim) + eps);
  for (int i = threadIdx.x; i < half; i += warp_size) {
    double turns = double(position) * rope.turns[i];
    turns -= floor(turns);
    const float angle = float(turns) * 6.283185307179586f;
    const float cos = rope.magnitude * cosf(angle), sin = rope.magnitude * sinf(angle);
    const float low = bfloat16_to_float(from[i]) * scale * weight[i];
    const float high = bfloat16_to_float(from[half + i]) * scale * weight[half + i];
    to[i] = to_bfloat16(low * cos - high * sin);
    to[half + i] = to_bfloat16(high * cos + low * sin);
  }
}

struct DraftHeads {
  const float* query_weight;  // [dim], of norms
  const float* key_weight;
  int num_heads, num_kv_heads, dim;
  float eps;
  DraftRope rope;
};

// grid (rows, query and key heads), 32 threads: norms and rotates the heads of rows [queries, keys, values],
// the rows of the block, in place. length: of the context, the position of the first row.
__global__ void __launch_bounds__(warp_size)
    place_draft_rows(Bfloat16Bits* qkv, const __grid_constant__ DraftHeads heads, const int* length) {
  wait_for_previous_grid();
  release_next_grid();
  const int row = blockIdx.x, head = blockIdx.y, row_heads = heads.num_heads + 2 * heads.num_kv_heads;
  Bfloat16Bits* at = qkv + (int64_t(row) * row_heads + head) * heads.dim;
  const float* weight = head < heads.num_heads ? heads.query_weight : heads.key_weight;
  place_head(at, at, weight, heads.dim, heads.eps, heads.rope, *length + row);
}

struct CommittedDraftRows {
  const Bfloat16Bits* kv;  // [layers, rows, 2 · num_kv_heads · dim], keys and then values
  const float* weights;    // [layers, dim], of the norms of keys
  const int* first;  // the position of the first row, and how many rows there are; null: `start` and all
  const int* count;
  int start, rows;
};

// grid (rows, key heads, layers), 32 threads: rows with the norm and rotation of their keys into the contexts
// of all layers. Of more rows than a context holds, the last ones.
__global__ void __launch_bounds__(warp_size)
    place_committed_rows(const __grid_constant__ CommittedDraftRows in,
                         const __grid_constant__ DraftHeads heads, const DraftContext* contexts) {
  wait_for_previous_grid();
  release_next_grid();
  const int row = blockIdx.x, head = blockIdx.y, layer = blockIdx.z, dim = heads.dim;
  const DraftContext context = contexts[layer];
  const int count = in.count != nullptr ? *in.count : in.rows;
  if (row >= count || row + context.capacity < count) return;
  const int position = (in.first != nullptr ? *in.first : in.start) + row,
            place = position % context.capacity;
  const Bfloat16Bits* keys = in.kv + ((int64_t(layer) * in.rows + row) * 2 * heads.num_kv_heads + head) * dim;
  const Bfloat16Bits* values = keys + heads.num_kv_heads * dim;
  const int64_t to = (int64_t(place) * heads.num_kv_heads + head) * dim;
  place_head(keys, context.keys + to, in.weights + layer * dim, dim, heads.eps, heads.rope, position);
  for (int i = threadIdx.x; i < dim; i += warp_size) context.values[to + i] = values[i];
  if (head == 0 && threadIdx.x == 0) context.positions[place] = position;
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
    before = int(__reduce_min_sync(all_lanes, key)) % ranks;
    if (threadIdx.x == 0) chain[depth] = ids[depth * ranks + before];
  }
}
