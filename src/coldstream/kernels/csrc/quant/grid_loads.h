// How the tiers with 512-bit registers look up grids whose entries have eight values.
#pragma once

#include "quant/blocks.h"

namespace coldstream {

// Whether entries of a type's grid are gathered from memory, not permuted from registers. Both give the same
// codes. Processors differ by a factor of three in what either takes.
extern bool gathers_grid[64];  // by QuantType

// Times both ways for each type, in about 0.1 ms, and keeps the faster one. Needs the tier's instructions.
void choose_grid_loads();

}  // namespace coldstream
