// Attention over caches of an integer type, for decode: rows of chains of any sequences: docs/arithmetic.md,
// Attention over integers.
//
// A block of threads takes 16 pairs of a row and a query head with a chunk of 256 positions, in steps of one
// or two blocks of 64 positions (integers_decode_steps.cuh). Each warp computes the scores of 16 positions,
// and then the sums of values of some columns over all positions of the step, so that numerators stay in
// registers. The keys and values of the next step are copied meanwhile, if they have a tile each. Steps
// without a position that a row sees are left out. Maximum,
// denominator and numerators of a chunk go to a workspace for the merge.
#include "attention/integers_block.cuh"
#include "attention/integers_decode_steps.cuh"

extern __shared__ float4 dynamic_shared[];

namespace coldstream {

// What the blocks of a chunk so far have left of a pair.
struct PairProgress {
  float maximum, denominator;
  bool has_begun, has_total;

  // Takes in a block's greatest score; returns the factor of what was before.
  __device__ __forceinline__ float raise(float best) {
    const float after = has_begun ? fmaxf(maximum, best) : best;
    const float correction = has_begun ? exact_exp(maximum - after) : 1.0f;
    maximum = after;
    has_begun = true;
    return correction;
  }

  __device__ __forceinline__ void add_total(float correction, float total) {
    denominator = has_total ? __fmaf_rn(denominator, correction, total) : total;
    has_total = true;
  }
};

// blocks: of 64 positions, in a step. halves: 1 if there are at most eight pairs, so that no lane has a
// second one. places: 1 if keys and values have the same place in turn. is_chosen: whether rows see the
// blocks of `chosen` alone.
template <int bits, int head_dim, int blocks, int halves, int places, bool is_chosen>
struct DecodeAttention {
  using KeptRow = CacheRow<bits, head_dim>;
  using Block = PairBlock<KeptRow::planes, head_dim>;
  using Memory = DecodeMemory<bits, head_dim, blocks, places>;
  static constexpr int warps = Memory::warps,
                       parts = warps / blocks;         // warps that share the scores of a block
  static constexpr int own_columns = columns / parts;  // times eight positions, of a warp
  static constexpr int own_strips = (Block::strips + warps - 1) / warps;

  const IntegersArguments& a;
  const Memory shared;
  // Said to be the same in a warp: otherwise the compiler would not let a warp stay together behind a
  // conditional branch on it.
  const int warp = __shfl_sync(all_lanes, int(threadIdx.x / warp_size), 0);
  const int lane = threadIdx.x % warp_size, g = lane / 4, t = lane % 4;
  const int own_block = warp / parts, first_column = warp % parts * own_columns;
  ForBoth<int> first, position;  // what the lane's pairs see of the run, if they are its
  ForBoth<int> rows;
  // With a choice: which blocks of an indexer the lane's pairs see, of which a tile has at most 16.
  static constexpr int bits_of_block = 16, all_of_block = 0xffff;
  ForBoth<uint32_t> chosen;
  ForBoth<float> query_scale;
  PairProgress progress[2];
  float numerators[own_strips][2][4];  // column 16 · strip + 4t + c of pair g + 8i

  __device__ DecodeAttention(const IntegersArguments& arguments, uint8_t* bytes)
      : a(arguments), shared{bytes} {}

  __device__ void begin_run(const DecodeStep& step) {
#pragma unroll
    for (int i = 0; i < halves; i++) {
      const int pair = int(step.pair_at(a, 8 * i + g)), row = pair / a.num_heads;
      query_scale[i] = a.query_scales[pair] * (1.0f / low_unit);
      rows[i] = row;
      position[i] = row >= step.run.begin && row < step.run.end ? a.rows.positions[row] : -1;
      first[i] = first_position(position[i], a.window);
      progress[i] = {};
    }
#pragma unroll
    for (int strip = 0; strip < own_strips; strip++) {
#pragma unroll
      for (int i = 0; i < 4 * halves; i++) numerators[strip][i / 4][i % 4] = 0.0f;
    }
  }

  // Which of the warp's positions the lane's pairs see.
  __device__ uint32_t visible_in(const DecodeStep& step) const {
    const int begin = (step.tile + own_block) * block_positions + 8 * first_column + 2 * t;
    uint32_t visible = 0;
#pragma unroll
    for (int n = 0; n < own_columns; n++) {
#pragma unroll
      for (int i = 0; i < 2 * halves; i++) {
        const int at = begin + 8 * n + i % 2;
        if (first[i / 2] <= at && at <= position[i / 2]) visible |= 1u << (4 * n + i);
      }
    }
    if constexpr (is_chosen) {
      ChosenTile<true> own = {{}, a.chosen.block_shift};
#pragma unroll
      for (int i = 0; i < halves; i++) {
        own.blocks[i] = chosen[i] >> bits_of_block * own_block;
        visible = own.limit(i, visible, first_column);
      }
    }
    return visible;
  }

  __device__ void load_chosen(const DecodeStep& step) {
#pragma unroll
    for (int i = 0; i < halves; i++) {
      chosen[i] = 0;
#pragma unroll
      for (int b = 0; b < blocks; b++)
        chosen[i] |= chosen_in(a.chosen, rows[i], step.tile + b) << bits_of_block * b;
    }
  }

  // Whether a row sees positions in block b of the step.
  __device__ static bool has(const DecodeStep& step, int b) {
    return step.has(b) && (!is_chosen || step.seen >> (step.tile + b) % chunk_blocks & 1);
  }

  // Computes the scores of the warp's positions, and writes the greatest of each pair to shared memory.
  __device__ void find_scores(const DecodeStep& step, uint32_t& visible,
                              FloatsOfPairs<own_columns>& scores) const {
    ForBoth<float> best = {negative_infinity(), negative_infinity()};
    if (has(step, own_block)) {
      Block::template find_scores<halves>(shared.key(own_block, 8 * first_column), shared.queries(),
                                          query_scale, scores);
      visible = visible_in(step);
      raise_best<halves>(scores, visible, best);
    }
#pragma unroll
    for (int i = 0; i < halves; i++) {
      best[i] = greatest_of_pair(best[i]);
      if (t == 0) shared.best(warp, 8 * i + g) = best[i];
    }
  }

  // Finds the correction factor of each of the step's blocks, and the running maximum of the warp's block.
  __device__ void raise(const DecodeStep& step, ForBoth<float> (&corrections)[blocks],
                        ForBoth<float>& maximum) {
#pragma unroll
    for (int i = 0; i < halves; i++) {
      maximum[i] = 0.0f;
#pragma unroll
      for (int b = 0; b < blocks; b++) {
        corrections[b][i] = 1.0f;
        if (!meets(step, b, i)) continue;
        float best = negative_infinity();
#pragma unroll
        for (int part = 0; part < parts; part++) best = fmaxf(best, shared.best(b * parts + part, 8 * i + g));
        corrections[b][i] = progress[i].raise(best);
        if (b == own_block) maximum[i] = progress[i].maximum;
      }
    }
  }

  // Whether the lane's pair i has positions in block b of the step.
  __device__ bool meets(const DecodeStep& step, int b, int i) const {
    const int begin = (step.tile + b) * block_positions;
    if constexpr (is_chosen) {
      if (!(chosen[i] >> bits_of_block * b & all_of_block)) return false;
    }
    return has(step, b) && begin + block_positions > first[i] && begin <= position[i];
  }

  // Turns scores into weights, writes them to shared memory for their sum, and multiplies them by the values'
  // scales.
  __device__ void weigh(const DecodeStep& step, uint32_t visible, const ForBoth<float>& maximum,
                        FloatsOfPairs<own_columns>& scores) const {
    ForBoth<uint32_t> greatest = {};
    if (has(step, own_block)) {
      weigh_scores<halves>(visible, maximum, scores);
#pragma unroll
      for (int n = 0; n < own_columns; n++)
        shared.weights(own_block, first_column + n)[lane] =
            halves == 1 ? make_float4(scores[n][0], scores[n][1], 0.0f, 0.0f)
                        : make_float4(scores[n][0], scores[n][1], scores[n][2], scores[n][3]);
      Block::template scale_weights<halves>(shared.value(own_block, 8 * first_column), visible, scores,
                                            greatest);
    }
#pragma unroll
    for (int i = 0; i < halves; i++) {
      greatest[i] = greatest_of_pair(greatest[i]);
      if (t == 0) shared.greatest(warp, 8 * i + g) = greatest[i];
    }
  }

  // The scale of a block's weights, of the lane's pair i.
  __device__ PlaneScale scale_of(int b, int i) const {
    uint32_t greatest = 0;
#pragma unroll
    for (int part = 0; part < parts; part++)
      greatest = max(greatest, shared.greatest(b * parts + part, 8 * i + g));
    return scale_of_codes<16>(greatest);
  }

  // Rounds the warp's weights to codes. The first warp of a block of positions also sums the weights of that
  // block, and leaves their scale.
  __device__ void round(const DecodeStep& step, const FloatsOfPairs<own_columns>& weights) const {
    if (!has(step, own_block)) return;
    ForBoth<PlaneScale> by;
#pragma unroll
    for (int i = 0; i < halves; i++) by[i] = scale_of(own_block, i);
#pragma unroll
    for (int n = 0; n < own_columns; n += 2) {
      uint2 high = {}, low = {};
      round_word(weights[n], weights[n + 1], 0, by[0], high.x, low.x);
      if (halves == 2) round_word(weights[n], weights[n + 1], 1, by[1], high.y, low.y);
      const int half = (first_column + n) / 4, words = (first_column + n) % 4 / 2;
      reinterpret_cast<uint2*>(shared.codes(own_block, half, 0) + lane)[words] = high;
      reinterpret_cast<uint2*>(shared.codes(own_block, half, 1) + lane)[words] = low;
    }
    if (first_column > 0) return;
    PairFloats all;
#pragma unroll
    for (int n = 0; n < columns; n++) {
      const float4 four = shared.weights(own_block, n)[lane];
      all[n][0] = four.x, all[n][1] = four.y, all[n][2] = four.z, all[n][3] = four.w;
    }
    ForBoth<float> total;
    sum_in_order<halves>(all, total);
#pragma unroll
    for (int i = 0; i < halves; i++) {
      if (t != 0) continue;
      shared.total(own_block, 8 * i + g) = total[i];
      shared.scale(own_block, 8 * i + g) = by[i].scale * (1.0f / low_unit);
    }
  }

  __device__ static void unpack_codes(const uint4& four, uint32_t (&words)[4]) {
    words[0] = four.x, words[1] = four.y, words[2] = four.z, words[3] = four.w;
  }

  // Adds the products of weights and the warp's columns of values to the numerators, and the sums of weights
  // to the denominators, block by block.
  __device__ void add_values(const DecodeStep& step, const ForBoth<float> (&corrections)[blocks]) {
#pragma unroll
    for (int b = 0; b < blocks; b++) {
      if (!has(step, b)) continue;
      WeightCodes codes;
#pragma unroll
      for (int half = 0; half < 2; half++) {
        unpack_codes(shared.codes(b, half, 0)[lane], codes.high[half]);
        unpack_codes(shared.codes(b, half, 1)[lane], codes.low[half]);
      }
      ForBoth<float> scale;
      ForBoth<bool> is_met;
#pragma unroll
      for (int i = 0; i < halves; i++) {
        scale[i] = shared.scale(b, 8 * i + g);
        is_met[i] = meets(step, b, i);
      }
#pragma unroll
      for (int k = 0; k < own_strips; k++) {
        const int strip = warp + warps * k;
        if (strip >= Block::strips) continue;
        ValueSums sums;
        Block::add_values(shared.value(b, 0), strip, codes, sums);
#pragma unroll
        for (int i = 0; i < halves; i++) {
          if (!is_met[i]) continue;
#pragma unroll
          for (int c = 0; c < 4; c++)
            numerators[k][i][c] =
                __fmaf_rn(scale[i], sums.sum(i, c), numerators[k][i][c] * corrections[b][i]);
        }
      }
#pragma unroll
      for (int i = 0; i < halves; i++) {
        if (is_met[i]) progress[i].add_total(corrections[b][i], shared.total(b, 8 * i + g));
      }
    }
  }

  // Stores the chunk's maximum, denominator and numerators of the run's pairs.
  __device__ void leave(const DecodeStep& step) const {
#pragma unroll
    for (int i = 0; i < halves; i++) {
      const int pair = int(step.pair_at(a, 8 * i + g)), row = pair / a.num_heads;
      if (!step.is_pair(a, 8 * i + g) || row < step.run.begin || row >= step.run.end ||
          !progress[i].has_begun)
        continue;
      const int64_t place = step.place_of(a, pair);
      float4* const to = reinterpret_cast<float4*>(a.values + place * head_dim);
#pragma unroll
      for (int k = 0; k < own_strips; k++) {
        const int strip = warp + warps * k;
        const float (&of)[4] = numerators[k][i];
        if (strip < Block::strips) to[4 * strip + t] = make_float4(of[0], of[1], of[2], of[3]);
      }
      if (warp == 0 && t == 0) a.stats[place] = make_float2(progress[i].maximum, progress[i].denominator);
    }
  }

  // And the queries of its item, with its first.
  __device__ void load_keys(const DecodeSteps<blocks, is_chosen>& step) const {
    if (step.begins_item) shared.load_queries(a, step);
    shared.load_keys(a, step);
  }

  // Each barrier separates writes to shared memory from reads by other warps: copied keys from scores, scores
  // from the copies of the next keys and from maxima, weights from codes, codes from sums of values, and
  // those from the next copies.
  __device__ void attend() {
    DecodeSteps<blocks, is_chosen> steps(a);
    DecodeStep now;
    bool has_now = false;
    while (true) {
      const bool has_next = steps.next();
      FloatsOfPairs<own_columns> scores;
      uint32_t visible = 0;
      if (has_now) {
        if (now.begins_run) begin_run(now);
        if constexpr (is_chosen) load_chosen(now);
        wait_for_copies<places - 1>();
        __syncthreads();
        shared.unpack(shared.keys());
        find_scores(now, visible, scores);
        if constexpr (places == 1) {
          __syncthreads();
          shared.load_values(a, now);
        }
        wait_for_copies<0>();
        __syncthreads();
      } else {
        wait_for_previous_grid();
        release_next_grid();
      }
      if (places == 2 && has_next) load_keys(steps);
      if (has_now) {
        shared.unpack(shared.values());
        ForBoth<float> corrections[blocks], maximum;
        raise(now, corrections, maximum);
        weigh(now, visible, maximum, scores);
        __syncthreads();
        round(now, scores);
        __syncthreads();
        add_values(now, corrections);
        if (now.ends_run) leave(now);
        __syncthreads();
      }
      if (!has_next) return;
      if constexpr (places == 2)
        shared.load_values(a, steps);
      else
        load_keys(steps);
      now = steps;
      has_now = true;
    }
  }
};

// Rows of draft trees are not supported. Positions and tables were written before the previous launch began,
// so that the first step may be found before that launch has ended.
template <int bits, int head_dim, int blocks, int halves, int places, bool is_chosen = false>
__global__ void __launch_bounds__(DecodeMemory<bits, head_dim, blocks, places>::threads, 1)
    attention_integers_decode(const IntegersArguments a) {
  DecodeAttention<bits, head_dim, blocks, halves, places, is_chosen>(
      a, reinterpret_cast<uint8_t*>(dynamic_shared))
      .attend();
}

}  // namespace coldstream
