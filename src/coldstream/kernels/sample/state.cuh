// What the blocks of a row keep in the device's memory, within a launch and between launches.
#pragma once

#include "sample/argmax.cuh"
#include "sample/row_blocks.cuh"

namespace coldstream {

constexpr int num_bins = block_items;
constexpr int list_capacity = block_items;  // as one block sorts a list
constexpr int most_tiles = block_items;     // of 2048 tokens, as one block adds up their weights
constexpr int num_histograms = 3;

struct Histogram {
  uint64_t weights[num_bins];
  uint32_t counts[num_bins];
};

// Zero at first. All but the arrays are zero between launches.
struct SamplerRow {
  ArgmaxRow argmax;  // of a launch that draws only the count
  RowCounts blocks;
  uint32_t num_listed[4];  // tokens of a list, by the first attempt and by the second; then by likelihood
  uint64_t total;          // weight of all tokens at temperature 1
  uint32_t num_before;     // tokens before the chosen one by the order
  Histogram histograms[num_histograms];
  uint64_t tile_keys[most_tiles];  // the least order key of each tile
  uint64_t numbers[block_items];   // order keys of listed tokens, or weights of tiles
};

}  // namespace coldstream
