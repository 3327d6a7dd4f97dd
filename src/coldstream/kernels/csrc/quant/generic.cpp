// The kernels in plain C++, for any machine: what the vector tiers must equal bit for bit.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "quant/blocks.h"
#include "quant/dequantize.h"
#include "quant/dispatch.h"
#include "quant/integer_blocks.h"
#include "quant/kernels.h"

namespace coldstream {

namespace {

// `span` inputs that share a scale, of which `count` exist.
void quantize_span(const float* x, int count, int span, int8_t* q, int16_t* sums, float* scale) {
  uint32_t max_bits = 0;  // of the absolute values: ordered like them, with everything non-finite on top
  for (int i = 0; i < count; i++) {
    const uint32_t bits = std::bit_cast<uint32_t>(x[i]) & 0x7fffffffu;
    max_bits = bits > max_bits ? bits : max_bits;
  }
  std::memset(q, 0, static_cast<size_t>(span));
  std::memset(sums, 0, static_cast<size_t>(span) / 16 * sizeof(int16_t));
  const float max = std::bit_cast<float>(max_bits);
  const bool finite = max_bits < 0x7f800000u;
  *scale = finite ? (max < 0x1p-100f ? 0.0f : max / 127.0f) : std::bit_cast<float>(0x7fc00000u);
  if (!finite || max < 0x1p-100f) return;
  const float r = 127.0f / max;
  for (int i = 0; i < count; i++) {
    q[i] = static_cast<int8_t>(std::nearbyint(x[i] * r));
    sums[i / 16] = static_cast<int16_t>(sums[i / 16] + q[i]);
  }
}

void quantize_row(const float* x, int64_t cols, ActivationRow out) {
  const int span = group_elements / ActivationRow::scales_per_group(out.form);
  for (int64_t i = 0; i < num_groups(cols) * group_elements; i += span) {
    const int count = static_cast<int>(std::clamp<int64_t>(cols - i, 0, span));
    quantize_span(x + (count > 0 ? i : 0), count, span, out.q + i, out.sums + i / 16, out.scales + i / span);
  }
}

int32_t dot(const int8_t* a, const int8_t* b, int count) {
  int32_t sum = 0;
  for (int i = 0; i < count; i++) sum += a[i] * b[i];
  return sum;
}

// One super-block times the activation group under it.
template <typename Format>
void add_super_block(const typename Format::Block& b, const ActivationRow* x, int64_t g, int num_rows,
                     float (*p)[8]) {
  int8_t codes[256];
  int16_t scales[16], mins[16];
  Format::codes(b, codes);
  Format::scales(b, scales, mins);
  for (int t = 0; t < num_rows; t++) {
    int32_t total = 0, total_min = 0;
    for (int j = 0; j < 16; j++) {
      total += scales[j] * dot(codes + j * 16, x[t].q + g * 256 + j * 16, 16);
      if constexpr (Format::has_mins) total_min += mins[j] * x[t].sums[g * 16 + j];
    }
    const float a = x[t].scales[g];
    float& lane = p[t][g % 8];
    lane = fma(load_half(b.d) * a, static_cast<float>(total), lane);
    if constexpr (Format::has_mins) lane = fma(-(load_half(b.dmin) * a), static_cast<float>(total_min), lane);
  }
}

template <typename Format>
void add_block(const typename Format::Block& b, const ActivationRow* x, int64_t index, int num_rows,
               float (*p)[8]) {
  int8_t codes[32];
  Format::codes(b, codes);
  for (int t = 0; t < num_rows; t++) {
    const float sum = static_cast<float>(dot(codes, x[t].q + index * 32, 32));
    float& lane = p[t][index % 8];
    lane = fma(load_half(b.d) * x[t].scales[index], sum, lane);
  }
}

template <QuantType Q>
void gemv_of_type(const WeightRows& w, const ActivationRow* x, int num_rows, float* const* out) {
  using Format = IntegerFormat<Q>;
  const int64_t num_blocks = w.cols / (Format::super_block ? 256 : 32);
  for (int64_t n = 0; n < w.count; n++) {
    const auto* blocks = reinterpret_cast<const typename Format::Block*>(w.data + n * w.row_bytes);
    float p[gemv_max_rows][8] = {};
    for (int64_t b = 0; b < num_blocks; b++) {
      if constexpr (Format::super_block) {
        add_super_block<Format>(blocks[b], x, b, num_rows, p);
      } else {
        add_block<Format>(blocks[b], x, b, num_rows, p);
      }
    }
    for (int t = 0; t < num_rows; t++) out[t][n] = sum_lanes_8(p[t]);
  }
}

void gemv(const WeightRows& w, const ActivationRow* x, int num_rows, float* const* out) {
  dispatch_integer(w.type, [&]<QuantType Q>() { gemv_of_type<Q>(w, x, num_rows, out); });
}

void float_product(const float* w, int64_t stride, int64_t count, int64_t cols, const float* const* x,
                   int num_rows, float* const* out) {
  for (int64_t n = 0; n < count; n++) {
    for (int t = 0; t < num_rows; t++) {
      float p[16] = {};
      for (int64_t i = 0; i < cols; i++) p[i % 16] = fma(x[t][i], w[n * stride + i], p[i % 16]);
      out[t][n] = sum_lanes_16(p);
    }
  }
}

void swiglu(const float* gate, const float* up, int64_t count, float* out) {
  for (int64_t i = 0; i < count; i++) out[i] = silu(gate[i]) * up[i];
}

}  // namespace

constinit const QuantKernels quant_kernels_generic = {
    .quantize_row = quantize_row,
    .gemv = gemv,
    .gemm = nullptr,
    .gemm_bytes = 0,
    .gemm_min_rows = 0,
    .pack = nullptr,
    .float_product = float_product,
    .dequantize_row = dequantize_row_generic,
    .swiglu = swiglu,
};

}  // namespace coldstream
