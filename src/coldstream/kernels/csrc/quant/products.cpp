#include "quant/products.h"

#include <algorithm>

#include "quant/blocks.h"

namespace coldstream {

namespace {

// Weight rows dequantised at a time: enough independent sums to keep the units busy, few enough to stay in
// cache.
constexpr int float_rows = 8;

void multiply_float(const QuantKernels& k, const WeightRows& w, const ProductRows& rows, float* memory) {
  for (int64_t n = 0; n < w.count; n += float_rows) {
    const int64_t count = std::min<int64_t>(float_rows, w.count - n);
    const float* values = memory;
    int64_t stride = w.cols;
    if (w.type == QuantType::f32) {
      values = reinterpret_cast<const float*>(w.data + n * w.row_bytes);
      stride = w.row_bytes / static_cast<int64_t>(sizeof(float));
    } else {
      for (int64_t i = 0; i < count; i++) {
        k.dequantize_row(w.type, w.data + (n + i) * w.row_bytes, w.cols, memory + i * w.cols);
      }
    }
    for (int t = 0; t < rows.count; t += gemv_max_rows) {
      float* out[gemv_max_rows];
      const int num_rows = std::min(gemv_max_rows, rows.count - t);
      for (int i = 0; i < num_rows; i++) out[i] = rows.out[t + i] + n;
      k.float_product(values, stride, count, w.cols, rows.x + t, num_rows, out);
    }
  }
}

}  // namespace

size_t multiply_bytes(const QuantKernels& k, int64_t cols) {
  return std::max(static_cast<size_t>(float_rows * cols) * sizeof(float), k.gemm_bytes);
}

void multiply(const QuantKernels& k, const WeightRows& w, const ProductRows& rows, std::byte* memory) {
  if (!quant_is_integer(w.type)) {
    multiply_float(k, w, rows, reinterpret_cast<float*>(memory));
  } else if (rows.tiles != nullptr) {
    k.gemm(w, rows.tiles, (rows.count + tile_rows - 1) / tile_rows, rows.out, memory);
  } else {
    for (int t = 0; t < rows.count; t += gemv_max_rows) {
      k.gemv(w, rows.q + t, std::min(gemv_max_rows, rows.count - t), rows.out + t);
    }
  }
}

}  // namespace coldstream
