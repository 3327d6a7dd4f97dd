#include "quant/unpack_generic.h"

namespace coldstream {
using Unpack = UnpackGeneric;
}

#include "quant/dequantize.inl"

namespace coldstream {

void dequantize_row_generic(QuantType type, const uint8_t* data, int64_t cols, float* out) {
  convert_row(type, data, cols, out);
}

}  // namespace coldstream
