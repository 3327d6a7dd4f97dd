// Many new rows of a few sequences, causal. A block of threads takes `num_rows` rows of the product of tokens
// and the query heads that share a key/value head, and walks their positions: 64 scores a row as a product of
// tiles with the head's dimensions outermost, then the numerators as one with the positions outermost. Every
// sum stays in one register from its first term to its last, so its order is the written one.
//
// Two blocks share a multiprocessor, and one computes while the other waits for keys or values.
#include "attention/tile.cuh"

namespace coldstream {

struct prefill_arguments {
  const float *query, *query_gate;
  const uint8_t *k_cache, *v_cache;
  const int32_t *positions, *slots;
  float* out;  // holds merged numerators until a row's last chunk
  cache_places places;
  int32_t query_gate_stride, num_tokens, num_heads, num_kv_heads, window;
};

constexpr int prefill_threads = 128;
// For the scores, groups of threads with rows of their own, and in them threads with positions of their own:
// the sixteen accumulators of a row's sum.
constexpr int row_lanes = 8;
constexpr int position_lanes = 16;
constexpr int positions_per_thread = block_positions / position_lanes;
static_assert(row_lanes * position_lanes == prefill_threads);

constexpr int power_of_two_up_to(int n) { return n < 2 ? 1 : 2 * power_of_two_up_to(n / 2); }
constexpr int smaller(int a, int b) { return a < b ? a : b; }

template <class cache, int head_dim, int num_rows>
struct prefiller {
  using tile = kv_tile<cache, head_dim>;
  static constexpr int rows_per_thread = num_rows / row_lanes;
  static constexpr int query_quads = (head_dim + 31) / 32 * 8;  // a row of queries, swizzled by eights
  // Numerators: a thread takes `mix_rows` neighbouring rows and eight neighbouring columns.
  static constexpr int column_lanes = head_dim / 8;
  static constexpr int mix_lanes = smaller(power_of_two_up_to(prefill_threads / column_lanes), num_rows / 4);
  static constexpr int mix_rows = num_rows / mix_lanes;
  static constexpr int weight_swizzle = smaller(num_rows / 4, 16) - 1;

  static constexpr int query_bytes = num_rows * query_quads * 16;
  static constexpr int weight_bytes = block_positions * num_rows * 4;
  static constexpr int shared_bytes = query_bytes + tile::bytes + weight_bytes + num_rows * 16;
  // Rows whose numerators fit into the memory of the block and the weights at once.
  static constexpr int merge_rows =
      smaller(power_of_two_up_to((tile::bytes + weight_bytes) / (4 * head_dim)), num_rows);
  static_assert(merge_rows >= mix_rows);

  const prefill_arguments& a;
  float4* queries;     // [num_rows, query_quads], quad c of row r at c ^ (r mod 8)
  uint8_t* block;      // keys, then values
  float* weights;      // [block_positions, num_rows], quad c of position p at c ^ (p mod 16)
  float* corrections;  // [3, num_rows]: of a block; at a chunk's end ours, theirs and 1 / denominator
  int* lasts;          // [num_rows], the row's own position, −1 for a row that is not to be written
  const int group, kv_head, first_pair, row_lane, position_lane, mix_lane, column;
  float maxima[rows_per_thread], denominators[rows_per_thread];
  float merged_maximum, merged_denominator;  // of row `position_lane` · 8 + row_lane
  float numerators[mix_rows][8];
  int least_last, greatest_last;  // of the rows of `numerators`

  __device__ __forceinline__ prefiller(const prefill_arguments& arguments, uint8_t* shared)
      : a(arguments),
        queries(reinterpret_cast<float4*>(shared)),
        block(shared + query_bytes),
        weights(reinterpret_cast<float*>(block + tile::bytes)),
        corrections(weights + block_positions * num_rows),
        lasts(reinterpret_cast<int*>(corrections + 3 * num_rows)),
        group(a.num_heads / a.num_kv_heads),
        kv_head(blockIdx.x % a.num_kv_heads),
        // Rows with the longest contexts first.
        first_pair(int(gridDim.x / a.num_kv_heads - 1 - blockIdx.x / a.num_kv_heads) * num_rows),
        row_lane(threadIdx.x / position_lanes),
        position_lane(threadIdx.x % position_lanes),
        mix_lane(threadIdx.x / column_lanes),
        column(threadIdx.x % column_lanes * 8) {}

  __device__ __forceinline__ int token_of(int row) const { return (first_pair + row) / group; }
  __device__ __forceinline__ int head_of(int row) const {
    return kv_head * group + (first_pair + row) % group;
  }

  // Queries and positions of the rows whose tokens are begin … end − 1.
  __device__ __forceinline__ void load_rows(int begin, int end) {
    constexpr int quads = head_dim / 4;
#pragma unroll 2
    for (int i = threadIdx.x; i < num_rows * quads; i += prefill_threads) {
      const int row = i / quads, quad = i % quads;
      const int64_t token = min(token_of(row), a.num_tokens - 1);
      queries[row * query_quads + (quad ^ (row & 7))] =
          reinterpret_cast<const float4*>(a.query + (token * a.num_heads + head_of(row)) * head_dim)[quad];
    }
    for (int row = threadIdx.x; row < num_rows; row += prefill_threads) {
      const int token = token_of(row);
      lasts[row] = token >= begin && token < end ? a.positions[token] : -1;
    }
    __syncthreads();
    least_last = 0x7fffffff, greatest_last = -1;
    for (int i = 0; i < mix_rows && mix_lane < mix_lanes; i++) {
      const int last = lasts[mix_lane * mix_rows + i];
      if (last >= 0) least_last = min(least_last, last), greatest_last = max(greatest_last, last);
    }
  }

  // Rows first … end − 1 (positions) of the cache into `block`.
  __device__ __forceinline__ void load_block(const uint8_t* rows, int begin, int first, int end,
                                             bool is_key) {
    const uint8_t* from = rows + begin * a.places.position_bytes;
    tile::template load<prefill_threads>(block, from, a.places.position_bytes, max(first - begin, 0),
                                         min(end - begin, block_positions), is_key);
    commit_copies();
    wait_for_copies<0>();
    __syncthreads();
  }

  // Scores of rows row_lane + 8 r and positions position_lane + 16 j: one chain over the head's dimensions.
  __device__ __forceinline__ void score(float (&scores)[rows_per_thread][positions_per_thread]) const {
#pragma unroll
    for (int r = 0; r < rows_per_thread; r++) {
#pragma unroll
      for (int j = 0; j < positions_per_thread; j++) scores[r][j] = 0.0f;
    }
#pragma unroll 1
    for (int chunk = 0; chunk < tile::code_chunks; chunk++) {
      uint4 keys[positions_per_thread];
      float scales[positions_per_thread];
#pragma unroll
      for (int j = 0; j < positions_per_thread; j++) {
        const int position = position_lane + position_lanes * j;
        keys[j] = tile::swizzled_chunk(block, position, chunk);
        scales[j] = tile::scale(block, position, chunk * cache::chunk_values);
      }
#pragma unroll
      for (int quad = 0; quad < cache::chunk_values / 4; quad++) {
        float4 k[positions_per_thread];
#pragma unroll
        for (int j = 0; j < positions_per_thread; j++) k[j] = cache::four_of(keys[j], quad, scales[j]);
        const int query_quad = chunk * (cache::chunk_values / 4) + quad;
        const float4* q_at = queries + row_lane * query_quads + (query_quad ^ row_lane);
#pragma unroll
        for (int r = 0; r < rows_per_thread; r++) {
          const float4 q = q_at[r * row_lanes * query_quads];
#pragma unroll
          for (int j = 0; j < positions_per_thread; j++) {
            float s = __fmaf_rn(q.x, k[j].x, scores[r][j]);
            s = __fmaf_rn(q.y, k[j].y, s);
            s = __fmaf_rn(q.z, k[j].z, s);
            scores[r][j] = __fmaf_rn(q.w, k[j].w, s);
          }
        }
      }
    }
  }

  // Scores of the block at `begin` into weights; the running maxima and denominators of the chunk go on. Rows
  // take turns in the first place of their arrays: a body of its own for each would not fit into the caches.
  __device__ __forceinline__ void weigh(float (&scores)[rows_per_thread][positions_per_thread], int begin,
                                        int chunk_begin) {
#pragma unroll 1
    for (int row = row_lane; row < num_rows; row += row_lanes) {
      const int last = lasts[row], first = first_position(last, a.window);
      float greatest = negative_infinity();
#pragma unroll
      for (int j = 0; j < positions_per_thread; j++) {
        const int position = begin + position_lane + position_lanes * j;
        if (position >= first && position <= last) greatest = fmaxf(greatest, scores[0][j]);
      }
#pragma unroll
      for (int distance = position_lanes / 2; distance > 0; distance /= 2) {
        greatest = fmaxf(greatest, __shfl_xor_sync(all_lanes, greatest, distance));
      }
      const bool started = max(first, chunk_begin) < begin;
      const bool used = begin <= last && begin + block_positions > first;
      const float maximum = started ? fmaxf(maxima[0], greatest) : greatest;
      const float correction = started && used ? exact_exp(maxima[0] - maximum) : 1.0f;
      float total = 0.0f;
#pragma unroll
      for (int j = 0; j < positions_per_thread; j++) {
        const int place = position_lane + position_lanes * j, position = begin + place;
        const float e = position >= first && position <= last ? exact_exp(scores[0][j] - maximum) : 0.0f;
        total += e;
        weights[place * num_rows + ((row / 4 ^ place & weight_swizzle) * 4 + row % 4)] = e;
      }
      total = sum_of_sixteen_lanes(total, 1);
      if (position_lane == 0) corrections[row] = correction;
      const float denominator = started ? __fmaf_rn(denominators[0], correction, total) : total;
      next_row(scores, used ? maximum : maxima[0], used ? denominator : denominators[0]);
    }
  }

  __device__ __forceinline__ void next_row(float (&scores)[rows_per_thread][positions_per_thread],
                                           float maximum, float denominator) {
#pragma unroll
    for (int r = 0; r + 1 < rows_per_thread; r++) {
      maxima[r] = maxima[r + 1];
      denominators[r] = denominators[r + 1];
#pragma unroll
      for (int j = 0; j < positions_per_thread; j++) scores[r][j] = scores[r + 1][j];
    }
    maxima[rows_per_thread - 1] = maximum;
    denominators[rows_per_thread - 1] = denominator;
  }

  __device__ __forceinline__ void load_weights(int place, float (&e)[mix_rows]) const {
    const float4* from = reinterpret_cast<const float4*>(weights + place * num_rows);
    const int high = (mix_lane * (mix_rows / 4)) ^ (place & weight_swizzle & ~3);
#pragma unroll
    for (int i = 0; i < mix_rows / 4; i++) {
      const int quad = high ^ (i ^ (place & weight_swizzle & 3));
      *reinterpret_cast<float4*>(e + 4 * i) = from[quad];
    }
  }

  // Values of place p of the block, for the rows that see it.
  __device__ __forceinline__ void mix_some(int place, int position) {
    float v[8], e[mix_rows];
    cache::load_eight(block + place * tile::row_bytes, column, tile::scale(block, place, column), v);
    load_weights(place, e);
#pragma unroll
    for (int r = 0; r < mix_rows; r++) {
      const int last = lasts[mix_lane * mix_rows + r];
      const bool seen = position <= last && position >= first_position(last, a.window);
#pragma unroll
      for (int c = 0; c < 8; c++) {
        const float sum = __fmaf_rn(e[r], v[c], numerators[r][c]);
        numerators[r][c] = seen ? sum : numerators[r][c];
      }
    }
  }

  // Four places whose positions all rows see; `place` is a multiple of four.
  __device__ __forceinline__ void mix_four(int place) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      float v[8], e[mix_rows];
      const float scale = tile::scale(block, place + i, column);
      cache::load_eight(block + (place + i) * tile::row_bytes, column, scale, v);
      load_weights(place + i, e);
#pragma unroll
      for (int r = 0; r < mix_rows; r++) {
#pragma unroll
        for (int c = 0; c < 8; c++) numerators[r][c] = __fmaf_rn(e[r], v[c], numerators[r][c]);
      }
    }
  }

  __device__ __forceinline__ void mix(int begin) {
    if (greatest_last < begin || mix_lane >= mix_lanes) return;
#pragma unroll
    for (int i = 0; i < mix_rows / 4; i++) {
      const float4 c = reinterpret_cast<const float4*>(corrections)[mix_lane * (mix_rows / 4) + i];
      const float factors[4] = {c.x, c.y, c.z, c.w};
#pragma unroll
      for (int r = 0; r < 4; r++) {
#pragma unroll
        for (int k = 0; k < 8; k++) numerators[4 * i + r][k] *= factors[r];
      }
    }
    // From `first` on some row sees a position, from `all_first` to `all_end` every row does.
    const int first = max(first_position(least_last, a.window) - begin, 0);
    const int all_first = max(first_position(greatest_last, a.window) - begin, 0);
    const int all_end = min(least_last + 1 - begin, block_positions);
    const int end = min(greatest_last + 1 - begin, block_positions);
    int place = first;
#pragma unroll 1
    while (place < end) {
      if (place % 4 == 0 && place >= all_first && place + 4 <= all_end) {
        mix_four(place);
        place += 4;
      } else {
        mix_some(place, begin + place);
        place++;
      }
    }
  }

  // The chunk at `chunk_begin` joins what its row has merged: factors of all rows into `corrections`.
  __device__ __forceinline__ void find_factors(int chunk_begin) {
    float maximum = 0.0f, denominator = 1.0f;
#pragma unroll
    for (int r = 0; r < rows_per_thread; r++) {
      if (r == position_lane) maximum = maxima[r], denominator = denominators[r];
    }
    if (position_lane < rows_per_thread) {
      const int row = position_lane * row_lanes + row_lane;
      merge_factors factors = {0.0f, 1.0f};
      if (first_position(lasts[row], a.window) < chunk_begin) {
        factors = factors_of(merged_maximum, maximum);
        merged_maximum = fmaxf(merged_maximum, maximum);
        merged_denominator = __fmaf_rn(denominator, factors.theirs, merged_denominator * factors.ours);
      } else {
        merged_maximum = maximum;
        merged_denominator = denominator;
      }
      corrections[row] = factors.ours;
      corrections[num_rows + row] = factors.theirs;
      corrections[2 * num_rows + row] = 1.0f / merged_denominator;
    }
    __syncthreads();
  }

  // Numerators of the chunk into `out`: merged, or after a row's last chunk its result. They go through
  // shared memory, so that a short loop does for all.
  __device__ __forceinline__ void merge(int chunk_begin) {
    constexpr int quads = head_dim / 4;
    float4* staged = reinterpret_cast<float4*>(block);
#pragma unroll 1
    for (int pass = 0; pass < num_rows / merge_rows; pass++) {
      if (mix_lane < mix_lanes && mix_lane * mix_rows / merge_rows == pass) {
#pragma unroll
        for (int r = 0; r < mix_rows; r++) {
          float4* to = staged + (mix_lane * mix_rows % merge_rows + r) * quads + column / 4;
          to[0] = make_float4(numerators[r][0], numerators[r][1], numerators[r][2], numerators[r][3]);
          to[1] = make_float4(numerators[r][4], numerators[r][5], numerators[r][6], numerators[r][7]);
        }
      }
      __syncthreads();
#pragma unroll 1
      for (int i = threadIdx.x; i < merge_rows * quads; i += prefill_threads) {
        merge_quad(pass * merge_rows + i / quads, i % quads * 4, staged[i], chunk_begin);
      }
      __syncthreads();
    }
  }

  __device__ __forceinline__ void merge_quad(int row, int from, float4 x, int chunk_begin) const {
    const int last = lasts[row], first = first_position(last, a.window);
    if (last < chunk_begin || first >= chunk_begin + chunk_positions) return;
    const int64_t token = token_of(row), head = head_of(row);
    float4* out = reinterpret_cast<float4*>(a.out + (token * a.num_heads + head) * head_dim + from);
    if (first < chunk_begin) {
      const float ours = corrections[row], theirs = corrections[num_rows + row];
      const float4 before = *out;
      x.x = __fmaf_rn(x.x, theirs, before.x * ours);
      x.y = __fmaf_rn(x.y, theirs, before.y * ours);
      x.z = __fmaf_rn(x.z, theirs, before.z * ours);
      x.w = __fmaf_rn(x.w, theirs, before.w * ours);
    }
    if (last < chunk_begin + chunk_positions) {
      const float inverse = corrections[2 * num_rows + row];
      const float* gate = a.query_gate + token * a.query_gate_stride + (2 * head + 1) * head_dim + from;
      x.x = x.x * inverse * exact_sigmoid(gate[0]);
      x.y = x.y * inverse * exact_sigmoid(gate[1]);
      x.z = x.z * inverse * exact_sigmoid(gate[2]);
      x.w = x.w * inverse * exact_sigmoid(gate[3]);
    }
    *out = x;
  }

  // The rows of tokens begin … end − 1, all of one slot and in the order of their positions.
  __device__ __forceinline__ void attend(int begin, int end) {
    load_rows(begin, end);
    const int64_t offset = a.slots[begin] * a.places.slot_bytes + kv_head * int64_t{tile::row_chunks * 16};
    const int first = first_position(a.positions[begin], a.window), last = a.positions[end - 1];
    for (int chunk = first / chunk_positions * chunk_positions; chunk <= last; chunk += chunk_positions) {
#pragma unroll
      for (int r = 0; r < mix_rows; r++) {
#pragma unroll
        for (int c = 0; c < 8; c++) numerators[r][c] = 0.0f;
      }
      const int chunk_end = min(chunk + chunk_positions, last + 1);
      const int first_block = max(chunk, first / block_positions * block_positions);
#pragma unroll 1
      for (int at = first_block; at < chunk_end; at += block_positions) {
        load_block(a.k_cache + offset, at, first, last + 1, true);
        float scores[rows_per_thread][positions_per_thread];
        score(scores);
        weigh(scores, at, chunk);
        __syncthreads();
        load_block(a.v_cache + offset, at, first, last + 1, false);
        mix(at);
        __syncthreads();
      }
      find_factors(chunk);
      merge(chunk);
    }
  }

  // A tile may hold the end of one sequence and the beginning of another.
  __device__ __forceinline__ void run() {
    const int end = min(token_of(num_rows - 1) + 1, a.num_tokens);
    for (int token = token_of(0); token < end;) {
      int next = token + 1;
      while (next < end && a.slots[next] == a.slots[token]) next++;
      if (a.slots[token] >= 0) attend(token, next);
      __syncthreads();
      token = next;
    }
  }
};

template <class cache, int head_dim, int num_rows>
__global__ void __launch_bounds__(prefill_threads, 2) attention_prefill(const prefill_arguments a) {
  extern __shared__ __align__(128) uint8_t shared[];
  prefiller<cache, head_dim, num_rows>(a, shared).run();
}

}  // namespace coldstream
