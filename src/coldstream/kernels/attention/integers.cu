// Attention over caches of an integer type, for many rows of any sequences, draft trees among them:
// docs/arithmetic.md, Attention over integers.
//
// A block of threads takes some rows next to each other and a key/value head, and walks over their positions. A warp
// takes 16 pairs of a row and a query head through the tensor cores, and all warps read the same keys and values. Where the
// workspace has one chunk a pair, a block walks over all positions, and what a chunk of 256 leaves is merged into what those
// before it have left. Where it has them all, blocks share the chunks out evenly and leave each by itself, for merge.cu.
#include "attention/integers_arguments.cuh"
#include "attention/integers_block.cuh"
#include "attention/integers_unpack.cuh"

extern __shared__ float4 dynamic_shared[];

namespace coldstream {

template <int bits, int head_dim, int warps, bool has_trees>
struct integer_attention {
  using kept_row = cache_row<bits, head_dim>;
  using block = pair_block<kept_row::planes, head_dim>;
  static constexpr int threads = warp_size * warps;
  static constexpr int most_tiles = has_trees ? 2 : 1;  // of indices in which a tile of positions has keys

  const integers_arguments& a;
  uint8_t *const tiles, *const queries;  // two tiles; [warps · pairs, query_bytes]
  float* const by_position;              // [warps · pairs, 64], weights of a draft tree's rows
  int32_t* const drafts;                 // positions of the rows of a tree
  const int group = a.num_heads / a.num_kv_heads, tile_rows = warps * pairs / group;
  const int warp = threadIdx.x / warp_size, lane = threadIdx.x % warp_size, g = lane / 4, t = lane % 4;
  int first_row, last_row, kv_head;  // of the item; its rows end before last_row
  int first_chunk, last_chunk;       // of the item
  int item = -1, chunks_before = 0, share_begin = 0, share_end = 0;

  lane_pairs own;
  for_both<float> maximum, denominator;  // of the chunk
  for_both<bool> has_begun;
  for_both<float> all_maximum, all_denominator;  // of the chunks before
  for_both<bool> has_any;
  float numerators[block::strips][2][4];  // of the chunk, column 16s + 4t + c at [s][pair][c]

  __device__ integer_attention(const integers_arguments& arguments, uint8_t* shared)
      : a(arguments),
        tiles(shared),
        queries(shared + 2 * block::tile_bytes),
        by_position(reinterpret_cast<float*>(queries + warps * pairs * block::query_bytes)),
        drafts(reinterpret_cast<int32_t*>(by_position + warps * pairs * block_positions)) {}

  // Pairs beyond the item's repeat the last one, and are not written.
  __device__ int64_t pair_at(int pair) const {
    const int found = min(pair, (last_row - first_row) * group - 1);
    return int64_t{first_row + found / group} * a.num_heads + kv_head * group + found % group;
  }

  __device__ void load_queries() {
    constexpr int pieces = 2 * head_dim / 16;
    for (int i = threadIdx.x; i < warps * pairs * pieces; i += threads) {
      const int pair = i / pieces, piece = i % pieces;
      copy_async_16(queries + pair * block::query_bytes + piece * 16,
                    a.query + pair_at(pair) * 2 * head_dim + piece * 16);
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int64_t pair = pair_at(warp * pairs + 8 * i + g);
      own.row[i] = int(pair / a.num_heads);
      own.head[i] = int(pair % a.num_heads);
      own.query_scale[i] = a.query_scales[pair] * (1.0f / low_unit);
    }
  }

  __device__ void load(uint8_t* to, const uint8_t* cache, const row_run& run, int tile) const {
    load_tile<kept_row::bytes, threads>(to + tile_layout<kept_row, head_dim>::packed_at, cache, a.places, a.rows, run,
                                        kv_head, tile);
  }

  // What has arrived, for the block of threads.
  __device__ void unpack(uint8_t* tile) const {
    if constexpr (kept_row::is_packed) unpack_tile<bits, head_dim, threads>(tile, threadIdx.x);
  }

  // What pairs weigh the keys of a tile of positions by, in place of their scores; the factors of what was before.
  __device__ void weigh(const row_run& run, int tile, int num_tiles, pair_floats (&scores)[most_tiles],
                        const uint32_t (&visible)[most_tiles], for_both<float>& correction) {
    for_both<float> best = {negative_infinity(), negative_infinity()}, after;
#pragma unroll
    for (int s = 0; s < most_tiles; s++) {
      if (s < num_tiles) raise_best(scores[s], visible[s], best);
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
      best[i] = greatest_of_pair(best[i]);
      after[i] = has_begun[i] ? fmaxf(maximum[i], best[i]) : best[i];
      correction[i] = has_begun[i] ? exact_exp(maximum[i] - after[i]) : 1.0f;
    }
#pragma unroll
    for (int s = 0; s < most_tiles; s++) weigh_scores(visible[s], after, scores[s]);
    for_both<float> total;
    if (has_trees && !run.is_committed(tile)) order_by_position(run, tile, scores, visible, total);
    else sum_in_order(scores[0], total);
#pragma unroll
    for (int i = 0; i < 2; i++) {
      if (!own.view[i].meets(tile)) continue;
      denominator[i] = has_begun[i] ? __fmaf_rn(denominator[i], correction[i], total[i]) : total[i];
      maximum[i] = after[i];
      has_begun[i] = true;
    }
  }

  // Sums of a pair's weights where keys do not lie in the order of their positions.
  __device__ void order_by_position(const row_run& run, int tile, const pair_floats (&weights)[most_tiles],
                                    const uint32_t (&visible)[most_tiles], for_both<float>& total) const {
    pair_floats ordered;
    float* const places = by_position + warp * pairs * block_positions;
    for (int i = lane; i < pairs * block_positions; i += warp_size) places[i] = 0.0f;
    __syncwarp();
#pragma unroll
    for (int s = 0; s < most_tiles; s++) {
#pragma unroll
      for (int n = 0; n < columns; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
          if (!is_seen(visible[s], n, i)) continue;
          const int index = (tile + s) * block_positions + 8 * n + 2 * t + i % 2;
          const int position = own.view[i / 2].position_in(tile, index, run, drafts);
          places[(8 * (i / 2) + g) * block_positions + position % block_positions] = weights[s][n][i];
        }
      }
    }
    __syncwarp();
#pragma unroll
    for (int n = 0; n < columns; n++) {
#pragma unroll
      for (int i = 0; i < 4; i++)
        ordered[n][i] = places[(8 * (i / 2) + g) * block_positions + 8 * n + 2 * t + i % 2];
    }
    __syncwarp();
    sum_in_order(ordered, total);
  }

  // values: of the tiles in which the tile of positions has keys, one behind the other.
  __device__ void add_values(const uint8_t* values, int tile, int num_tiles, pair_floats (&weights)[most_tiles],
                             const uint32_t (&visible)[most_tiles], const for_both<float>& correction) {
    for_both<uint32_t> greatest = {};
#pragma unroll
    for (int s = 0; s < most_tiles; s++) {
      if (s < num_tiles) block::scale_weights(values + s * block::tile_bytes, visible[s], weights[s], greatest);
    }
    for_both<plane_scale> by;
    for_both<float> scale;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      by[i] = scale_of_codes<16>(greatest_of_pair(greatest[i]));
      scale[i] = by[i].scale * (1.0f / low_unit);
    }
    weight_codes codes[most_tiles];
#pragma unroll
    for (int s = 0; s < most_tiles; s++) {
      if (s < num_tiles) round_weights(weights[s], by, codes[s]);
    }
#pragma unroll
    for (int strip = 0; strip < block::strips; strip++) {
      value_sums sums;
#pragma unroll
      for (int s = 0; s < most_tiles; s++) {
        if (s < num_tiles) block::add_values(values + s * block::tile_bytes, strip, codes[s], sums);
      }
#pragma unroll
      for (int i = 0; i < 2; i++) {
#pragma unroll
        for (int c = 0; c < 4; c++) {
          float& numerator = numerators[strip][i][c];
          const float before = numerator * correction[i];
          if (own.view[i].meets(tile)) numerator = __fmaf_rn(scale[i], sums.sum(i, c), before);
        }
      }
    }
  }

  __device__ const uint8_t* own_queries() const { return queries + warp * pairs * block::query_bytes; }

  // Tiles begin … end of positions whose keys lie in their order; `last` is the run's last. The keys of one are on their way
  // while the values of the one before are multiplied, and values while scores are.
  __device__ void attend_in_order(const row_run& run, int begin, int end, int last) {
    uint8_t *const keys = tiles, *const values = tiles + block::tile_bytes;
    load(keys, a.k_cache, run, begin);
    commit_copies();
    load(values, a.v_cache, run, begin);
    commit_copies();
    for (int tile = begin; tile <= end; tile++) {
      pair_floats scores[most_tiles];
      uint32_t visible[most_tiles] = {};
      for_both<float> correction;
      wait_for_copies<1>();
      __syncthreads();
      unpack(keys);
      block::find_scores(keys, own_queries(), own.query_scale, scores[0]);
      __syncthreads();
      if (tile < end) load(keys, a.k_cache, run, tile + 1);
      commit_copies();
      visible[0] = own.visible_in(tile, tile, run, drafts);
      weigh(run, tile, 1, scores, visible, correction);
      wait_for_copies<1>();
      __syncthreads();
      unpack(values);
      add_values(values, tile, 1, scores, visible, correction);
      __syncthreads();
      if (tile < end) load(values, a.v_cache, run, tile + 1);
      commit_copies();
      if (tile == last || (tile + 1) % chunk_blocks == 0) end_chunk(tile / chunk_blocks);
    }
    wait_for_copies<0>();
  }

  // Tiles begin … last, in which there are drafts.
  __device__ void attend_drafts(const row_run& run, int begin, int last) {
    for (int tile = begin; tile <= last; tile++) {
      const int num_tiles = run.last_tile(tile) - tile + 1;
      pair_floats scores[most_tiles];
      uint32_t visible[most_tiles] = {};
      for_both<float> correction;
#pragma unroll
      for (int s = 0; s < most_tiles; s++) {
        if (s >= num_tiles) continue;
        __syncthreads();
        load(tiles, a.k_cache, run, tile + s);
        commit_copies();
        wait_for_copies<0>();
        __syncthreads();
        unpack(tiles);
        block::find_scores(tiles, own_queries(), own.query_scale, scores[s]);
        visible[s] = own.visible_in(tile, tile + s, run, drafts);
      }
      __syncthreads();
      for (int s = 0; s < num_tiles; s++) load(tiles + s * block::tile_bytes, a.v_cache, run, tile + s);
      commit_copies();
      weigh(run, tile, num_tiles, scores, visible, correction);
      wait_for_copies<0>();
      __syncthreads();
      for (int s = 0; s < num_tiles; s++) unpack(tiles + s * block::tile_bytes);
      add_values(tiles, tile, num_tiles, scores, visible, correction);
      if (tile == last || (tile + 1) % chunk_blocks == 0) end_chunk(tile / chunk_blocks);
    }
    __syncthreads();
  }

  // Leaves chunk number `chunk`, by itself or merged into those before it, and begins the next.
  __device__ void end_chunk(int chunk) {
    const bool merges = a.max_chunks == 1;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      if (!has_begun[i]) continue;
      float ours = 0.0f, theirs = 1.0f;
      const bool adds = merges && has_any[i];
      if (adds) {
        const float after = fmaxf(all_maximum[i], maximum[i]);
        ours = exact_exp(all_maximum[i] - after);
        theirs = exact_exp(maximum[i] - after);
        all_denominator[i] = __fmaf_rn(denominator[i], theirs, all_denominator[i] * ours);
        all_maximum[i] = after;
      } else {
        all_denominator[i] = denominator[i];
        all_maximum[i] = maximum[i];
      }
      const bool exists = warp * pairs + 8 * i + g < (last_row - first_row) * group;
      const int64_t place = place_of(i, merges ? 0 : chunk);
      float4* const to = reinterpret_cast<float4*>(a.values + place * head_dim) + t;
#pragma unroll
      for (int strip = 0; strip < block::strips; strip++) {
        float(&value)[4] = numerators[strip][i];
        if (exists && adds) {
          const float4 before = to[4 * strip];
          value[0] = __fmaf_rn(value[0], theirs, before.x * ours);
          value[1] = __fmaf_rn(value[1], theirs, before.y * ours);
          value[2] = __fmaf_rn(value[2], theirs, before.z * ours);
          value[3] = __fmaf_rn(value[3], theirs, before.w * ours);
        }
        if (exists) to[4 * strip] = make_float4(value[0], value[1], value[2], value[3]);
#pragma unroll
        for (int c = 0; c < 4; c++) value[c] = 0.0f;
      }
      if (exists && t == 0) a.stats[place] = make_float2(all_maximum[i], all_denominator[i]);
      has_any[i] = true;
      has_begun[i] = false;
    }
  }

  // In the workspace, of chunk number `chunk` of a row's positions; 0 for the one that all are merged into.
  __device__ int64_t place_of(int i, int chunk) const {
    const int64_t pair = int64_t{own.row[i]} * a.num_heads + own.head[i];
    const int before = first_position(a.rows.positions[own.row[i]], a.window) / chunk_positions;
    return pair * a.max_chunks + (chunk ? chunk - before : 0);
  }

  // The rows of one sequence, if it is one.
  __device__ void attend_run(const row_run& run) {
    int first = 0x7fffffff, last = -1;  // tiles
    for (int i = run.begin; i < run.end; i++) {
      const int position = a.rows.positions[i];
      if (position < 0) continue;
      first = min(first, first_position(position, a.window) / block_positions);
      last = max(last, position / block_positions);
    }
    first = max(first, first_chunk * chunk_blocks);
    last = min(last, last_chunk * chunk_blocks + chunk_blocks - 1);
    if (first > last) return;
    if (has_trees && run.is_tree) {
      for (int i = threadIdx.x; i < run.num_kept - run.committed; i += threads)
        drafts[i] = a.rows.positions[run.start + i];
      __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const bool is_own = own.row[i] >= run.begin && own.row[i] < run.end;
      own.view[i] = is_own ? row_view(a.rows, run, own.row[i], a.window) : row_view();
    }
    const int end = has_trees && run.is_tree ? min(last, run.committed / block_positions - 1) : last;
    if (first <= end) attend_in_order(run, first, end, last);
    if (has_trees && end < last) attend_drafts(run, max(first, end + 1), last);
  }

  __device__ void run_item() {
    __syncthreads();
    load_queries();
#pragma unroll
    for (int i = 0; i < 2; i++) has_begun[i] = has_any[i] = false;
#pragma unroll
    for (int strip = 0; strip < block::strips; strip++) {
#pragma unroll
      for (int i = 0; i < 8; i++) numerators[strip][i / 4][i % 4] = 0.0f;
    }
    for (int begin = first_row; begin < last_row;) {
      const row_run run(a.rows, begin, last_row);
      attend_run(run);
      begin = run.end;
    }
  }

  // The item's chunks, from the first to the one behind the last, that rows of it have positions in.
  __device__ void find_chunks(int& begin, int& end) const {
    begin = 0x7fffffff;
    end = 0;
    for (int i = first_row; i < last_row; i++) {
      const int position = a.rows.positions[i];
      if (position < 0) continue;
      begin = min(begin, first_position(position, a.window) / chunk_positions);
      end = max(end, position / chunk_positions + 1);
    }
    begin = min(begin, end);
  }

  __device__ void take_rows(int tile) {
    first_row = tile * tile_rows;
    last_row = min(first_row + tile_rows, a.rows.num_rows);
  }

  // The next of the block's items; `item` is −1 before the first.
  __device__ bool next_item() {
    const int num_tiles = (a.rows.num_rows + tile_rows - 1) / tile_rows, num_items = num_tiles * a.num_kv_heads;
    if (a.max_chunks == 1) {
      // All chunks of some rows at once; the last rows come first, as they have most to do.
      item = item < 0 ? blockIdx.x : item + gridDim.x;
      if (item >= num_items) return false;
      kv_head = item % a.num_kv_heads;
      take_rows(num_tiles - 1 - item / a.num_kv_heads);
      first_chunk = 0;
      last_chunk = 0x7fffffff / chunk_positions;
      return true;
    }
    int begin, end;
    if (item < 0) {
      // An even share of the chunks of all rows.
      int64_t total = 0;
      for (int tile = 0; tile < num_tiles; tile++) {
        take_rows(tile);
        find_chunks(begin, end);
        total += (end - begin) * a.num_kv_heads;
      }
      share_begin = int(total * blockIdx.x / gridDim.x);
      share_end = int(total * (blockIdx.x + 1) / gridDim.x);
    }
    for (item++; item < num_items && chunks_before < share_end; item++) {
      kv_head = item % a.num_kv_heads;
      take_rows(item / a.num_kv_heads);
      find_chunks(begin, end);
      first_chunk = begin + max(share_begin - chunks_before, 0);
      last_chunk = begin + min(share_end - chunks_before, end - begin) - 1;
      chunks_before += end - begin;
      if (first_chunk <= last_chunk) return true;
    }
    return false;
  }

  __device__ void run() {
    while (next_item()) run_item();
  }
};

// has_trees: whether there may be draft trees among the rows.
template <int bits, int head_dim, int warps, bool has_trees>
__global__ void __launch_bounds__(warp_size * warps) attention_integers(const integers_arguments a) {
  wait_for_previous_grid();
  release_next_grid();
  integer_attention<bits, head_dim, warps, has_trees>(a, reinterpret_cast<uint8_t*>(dynamic_shared)).run();
}

}  // namespace coldstream
