// Attention over caches of an integer type, for prefill of any sequences, and for draft trees:
// docs/arithmetic.md, Attention over integers.
//
// A block of threads takes some rows next to each other and a key/value head, and walks over their positions.
// A warp takes 16 pairs of a row and a query head through the tensor cores, and all warps read the same keys
// and values. If the workspace has one chunk per pair, a block walks over all positions and merges the
// results of each chunk of 256 into those of the chunks before it. If it has all chunks, blocks share them
// out evenly and store each separately, for merge.cu. Tiles of which no row of the block sees anything are
// left out.
#include "attention/integers_block.cuh"
#include "attention/integers_items.cuh"
#include "attention/integers_unpack.cuh"

extern __shared__ float4 dynamic_shared[];

namespace coldstream {

// places: 1 if keys and values have the same place in turn. parts: of a head's channels, of which a tile has
// one. sharing: warps that have the same pairs, as one has no registers for the numerators of many columns.
// Each computes the scores of some positions, which they exchange, and then the sums of its columns of
// values.
template <int bits, int head_dim, int warps, bool has_trees, int places, int parts, int sharing,
          bool is_chosen>
struct IntegerAttention : BlockItems<warps / sharing * pairs> {
  static constexpr int block_pairs = warps / sharing * pairs;
  using Items = BlockItems<block_pairs>;
  using Items::a;
  using Items::kv_head;
  using KeptRow = CacheRow<bits, head_dim>;
  using Block = PairBlock<KeptRow::planes, head_dim / parts, head_dim>;
  static constexpr int threads = warp_size * warps;
  static constexpr int most_tiles = has_trees ? 2 : 1;  // of indices in which a tile of positions has keys
  static constexpr int own_strips = Block::strips / sharing,  // of a part, that a warp has
      own_columns = columns / sharing;                        // of eight positions, whose scores it computes
  static_assert(sharing == 1 || block_pairs * block_positions * int(sizeof(float)) <= Block::tile_bytes);

  uint8_t *const tiles, *const queries;  // [places, tile_bytes]; [block_pairs, query_bytes]
  float* const by_position;              // [warps · pairs, 64], weights of a draft tree's rows
  int32_t* const drafts;                 // positions of the rows of a tree
  const int warp = threadIdx.x / warp_size, lane = threadIdx.x % warp_size, g = lane / 4, t = lane % 4;
  const int first_pair = warp / sharing * pairs, first_strip = warp % sharing * own_strips,
            first_column = warp % sharing * own_columns;  // of the warp

  LanePairs own;
  ChosenTile<is_chosen> chosen;  // of the tile that is computed
  PairChunk chunks;
  ForBoth<float2> all;  // maximum and denominator of the chunks before
  ForBoth<bool> has_any;
  float numerators[parts * own_strips][2][4];  // of the chunk, column 16s + 4t + c of its own at [s][pair][c]

  __device__ IntegerAttention(const IntegersArguments& arguments, uint8_t* shared)
      : Items(arguments),
        tiles(shared),
        queries(shared + places * Block::tile_bytes),
        by_position(reinterpret_cast<float*>(queries + block_pairs * Block::query_bytes)),
        drafts(reinterpret_cast<int32_t*>(by_position + warps * pairs * block_positions)) {}

  __device__ void load_queries() {
    constexpr int pieces = 2 * head_dim / 16;
    for (int i = threadIdx.x; i < block_pairs * pieces; i += threads) {
      const int pair = i / pieces, piece = i % pieces;
      copy_async_16(queries + pair * Block::query_bytes + piece * 16,
                    a.query + Items::pair_at(a, pair) * 2 * head_dim + piece * 16);
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int64_t pair = Items::pair_at(a, first_pair + 8 * i + g);
      own.row[i] = int(pair / a.num_heads);
      own.head[i] = int(pair % a.num_heads);
      own.query_scale[i] = a.query_scales[pair] * (1.0f / low_unit);
    }
  }

  __device__ void load(uint8_t* to, const uint8_t* cache, const RowRun& run, int tile, int part = 0) const {
    if constexpr (parts > 1)
      load_part<KeptRow, head_dim, parts, threads>(to, cache, a.strides, a.rows, run, kv_head, tile, part);
    else
      load_tile<KeptRow::bytes, threads>(to + TileLayout<KeptRow, head_dim>::packed_at, cache, a.strides,
                                         a.rows, run, kv_head, tile);
  }

  // What has arrived, for the block of threads.
  __device__ void unpack(uint8_t* tile) const {
    if constexpr (KeptRow::is_packed) unpack_tile<bits, head_dim, threads>(tile, threadIdx.x);
  }

  // Whether pair i sees positions of the tile that is computed.
  __device__ bool meets(int i, int tile) const {
    if constexpr (is_chosen) {
      if (!chosen.meets(i)) return false;
    }
    return own.view[i].meets(tile);
  }

  // Replaces scores of a tile of positions by weights. correction: the factors of earlier results.
  __device__ void weigh(const RowRun& run, int tile, int num_tiles, PairFloats (&scores)[most_tiles],
                        const uint32_t (&visible)[most_tiles], ForBoth<float>& correction) {
    ForBoth<float> best = {negative_infinity(), negative_infinity()}, after;
#pragma unroll
    for (int s = 0; s < most_tiles; s++) {
      if (s < num_tiles) raise_best(scores[s], visible[s], best);
    }
#pragma unroll
    for (int i = 0; i < 2; i++) best[i] = greatest_of_pair(best[i]);
    chunks.raise(best, after, correction);
#pragma unroll
    for (int s = 0; s < most_tiles; s++) weigh_scores(visible[s], after, scores[s]);
    ForBoth<float> total;
    if (has_trees && !run.is_committed(tile))
      order_by_position(run, tile, scores, visible, total);
    else
      sum_in_order(scores[0], total);
#pragma unroll
    for (int i = 0; i < 2; i++) {
      if (meets(i, tile)) chunks.add(i, total[i], after[i], correction[i]);
    }
  }

  // Sums of a pair's weights if keys are not in the order of positions.
  __device__ void order_by_position(const RowRun& run, int tile, const PairFloats (&weights)[most_tiles],
                                    const uint32_t (&visible)[most_tiles], ForBoth<float>& total) const {
    PairFloats ordered;
    float* const ordered_at = by_position + warp * pairs * block_positions;
    for (int i = lane; i < pairs * block_positions; i += warp_size) ordered_at[i] = 0.0f;
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
          ordered_at[(8 * (i / 2) + g) * block_positions + position % block_positions] = weights[s][n][i];
        }
      }
    }
    __syncwarp();
#pragma unroll
    for (int n = 0; n < columns; n++) {
#pragma unroll
      for (int i = 0; i < 4; i++)
        ordered[n][i] = ordered_at[(8 * (i / 2) + g) * block_positions + 8 * n + 2 * t + i % 2];
    }
    __syncwarp();
    sum_in_order(ordered, total);
  }

  // Rounds weights that have been multiplied by the values' scales. greatest: of the lane's.
  __device__ void round(int num_tiles, const PairFloats (&weights)[most_tiles],
                        const ForBoth<uint32_t>& greatest, WeightCodes (&codes)[most_tiles],
                        ForBoth<float>& scale) const {
    ForBoth<PlaneScale> by;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      by[i] = scale_of_codes<16>(greatest_of_pair(greatest[i]));
      scale[i] = by[i].scale * (1.0f / low_unit);
    }
#pragma unroll
    for (int s = 0; s < most_tiles; s++) {
      if (s < num_tiles) round_weights(weights[s], by, codes[s]);
    }
  }

  __device__ void add_sums(int tile, int strip, const ValueSums& sums, const ForBoth<float>& scale,
                           const ForBoth<float>& correction) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
#pragma unroll
      for (int c = 0; c < 4; c++) {
        float& numerator = numerators[strip][i][c];
        const float before = numerator * correction[i];
        if (meets(i, tile)) numerator = __fmaf_rn(scale[i], sums.sum(i, c), before);
      }
    }
  }

  // values: of the tiles with keys of the tile of positions, in order, with all channels.
  __device__ void add_values(const uint8_t* values, int tile, int num_tiles,
                             PairFloats (&weights)[most_tiles], const uint32_t (&visible)[most_tiles],
                             const ForBoth<float>& correction) {
    ForBoth<uint32_t> greatest = {};
#pragma unroll
    for (int s = 0; s < most_tiles; s++) {
      if (s < num_tiles)
        Block::scale_weights(values + s * Block::tile_bytes, visible[s], weights[s], greatest);
    }
    WeightCodes codes[most_tiles];
    ForBoth<float> scale;
    round(num_tiles, weights, greatest, codes, scale);
#pragma unroll
    for (int strip = 0; strip < own_strips; strip++) {
      ValueSums sums;
#pragma unroll
      for (int s = 0; s < most_tiles; s++) {
        if (s < num_tiles)
          Block::add_values(values + s * Block::tile_bytes, first_strip + strip, codes[s], sums);
      }
      add_sums(tile, strip, sums, scale, correction);
    }
  }

  // The same for tiles that have one place in turn: two come once for their scales, and once for every few
  // columns, as the sums of both are one number before it is rounded.
  __device__ void add_values_in_turn(const RowRun& run, int tile, int num_tiles,
                                     PairFloats (&weights)[most_tiles], const uint32_t (&visible)[most_tiles],
                                     const ForBoth<float>& correction) {
    constexpr int at_once = own_strips % 4 ? 2 : 4;
    ForBoth<uint32_t> greatest = {};
#pragma unroll
    for (int s = 0; s < most_tiles; s++) {
      if (s >= num_tiles) continue;
      bring(a.v_cache, run, tile + s);
      Block::scale_weights(tiles, visible[s], weights[s], greatest);
    }
    WeightCodes codes[most_tiles];
    ForBoth<float> scale;
    round(num_tiles, weights, greatest, codes, scale);
#pragma unroll
    for (int part = 0; part < parts; part++) {
#pragma unroll
      for (int begin = 0; begin < own_strips; begin += at_once) {
        ValueSums sums[at_once];
#pragma unroll
        for (int s = 0; s < most_tiles; s++) {
          if (s >= num_tiles) continue;
          if (num_tiles > 1 || (part > 0 && begin == 0)) bring(a.v_cache, run, tile + s, part);
#pragma unroll
          for (int k = 0; k < at_once; k++)
            Block::add_values(tiles, first_strip + begin + k, codes[s], sums[k]);
        }
#pragma unroll
        for (int k = 0; k < at_once; k++)
          add_sums(tile, part * own_strips + begin + k, sums[k], scale, correction);
      }
    }
  }

  __device__ const uint8_t* own_queries() const { return queries + first_pair * Block::query_bytes; }

  // Copies a part of a tile to the first place, in which nobody reads any more what was there.
  __device__ void bring(const uint8_t* cache, const RowRun& run, int tile, int part = 0) {
    __syncthreads();
    load(tiles, cache, run, tile, part);
    commit_copies();
    wait_for_copies<0>();
    __syncthreads();
    unpack(tiles);
  }

  // The first tile from `tile` to `end` that a row of the run sees, or end + 1.
  __device__ int first_seen(SeenTiles<is_chosen>& seen, const RowRun& run, int tile, int end) const {
    return seen.from(a.chosen, run.begin, run.end, tile, end);
  }

  // Behind a tile: whether the next one that is seen, or that has drafts, is of another chunk.
  static __device__ bool leaves_chunk(int tile, int next, int last) {
    return next > last || next / chunk_blocks != tile / chunk_blocks;
  }

  // Tiles begin … end of positions whose keys are in order; `last` is the run's last. Keys are copied while
  // the values of the tile before are multiplied, and values while scores are computed. In one place each is
  // copied when it is needed.
  __device__ void attend_in_order(const RowRun& run, int begin, int end, int last) {
    constexpr bool in_turn = places == 1;
    uint8_t *const keys = tiles, *const values = tiles + (places - 1) * Block::tile_bytes;
    SeenTiles<is_chosen> seen;
    begin = first_seen(seen, run, begin, end);
    if (is_chosen && begin > end) return;
    load(keys, a.k_cache, run, begin);
    commit_copies();
    if constexpr (!in_turn) {
      load(values, a.v_cache, run, begin);
      commit_copies();
    }
    for (int tile = begin, next; tile <= end; tile = next) {
      PairFloats scores[most_tiles];
      uint32_t visible[most_tiles] = {};
      ForBoth<float> correction;
      chosen.load(a, own.row, tile);
      next = first_seen(seen, run, tile + 1, end);
      if (is_chosen && next > end) end = tile;  // the last that is seen
      wait_for_copies<places - 1>();
      __syncthreads();
      unpack(keys);
      Block::find_scores(keys, own_queries(), own.query_scale, scores[0]);
      __syncthreads();
      if constexpr (in_turn)
        load(values, a.v_cache, run, tile);
      else if (tile < end)
        load(keys, a.k_cache, run, next);
      commit_copies();
      visible[0] = own.visible_in(tile, tile, run, drafts, chosen);
      weigh(run, tile, 1, scores, visible, correction);
      wait_for_copies<places - 1>();
      __syncthreads();
      unpack(values);
      add_values(values, tile, 1, scores, visible, correction);
      __syncthreads();
      if (tile < end) load(values, in_turn ? a.k_cache : a.v_cache, run, next);
      commit_copies();
      if (is_chosen ? leaves_chunk(tile, next, last) : tile == last || (tile + 1) % chunk_blocks == 0)
        end_chunk(tile / chunk_blocks);
    }
    wait_for_copies<0>();
  }

  // The same where warps share pairs: the parts of a tile's keys come one after the other, and then those of
  // its values.
  __device__ void attend_shared_in_order(const RowRun& run, int begin, int end, int last) {
    SeenTiles<is_chosen> seen;
    begin = first_seen(seen, run, begin, end);
    if (is_chosen && begin > end) return;
    if (places > 1) load_piece(run, begin, 0);
    for (int tile = begin, next; tile <= end; tile = next) {
      PairFloats scores[most_tiles];
      uint32_t visible[most_tiles] = {};
      ForBoth<float> correction;
      ScoreSums<own_columns> sums;
      uint8_t* keys = nullptr;
      chosen.load(a, own.row, tile);
      next = first_seen(seen, run, tile + 1, end);
      if (is_chosen && next > end) end = tile;  // the last that is seen
#pragma unroll
      for (int part = 0; part < parts; part++) {
        keys = take_piece(run, tile, part, next, end);
        add_scores(keys, part, sums);
      }
      share_scores(keys, sums, scores[0]);
      visible[0] = own.visible_in(tile, tile, run, drafts, chosen);
      weigh(run, tile, 1, scores, visible, correction);
      ForBoth<uint32_t> greatest = {};
      WeightCodes codes[most_tiles];
      ForBoth<float> scale;
#pragma unroll
      for (int part = 0; part < parts; part++) {
        const uint8_t* const values = take_piece(run, tile, parts + part, next, end);
        if (part == 0) {
          Block::scale_weights(values, visible[0], scores[0], greatest);
          round(1, scores, greatest, codes, scale);
        }
#pragma unroll
        for (int strip = 0; strip < own_strips; strip++) {
          ValueSums products;
          Block::add_values(values, first_strip + strip, codes[0], products);
          add_sums(tile, part * own_strips + strip, products, scale, correction);
        }
      }
      if (is_chosen ? leaves_chunk(tile, next, last) : tile == last || (tile + 1) % chunk_blocks == 0)
        end_chunk(tile / chunk_blocks);
    }
    __syncthreads();
  }

  // Adds the products of a part of the channels, of the warp's own positions.
  __device__ void add_scores(const uint8_t* keys, int part, ScoreSums<own_columns>& sums) const {
    Block::add_scores(keys + first_column * 8 * Block::row_bytes, own_queries() + part * (head_dim / parts),
                      sums);
  }

  // All scores of the warp's pairs, of which each of the warps that share them has some. They take the place
  // of keys.
  __device__ void share_scores(uint8_t* keys, const ScoreSums<own_columns>& sums, PairFloats& scores) const {
    FloatsOfPairs<own_columns> found;
    Block::scale_scores(keys + first_column * 8 * Block::row_bytes, own.query_scale, sums, found);
    float4* const shared = reinterpret_cast<float4*>(keys) + warp / sharing * columns * warp_size + lane;
    __syncthreads();
#pragma unroll
    for (int n = 0; n < own_columns; n++)
      shared[(first_column + n) * warp_size] =
          make_float4(found[n][0], found[n][1], found[n][2], found[n][3]);
    __syncthreads();
#pragma unroll
    for (int n = 0; n < columns; n++) {
      const float4 four = shared[n * warp_size];
      scores[n][0] = four.x, scores[n][1] = four.y, scores[n][2] = four.z, scores[n][3] = four.w;
    }
  }

  // Begins the copies of a part of a tile's keys, or if `piece` is at least `parts` of its values.
  __device__ void load_piece(const RowRun& run, int tile, int piece) const {
    load(tiles + piece % places * Block::tile_bytes, piece < parts ? a.k_cache : a.v_cache, run, tile,
         piece % parts);
    commit_copies();
  }

  // Waits for a piece, behind which nobody reads the one before any more. With two places the next one is
  // copied meanwhile.
  __device__ uint8_t* take_piece(const RowRun& run, int tile, int piece, int next, int end) const {
    if (places == 1) {
      __syncthreads();
      load_piece(run, tile, piece);
    }
    wait_for_copies<0>();
    __syncthreads();
    if (places > 1) {
      const bool is_last = piece == 2 * parts - 1;
      if (!is_last || tile < end) load_piece(run, is_last ? next : tile, is_last ? 0 : piece + 1);
    }
    uint8_t* const taken = tiles + piece % places * Block::tile_bytes;
    unpack(taken);
    return taken;
  }

  // Tiles begin … last, which contain rows of a draft tree.
  __device__ void attend_drafts(const RowRun& run, int begin, int last) {
    for (int tile = begin; tile <= last; tile++) {
      const int num_tiles = run.last_tile(tile) - tile + 1;
      chosen.load(a, own.row, tile);
      PairFloats scores[most_tiles];
      uint32_t visible[most_tiles] = {};
      ForBoth<float> correction;
#pragma unroll
      for (int s = 0; s < most_tiles; s++) {
        if (s >= num_tiles) continue;
        if constexpr (sharing == 1) {
          bring(a.k_cache, run, tile + s);
          Block::find_scores(tiles, own_queries(), own.query_scale, scores[s]);
        } else {
          bring_scores(run, tile + s, scores[s]);
        }
        visible[s] = own.visible_in(tile, tile + s, run, drafts, chosen);
      }
      if constexpr (places == 1 || parts > 1) {
        weigh(run, tile, num_tiles, scores, visible, correction);
        add_values_in_turn(run, tile, num_tiles, scores, visible, correction);
      } else {
        __syncthreads();
        for (int s = 0; s < num_tiles; s++) load(tiles + s * Block::tile_bytes, a.v_cache, run, tile + s);
        commit_copies();
        weigh(run, tile, num_tiles, scores, visible, correction);
        wait_for_copies<0>();
        __syncthreads();
        for (int s = 0; s < num_tiles; s++) unpack(tiles + s * Block::tile_bytes);
        add_values(tiles, tile, num_tiles, scores, visible, correction);
      }
      if (tile == last || (tile + 1) % chunk_blocks == 0) end_chunk(tile / chunk_blocks);
    }
    __syncthreads();
  }

  // The scores of a tile where warps share pairs.
  __device__ void bring_scores(const RowRun& run, int tile, PairFloats& scores) {
    ScoreSums<own_columns> sums;
#pragma unroll 1
    for (int part = 0; part < parts; part++) {
      bring(a.k_cache, run, tile, part);
      add_scores(tiles, part, sums);
    }
    share_scores(tiles, sums, scores);
  }

  // Stores chunk number `chunk`, separately or merged into those before it, and begins the next.
  __device__ void end_chunk(int chunk) {
    const bool merges = a.max_chunks == 1;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      if (!chunks.has_begun[i]) continue;
      float ours, theirs;
      const bool adds = merges && has_any[i];
      const float2 own_chunk = make_float2(chunks.maximum[i], chunks.denominator[i]);
      all[i] = adds ? merge_chunk(all[i], own_chunk, ours, theirs) : own_chunk;
      has_any[i] = true;
      chunks.has_begun[i] = false;
      const bool exists = first_pair + 8 * i + g < Items::num_pairs(a);
      const int64_t pair = int64_t{own.row[i]} * a.num_heads + own.head[i];
      const int64_t place = place_of_chunk(a, pair, chunk, first_chunk_of(a, own.row[i]));
      float4* const to = reinterpret_cast<float4*>(a.values + place * head_dim) + 4 * first_strip + t;
      if (exists && adds) merge_into(to, i, ours, theirs);
#pragma unroll
      for (int strip = 0; strip < parts * own_strips; strip++) {
        float (&value)[4] = numerators[strip][i];
        if (exists) to[4 * strip_of_head(strip)] = make_float4(value[0], value[1], value[2], value[3]);
#pragma unroll
        for (int c = 0; c < 4; c++) value[c] = 0.0f;
      }
      if (exists && t == 0 && first_strip == 0) a.stats[place] = all[i];
    }
  }

  // Where the warp's strip number `strip` is, from its first one on.
  static __device__ constexpr int strip_of_head(int strip) {
    return strip / own_strips * Block::strips + strip % own_strips;
  }

  // Many loads at a time, to hide their latency.
  __device__ void merge_into(const float4* from, int i, float ours, float theirs) {
    constexpr int at_once = own_strips % 4 ? 2 : 4;
#pragma unroll
    for (int begin = 0; begin < parts * own_strips; begin += at_once) {
      float4 before[at_once];
#pragma unroll
      for (int s = 0; s < at_once; s++) before[s] = from[4 * strip_of_head(begin + s)];
#pragma unroll
      for (int s = 0; s < at_once; s++) {
        float (&value)[4] = numerators[begin + s][i];
        value[0] = __fmaf_rn(value[0], theirs, before[s].x * ours);
        value[1] = __fmaf_rn(value[1], theirs, before[s].y * ours);
        value[2] = __fmaf_rn(value[2], theirs, before[s].z * ours);
        value[3] = __fmaf_rn(value[3], theirs, before[s].w * ours);
      }
    }
  }

  // The rows of one sequence, if it is one.
  __device__ void attend_run(const RowRun& run) {
    int first, last;
    if (!Items::find_tiles(run, first, last)) return;
    if (has_trees && run.is_tree) {
      for (int i = threadIdx.x; i < run.num_kept - run.committed; i += threads)
        drafts[i] = a.rows.positions[run.start + i];
      __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const bool is_own = own.row[i] >= run.begin && own.row[i] < run.end;
      own.view[i] = is_own ? RowView(a.rows, run, own.row[i], a.window) : RowView();
    }
    const int end = has_trees && run.is_tree ? min(last, run.committed / block_positions - 1) : last;
    if (first <= end) {
      if constexpr (sharing == 1)
        attend_in_order(run, first, end, last);
      else
        attend_shared_in_order(run, first, end, last);
    }
    if (has_trees && end < last) attend_drafts(run, max(first, end + 1), last);
  }

  __device__ void run_item() {
    // An item whose rows have no positions leaves the copies of its queries under way.
    commit_copies();
    wait_for_copies<0>();
    __syncthreads();
    load_queries();
    chunks.begin();
    has_any[0] = has_any[1] = false;
#pragma unroll
    for (int strip = 0; strip < parts * own_strips; strip++) {
#pragma unroll
      for (int i = 0; i < 8; i++) numerators[strip][i / 4][i % 4] = 0.0f;
    }
    for (int begin = Items::first_row; begin < Items::last_row;) {
      const RowRun run(a.rows, begin, Items::last_row);
      attend_run(run);
      begin = run.end;
    }
  }

  __device__ void run() {
    while (Items::next()) run_item();
  }
};

// has_trees: whether there may be draft trees among the rows. places, parts and sharing: see PLACES,
// TILE_CODES and WARP_COLUMNS in cuda.py. is_chosen: whether rows see the blocks of `chosen` alone.
template <int bits, int head_dim, int warps, bool has_trees, int places, int parts, int sharing,
          bool is_chosen = false>
__global__ void __launch_bounds__((warp_size * warps)) attention_integers(const IntegersArguments a) {
  wait_for_previous_grid();
  release_next_grid();
  IntegerAttention<bits, head_dim, warps, has_trees, places, parts, sharing, is_chosen>(
      a, reinterpret_cast<uint8_t*>(dynamic_shared))
      .run();
}

}  // namespace coldstream
