// Products with few activation rows: every byte of the weights is read once, straight from the file, and
// unpacked once for all rows. Eight super-blocks (or eight blocks of 32) meet in the eight lanes that are the
// arithmetic's eight accumulators.
#pragma once

#include "quant/kernels.h"

namespace coldstream {

void gemv_avx512(const WeightRows& w, const ActivationRow* x, int num_rows, float* const* out);

}  // namespace coldstream
