// What products with many activation rows by VNNI and by AMX share beyond those of other tiers.
#pragma once

#include <immintrin.h>

#include <algorithm>

#include "quant/blocks_avx512.h"
#include "quant/eight_lanes.h"
#include "quant/gemm_panels.h"
#include "quant/transpose_avx512.h"

namespace coldstream {

// Weight rows i … i + 15 of a panel, of which `num_rows` exist, to n … n + 15.
static inline void store_half_panel(const Accumulators& p, int num_lanes, int i, int num_rows,
                                    float* const* out, int64_t n) {
  __m512i sums[16];
  for (int r = 0; r < 16; r++) {
    __m512 lane[8];
    for (int j = 0; j < 8; j++)
      lane[j] = j < num_lanes ? _mm512_load_ps(p.lane[j][i + r]) : _mm512_setzero_ps();
    const __m512 even = _mm512_add_ps(_mm512_add_ps(lane[0], lane[4]), _mm512_add_ps(lane[2], lane[6]));
    const __m512 odd = _mm512_add_ps(_mm512_add_ps(lane[1], lane[5]), _mm512_add_ps(lane[3], lane[7]));
    sums[r] = _mm512_castps_si512(_mm512_add_ps(even, odd));
  }
  transpose_16x16(sums);
  const auto present = static_cast<__mmask16>(num_rows >= 16 ? 0xffff : (1 << num_rows) - 1);
  for (int t = 0; t < tile_rows; t++) {
    if (out[t] != nullptr) _mm512_mask_storeu_epi32(out[t] + n, present, sums[t]);
  }
}

// The part of a kernel for `gemm_of_type` that does not depend on how it multiplies.
struct Kernel512 {
  static void store(const Accumulators& p, int num_lanes, int num_rows, float* const* out, int64_t n) {
    for (int i = 0; i < num_rows; i += 16) store_half_panel(p, num_lanes, i, num_rows - i, out, n + i);
  }

  static constexpr int num_tiles(int num_rows) { return (num_rows + tile_rows - 1) / tile_rows; }
};

}  // namespace coldstream
