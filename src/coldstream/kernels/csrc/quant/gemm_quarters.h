// Products of super-blocks with at most eight activation rows, which the 512-bit tiers pack into quarters of
// four.
#pragma once

#include "quant/gemm_panels.h"

namespace coldstream {

inline constexpr int quarter_rows = tile_rows / 4;

struct alignas(64) PanelQuarters {
  uint8_t codes[panel_rows][256];
  const uint8_t* blocks[panel_rows];
  int16_t scales[panel_rows][8][8];  // of two sub-blocks, each four times
  uint16_t half_d[panel_rows];
  WeightsAhead ahead;
  // Of four rows each.
  alignas(64) float d[panel_rows / 4][4], dmin[panel_rows / 4][4];
  alignas(64) int32_t mins[panel_rows / 4][4][4];  // [two sub-blocks][row], two int16 each
  alignas(64) int32_t starts[2][16][tile_rows];  // of each quarter: minus the offset times the sums of inputs
};

// The least rows for which the product below is faster than that of rows; more than a narrow tile has for
// types that it does not multiply.
int quarters_min_rows(QuantType type);

// Multiplies a narrow tile, unless the type has no such product or there are more rows. Returns whether it
// did.
bool gemm_quarters(const WeightRows& w, const ActivationTile* x, int num_tiles, float* const* out,
                   std::byte* memory);

}  // namespace coldstream
