// The part of products with many activation rows that all vector tiers share.
//
// Weights are taken 32 rows at a time. For each activation group their blocks are unpacked once into a panel
// that stays in the first-level cache, and multiplied with every tile of 16 activation rows; lanes of a
// register are activation rows. The eight accumulators of the arithmetic lie in memory, as
// [tile][accumulator][weight row][activation row].
#pragma once

#include <algorithm>
#include <cstring>

#include "quant/kernels.h"
#include "quant/traits.h"

namespace coldstream {

inline constexpr int panel_rows = 32;
// Blocks of so many rows are streams too many for the hardware's prefetching, which sees a row's next block
// only when all others have been read.
inline constexpr int64_t prefetch_groups = 2;

struct Accumulators {
  float lane[8][panel_rows][tile_rows];
};

static inline __attribute__((always_inline)) void prefetch_bytes(const uint8_t* from, size_t count) {
  for (size_t i = 0; i < count; i += 64) __builtin_prefetch(from + i, 0, 2);
}

// The bytes of a group of a weight row.
template <QuantType Q>
inline constexpr size_t group_bytes =
    group_elements / Traits<Q>::block_inputs * sizeof(typename Traits<Q>::Block);

// What is prefetched while a group of a panel's rows is multiplied, a share with each row. All at once would
// be more loads than a core has under way, and would wait for memory while nothing is computed.
struct WeightsAhead {
  const uint8_t* of_rows;  // of the first panel: a later group of its rows; null otherwise
  int64_t row_bytes;
  const uint8_t* of_next;  // a share of the next panel, which lies behind this one; null if there is none

  template <QuantType Q>
  inline __attribute__((always_inline)) void prefetch(int row, int count) const {
    for (int i = row; of_rows != nullptr && i < row + count; i++)
      prefetch_bytes(of_rows + i * row_bytes, group_bytes<Q>);
    if (of_next != nullptr)
      prefetch_bytes(of_next + static_cast<size_t>(row) * group_bytes<Q>,
                     static_cast<size_t>(count) * group_bytes<Q>);
  }
};

// Rows that are not padding; these come first.
static inline int present_rows(float* const* out, int num_rows) {
  while (num_rows > 0 && out[num_rows - 1] == nullptr) num_rows--;
  return num_rows;
}

// `kernel` has a panel type, load(panel, row, blocks) for one weight row of one group, clear(panel, row),
// multiply(panel, x, stride, num_rows, g, num_blocks, p), which adds group g of all tiles to p, of which
// types of small blocks have `num_blocks` of 32 inputs, and store(p, num_lanes, rows, out, n), which sums the
// first `num_lanes` accumulators of a tile (the others are zero) in their order and stores weight rows n … n
// + rows
// - 1. Not inlined, because all types in one function left too few registers to some.
template <QuantType Q, typename Kernel>
__attribute__((noinline)) void gemm_of_type(const WeightRows& w, const ActivationTile* x, int num_tiles,
                                            float* const* out, std::byte* memory) {
  using T = Traits<Q>;
  using Block = typename T::Block;
  constexpr int step_blocks = group_elements / T::block_inputs;
  constexpr auto step_bytes = static_cast<int64_t>(group_bytes<Q>);
  const int64_t groups = num_groups(w.cols), num_blocks = w.cols / T::block_inputs;
  const int64_t num_scaled = w.cols / (T::super_block ? group_elements : block_elements);
  const int num_rows = present_rows(out, num_tiles * tile_rows);
  auto& panel = *reinterpret_cast<typename Kernel::Panel*>(memory);
  auto* p = reinterpret_cast<Accumulators*>(memory + sizeof(typename Kernel::Panel));
  for (int64_t n = 0; n < w.count; n += panel_rows) {
    const int rows = static_cast<int>(w.count - n < panel_rows ? w.count - n : panel_rows);
    for (int i = rows; i < panel_rows; i++) Kernel::clear(panel, i);
    for (int64_t g = 0; g < groups; g++) {
      const int64_t first = g * step_blocks, ahead = g + prefetch_groups;
      // Behind its last group, a panel's rows are followed by those of the next one.
      const int64_t to_ahead =
          ahead < groups ? ahead * step_bytes : panel_rows * w.row_bytes + (ahead - groups) * step_bytes;
      constexpr bool prefetches_later = requires { panel.ahead; };
      if constexpr (prefetches_later) {
        panel.ahead = {n == 0 && ahead < groups ? w.data + to_ahead : nullptr, w.row_bytes,
                       n + 2 * panel_rows <= w.count
                           ? w.data + (n + panel_rows) * w.row_bytes + g * panel_rows * step_bytes
                           : nullptr};
      }
      for (int i = 0; i < rows; i++) {
        const uint8_t* data = w.data + (n + i) * w.row_bytes;
        if constexpr (!prefetches_later) prefetch_bytes(data + to_ahead, step_bytes);
        const auto* row = reinterpret_cast<const Block*>(data);
        if (first + step_blocks <= num_blocks) {
          Kernel::load(panel, i, row + first);
        } else {
          Block padded[step_blocks] = {};
          std::memcpy(padded, row + first, static_cast<size_t>(num_blocks - first) * sizeof(Block));
          Kernel::load(panel, i, padded);
        }
      }
      // Rows of outputs lie far apart. A share of them is fetched in every group, for the stores behind the
      // last.
      for (int64_t t = num_rows * g / groups; t < num_rows * (g + 1) / groups; t++) {
        __builtin_prefetch(out[t] + n, 1, 2);
        __builtin_prefetch(out[t] + n + 16, 1, 2);
      }
      const auto present =
          static_cast<int>(std::min<int64_t>(blocks_per_group, num_scaled - g * blocks_per_group));
      Kernel::multiply(panel, x + g, groups, num_rows, g, present, p);
    }
    const auto num_lanes = static_cast<int>(std::min<int64_t>(8, num_scaled));
    for (int tile = 0; tile < num_tiles; tile++)
      Kernel::store(p[tile], num_lanes, rows, out + tile * tile_rows, n);
  }
}

template <typename Panel>
constexpr size_t panel_memory() {
  return sizeof(Panel) + gemm_max_tiles * sizeof(Accumulators);
}

}  // namespace coldstream
