// The kernels in plain C++, for any machine: what the vector tiers must equal bit for bit.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "quant/blocks.h"
#include "quant/dequantize.h"
#include "quant/dispatch.h"
#include "quant/kernels.h"
#include "quant/traits.h"
#include "quant/unpack_generic.h"

namespace coldstream {

namespace {

// `span` inputs that share a scale, of which `count` exist.
void quantize_span(const float* x, int count, int span, int8_t* q, int16_t* sums, float* scale) {
  uint32_t max_bits = 0;  // of the absolute values
  for (int i = 0; i < count; i++) {
    const uint32_t bits = std::bit_cast<uint32_t>(x[i]) & 0x7fffffffu;
    max_bits = bits > max_bits ? bits : max_bits;
  }
  std::memset(q, 0, static_cast<size_t>(span));
  std::memset(sums, 0, static_cast<size_t>(span) / 16 * sizeof(int16_t));
  const SpanScale found = span_scale(max_bits);
  *scale = found.scale;
  if (found.is_zero) return;
  for (int i = 0; i < count; i++) {
    q[i] = static_cast<int8_t>(std::nearbyint(x[i] * found.inverse));
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
// The signed codes of 256 inputs.
template <QuantType Q>
void load_codes(const typename Traits<Q>::Block* b, int k, int8_t* out) {
  const auto bytes = Traits<Q>::template codes<UnpackGeneric>(b, k);
  for (int i = 0; i < 64; i++) out[i] = static_cast<int8_t>(bytes.at[i] - Traits<Q>::offset);
}

int8_t byte_of(const ScaleBytes& bytes, int i) {
  return static_cast<int8_t>((i < 8 ? bytes.low : bytes.high) >> i % 8 * 8);
}

template <QuantType Q>
void add_super_block(const typename Traits<Q>::Block& b, const ActivationRow* x, int64_t g, int num_rows,
                     float (*p)[8]) {
  using T = Traits<Q>;
  constexpr int sub_block = T::sub_block;
  int8_t codes[256];
  for (int k = 0; k < 4; k++) load_codes<Q>(&b, k, codes + 64 * k);
  const ScaleBytes scales = T::scales(b);
  for (int t = 0; t < num_rows; t++) {
    int32_t total = 0, total_min = 0;
    for (int j = 0; j < 256 / sub_block; j++) {
      const int64_t first = g * 256 + j * sub_block;
      total += byte_of(scales, j) * dot(codes + j * sub_block, x[t].q + first, sub_block);
      if constexpr (T::has_mins) {
        for (int64_t i = first / 16; i < (first + sub_block) / 16; i++)
          total_min += byte_of(T::mins(b), j) * x[t].sums[i];
      }
    }
    const float a = x[t].scales[g];
    float& lane = p[t][g % 8];
    lane = fma(scale_of<Q>(b) * a, static_cast<float>(total), lane);
    if constexpr (T::has_mins)
      lane = fma(-(half_bits_to_float(T::half_dmin(b)) * a), static_cast<float>(total_min), lane);
  }
}

// Blocks of the 32 inputs from `index` * 32 on, of which there are some in this block.
template <QuantType Q>
void add_small_block(const typename Traits<Q>::Block& b, const int8_t* codes, const ActivationRow* x,
                     int64_t index, int num_rows, float (*p)[8]) {
  using T = Traits<Q>;
  for (int t = 0; t < num_rows; t++) {
    const float sum = static_cast<float>(dot(codes, x[t].q + index * 32, 32)), a = x[t].scales[index];
    float& lane = p[t][index % 8];
    lane = fma(scale_of<Q>(b) * a, sum, lane);
    if constexpr (T::has_mins) {
      const int inputs = x[t].sums[2 * index] + x[t].sums[2 * index + 1];
      lane = fma(half_bits_to_float(T::half_dmin(b)) * a, static_cast<float>(inputs), lane);
    }
  }
}

// 256 inputs, or as many as there are.
template <QuantType Q>
void add_small_blocks(const typename Traits<Q>::Block* b, int count, const ActivationRow* x, int64_t g,
                      int num_rows, float (*p)[8]) {
  using T = Traits<Q>;
  constexpr int per_group = 256 / T::block_inputs;
  typename T::Block blocks[per_group] = {};
  std::memcpy(blocks, b, static_cast<size_t>(count) * sizeof *b);
  int8_t codes[256];
  for (int k = 0; k < 4; k++) load_codes<Q>(blocks, k, codes + 64 * k);
  for (int i = 0; i < count * T::block_inputs / 32; i++)
    add_small_block<Q>(blocks[i * 32 / T::block_inputs], codes + 32 * i, x, 8 * g + i, num_rows, p);
}

template <QuantType Q>
void gemv_of_type(const WeightRows& w, const ActivationRow* x, int num_rows, float* const* out) {
  using T = Traits<Q>;
  constexpr int per_group = 256 / T::block_inputs;
  const int64_t num_blocks = w.cols / T::block_inputs;
  for (int64_t n = 0; n < w.count; n++) {
    const auto* blocks = reinterpret_cast<const typename T::Block*>(w.data + n * w.row_bytes);
    float p[gemv_max_rows][8] = {};
    for (int64_t b = 0; b < num_blocks; b += per_group) {
      if constexpr (T::super_block) {
        add_super_block<Q>(blocks[b], x, b, num_rows, p);
      } else {
        const auto count = static_cast<int>(std::min<int64_t>(per_group, num_blocks - b));
        add_small_blocks<Q>(blocks + b, count, x, b / per_group, num_rows, p);
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

}  // namespace

constinit const QuantKernels quant_kernels_generic = {
    .quantize_row = quantize_row,
    .gemv = gemv,
    .gemm = nullptr,
    .gemm_bytes = 0,
    .gemm_min_rows = nullptr,
    .pack = nullptr,
    .float_product = float_product,
    .dequantize_row = dequantize_row_generic,
    .glu = glu,
};

}  // namespace coldstream
