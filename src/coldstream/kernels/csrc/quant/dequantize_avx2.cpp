#if defined(__x86_64__)

#include "quant/unpack_avx2.h"

namespace coldstream {
using Unpack = UnpackAvx2;
}

#include "quant/dequantize.inl"

namespace coldstream {

void dequantize_row_avx2(QuantType type, const uint8_t* data, int64_t cols, float* out) {
  convert_row(type, data, cols, out);
}

}  // namespace coldstream

#endif
