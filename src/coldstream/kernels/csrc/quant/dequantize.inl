// Rows of any type to float32. Included by one file for each tier, which has declared `Unpack`.
#include <algorithm>
#include <cstring>

#include "quant/blocks.h"
#include "quant/dequantize.h"
#include "quant/dispatch.h"
#include "quant/traits.h"

namespace coldstream {

namespace {

// Bytes of 64 codes in memory, as signed codes.
template <QuantType Q>
void store_codes(const typename Traits<Q>::Block* b, int k, int8_t* out) {
  const typename Unpack::Bytes bytes = Traits<Q>::template codes<Unpack>(b, k);
  static_assert(sizeof bytes == 64);
  std::memcpy(out, &bytes, sizeof bytes);
  for (int i = 0; i < 64; i++) out[i] = static_cast<int8_t>(out[i] - Traits<Q>::offset);
}

// Scales times codes are exact in float32, so that only the difference of a minimum is rounded.
template <QuantType Q>
void dequantize_super_block(const typename Traits<Q>::Block& b, float* __restrict out) {
  using T = Traits<Q>;
  alignas(64) int8_t codes[256];
  int8_t scales[16], mins[16] = {};
  for (int k = 0; k < 4; k++) store_codes<Q>(&b, k, codes + 64 * k);
  const ScaleBytes scale_bytes = T::scales(b);
  std::memcpy(scales, &scale_bytes, sizeof scales);
  const float d = scale_of<Q>(b);
  float dmin = 0.0f;
  if constexpr (T::has_mins) {
    const ScaleBytes min_bytes = T::mins(b);
    std::memcpy(mins, &min_bytes, sizeof mins);
    dmin = half_bits_to_float(T::half_dmin(b));
  }
  for (int j = 0; j < 256 / T::sub_block; j++) {
    const float scale = d * static_cast<float>(scales[j]), min = dmin * static_cast<float>(mins[j]);
    const int8_t* from = codes + j * T::sub_block;
    float* to = out + j * T::sub_block;
    for (int i = 0; i < T::sub_block; i++) {
      const float value = scale * static_cast<float>(from[i]);
      to[i] = T::has_mins ? value - min : value;
    }
  }
}

// As many small blocks as 256 inputs have, or the last `count` of a row.
template <QuantType Q>
void dequantize_small_blocks(const typename Traits<Q>::Block* b, int count, float* __restrict out) {
  using T = Traits<Q>;
  typename T::Block blocks[256 / T::block_inputs] = {};
  std::memcpy(blocks, b, static_cast<size_t>(count) * sizeof *b);
  alignas(64) int8_t codes[256];
  for (int k = 0; k < 4; k++) store_codes<Q>(blocks, k, codes + 64 * k);
  for (int j = 0; j < count; j++) {
    const float d = scale_of<Q>(blocks[j]);
    float min = 0.0f;
    if constexpr (T::has_mins) min = half_bits_to_float(T::half_dmin(blocks[j]));
    for (int i = j * T::block_inputs; i < (j + 1) * T::block_inputs; i++) {
      const float value = d * static_cast<float>(codes[i]);
      out[i] = T::has_mins ? value + min : value;
    }
  }
}

template <QuantType Q>
void dequantize_row(const uint8_t* data, int64_t cols, float* out) {
  using T = Traits<Q>;
  const auto* blocks = reinterpret_cast<const typename T::Block*>(data);
  constexpr int per_group = 256 / T::block_inputs;
  const int64_t num_blocks = cols / T::block_inputs;
  for (int64_t b = 0; b < num_blocks; b += per_group) {
    if constexpr (T::super_block) {
      dequantize_super_block<Q>(blocks[b], out + 256 * b);
    } else {
      const auto count = static_cast<int>(std::min<int64_t>(per_group, num_blocks - b));
      dequantize_small_blocks<Q>(blocks + b, count, out + b * T::block_inputs);
    }
  }
}

void convert_row(QuantType type, const uint8_t* data, int64_t cols, float* out) {
  switch (type) {
    case QuantType::f32:
      std::memcpy(out, data, static_cast<size_t>(cols) * sizeof(float));
      return;
    case QuantType::f16:
      for (int64_t i = 0; i < cols; i++) out[i] = load_half(data + 2 * i);
      return;
    case QuantType::bf16:
      for (int64_t i = 0; i < cols; i++) out[i] = bfloat_to_float(load_u16(data + 2 * i));
      return;
    default:
      dispatch_integer(type, [&]<QuantType Q>() { dequantize_row<Q>(data, cols, out); });
  }
}

}  // namespace

}  // namespace coldstream
