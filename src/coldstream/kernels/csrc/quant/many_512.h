// The part of 512-bit products with many activation rows that VNNI and AMX share.
//
// Weights are taken 32 rows at a time. For each activation group their blocks are unpacked once into a panel
// that stays in the first-level cache, and multiplied with every tile of 16 activation rows; lanes of a
// register are activation rows. The eight accumulators of the arithmetic lie in memory, as
// [tile][accumulator][weight row][activation row].
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstring>

#include "quant/blocks_avx512.h"
#include "quant/kernels.h"
#include "quant/transpose_avx512.h"

namespace coldstream {

inline constexpr int panel_rows = 32;
// Blocks of so many rows are streams too many for the hardware's prefetching, which sees a row's next block
// only when all others have been read.
inline constexpr int64_t prefetch_groups = 2;

struct accumulators {
  float lane[8][panel_rows][tile_rows];
};

// Sums the first `num_lanes` accumulators (the others are zero) in their order, and stores weight rows n … n
// + 15.
static inline void store_half_panel(const accumulators& p, int num_lanes, int n, int num_rows,
                                    float* const* out, int64_t out_begin) {
  __m512i sums[16];
  for (int i = 0; i < 16; i++) {
    __m512 lane[8];
    for (int j = 0; j < 8; j++)
      lane[j] = j < num_lanes ? _mm512_load_ps(p.lane[j][n + i]) : _mm512_setzero_ps();
    const __m512 even = _mm512_add_ps(_mm512_add_ps(lane[0], lane[4]), _mm512_add_ps(lane[2], lane[6]));
    const __m512 odd = _mm512_add_ps(_mm512_add_ps(lane[1], lane[5]), _mm512_add_ps(lane[3], lane[7]));
    sums[i] = _mm512_castps_si512(_mm512_add_ps(even, odd));
  }
  transpose_16x16(sums);
  const auto present = static_cast<__mmask16>(num_rows >= 16 ? 0xffff : (1 << num_rows) - 1);
  for (int t = 0; t < tile_rows; t++) {
    if (out[t] != nullptr) _mm512_mask_storeu_epi32(out[t] + out_begin, present, sums[t]);
  }
}

static inline void prefetch_bytes(const uint8_t* from, size_t count) {
  for (size_t i = 0; i < count; i += 64) _mm_prefetch(reinterpret_cast<const char*>(from + i), _MM_HINT_T1);
}

// `kernel` has a panel type, load(panel, row, blocks) for one weight row of one group, clear(panel, row), and
// multiply(panel, x, stride, num_tiles, g, p), which adds group g of all tiles to p.
template <quant_type Q, typename kernel>
void many_of_type(const weight_rows& w, const activation_tile* x, int num_tiles, float* const* out,
                  std::byte* memory) {
  using format = format_512<Q>;
  using block = typename format::block;
  constexpr int step_blocks = format::super_block ? 1 : 8;
  constexpr int64_t step_bytes = step_blocks * static_cast<int64_t>(sizeof(block));
  const int64_t groups = num_groups(w.cols), num_blocks = w.cols / (format::super_block ? 256 : 32);
  auto& panel = *reinterpret_cast<typename kernel::panel*>(memory);
  auto* p = reinterpret_cast<accumulators*>(memory + sizeof(typename kernel::panel));
  for (int64_t n = 0; n < w.count; n += panel_rows) {
    const int rows = static_cast<int>(w.count - n < panel_rows ? w.count - n : panel_rows);
    for (int i = rows; i < panel_rows; i++) kernel::clear(panel, i);
    for (int64_t g = 0; g < groups; g++) {
      const int64_t first = g * step_blocks, ahead = g + prefetch_groups;
      // Behind its last group, a panel's rows are followed by those of the next one.
      const int64_t to_ahead = ahead < groups ? ahead * step_bytes
                                              : panel_rows * w.row_bytes + (ahead - groups) * step_bytes;
      for (int i = 0; i < rows; i++) {
        const uint8_t* data = w.data + (n + i) * w.row_bytes;
        prefetch_bytes(data + to_ahead, step_bytes);
        const auto* row = reinterpret_cast<const block*>(data);
        if (first + step_blocks <= num_blocks) {
          kernel::load(panel, i, row + first);
        } else {
          block padded[step_blocks] = {};
          std::memcpy(padded, row + first, static_cast<size_t>(num_blocks - first) * sizeof(block));
          kernel::load(panel, i, padded);
        }
      }
      kernel::multiply(panel, x + g, groups, num_tiles, g, p);
    }
    const int num_lanes = format::super_block && groups < 8 ? static_cast<int>(groups) : 8;
    for (int tile = 0; tile < num_tiles; tile++) {
      for (int i = 0; i < rows; i += 16) {
        store_half_panel(p[tile], num_lanes, i, rows - i, out + tile * tile_rows, n + i);
      }
    }
  }
}

template <typename panel>
constexpr size_t many_512_bytes() {
  return sizeof(panel) + many_max_tiles * sizeof(accumulators);
}

}  // namespace coldstream
