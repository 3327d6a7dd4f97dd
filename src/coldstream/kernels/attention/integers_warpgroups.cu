// Attention over caches of two planes or one by warpgroups, which only sm_90 has: docs/arithmetic.md,
// Attention over integers.
//
// A block of threads takes some adjacent rows and a key/value head, as in integers.cu. Its first warpgroup
// copies tiles of 64 keys and values; each of the others takes 64 pairs of a row and a query head through the
// tensor cores.
#include "attention/integers_block.cuh"
#include "attention/integers_items.cuh"
#include "attention/integers_staging.cuh"

extern __shared__ float4 dynamic_shared[];

namespace coldstream {

constexpr int group_pairs = 64, threads_of_group = 128;

// A multiprocessor's registers, for a warpgroup that copies and two that multiply.
constexpr int copying_registers = 40, multiplying_registers = 232;

constexpr int no_chunk = 0x7fffffff;

// A warpgroup's 64 pairs, 16 a warp.
template <int bits, int head_dim, int groups, bool is_chosen>
struct MultiplyingGroup {
  using TileType = StagedTile<bits, head_dim>;
  static constexpr int planes = TileType::planes, query_chunks = 2 * head_dim / 16, steps = head_dim / 32;
  static constexpr int block_pairs = groups * group_pairs, query_bytes = block_pairs * 2 * head_dim;
  static constexpr int pairs_at = query_bytes + Staging<bits, head_dim>::bytes;
  static constexpr int shared_bytes = pairs_at + block_pairs * int(sizeof(int2));
  // Of eight keys or columns of values, that are multiplied at once. Two warpgroups have registers for more
  // columns than one, which keeps two sums of them.
  static constexpr int key_tiles = 4, value_tiles = groups == 2 ? 4 : 2;
  static constexpr int slices = head_dim / (8 * value_tiles);

  const IntegersArguments& a;
  uint8_t* const queries;  // [2, block_pairs, head_dim], swizzled
  // Numbers of the item's pairs in the batch, −1 beyond them, and their first chunks. Of a choice whose
  // chunks are merged the first one that a pair sees, no_chunk before there is one.
  int2* const kept_pairs;
  const Staging<bits, head_dim> from;
  const int group_number, warp, lane = threadIdx.x % warp_size, g = lane / 4, t = lane % 4;

  ForBoth<int> first, position;  // what the lane's pairs see of the run, if they are its
  ChosenTile<is_chosen> chosen;  // of the tile
  ForBoth<float> query_scale;
  PairChunk chunks;
  float numerators[head_dim / 8][4];  // of the chunk, column 8n + 2t + b of pair i at [n][2i + b]

  // Sums of products of both planes.
  template <int tiles>
  struct PlaneSums {
    int high[tiles][4], mixed[tiles][4];

    __device__ void take() {
      take_products(high);
      take_products(mixed);
    }
    __device__ float total(int n, int i) const { return float(low_unit * high[n][i] + mixed[n][i]); }
  };

  __device__ int64_t pair_of(const ItemPairs& item, int i) const {
    return item.pair_at(a, warp * pairs + 8 * i + g);
  }

  __device__ void begin_item(const ItemPairs& item) {
    meet_at<threads_of_group>(copying_barrier + 1 + group_number);
    for (int i = threadIdx.x % threads_of_group; i < group_pairs * query_chunks; i += threads_of_group) {
      const int pair = group_number * group_pairs + i / query_chunks, chunk = i % query_chunks;
      copy_async_16(queries + swizzled_place<block_pairs>(pair, chunk),
                    a.query + item.pair_at(a, pair) * 2 * head_dim + chunk * 16);
    }
    commit_copies();
    const int own = threadIdx.x % threads_of_group;
    if (own < group_pairs) {
      const int number = group_number * group_pairs + own, pair = int(item.pair_at(a, number));
      const int first_chunk =
          is_chosen && a.max_chunks == 1 ? no_chunk : first_chunk_of(a, pair / a.num_heads);
      kept_pairs[number] = {number < item.num_pairs(a) ? pair : -1, first_chunk};
    }
#pragma unroll
    for (int i = 0; i < 2; i++) query_scale[i] = a.query_scales[pair_of(item, i)] * (1.0f / low_unit);
    chunks.begin();
    clear();
    wait_for_copies<0>();
    see_copies();
    meet_at<threads_of_group>(copying_barrier + 1 + group_number);
  }

  __device__ void clear() {
#pragma unroll
    for (int n = 0; n < head_dim / 8; n++) {
#pragma unroll
      for (int i = 0; i < 4; i++) numerators[n][i] = 0.0f;
    }
  }

  __device__ void begin_run(const TileNote& note) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int row = int(pair_of(note.item, i) / a.num_heads);
      position[i] = row >= note.begin && row < note.end ? a.rows.positions[row] : -1;
      first[i] = first_position(position[i], a.window);
    }
  }

  // Whether pair i sees a position of a tile.
  __device__ bool meets(int i, int tile) const {
    if constexpr (is_chosen) {
      if (!chosen.meets(i)) return false;
    }
    return tile >= first[i] / block_positions && tile * block_positions <= position[i];
  }

  __device__ uint64_t part_of_queries(uint32_t own, int plane, int step) const {
    const int chunk = plane * head_dim / 16 + 2 * step;
    return describe_swizzled_from(own, chunk / 8 * block_pairs * swizzled_row_bytes + chunk % 8 * 16);
  }

  // Half of the keys at a time, as numerators leave too few registers for the sums of all.
  __device__ void find_scores(const uint8_t* staged, const float* scales, PairFloats& scores) const {
    const uint32_t keys = same_for_warp(shared_address(staged));
    const uint32_t own =
        same_for_warp(shared_address(queries) + group_number * group_pairs * swizzled_row_bytes);
#pragma unroll
    for (int begin = 0; begin < columns; begin += key_tiles) {
      PlaneSums<key_tiles> sums;
      begin_products();
#pragma unroll
      for (int step = 0; step < steps; step++) {
        const uint64_t high = part_of_queries(own, 0, step),
                       keys_high = TileType::part_of_keys(keys, 0, begin, step);
        multiply_shared_by_four(sums.high, high, keys_high, step > 0);
        multiply_shared_by_four(sums.mixed, part_of_queries(own, 1, step), keys_high, step > 0);
        if (planes == 2)
          multiply_shared_by_four(sums.mixed, high, TileType::part_of_keys(keys, 1, begin, step), true);
      }
      commit_products();
      wait_for_products<0>();
      sums.take();
#pragma unroll
      for (int n = 0; n < key_tiles; n++) {
        const float2 scale = *reinterpret_cast<const float2*>(scales + 8 * (begin + n) + 2 * t);
#pragma unroll
        for (int i = 0; i < 4; i++)
          scores[begin + n][i] = sums.total(n, i) * query_scale[i / 2] * (i % 2 ? scale.y : scale.x);
      }
    }
  }

  __device__ void weigh(int tile, uint32_t visible, PairFloats& scores, ForBoth<float>& correction) {
    ForBoth<float> best = {negative_infinity(), negative_infinity()}, after, total;
    raise_best(scores, visible, best);
#pragma unroll
    for (int i = 0; i < 2; i++) best[i] = greatest_of_pair(best[i]);
    chunks.raise(best, after, correction);
    weigh_scores(visible, after, scores);
    sum_in_order(scores, total);
#pragma unroll
    for (int i = 0; i < 2; i++) {
      if (meets(i, tile))
        chunks.add(i, total[i], after[i], correction[i]);
      else
        correction[i] = 1.0f;
    }
  }

  // Weights times the values' scales as codes, and what products of theirs are multiplied by: where there are
  // none, minus zero, which times their sum of zero leaves what it is added to, zeros of either sign too.
  __device__ void round(int tile, const float* scales, uint32_t visible, PairFloats& weights,
                        WeightCodes& codes, ForBoth<float>& unit) const {
    ForBoth<uint32_t> greatest = {};
#pragma unroll
    for (int n = 0; n < columns; n++) {
      const float2 scale = *reinterpret_cast<const float2*>(scales + 8 * n + 2 * t);
#pragma unroll
      for (int i = 0; i < 4; i++) weights[n][i] *= i % 2 ? scale.y : scale.x;
    }
    keep_seen(visible, weights, 0.0f);
#pragma unroll
    for (int n = 0; n < columns; n++) {
#pragma unroll
      for (int i = 0; i < 4; i++) greatest[i / 2] = max(greatest[i / 2], magnitude(weights[n][i]));
    }
    ForBoth<PlaneScale> by;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      by[i] = scale_of_codes<16>(greatest_of_pair(greatest[i]));
      unit[i] = meets(i, tile) ? by[i].scale * (1.0f / low_unit) : -0.0f;
    }
    round_weights(weights, by, codes);
  }

  // Multiplies the numerators by factors, which far into a text are nearly always 1.
  __device__ void correct(const ForBoth<float>& correction) {
    if (!__any_sync(all_lanes, correction[0] != 1.0f || correction[1] != 1.0f)) return;
#pragma unroll
    for (int n = 0; n < head_dim / 8; n++) {
#pragma unroll
      for (int i = 0; i < 4; i++) numerators[n][i] *= correction[i / 2];
    }
  }

  // Begins the products of a slice of columns.
  __device__ static void multiply(uint32_t values, int slice, const WeightCodes& codes,
                                  PlaneSums<value_tiles>& sums) {
    const int column = slice * 8 * value_tiles;
    begin_products();
#pragma unroll
    for (int step = 0; step < 2; step++) {
      const uint64_t high = TileType::part_of_values(values, 0, column, step);
      multiply_by_four<false>(sums.high, codes.high[step], high, step > 0);
      multiply_by_four<false>(sums.mixed, codes.low[step], high, step > 0);
      if (planes == 2)
        multiply_by_four<false>(sums.mixed, codes.high[step],
                                TileType::part_of_values(values, 1, column, step), true);
    }
    commit_products();
  }

  __device__ void add(int slice, const PlaneSums<value_tiles>& sums, const ForBoth<float>& unit) {
#pragma unroll
    for (int n = 0; n < value_tiles; n++) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        float& numerator = numerators[slice * value_tiles + n][i];
        numerator = __fmaf_rn(unit[i / 2], sums.total(n, i), numerator);
      }
    }
  }

  // A single warpgroup overlaps the products of a slice with the additions of the one before. Two warpgroups
  // overlap each other, and have no registers for it.
  __device__ void add_values(const uint8_t* staged, const WeightCodes& codes, const ForBoth<float>& unit) {
    constexpr int ahead = groups == 1 ? 1 : 0;
    const uint32_t values = same_for_warp(shared_address(staged));
    PlaneSums<value_tiles> sums[1 + ahead];
    if (ahead) multiply(values, 0, codes, sums[0]);
#pragma unroll
    for (int slice = 0; slice < slices; slice++) {
      const bool begins = slice + ahead < slices;
      if (begins) multiply(values, slice + ahead, codes, sums[(slice + ahead) % (1 + ahead)]);
      if (begins && ahead)
        wait_for_products<1>();
      else
        wait_for_products<0>();
      sums[slice % (1 + ahead)].take();
      add(slice, sums[slice % (1 + ahead)], unit);
    }
  }

  // Runs until there are no more tiles.
  __device__ void run() {
    for (int number = 0;; number++) {
      const int stage = number % stages;
      wait_barrier(from.full(stage), number / stages % 2);
      const TileNote& note = from.note(stage);
      if (note.tile < 0) return;
      if (note.begins_item) begin_item(note.item);
      if (note.begins_run) begin_run(note);
      if constexpr (is_chosen) load_chosen(note);
      attend(stage, note.tile);
      const int chunk = note.tile / chunk_blocks;
      const bool ends_chunk = note.ends_chunk;
      __syncwarp();
      if (lane == 0) arrive_barrier(from.empty(stage));
      if (ends_chunk) end_chunk(chunk);
    }
  }

  __device__ void load_chosen(const TileNote& note) {
    ForBoth<int> rows;
#pragma unroll
    for (int i = 0; i < 2; i++) rows[i] = int(pair_of(note.item, i) / a.num_heads);
    chosen.load(a, rows, note.tile);
  }

  __device__ void attend(int stage, int tile) {
    const float* const scales = from.scales(stage);
    PairFloats scores;
    WeightCodes codes;
    ForBoth<float> correction, unit;
    uint32_t visible = visible_in_order(tile, first, position);
    find_scores(from.keys(stage), scales, scores);
    if constexpr (is_chosen) visible = chosen.limit(1, chosen.limit(0, visible));
    weigh(tile, visible, scores, correction);
    round(tile, scales + block_positions, visible, scores, codes, unit);
    correct(correction);
    add_values(from.values(stage), codes, unit);
  }

  // Stores chunk number `chunk`, separately or merged into those before it, and begins the next.
  __device__ void end_chunk(int chunk) {
    const bool merges = a.max_chunks == 1;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int2 pair = kept_pairs[warp * pairs + 8 * i + g];
      const bool leaves = chunks.has_begun[i] && pair.x >= 0;
      const int64_t place = place_of_chunk(a, pair.x, chunk, pair.y);
      float2 stats = make_float2(chunks.maximum[i], chunks.denominator[i]);
      if (leaves) {
        float2* const to = reinterpret_cast<float2*>(a.values + place * head_dim) + t;
        if (merges && chunk > pair.y) {
          float ours, theirs;
          stats = merge_chunk(a.stats[place], stats, ours, theirs);
          merge(to, i, ours, theirs);
        } else {
          leave(to, i);
        }
      }
      __syncwarp();  // all lanes of a pair have read what one of them writes
      if (leaves && t == 0) a.stats[place] = stats;
      if (is_chosen && merges && leaves && t == 0 && pair.y == no_chunk)
        kept_pairs[warp * pairs + 8 * i + g].y = chunk;
      chunks.has_begun[i] = false;
    }
    clear();
  }

  __device__ void leave(float2* to, int i) const {
#pragma unroll
    for (int n = 0; n < head_dim / 8; n++)
      to[4 * n] = make_float2(numerators[n][2 * i], numerators[n][2 * i + 1]);
  }

  // Several loads at a time to hide latency, but not all, which would take the registers of numerators.
  __device__ void merge(float2* into, int i, float ours, float theirs) const {
    constexpr int at_once = 8;
#pragma unroll
    for (int begin = 0; begin < head_dim / 8; begin += at_once) {
      float2 before[at_once];
#pragma unroll
      for (int n = 0; n < at_once; n++) before[n] = into[4 * (begin + n)];
#pragma unroll
      for (int n = 0; n < at_once; n++) {
        const float first = numerators[begin + n][2 * i], second = numerators[begin + n][2 * i + 1];
        into[4 * (begin + n)] = make_float2(__fmaf_rn(first, theirs, before[n].x * ours),
                                            __fmaf_rn(second, theirs, before[n].y * ours));
      }
      asm volatile("" ::: "memory");
    }
  }
};

// is_chosen: whether rows see the blocks of `chosen` alone.
template <int bits, int head_dim, int groups, bool is_chosen = false>
__global__ void __launch_bounds__((threads_of_group * (groups + 1)), 1)
    attention_integers_warpgroups(const IntegersArguments a) {
  using Group = MultiplyingGroup<bits, head_dim, groups, is_chosen>;
  uint8_t* const shared = reinterpret_cast<uint8_t*>(dynamic_shared);
  const Staging<bits, head_dim> staged = {shared + Group::query_bytes};
  if (threadIdx.x == 0) {
    for (int i = 0; i < stages; i++) {
      init_barrier(staged.full(i), copying_threads);
      init_barrier(staged.empty(i), groups * threads_of_group / warp_size);
    }
  }
  __syncthreads();
  wait_for_previous_grid();
  release_next_grid();
  if (threadIdx.x < copying_threads) {
    if (groups == 2) give_registers<copying_registers>();
    TileCopier<bits, head_dim> copier = {staged, a.strides.position_bytes, int(threadIdx.x)};
    copier.template copy_all<Group::block_pairs, is_chosen>(a);
  } else {
    if (groups == 2) take_registers<multiplying_registers>();
    const int thread = threadIdx.x - copying_threads;
    Group multiplier = {a,
                        shared,
                        reinterpret_cast<int2*>(shared + Group::pairs_at),
                        staged,
                        thread / threads_of_group,
                        thread / warp_size};
    multiplier.run();
  }
}

}  // namespace coldstream
