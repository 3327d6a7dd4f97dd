#if defined(__aarch64__)

#include "quant/unpack_neon.h"

namespace coldstream {
using Unpack = UnpackNeon;
}

#include "quant/dequantize.inl"

namespace coldstream {

void dequantize_row_neon(QuantType type, const uint8_t* data, int64_t cols, float* out) {
  convert_row(type, data, cols, out);
}

}  // namespace coldstream

#endif
