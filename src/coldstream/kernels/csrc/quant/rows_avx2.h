// The 256-bit tier beside integer products: quantising and packing activations, float products, SwiGLU.
#pragma once

#include "quant/kernels.h"

namespace coldstream {

void quantize_row_avx2(const float* x, int64_t cols, ActivationRow out);
void pack_avx2(const ActivationRow* x, int num_rows, int64_t cols, ActivationTile* out);
void float_product_avx2(const float* w, int64_t stride, int64_t count, int64_t cols, const float* const* x,
                        int num_rows, float* const* out);
void glu_avx2(const Glu& unit, const float* gate, const float* up, int64_t count, float* out);

}  // namespace coldstream
