// Attention over caches of an integer type, for rows of any sequences, draft trees among them: docs/arithmetic.md,
// Attention over integers.
//
// The work is cut into items: some rows next to each other, a key/value head, and a chunk of 256 positions. A warp
// takes 16 pairs of a row and a query head through the tensor cores, and all warps read the same keys and values.
// Chunks leave maximum, denominator and numerators in a workspace for merge.cu.
#include "attention/integers_pairs.cuh"
#include "attention/integers_tile.cuh"
#include "cuda/tensor_cores.cuh"

extern __shared__ float4 dynamic_shared[];

namespace coldstream {

struct integers_arguments {
  const int8_t* query;        // [T, H, 2, D], high planes and low planes
  const float* query_scales;  // [T, H]
  const uint8_t *k_cache, *v_cache;
  float* values;  // [T, H, max_chunks, D], numerators
  float2* stats;  // [T, H, max_chunks], maximum and denominator
  batch_rows rows;
  block_places places;
  int32_t num_heads, num_kv_heads, max_chunks, window;
};

template <int planes, int head_dim, int warps, bool has_trees>
struct integer_attention {
  static constexpr int threads = warp_size * warps;
  static constexpr int row_bytes = planes * head_dim + scale_bytes_of_row;
  static constexpr int query_bytes = 2 * head_dim + 16;  // a pair's, with a gap so that eight meet all banks
  static constexpr int tile_bytes = block_positions * row_bytes;
  static constexpr int most_tiles = has_trees ? 2 : 1;  // of indices in which a tile of positions has keys
  static constexpr int columns = block_positions / 8, steps = head_dim / 32;
  static constexpr int shared_bytes =
      2 * tile_bytes + warps * pairs * (query_bytes + block_positions * 4) + max_tree_rows * 4;
  static_assert(head_dim % 32 == 0 && row_bytes % 16 == 0);

  const integers_arguments& a;
  uint8_t *const tiles, *const queries;  // two tiles; [warps · pairs, query_bytes]
  float* const by_position;              // [warps · pairs, 64], weights of a draft tree's rows
  int32_t* const drafts;                 // positions of the rows of a tree
  const int group = a.num_heads / a.num_kv_heads, tile_rows = warps * pairs / group;
  const int warp = threadIdx.x / warp_size, lane = threadIdx.x % warp_size, g = lane / 4, t = lane % 4;
  int first_row, last_row, kv_head, chunk;  // of the item; its rows end before last_row

  // Of the lane's two pairs.
  for_both<int> row, head;
  for_both<row_view> view;
  for_both<float> query_scale, maximum, denominator;
  for_both<bool> has_begun;
  float numerators[head_dim / 8][4];

  __device__ integer_attention(const integers_arguments& arguments, uint8_t* shared)
      : a(arguments),
        tiles(shared),
        queries(shared + 2 * tile_bytes),
        by_position(reinterpret_cast<float*>(queries + warps * pairs * query_bytes)),
        drafts(reinterpret_cast<int32_t*>(by_position + warps * pairs * block_positions)) {}

  // Items are counted by tiles of rows, each with the chunks from its first to its last.
  __device__ bool find_item(int index) {
    for (first_row = 0; first_row < a.rows.num_rows; first_row += tile_rows) {
      last_row = min(first_row + tile_rows, a.rows.num_rows);
      int begin = 0x7fffffff, end = 0;
      for (int i = first_row; i < last_row; i++) {
        const int position = a.rows.positions[i];
        begin = min(begin, first_position(position, a.window) / chunk_positions);
        end = max(end, position / chunk_positions + 1);
      }
      const int count = (end - begin) * a.num_kv_heads;
      if (index < count) {
        kv_head = index % a.num_kv_heads;
        chunk = begin + index / a.num_kv_heads;
        return true;
      }
      index -= count;
    }
    return false;
  }

  // Pairs beyond the item's repeat the last one, and are not written.
  __device__ int64_t pair_at(int pair) const {
    const int found = min(pair, (last_row - first_row) * group - 1);
    return int64_t{first_row + found / group} * a.num_heads + kv_head * group + found % group;
  }

  __device__ void load_queries() {
    constexpr int pieces = 2 * head_dim / 16;
    for (int i = threadIdx.x; i < warps * pairs * pieces; i += threads) {
      const int pair = i / pieces, piece = i % pieces;
      copy_async_16(queries + pair * query_bytes + piece * 16,
                    a.query + pair_at(pair) * 2 * head_dim + piece * 16);
    }
    commit_copies();
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int64_t pair = pair_at(warp * pairs + 8 * i + g);
      row[i] = int(pair / a.num_heads);
      head[i] = int(pair % a.num_heads);
      query_scale[i] = a.query_scales[pair] * (1.0f / low_unit);
    }
  }

  // Scores of the 64 keys in the first tile; a pair's keys 8n + 2t and the next one are a lane's.
  __device__ void find_scores(float (&scores)[columns][4]) const {
    int high[columns][4] = {}, mixed[columns][4] = {};
    const uint32_t own = shared_address(queries) + (warp * pairs + lane % 16) * query_bytes + lane / 16 * 16;
    const uint8_t* keys = tiles + g * row_bytes + 4 * t;
#pragma unroll
    for (int step = 0; step < steps; step++) {
      uint32_t query_high[4], query_low[4];
      load_matrices(query_high, own + 32 * step);
      load_matrices(query_low, own + head_dim + 32 * step);
#pragma unroll
      for (int n = 0; n < columns; n++) {
        const uint32_t* words = reinterpret_cast<const uint32_t*>(keys + 8 * n * row_bytes + 32 * step);
        add_product(high[n], query_high, words[0], words[4]);
        add_product(mixed[n], query_low, words[0], words[4]);
        if (planes == 2)
          add_product(mixed[n], query_high, words[head_dim / 4], words[head_dim / 4 + 4]);
      }
    }
#pragma unroll
    for (int n = 0; n < columns; n++) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float scale = scale_of_row<row_bytes>(tiles + (8 * n + 2 * t + i % 2) * row_bytes);
        scores[n][i] = float(low_unit * high[n][i] + mixed[n][i]) * query_scale[i / 2] * scale;
      }
    }
  }

  // What pairs weigh the keys of a tile of positions by, in place of their scores; the lane's factors that follow.
  __device__ void weigh(const row_run& run, int tile, int num_tiles, float (&scores)[most_tiles][columns][4],
                        uint32_t (&visible)[most_tiles], for_both<float>& correction) {
    for_both<float> best = {negative_infinity(), negative_infinity()};
#pragma unroll
    for (int s = 0; s < most_tiles; s++) {
      visible[s] = 0;
      if (s >= num_tiles) continue;
#pragma unroll
      for (int n = 0; n < columns; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
          if (view[i / 2].position_in(tile, index_of(tile + s, n, i), run, drafts) < 0) continue;
          visible[s] |= 1u << (4 * n + i);
          best[i / 2] = fmaxf(best[i / 2], scores[s][n][i]);
        }
      }
    }
    for_both<float> after;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      best[i] = greatest_of_pair(best[i]);
      after[i] = has_begun[i] ? fmaxf(maximum[i], best[i]) : best[i];
      correction[i] = has_begun[i] ? exact_exp(maximum[i] - after[i]) : 1.0f;
    }
#pragma unroll
    for (int s = 0; s < most_tiles; s++) {
#pragma unroll
      for (int n = 0; n < columns; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const bool is_seen = visible[s] >> (4 * n + i) & 1;
          scores[s][n][i] = is_seen ? exact_exp(scores[s][n][i] - after[i / 2]) : 0.0f;
        }
      }
    }
    for_both<float> total;
    if (has_trees && run.is_tree) order_by_position(run, tile, scores, visible, total);
    else sum_in_order(scores[0], total);
#pragma unroll
    for (int i = 0; i < 2; i++) {
      if (!view[i].meets(tile)) continue;
      denominator[i] = has_begun[i] ? __fmaf_rn(denominator[i], correction[i], total[i]) : total[i];
      maximum[i] = after[i];
      has_begun[i] = true;
    }
  }

  __device__ int index_of(int tile, int n, int i) const {
    return tile * block_positions + 8 * n + 2 * t + i % 2;
  }

  // Sums of a pair's weights where keys do not lie in the order of their positions.
  __device__ void order_by_position(const row_run& run, int tile, const float (&weights)[most_tiles][columns][4],
                                    const uint32_t (&visible)[most_tiles], for_both<float>& total) const {
    float ordered[columns][4];
    float* const own = by_position + warp * pairs * block_positions;
    for (int i = lane; i < pairs * block_positions; i += warp_size) own[i] = 0.0f;
    __syncwarp();
#pragma unroll
    for (int s = 0; s < most_tiles; s++) {
#pragma unroll
      for (int n = 0; n < columns; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
          if (!(visible[s] >> (4 * n + i) & 1)) continue;
          const int position = view[i / 2].position_in(tile, index_of(tile + s, n, i), run, drafts);
          own[(8 * (i / 2) + g) * block_positions + position % block_positions] = weights[s][n][i];
        }
      }
    }
    __syncwarp();
#pragma unroll
    for (int n = 0; n < columns; n++) {
#pragma unroll
      for (int i = 0; i < 4; i++)
        ordered[n][i] = own[(8 * (i / 2) + g) * block_positions + 8 * n + 2 * t + i % 2];
    }
    __syncwarp();
    sum_in_order(ordered, total);
  }

  // Weights times the values' scales as two planes of codes, as the tensor cores want them: a lane's keys 32s + 2t,
  // 32s + 2t + 1, 32s + 8 + 2t and 32s + 9 + 2t are bytes of one word, and those 16 further of another.
  struct weight_codes {
    uint32_t high[most_tiles][2][4], low[most_tiles][2][4];
    for_both<float> scale;
  };

  __device__ void round_weights(const float (&weights)[most_tiles][columns][4],
                                const uint32_t (&visible)[most_tiles], weight_codes& out) const {
    for_both<uint32_t> greatest = {};
    auto scaled = [&](int s, int n, int i) {
      const uint8_t* row = tiles + s * tile_bytes + (8 * n + 2 * t + i % 2) * row_bytes;
      return visible[s] >> (4 * n + i) & 1 ? weights[s][n][i] * scale_of_row<row_bytes>(row) : 0.0f;
    };
#pragma unroll
    for (int s = 0; s < most_tiles; s++) {
#pragma unroll
      for (int n = 0; n < columns; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) greatest[i / 2] = max(greatest[i / 2], magnitude(scaled(s, n, i)));
      }
    }
    for_both<plane_scale> by;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      by[i] = scale_of_planes<2>(greatest_of_pair(greatest[i]));
      out.scale[i] = by[i].scale * (1.0f / low_unit);
    }
#pragma unroll
    for (int s = 0; s < most_tiles; s++) {
#pragma unroll
      for (int word = 0; word < 8; word++) {
        // Half `word / 4` of the tile; words 0 and 2 are of pair g, 1 and 3 of pair g + 8.
        const int pair = word % 2, n = 4 * (word / 4) + word % 4 / 2 * 2;
        uint32_t high = 0, low = 0;
#pragma unroll
        for (int byte = 0; byte < 4; byte++) {
          const int code = code_of(scaled(s, n + byte / 2, 2 * pair + byte % 2), by[pair]);
          high |= uint32_t(high_plane(code) & 255) << 8 * byte;
          low |= uint32_t(low_plane(code) & 255) << 8 * byte;
        }
        out.high[s][word / 4][word % 4] = high;
        out.low[s][word / 4][word % 4] = low;
      }
    }
  }

  // The lane's numerators of columns 32m + 8t + j and 32m + 8t + 4 + j are at [4m + j].
  __device__ void add_values(int tile, int num_tiles, const weight_codes& weights,
                             const for_both<float>& correction) {
#pragma unroll
    for (int m = 0; m < steps; m++) {
      int high[4][4] = {}, mixed[4][4] = {};
#pragma unroll
      for (int s = 0; s < most_tiles; s++) {
        if (s >= num_tiles) continue;
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const uint8_t* from = tiles + s * tile_bytes + 32 * m + 4 * g;
          uint32_t first[4], second[4];
          load_values<row_bytes>(from + 32 * half * row_bytes, t, first);
          load_values<row_bytes>(from + (32 * half + 16) * row_bytes, t, second);
#pragma unroll
          for (int j = 0; j < 4; j++) {
            add_product(high[j], weights.high[s][half], first[j], second[j]);
            add_product(mixed[j], weights.low[s][half], first[j], second[j]);
          }
          if (planes == 1) continue;
          load_values<row_bytes>(from + head_dim + 32 * half * row_bytes, t, first);
          load_values<row_bytes>(from + head_dim + (32 * half + 16) * row_bytes, t, second);
#pragma unroll
          for (int j = 0; j < 4; j++) add_product(mixed[j], weights.high[s][half], first[j], second[j]);
        }
      }
#pragma unroll
      for (int j = 0; j < 4; j++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
          float& numerator = numerators[4 * m + j][i];
          const float before = numerator * correction[i / 2];
          const float sum = float(low_unit * high[j][i] + mixed[j][i]);
          if (view[i / 2].meets(tile)) numerator = __fmaf_rn(weights.scale[i / 2], sum, before);
        }
      }
    }
  }

  __device__ void attend_tile(const row_run& run, int tile) {
    const int num_tiles = run.last_tile(tile) - tile + 1;
    float scores[most_tiles][columns][4];
    uint32_t visible[most_tiles];
    for_both<float> correction;
#pragma unroll
    for (int s = 0; s < most_tiles; s++) {
      if (s >= num_tiles) continue;
      __syncthreads();
      load_tile<row_bytes, threads>(tiles, a.k_cache, a.places, a.rows, run, kv_head, tile + s);
      commit_copies();
      wait_for_copies<0>();
      __syncthreads();
      find_scores(scores[s]);
    }
    __syncthreads();
    for (int s = 0; s < num_tiles; s++) {
      load_tile<row_bytes, threads>(tiles + s * tile_bytes, a.v_cache, a.places, a.rows, run, kv_head, tile + s);
    }
    commit_copies();
    weigh(run, tile, num_tiles, scores, visible, correction);
    wait_for_copies<0>();
    __syncthreads();
    weight_codes weights;
    round_weights(scores, visible, weights);
    add_values(tile, num_tiles, weights, correction);
  }

  // The chunk of the rows of one sequence.
  __device__ void attend_run(const row_run& run) {
    __syncthreads();
    if (run.is_tree) {
      for (int i = threadIdx.x; i < run.num_kept - run.committed; i += threads)
        drafts[i] = a.rows.positions[run.start + i];
    }
    __syncthreads();
    int first = 0x7fffffff, last = 0;  // tiles
    for (int i = run.begin; i < run.end; i++) {
      const int position = a.rows.positions[i];
      first = min(first, first_position(position, a.window) / block_positions);
      last = max(last, position / block_positions);
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const bool is_own = row[i] >= run.begin && row[i] < run.end;
      view[i] = is_own ? row_view(a.rows, run, row[i], a.window) : row_view();
    }
    const int begin = max(first, chunk * chunk_blocks), end = min(last, chunk * chunk_blocks + chunk_blocks - 1);
    for (int tile = begin; tile <= end; tile++) attend_tile(run, tile);
  }

  __device__ void leave() const {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      if (!has_begun[i] || warp * pairs + 8 * i + g >= (last_row - first_row) * group) continue;
      const int first = first_position(a.rows.positions[row[i]], a.window) / chunk_positions;
      const int64_t place = (int64_t{row[i]} * a.num_heads + head[i]) * a.max_chunks + chunk - first;
      if (t == 0) a.stats[place] = make_float2(maximum[i], denominator[i]);
      float* to = a.values + place * head_dim + 8 * t;
#pragma unroll
      for (int m = 0; m < steps; m++) {
#pragma unroll
        for (int j = 0; j < 8; j++) to[32 * m + j] = numerators[4 * m + j % 4][2 * i + j / 4];
      }
    }
  }

  __device__ void run_items() {
    for (int index = blockIdx.x; find_item(index); index += gridDim.x) {
      __syncthreads();
      load_queries();
#pragma unroll
      for (int i = 0; i < 2; i++) has_begun[i] = false;
#pragma unroll
      for (int n = 0; n < head_dim / 8; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) numerators[n][i] = 0.0f;
      }
      for (int begin = first_row; begin < last_row;) {
        const row_run run(a.rows, begin, last_row);
        attend_run(run);
        begin = run.end;
      }
      leave();
    }
  }
};

// has_trees: whether there may be draft trees among the rows.
template <int planes, int head_dim, int warps, bool has_trees>
__global__ void __launch_bounds__(warp_size * warps) attention_integers(const integers_arguments a) {
  wait_for_previous_grid();
  release_next_grid();
  integer_attention<planes, head_dim, warps, has_trees>(a, reinterpret_cast<uint8_t*>(dynamic_shared)).run_items();
}

}  // namespace coldstream
