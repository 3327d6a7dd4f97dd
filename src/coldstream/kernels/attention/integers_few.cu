// Attention over caches of an integer type, for few rows of chains of any sequences: docs/arithmetic.md, Attention over
// integers.
//
// The work is cut into items: 16 pairs of a row and a query head, and a chunk of 256 positions. Each warp takes a block of 64
// positions of it through the tensor cores, so that the keys and values of a whole chunk are on their way at once. The blocks of a chunk belong together in their order: what a
// block weighs by depends on the maxima of those before it, and its products are added to theirs. Chunks leave maximum,
// denominator and numerators in a workspace for merge.cu.
#include "attention/integers_arguments.cuh"
#include "attention/integers_block.cuh"
#include "attention/integers_unpack.cuh"

extern __shared__ float4 dynamic_shared[];

namespace coldstream {

constexpr int exchanged_columns = 32;
constexpr int exchanged_stride = exchanged_columns + 4;  // a gap, so that eight pairs meet all banks

// What warps tell each other of a pair and a block of positions.
struct block_share {
  float best;        // the greatest score
  float correction;  // the factor of what was before
  float total;       // of weights
  float scale;       // of the sums of products
  bool is_met;       // whether the pair has positions there
};

// Of a pair, in the blocks so far of a chunk.
struct pair_progress {
  float maximum, denominator;
  bool has_begun, has_total;

  // Takes in a block's greatest score; returns its correction.
  __device__ __forceinline__ float raise(float best) {
    const float after = has_begun ? fmaxf(maximum, best) : best;
    const float correction = has_begun ? exact_exp(maximum - after) : 1.0f;
    maximum = after;
    has_begun = true;
    return correction;
  }
};

template <int bits, int head_dim, int warps>
struct few_rows_attention {
  using kept_row = cache_row<bits, head_dim>;
  using block = pair_block<kept_row::planes, head_dim>;
  static constexpr int threads = warp_size * warps;
  static constexpr int passes = chunk_blocks / warps;
  static constexpr int pieces = exchanged_columns / 4;                     // of a pair's sums that are exchanged
  static constexpr int own_pieces = pairs * pieces / threads;              // that a thread combines
  static_assert(pairs * pieces % threads == 0 && chunk_blocks % warps == 0);

  const integers_arguments& a;
  uint8_t *const tiles, *const queries;  // one a warp; [pairs, query_bytes]
  float* const sums;                     // [2, warps, pairs, exchanged_stride]
  block_share* const shares;             // [warps, pairs]
  const int group = a.num_heads / a.num_kv_heads, tile_rows = pairs / group;
  const int warp = threadIdx.x / warp_size, lane = threadIdx.x % warp_size, g = lane / 4, t = lane % 4;
  int first_row = 0, last_row = 0, kv_head = 0, chunk = 0;  // of the item; its rows end before last_row
  int items_before = 0;                                     // the item's tile of rows
  lane_pairs own;

  __device__ few_rows_attention(const integers_arguments& arguments, uint8_t* shared)
      : a(arguments),
        tiles(shared),
        queries(tiles + warps * block::tile_bytes),
        sums(reinterpret_cast<float*>(queries + pairs * block::query_bytes)),
        shares(reinterpret_cast<block_share*>(sums + 2 * warps * pairs * exchanged_stride)) {}

  // Items are counted by tiles of rows, each with the chunks from its first to its last. `index` only grows.
  __device__ bool find_item(int index) {
    for (; first_row < a.rows.num_rows; first_row += tile_rows) {
      last_row = min(first_row + tile_rows, a.rows.num_rows);
      int begin = 0x7fffffff, end = 0;
      for (int i = first_row; i < last_row; i++) {
        const int position = a.rows.positions[i];
        if (position < 0) continue;
        begin = min(begin, first_position(position, a.window) / chunk_positions);
        end = max(end, position / chunk_positions + 1);
      }
      const int count = max(end - begin, 0) * a.num_kv_heads;
      if (index - items_before < count) {
        kv_head = (index - items_before) % a.num_kv_heads;
        chunk = begin + (index - items_before) / a.num_kv_heads;
        return true;
      }
      items_before += count;
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
    for (int i = threadIdx.x; i < pairs * pieces; i += threads) {
      const int pair = i / pieces, piece = i % pieces;
      copy_async_16(queries + pair * block::query_bytes + piece * 16,
                    a.query + pair_at(pair) * 2 * head_dim + piece * 16);
    }
    commit_copies();
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int64_t pair = pair_at(8 * i + g);
      own.row[i] = int(pair / a.num_heads);
      own.head[i] = int(pair % a.num_heads);
      own.query_scale[i] = a.query_scales[pair] * (1.0f / low_unit);
    }
  }

  __device__ uint8_t* own_tile() const { return tiles + warp * block::tile_bytes; }

  // Of the warp alone.
  __device__ void load(const uint8_t* cache, const row_run& run, int tile) const {
    uint8_t* const to = own_tile() + tile_layout<kept_row, head_dim>::packed_at;
    load_tile_by<kept_row::bytes, warp_size>(to, cache, a.places, a.rows, run, kv_head, tile, lane);
    commit_copies();
  }

  // What has arrived, for the warp.
  __device__ void unpack() const {
    if constexpr (kept_row::is_packed) unpack_tile<bits, head_dim, warp_size>(own_tile(), lane);
  }

  __device__ block_share& share_of(int of_warp, int pair) const { return shares[of_warp * pairs + pair]; }

  // Weights of the warp's block, after all warps have told their greatest scores. `progress`: of the lane's pairs, before
  // the pass and after it.
  __device__ void weigh(pair_floats& scores, uint32_t visible, pair_progress (&progress)[2]) {
    for_both<float> maximum, correction, total;
#pragma unroll
    for (int i = 0; i < 2; i++) {
#pragma unroll
      for (int w = 0; w < warps; w++) {
        const block_share& other = share_of(w, 8 * i + g);
        if (other.is_met) {
          const float factor = progress[i].raise(other.best);
          if (w == warp) correction[i] = factor;
        }
        if (w == warp) maximum[i] = progress[i].maximum;
      }
    }
    weigh_scores(visible, maximum, scores);
    sum_in_order(scores, total);
#pragma unroll
    for (int i = 0; i < 2; i++) {
      block_share& share = share_of(warp, 8 * i + g);
      if (t == 0 && share.is_met) {
        share.correction = correction[i];
        share.total = total[i];
      }
    }
  }

  // Rounds the weights of the warp's block.
  __device__ void round(pair_floats& weights, uint32_t visible, weight_codes& codes) {
    for_both<uint32_t> greatest = {};
    block::scale_weights(own_tile(), visible, weights, greatest);
    for_both<plane_scale> by;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      by[i] = scale_of_codes<16>(greatest_of_pair(greatest[i]));
      if (t == 0) share_of(warp, 8 * i + g).scale = by[i].scale * (1.0f / low_unit);
    }
    round_weights(weights, by, codes);
  }

  // The pass's products with values, added to what the passes before have left in the workspace, in the order of blocks.
  __device__ void add_products(bool has_block, bool is_first_pass, const weight_codes& codes,
                               float4* const (&places)[own_pieces]) {
#pragma unroll
    for (int part = 0; part < head_dim / exchanged_columns; part++) {
      float* const mine = sums + (part % 2 * warps + warp) * pairs * exchanged_stride;
      if (has_block) {
#pragma unroll
        for (int strip = 0; strip < exchanged_columns / 16; strip++) {
          value_sums of_strip;
          block::add_values(own_tile(), exchanged_columns / 16 * part + strip, codes, of_strip);
#pragma unroll
          for (int i = 0; i < 2; i++) {
            float* const to = mine + (8 * i + g) * exchanged_stride + 16 * strip + 4 * t;
            *reinterpret_cast<float4*>(to) =
                make_float4(of_strip.sum(i, 0), of_strip.sum(i, 1), of_strip.sum(i, 2), of_strip.sum(i, 3));
          }
        }
      }
      __syncthreads();
      combine(part, is_first_pass, places);
    }
  }

  __device__ void combine(int part, bool is_first_pass, float4* const (&places)[own_pieces]) {
#pragma unroll
    for (int k = 0; k < own_pieces; k++) {
      if (!places[k]) continue;
      const int i = k * threads + threadIdx.x, pair = i / pieces, column = i % pieces * 4;
      float4* const to = places[k] + part * pieces;
      float4 numerator = is_first_pass ? make_float4(0.0f, 0.0f, 0.0f, 0.0f) : *to;
#pragma unroll
      for (int w = 0; w < warps; w++) {
        const block_share& share = share_of(w, pair);
        if (!share.is_met) continue;
        const float* const from = sums + ((part % 2 * warps + w) * pairs + pair) * exchanged_stride + column;
        const float4 sum = *reinterpret_cast<const float4*>(from);
        numerator.x = __fmaf_rn(share.scale, sum.x, numerator.x * share.correction);
        numerator.y = __fmaf_rn(share.scale, sum.y, numerator.y * share.correction);
        numerator.z = __fmaf_rn(share.scale, sum.z, numerator.z * share.correction);
        numerator.w = __fmaf_rn(share.scale, sum.w, numerator.w * share.correction);
      }
      *to = numerator;
    }
  }

  // Where the thread's pieces of numerators belong in the workspace; null for none.
  __device__ void find_places(const row_run& run, float4* (&places)[own_pieces]) const {
#pragma unroll
    for (int k = 0; k < own_pieces; k++) {
      const int i = k * threads + threadIdx.x, pair = i / pieces;
      const int64_t found = pair_at(pair);
      const int row = int(found / a.num_heads);
      const bool is_own = pair < (last_row - first_row) * group && row >= run.begin && row < run.end;
      places[k] = nullptr;
      if (is_own && meets_chunk(row))
        places[k] = reinterpret_cast<float4*>(a.values + place_of(found, row) * head_dim) + i % pieces;
    }
  }

  __device__ bool meets_chunk(int row) const {
    const int position = a.rows.positions[row];
    return chunk >= first_position(position, a.window) / chunk_positions && chunk <= position / chunk_positions;
  }

  // In the workspace, of the row's pair.
  __device__ int64_t place_of(int64_t pair, int row) const {
    return pair * a.max_chunks + chunk - first_position(a.rows.positions[row], a.window) / chunk_positions;
  }

  // The chunk of the rows of one sequence, which have positions in tiles begin … end of it.
  __device__ void attend_tiles(const row_run& run, int begin, int end) {
    pair_progress progress[2] = {};
    float4* places[own_pieces];
    find_places(run, places);
    for (int pass = 0; pass < passes; pass++) {
      const int tile = chunk * chunk_blocks + pass * warps + warp;
      const bool has_block = tile >= begin && tile <= end;
      pair_floats scores;
      uint32_t visible = 0;
      for_both<float> best = {negative_infinity(), negative_infinity()};
      __syncthreads();  // the last pass has used what is shared
      if (has_block) load(a.k_cache, run, tile);
      wait_for_copies<0>();
      if (pass == 0) __syncthreads();  // the queries are there
      else __syncwarp();
      if (has_block) {
        unpack();
        block::find_scores(own_tile(), queries, own.query_scale, scores);
        visible = own.visible_in(tile, tile, run, nullptr);
        raise_best(scores, visible, best);
      }
#pragma unroll
      for (int i = 0; i < 2; i++) {
        best[i] = greatest_of_pair(best[i]);
        block_share& share = share_of(warp, 8 * i + g);
        if (t == 0) {
          share.best = best[i];
          share.is_met = has_block && own.view[i].meets(tile);
        }
      }
      __syncthreads();
      if (has_block) load(a.v_cache, run, tile);
      weigh(scores, visible, progress);
      wait_for_copies<0>();
      __syncwarp();
      weight_codes codes;
      if (has_block) {
        unpack();
        round(scores, visible, codes);
      }
      add_products(has_block, pass == 0, codes, places);
      add_totals(progress);
    }
    leave(run, progress);
  }

  // The pass's weights, in the order of blocks; each warp does the same.
  __device__ void add_totals(pair_progress (&progress)[2]) const {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      pair_progress& of = progress[i];
      for (int w = 0; w < warps; w++) {
        const block_share& share = share_of(w, 8 * i + g);
        if (!share.is_met) continue;
        of.denominator = of.has_total ? __fmaf_rn(of.denominator, share.correction, share.total) : share.total;
        of.has_total = true;
      }
    }
  }

  __device__ void leave(const row_run& run, const pair_progress (&progress)[2]) const {
    if (warp > 0 || t > 0) return;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int pair = 8 * i + g, row = own.row[i];
      const bool is_own = pair < (last_row - first_row) * group && row >= run.begin && row < run.end;
      if (!is_own || !progress[i].has_begun) continue;
      a.stats[place_of(pair_at(pair), row)] = make_float2(progress[i].maximum, progress[i].denominator);
    }
  }

  // The chunk of the rows of one sequence, if it is one.
  __device__ void attend_run(const row_run& run) {
    int first = 0x7fffffff, last = -1;  // tiles
    for (int i = run.begin; i < run.end; i++) {
      const int position = a.rows.positions[i];
      if (position < 0) continue;
      first = min(first, first_position(position, a.window) / block_positions);
      last = max(last, position / block_positions);
    }
    const int begin = max(first, chunk * chunk_blocks), end = min(last, chunk * chunk_blocks + chunk_blocks - 1);
    if (begin > end) return;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const bool is_own = own.row[i] >= run.begin && own.row[i] < run.end;
      own.view[i] = is_own ? row_view(a.rows, run, own.row[i], a.window) : row_view();
    }
    attend_tiles(run, begin, end);
  }

  __device__ void run_items() {
    for (int index = blockIdx.x; find_item(index); index += gridDim.x) {
      __syncthreads();
      load_queries();
      for (int begin = first_row; begin < last_row;) {
        const row_run run(a.rows, begin, last_row);
        attend_run(run);
        begin = run.end;
      }
    }
  }
};

// There are no draft trees among the rows.
template <int bits, int head_dim, int warps>
__global__ void __launch_bounds__(warp_size * warps) attention_integers_few(const integers_arguments a) {
  wait_for_previous_grid();
  release_next_grid();
  few_rows_attention<bits, head_dim, warps>(a, reinterpret_cast<uint8_t*>(dynamic_shared)).run_items();
}

}  // namespace coldstream
