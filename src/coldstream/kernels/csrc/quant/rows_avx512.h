// The 512-bit tiers beside integer products: quantising and packing activations, float products, SwiGLU.
#pragma once

#include "quant/kernels.h"

namespace coldstream {

void quantize_row_avx512(const float* x, int64_t cols, ActivationRow out);
// Narrow tiles by group are quarters of four rows.
void pack_avx512(const ActivationRow* x, int num_rows, int64_t cols, ActivationTile* out);
// Narrow tiles by block have eight inputs of a row together.
void pack_vnni(const ActivationRow* x, int num_rows, int64_t cols, ActivationTile* out);
void float_product_avx512(const float* w, int64_t stride, int64_t count, int64_t cols, const float* const* x,
                          int num_rows, float* const* out);
void glu_avx512(const Glu& unit, const float* gate, const float* up, int64_t count, float* out);

}  // namespace coldstream
