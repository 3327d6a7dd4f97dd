// The indexer of attention: kernels/indexer/reference.py defines it. Three launches: new rows, whose queries
// are prepared and whose raw keys and keys of blocks go to the cache; scores of complete blocks; the best.
#include "attention/heads.cuh"
#include "attention/integers_tile.cuh"

extern __shared__ float4 dynamic_shared[];

namespace coldstream {

constexpr int most_head_values = 128, most_block_positions = 64;

struct IndexArguments {
  const float *query, *key;            // [T, H · D] and [T, D]
  const float *angles, *block_angles;  // [T, rope_half, 2]
  const float *q_norm, *k_norm;        // [D]
  float* queries;                      // [T, H, D], normed and rotated
  uint16_t* cache;                     // float16 [blocks, 256, D]
  float* scores;                       // [rows of a part, max_blocks]
  uint32_t* words;                     // [T, num_words]
  BatchRows rows;
  int64_t block_stride;                               // numbers between blocks of 256 positions
  int32_t query_stride, key_stride, position_stride;  // numbers between rows, and between positions
  int32_t num_heads, head_dim, rope_half;
  int32_t num_chosen, block_shift;  // blocks that a row sees at most, of 1 << block_shift positions
  int32_t max_blocks, num_words;
  float eps;

  // Complete blocks at a row.
  __device__ int num_complete(int row) const { return (rows.positions[row] + 1) >> block_shift; }
  __device__ bool has_choice(int row) const { return num_complete(row) > num_chosen; }

  // The cache's numbers of a place of a sequence.
  __device__ uint16_t* at(int segment, int index) const {
    const int block = rows.tables[int64_t{segment} * rows.table_stride + index / chunk_positions];
    return cache + block * block_stride + index % chunk_positions * position_stride;
  }

  // The row that a row of the batch follows; −1 if that is committed.
  __device__ int row_before(int row) const {
    if (rows.kept[row] >= 0) return rows.parents[row];
    return row > 0 && rows.segments[row - 1] == rows.segments[row] ? row - 1 : -1;
  }
};

constexpr int index_prepare_threads = 128, index_units = index_prepare_threads / lanes_per_head;
constexpr int lane_numbers = most_head_values / lanes_per_head;

// Numbers of a lane: lane, lane + 16, ….
using LaneNumbers = float[lane_numbers];

// The average of the raw keys of the block that ends with the row. path: the rows of the batch that it
// follows, itself first; −1 where they end.
__device__ __forceinline__ void average_block(const IndexArguments& a, int row, const int32_t* path, int lane,
                                              LaneNumbers& values) {
  const int size = 1 << a.block_shift, position = a.rows.positions[row], segment = a.rows.segments[row];
#pragma unroll 1
  for (int back = size - 1; back >= 0; back--) {
    const int of_batch = path[back];
    const float* const raw = of_batch >= 0 ? a.key + int64_t{of_batch} * a.key_stride : nullptr;
    const uint16_t* const kept = of_batch >= 0 ? nullptr : a.at(segment, position - back);
#pragma unroll
    for (int step = 0; step < lane_numbers; step++) {
      const int c = step * lanes_per_head + lane;
      if (c >= a.head_dim) continue;
      const float x = half_to_float(raw ? float_to_half(raw[c]) : kept[c]);
      values[step] = back == size - 1 ? x : values[step] + x;
    }
  }
#pragma unroll
  for (float& value : values) value *= 1.0f / float(size);
}

// grid (T, heads and one more / 8): half a warp takes a head of the queries, or the key.
__global__ void __launch_bounds__(index_prepare_threads) index_prepare(const IndexArguments a) {
  __shared__ float heads[index_units][most_head_values];
  __shared__ int32_t path[most_block_positions];
  wait_for_previous_grid();
  release_next_grid();
  const int lane = threadIdx.x % lanes_per_head, row = blockIdx.x;
  float* const head = heads[threadIdx.x / lanes_per_head];
  const int unit = blockIdx.y * index_units + threadIdx.x / lanes_per_head;
  const bool is_key = unit == a.num_heads, is_query = unit < a.num_heads;
  const int position = a.rows.positions[row], size = 1 << a.block_shift;
  const bool ends_block = is_key && position >= 0 && (position + 1) % size == 0;
  if (ends_block && lane == 0) {
    for (int back = 0, at = row; back < size; back++) {
      path[back] = at;
      if (at >= 0) at = a.row_before(at);
    }
  }
  __syncwarp();
  const float* const x = is_query ? a.query + int64_t{row} * a.query_stride + unit * a.head_dim
                                  : a.key + int64_t{row} * a.key_stride;
  LaneNumbers values;
#pragma unroll
  for (int step = 0; step < lane_numbers; step++) {
    const int c = step * lanes_per_head + lane;
    values[step] = c < a.head_dim && (is_query || is_key) ? x[c] : 0.0f;
  }
  if (ends_block) average_block(a, row, path, lane, values);
  float squares = 0.0f;
#pragma unroll
  for (const float value : values) squares = __fmaf_rn(value, value, squares);
  const float mean = sum_of_sixteen_lanes(squares, 1) / float(a.head_dim);
  const float scale = inverse_sqrt(mean + a.eps);
  const float* const weight = is_key ? a.k_norm : a.q_norm;
#pragma unroll
  for (int step = 0; step < lane_numbers; step++) {
    const int c = step * lanes_per_head + lane;
    if (c < a.head_dim) head[c] = values[step] * scale * weight[c];
  }
  __syncwarp();
  const float* const angles = (is_key ? a.block_angles : a.angles) + int64_t{row} * a.rope_half * 2;
  uint16_t* const to = is_key && position >= 0 ? a.at(a.rows.segments[row], a.rows.indices[row]) : nullptr;
#pragma unroll
  for (int step = 0; step < lane_numbers; step++) {
    const int c = step * lanes_per_head + lane;
    if (c >= a.head_dim) continue;
    const float turned = rotated(head, angles, a.rope_half, c);
    if (is_query) a.queries[(int64_t{row} * a.num_heads + unit) * a.head_dim + c] = turned;
    if (to) to[c] = float_to_half(ends_block ? turned : values[step]);
  }
}

constexpr int score_threads = 128, score_keys = 64;
constexpr int channel_stride = score_keys + 4;  // of a channel in shared memory
constexpr int slice_pairs = 32, tile_of = 4;    // pairs of a row and a head at once; of a thread, as of keys

// Scores of 64 blocks of positions for some adjacent rows. A slice of pairs is multiplied at a time: a thread
// has four pairs and four blocks, and a chain of fma for each.
struct IndexScores {
  const IndexArguments& a;
  const int first_row;  // of the part
  float* const keys;    // [D, channel_stride]
  float* const pairs;   // [slice_pairs, D + 4], and then products [slice_pairs, 64]
  float* const totals;  // [rows, 64]

  __device__ int pair_stride() const { return a.head_dim + 4; }
  __device__ static int key_group() { return threadIdx.x % (score_keys / tile_of); }
  __device__ static int pair_group() { return threadIdx.x / (score_keys / tile_of); }

  // Where the key of a block lies that is complete at the row.
  __device__ const uint16_t* key_at(const RowRun& run, int row, int block) const {
    const int position = ((block + 1) << a.block_shift) - 1;
    int index = position;
    if (run.is_tree && position >= run.committed) {
      while (a.rows.positions[row] > position) row = a.rows.parents[row];
      index = a.rows.indices[row];
    }
    return a.at(run.segment, index);
  }

  // As floats, by channels. row: whose keys those of draft trees are.
  __device__ void load_keys(const RowRun& run, int row, int first, int count) const {
    constexpr int at_once = 8;
    const int pieces = a.head_dim / at_once;
    for (int i = threadIdx.x; i < score_keys * pieces; i += score_threads) {
      const int key = i % score_keys, c = i / score_keys * at_once;
      uint4 words = make_uint4(0, 0, 0, 0);
      if (key < count) words = *reinterpret_cast<const uint4*>(key_at(run, row, first + key) + c);
      const uint32_t of[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
      for (int k = 0; k < at_once; k++)
        keys[(c + k) * channel_stride + key] = half_to_float(uint16_t(of[k / 2] >> 16 * (k % 2)));
    }
  }

  // Pairs from number `begin` of rows that begin with `row`.
  __device__ void load_pairs(int row, int begin, int count) const {
    const int pieces = a.head_dim / 4;
    const float* const from = a.queries + (int64_t{row} * a.num_heads + begin) * a.head_dim;
    for (int i = threadIdx.x; i < count * pieces; i += score_threads) {
      const int pair = i / pieces, c = i % pieces * 4;
      *reinterpret_cast<float4*>(pairs + pair * pair_stride() + c) =
          *reinterpret_cast<const float4*>(from + pair * a.head_dim + c);
    }
  }

  __device__ void multiply(float (&products)[tile_of][tile_of]) const {
    const float* const own = pairs + pair_group() * tile_of * pair_stride();
    for (int c = 0; c < a.head_dim; c += 4) {
      float query[tile_of][4];
#pragma unroll
      for (int p = 0; p < tile_of; p++) {
        const float4 four = *reinterpret_cast<const float4*>(own + p * pair_stride() + c);
        query[p][0] = four.x, query[p][1] = four.y, query[p][2] = four.z, query[p][3] = four.w;
      }
#pragma unroll
      for (int k = 0; k < 4; k++) {
        const float4 key =
            *reinterpret_cast<const float4*>(keys + (c + k) * channel_stride + key_group() * tile_of);
#pragma unroll
        for (int p = 0; p < tile_of; p++) {
          products[p][0] = __fmaf_rn(query[p][k], key.x, products[p][0]);
          products[p][1] = __fmaf_rn(query[p][k], key.y, products[p][1]);
          products[p][2] = __fmaf_rn(query[p][k], key.z, products[p][2]);
          products[p][3] = __fmaf_rn(query[p][k], key.w, products[p][3]);
        }
      }
    }
  }

  // Adds the products of a slice to the scores of their rows, heads in ascending order. A product that is no
  // number counts as 0.
  __device__ void add(int begin, int count) const {
    const int key = threadIdx.x % score_keys, half = threadIdx.x / score_keys;
    for (int pair = 0; pair < count; pair++) {
      const int row = (begin + pair) / a.num_heads;
      if (row % (score_threads / score_keys) != half) continue;
      totals[row * score_keys + key] += fmaxf(pairs[pair * score_keys + key], 0.0f);
    }
  }

  // Rows that see the same keys of blocks first … first + count − 1.
  __device__ void score(const RowRun& run, int row, int num_rows, int first, int count) const {
    __syncthreads();
    load_keys(run, row, first, count);
    for (int i = threadIdx.x; i < num_rows * score_keys; i += score_threads) totals[i] = 0.0f;
    const int num_pairs = num_rows * a.num_heads;
    for (int begin = 0; begin < num_pairs; begin += slice_pairs) {
      const int pairs_of_slice = min(slice_pairs, num_pairs - begin);
      load_pairs(row, begin, pairs_of_slice);
      __syncthreads();
      float products[tile_of][tile_of] = {};
      const bool has_pairs = pair_group() * tile_of < pairs_of_slice;
      if (has_pairs) multiply(products);
      __syncthreads();
#pragma unroll
      for (int p = 0; p < tile_of; p++) {
        if (has_pairs)
          *reinterpret_cast<float4*>(pairs + (pair_group() * tile_of + p) * score_keys +
                                     key_group() * tile_of) =
              make_float4(products[p][0], products[p][1], products[p][2], products[p][3]);
      }
      __syncthreads();
      add(begin, pairs_of_slice);
      __syncthreads();
    }
    for (int i = threadIdx.x; i < num_rows * score_keys; i += score_threads) {
      const int of_row = row + i / score_keys, block = first + i % score_keys;
      if (block < a.num_complete(of_row))
        a.scores[int64_t{of_row - first_row} * a.max_blocks + block] = totals[i];
    }
  }

  // Rows of one sequence, if one of them has a choice.
  __device__ void score_run(const RowRun& run, int first) const {
    int most = 0;
    for (int row = run.begin; row < run.end; row++) most = max(most, a.num_complete(row));
    if (most <= a.num_chosen || most <= first) return;
    const bool is_shared = !run.is_tree || (first + score_keys) << a.block_shift <= run.committed;
    const int at_once = is_shared ? run.end - run.begin : 1;
    for (int row = run.begin; row < run.end; row += at_once) {
      const int complete = is_shared ? most : a.num_complete(row);
      if (complete > first) score(run, row, at_once, first, min(score_keys, complete - first));
    }
  }
};

// grid (blocks / 64, rows of the part / tile_rows).
__global__ void __launch_bounds__(score_threads)
    index_score(const IndexArguments a, int first_row, int num_rows, int tile_rows) {
  wait_for_previous_grid();
  release_next_grid();
  float* const keys = reinterpret_cast<float*>(dynamic_shared);
  float* const totals = keys + a.head_dim * channel_stride;
  const IndexScores scores = {a, first_row, keys, totals + tile_rows * score_keys, totals};
  const int begin = first_row + blockIdx.y * tile_rows, end = min(begin + tile_rows, first_row + num_rows);
  for (int row = begin; row < end;) {
    const RowRun run(a.rows, row, end);
    if (a.rows.positions[row] >= 0) scores.score_run(run, blockIdx.x * score_keys);
    row = run.end;
  }
}

constexpr int select_threads = 512, select_warps = select_threads / warp_size, digits = 256;

// The num_chosen-th best of a row's scores, found digit by digit: its bits, which are in the order of the
// scores since none is negative, and how many blocks with these bits are chosen.
struct Threshold {
  uint32_t bits;
  int count;
};

// A digit of the scores whose higher digits are `prefix`: how often each value occurs.
__device__ __forceinline__ void count_digits(const float* scores, int complete, int shift, uint32_t prefix,
                                             uint32_t* counts) {
  const int lane = threadIdx.x % warp_size;
  for (int i = threadIdx.x; i < digits; i += select_threads) counts[i] = 0;
  __syncthreads();
  for (int begin = threadIdx.x - lane; begin < complete; begin += select_threads) {
    const int block = begin + lane;
    const uint32_t bits = block < complete ? __float_as_uint(scores[block]) : 0;
    const bool counts_it = block < complete && (shift == 24 || bits >> (shift + 8) == prefix);
    const uint32_t digit = bits >> shift & (digits - 1);
    if (shift < 24) {
      if (counts_it) atomicAdd(counts + digit, 1u);
      continue;
    }
    // The first digit, most of an exponent, is nearly the same everywhere: lanes that share it add together.
    for (uint32_t left = __ballot_sync(all_lanes, counts_it); left;) {
      const int leader = __ffs(int(left)) - 1;
      const uint32_t shared = __shfl_sync(all_lanes, digit, leader);
      const uint32_t same = __ballot_sync(all_lanes, counts_it && digit == shared);
      if (lane == leader) atomicAdd(counts + shared, uint32_t(__popc(same)));
      left &= ~same;
    }
  }
  __syncthreads();
}

// By the first warp: the digit in which the wanted rank lies, greatest first, and the rank within it.
__device__ __forceinline__ void find_digit(const uint32_t* counts, int* found) {
  constexpr int own_digits = digits / warp_size;
  const int lane = threadIdx.x % warp_size, first = digits - 1 - lane * own_digits;
  const int wanted = found[1];
  int own = 0;
  for (int i = 0; i < own_digits; i++) own += int(counts[first - i]);
  int up_to = own;
#pragma unroll
  for (int distance = 1; distance < warp_size; distance *= 2) {
    const int other = __shfl_up_sync(all_lanes, up_to, distance);
    if (lane >= distance) up_to += other;
  }
  const uint32_t reach = __ballot_sync(all_lanes, up_to >= wanted);
  if (lane != __ffs(int(reach)) - 1) return;
  int rank = wanted - (up_to - own), digit = first;
  while (rank > int(counts[digit])) rank -= int(counts[digit--]);
  found[0] = found[0] << 8 | digit;
  found[1] = rank;
}

// grid (rows of the part): the words of a row.
__global__ void __launch_bounds__(select_threads) index_select(const IndexArguments a, int first_row) {
  __shared__ uint32_t counts[digits];
  __shared__ int found[2];  // bits of the threshold so far, and the rank that is wanted
  __shared__ int ties[select_warps];
  wait_for_previous_grid();
  release_next_grid();
  const int row = first_row + blockIdx.x, position = a.rows.positions[row];
  const int complete = a.num_complete(row), warp = threadIdx.x / warp_size, lane = threadIdx.x % warp_size;
  const float* const scores = a.scores + int64_t{blockIdx.x} * a.max_blocks;
  uint32_t* const words = a.words + int64_t{row} * a.num_words;
  // The positions behind the last complete block.
  const int own = position >= 0 && (position + 1) % (1 << a.block_shift) ? complete : -1;
  const bool has_choice = complete > a.num_chosen;
  if (has_choice) {
    if (threadIdx.x == 0) found[0] = 0, found[1] = a.num_chosen;
    __syncthreads();
    for (int shift = 24; shift >= 0; shift -= 8) {
      count_digits(scores, complete, shift, uint32_t(found[0]), counts);
      if (warp == 0) find_digit(counts, found);
      __syncthreads();
    }
  }
  const uint32_t threshold = has_choice ? uint32_t(found[0]) : 0;
  const int share = (a.num_words + select_warps - 1) / select_warps, first = warp * share,
            last = min(first + share, a.num_words);
  const auto bits_of = [&](int word) {
    const int block = word * warp_size + lane;
    return block < complete ? __float_as_uint(scores[block]) : 0;
  };
  const auto is_complete = [&](int word) { return word * warp_size + lane < complete; };
  if (has_choice) {
    int own_ties = 0;
    for (int word = first; word < last; word++)
      own_ties += __popc(__ballot_sync(all_lanes, is_complete(word) && bits_of(word) == threshold));
    if (lane == 0) ties[warp] = own_ties;
  }
  __syncthreads();
  int left = has_choice ? found[1] : 0;  // of blocks at the threshold, the first
  for (int before = 0; has_choice && before < warp; before++) left -= ties[before];
  for (int word = first; word < last; word++) {
    uint32_t chosen = __ballot_sync(all_lanes, is_complete(word));
    if (has_choice) {
      const uint32_t bits = bits_of(word);
      const bool ties_here = is_complete(word) && bits == threshold;
      const uint32_t equal = __ballot_sync(all_lanes, ties_here);
      const bool takes = __popc(equal & ((1u << lane) - 1)) < left;
      chosen = __ballot_sync(all_lanes, is_complete(word) && (bits > threshold || (ties_here && takes)));
      left -= __popc(equal);
    }
    if (own >= 0 && own / warp_size == word) chosen |= 1u << own % warp_size;
    if (lane == 0) words[word] = chosen;
  }
}

}  // namespace coldstream
