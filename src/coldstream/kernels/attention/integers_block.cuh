// A warp's 16 pairs of a row and a query head, and a block of 64 keys or values in shared memory: both
// products, and the weights between them. Lane 4g + t has pairs g and g + 8, and of each the positions 8n +
// 2t and the next one.
#pragma once

#include "attention/integers_arguments.cuh"
#include "attention/integers_pairs.cuh"
#include "attention/integers_tile.cuh"
#include "cuda/tensor_cores.cuh"

namespace coldstream {

constexpr int columns = block_positions / 8;

// A number for each of the lane's two pairs and each of its positions in `count` times eight: [n][2 · pair +
// position].
template <int count>
using FloatsOfPairs = float[count][4];
using PairFloats = FloatsOfPairs<columns>;

// In what follows `halves` is 1 where only the lane's first pair is wanted: what belongs to its second one is
// not touched.

// A bit for each of them.
template <int count, int halves = 2>
constexpr uint32_t all_positions =
    (halves == 1 ? 0x33333333u : 0xffffffffu) & 0xffffffffu >> (32 - 4 * count);

// Which of them a pair sees, a bit each.
__device__ __forceinline__ bool is_seen(uint32_t visible, int n, int i) { return visible >> (4 * n + i) & 1; }

// The blocks of a tile that the lane's pairs see. Without a choice that is all of them.
template <bool is_chosen>
struct ChosenTile {
  __device__ __forceinline__ void load(const IntegersArguments&, const ForBoth<int>&, int) {}
  __device__ __forceinline__ uint32_t limit(int, uint32_t visible) const { return visible; }
};

template <>
struct ChosenTile<true> {
  ForBoth<uint32_t> blocks;  // a bit each
  int shift;

  __device__ __forceinline__ void load(const IntegersArguments& a, const ForBoth<int>& row, int tile) {
    shift = a.chosen.block_shift;
#pragma unroll
    for (int i = 0; i < 2; i++) blocks[i] = chosen_in(a.chosen, row[i], tile);
  }

  __device__ __forceinline__ bool meets(int i) const { return blocks[i] != 0; }

  // Whether pair i sees a position of the tile; any bit for one that is negative.
  __device__ __forceinline__ bool has(int i, int position) const {
    return blocks[i] >> ((position & (block_positions - 1)) >> shift) & 1;
  }

  // Those bits of keys in their order that pair i sees, from column number `first` on. A lane's positions
  // next to each other are in one block.
  __device__ __forceinline__ uint32_t limit(int i, uint32_t visible, int first = 0) const {
#pragma unroll
    for (int n = 0; n < columns; n++) {
      if (!has(i, 8 * (first + n) + 2 * (int(threadIdx.x) % 4))) visible &= ~(3u << (4 * n + 2 * i));
    }
    return visible;
  }
};

// The lane's pairs: their rows, and the positions that these see.
struct LanePairs {
  ForBoth<int> row, head;
  ForBoth<RowView> view;
  ForBoth<float> query_scale;

  // Which of a tile's keys, kept at the indices of tile `kept_in`, are at positions of `tile` that the pairs
  // see; chosen: of the tile.
  template <bool is_chosen>
  __device__ uint32_t visible_in(int tile, int kept_in, const RowRun& run, const int32_t* drafts,
                                 const ChosenTile<is_chosen>& chosen) const {
    uint32_t visible = 0;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const uint32_t bits = 0x33333333u << 2 * i;
      if (kept_in == tile && run.is_committed(tile) && view[i].covers(tile)) {
        visible |= chosen.limit(i, bits);
        continue;
      }
      if (!view[i].meets(tile)) continue;
      const int t = threadIdx.x % 4;
#pragma unroll
      for (int n = 0; n < columns; n++) {
#pragma unroll
        for (int b = 0; b < 2; b++) {
          const int index = kept_in * block_positions + 8 * n + 2 * t + b;
          const int position = view[i].position_in(tile, index, run, drafts);
          if constexpr (is_chosen) {
            if (!chosen.has(i, position)) continue;
          }
          if (position >= 0) visible |= 1u << (4 * n + 2 * i + b);
        }
      }
    }
    return visible;
  }
};

// Sets values of positions that pairs do not see to `other`. Separate from the computation on all values,
// which would otherwise be serialised by conditional branches.
template <int halves = 2, int count>
__device__ __forceinline__ void keep_seen(uint32_t visible, float (&numbers)[count][4], float other) {
  constexpr uint32_t all = all_positions<count, halves>;
  if ((visible & all) == all) return;
#pragma unroll
  for (int n = 0; n < count; n++) {
#pragma unroll
    for (int i = 0; i < 2 * halves; i++) numbers[n][i] = is_seen(visible, n, i) ? numbers[n][i] : other;
  }
}

// Which keys of a tile in their order the lane's pairs see, which have a position from the first to their
// own.
__device__ __forceinline__ uint32_t visible_in_order(int tile, const ForBoth<int>& first,
                                                     const ForBoth<int>& position) {
  uint32_t visible = 0;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int begin = tile * block_positions;
    if (first[i] <= begin && position[i] >= begin + block_positions - 1) {
      visible |= 0x33333333u << 2 * i;
      continue;
    }
#pragma unroll
    for (int n = 0; n < columns; n++) {
#pragma unroll
      for (int b = 0; b < 2; b++) {
        const int at = begin + 8 * n + 2 * (int(threadIdx.x) % 4) + b;
        if (first[i] <= at && at <= position[i]) visible |= 1u << (4 * n + 2 * i + b);
      }
    }
  }
  return visible;
}

// Weights times the values' scales as two planes of codes, as the tensor cores want them: keys 32s + 2t, 32s
// + 2t + 1, 32s + 8 + 2t and 32s + 9 + 2t are bytes of one word, and those 16 further of another.
struct WeightCodes {
  uint32_t high[2][4], low[2][4];
};

// A code and 128 added to this are exact, so that rounding is that of the sum, to even.
constexpr float code_rounding = 12582912.0f + low_unit / 2;

// The codes of a pair's four positions in two consecutive groups of eight, as a word of each plane. Codes of
// numbers that are not finite are arbitrary, as the scale is NaN. If the scale is 0, so are factor and codes.
__device__ __forceinline__ void round_word(const float (&first_eight)[4], const float (&second_eight)[4],
                                           int pair, const PlaneScale& by, uint32_t& high, uint32_t& low) {
  uint32_t codes[4];  // bytes 0 and 1 are those of a code and 128
#pragma unroll
  for (int byte = 0; byte < 4; byte++) {
    const float scaled = (byte < 2 ? first_eight : second_eight)[2 * pair + byte % 2];
    codes[byte] = __float_as_uint(scaled * by.factor + code_rounding);
  }
  const uint32_t first = __byte_perm(codes[0], codes[1], 0x5140),
                 second = __byte_perm(codes[2], codes[3], 0x5140);
  low = __byte_perm(first, second, 0x5410) ^ 0x80808080u;
  high = __byte_perm(first, second, 0x7632);
}

// Words 0 and 2 of a half of the tile are of pair g, 1 and 3 of pair g + 8.
__device__ __forceinline__ void round_weights(const PairFloats& scaled, const ForBoth<PlaneScale>& by,
                                              WeightCodes& out) {
#pragma unroll
  for (int word = 0; word < 8; word++) {
    const int pair = word % 2, n = 4 * (word / 4) + word % 4 / 2 * 2;
    round_word(scaled[n], scaled[n + 1], pair, by[pair], out.high[word / 4][word % 4],
               out.low[word / 4][word % 4]);
  }
}

// Products of 16 columns of values, at [parity of the column][2 · pair + k]: column 4t + 2k + parity.
struct ValueSums {
  int high[2][4] = {}, mixed[2][4] = {};

  // Column 4t + c of the strip for pair i.
  __device__ float sum(int i, int c) const {
    return float(low_unit * high[c % 2][2 * i + c / 2] + mixed[c % 2][2 * i + c / 2]);
  }
};

// Sums of products of a pair's queries and keys, at [n][2 · pair + position].
template <int count>
struct ScoreSums {
  int high[count][4] = {}, mixed[count][4] = {};
};

// channels: of a head, that a tile has.
template <int planes, int channels, int head_dim = channels>
struct PairBlock {
  static constexpr int row_bytes = planes * channels + scale_bytes_of_row;
  static constexpr int tile_bytes = block_positions * row_bytes;
  static constexpr int query_bytes = 2 * head_dim + 16;  // a pair's, with a gap so that eight meet all banks
  static constexpr int steps = channels / 32, strips = channels / 16;
  static_assert(channels % 32 == 0 && head_dim % channels == 0 && row_bytes % 16 == 0);

  static __device__ int lane() { return threadIdx.x % warp_size; }

  static __device__ const uint8_t* row_of(const uint8_t* tile, int n, int i) {
    return tile + (8 * n + 2 * (threadIdx.x % 4) + i % 2) * row_bytes;
  }

  // keys: [8 · count, row_bytes]; queries: [16, query_bytes], the warp's.
  template <int halves = 2, int count>
  static __device__ void find_scores(const uint8_t* keys, const uint8_t* queries,
                                     const ForBoth<float>& query_scale, float (&scores)[count][4]) {
    ScoreSums<count> sums;
    add_scores(keys, queries, sums);
    scale_scores<halves>(keys, query_scale, sums, scores);
  }

  // Adds the products of the tile's channels; queries: of the first of them.
  template <int count>
  static __device__ void add_scores(const uint8_t* keys, const uint8_t* queries, ScoreSums<count>& sums) {
    auto& high = sums.high;
    auto& mixed = sums.mixed;
    const uint32_t query = shared_address(queries) + lane() % 16 * query_bytes + lane() / 16 * 16;
    const uint32_t key = shared_address(keys) + lane() % 8 * row_bytes + lane() / 8 * 16;
#pragma unroll
    for (int step = 0; step + 1 < steps; step += 2) {
      uint32_t query_high[2][4], query_low[2][4];
#pragma unroll
      for (int k = 0; k < 2; k++) {
        load_matrices(query_high[k], query + 32 * (step + k));
        load_matrices(query_low[k], query + head_dim + 32 * (step + k));
      }
#pragma unroll
      for (int n = 0; n < count; n++) {
        uint32_t words[4];
        load_matrices(words, key + 8 * n * row_bytes + 32 * step);
#pragma unroll
        for (int k = 0; k < 2; k++) {
          add_product(high[n], query_high[k], words[2 * k], words[2 * k + 1]);
          add_product(mixed[n], query_low[k], words[2 * k], words[2 * k + 1]);
        }
        if (planes == 1) continue;
        load_matrices(words, key + channels + 8 * n * row_bytes + 32 * step);
#pragma unroll
        for (int k = 0; k < 2; k++) add_product(mixed[n], query_high[k], words[2 * k], words[2 * k + 1]);
      }
    }
    if (steps % 2) {
      constexpr int step = steps - 1;
      uint32_t query_high[4], query_low[4];
      load_matrices(query_high, query + 32 * step);
      load_matrices(query_low, query + head_dim + 32 * step);
      const uint32_t last_key =
          shared_address(keys) + lane() % 8 * row_bytes + lane() / 8 % 2 * 16 + 32 * step;
#pragma unroll
      for (int n = 0; n < count; n++) {
        uint32_t words[2];
        load_two_matrices(words, last_key + 8 * n * row_bytes);
        add_product(high[n], query_high, words[0], words[1]);
        add_product(mixed[n], query_low, words[0], words[1]);
        if (planes == 1) continue;
        load_two_matrices(words, last_key + channels + 8 * n * row_bytes);
        add_product(mixed[n], query_high, words[0], words[1]);
      }
    }
  }

  // The sums of all channels become scores.
  template <int halves = 2, int count>
  static __device__ void scale_scores(const uint8_t* keys, const ForBoth<float>& query_scale,
                                      const ScoreSums<count>& sums, float (&scores)[count][4]) {
#pragma unroll
    for (int n = 0; n < count; n++) {
#pragma unroll
      for (int b = 0; b < 2; b++) {
        const float scale = scale_of_row<row_bytes>(row_of(keys, n, b));
#pragma unroll
        for (int i = 0; i < halves; i++) {
          const int at = 2 * i + b;
          scores[n][at] = float(low_unit * sums.high[n][at] + sums.mixed[n][at]) * query_scale[i] * scale;
        }
      }
    }
  }

  // Multiplies weights by the values' scales, and updates the greatest magnitudes of the lane's pairs.
  // values: [8 · count, row_bytes].
  template <int halves = 2, int count>
  static __device__ void scale_weights(const uint8_t* values, uint32_t visible, float (&weights)[count][4],
                                       ForBoth<uint32_t>& greatest) {
#pragma unroll
    for (int n = 0; n < count; n++) {
#pragma unroll
      for (int b = 0; b < 2; b++) {
        const float scale = scale_of_row<row_bytes>(row_of(values, n, b));
#pragma unroll
        for (int i = 0; i < halves; i++) {
          float& weight = weights[n][2 * i + b];
          weight *= scale;
        }
      }
    }
    keep_seen<halves>(visible, weights, 0.0f);
#pragma unroll
    for (int n = 0; n < count; n++) {
#pragma unroll
      for (int i = 0; i < 2 * halves; i++) greatest[i / 2] = max(greatest[i / 2], magnitude(weights[n][i]));
    }
  }

  // Adds the products of columns 16 · strip … 16 · strip + 15.
  static __device__ void add_values(const uint8_t* values, int strip, const WeightCodes& weights,
                                    ValueSums& sums) {
    const uint32_t from = shared_address(values) + lane() * row_bytes + 16 * strip;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      uint32_t pairs_of_bytes[4];
      load_transposed_pairs(pairs_of_bytes, from + 32 * half * row_bytes);
#pragma unroll
      for (int parity = 0; parity < 2; parity++) {
        const uint32_t first = column_of(pairs_of_bytes[0], pairs_of_bytes[1], parity);
        const uint32_t second = column_of(pairs_of_bytes[2], pairs_of_bytes[3], parity);
        add_product(sums.high[parity], weights.high[half], first, second);
        add_product(sums.mixed[parity], weights.low[half], first, second);
      }
      if (planes == 1) continue;
      load_transposed_pairs(pairs_of_bytes, from + channels + 32 * half * row_bytes);
#pragma unroll
      for (int parity = 0; parity < 2; parity++) {
        const uint32_t first = column_of(pairs_of_bytes[0], pairs_of_bytes[1], parity);
        const uint32_t second = column_of(pairs_of_bytes[2], pairs_of_bytes[3], parity);
        add_product(sums.mixed[parity], weights.high[half], first, second);
      }
    }
  }

  static __device__ uint32_t column_of(uint32_t first, uint32_t second, int parity) {
    return __byte_perm(first, second, parity ? 0x7531 : 0x6420);
  }
};

// The greatest of the visible scores of the lane's pairs, −∞ without any; others become −∞.
template <int halves = 2, int count>
__device__ __forceinline__ void raise_best(float (&scores)[count][4], uint32_t visible,
                                           ForBoth<float>& best) {
  keep_seen<halves>(visible, scores, negative_infinity());
#pragma unroll
  for (int n = 0; n < count; n++) {
#pragma unroll
    for (int i = 0; i < 2 * halves; i++) best[i / 2] = fmaxf(best[i / 2], scores[n][i]);
  }
}

// Scores become weights.
template <int halves = 2, int count>
__device__ __forceinline__ void weigh_scores(uint32_t visible, const ForBoth<float>& maximum,
                                             float (&scores)[count][4]) {
#pragma unroll
  for (int n = 0; n < count; n++) {
#pragma unroll
    for (int i = 0; i < 2 * halves; i++) scores[n][i] = exact_exp(scores[n][i] - maximum[i / 2]);
  }
  keep_seen<halves>(visible, scores, 0.0f);
}

}  // namespace coldstream
