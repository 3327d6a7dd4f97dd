// See gemv_avx512.h: the same in 256-bit registers, without VNNI.
#pragma once

#include "quant/kernels.h"

namespace coldstream {

void gemv_avx2(const WeightRows& w, const ActivationRow* x, int num_rows, float* const* out);

}  // namespace coldstream
