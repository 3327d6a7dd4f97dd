// Rows of any type to float32, every value as kernels/dequantize/reference.py has it.
#pragma once

#include <cstdint>

#include "quant/weight.h"

namespace coldstream {

// `cols` is a whole number of blocks. Reads nothing beyond them.
void dequantize_row_generic(QuantType type, const uint8_t* data, int64_t cols, float* out);
void dequantize_row_avx2(QuantType type, const uint8_t* data, int64_t cols, float* out);
void dequantize_row_avx512(QuantType type, const uint8_t* data, int64_t cols, float* out);
void dequantize_row_neon(QuantType type, const uint8_t* data, int64_t cols, float* out);

}  // namespace coldstream
