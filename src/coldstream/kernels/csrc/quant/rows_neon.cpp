#include "quant/rows_neon.h"

#if defined(__aarch64__)

#include <arm_neon.h>

#include <cstring>

#include "arithmetic.h"
#include "shuffles_neon.h"

namespace coldstream {

namespace {

// `span` inputs that share a scale.
template <int span>
void quantize_span(const float* x, int8_t* q, int16_t* sums, float* scale) {
  uint32x4_t max_bits = vdupq_n_u32(0);  // of absolute values: ordered like them, non-finite ones on top
  for (int i = 0; i < span; i += 4)
    max_bits = vmaxq_u32(max_bits, vreinterpretq_u32_f32(vabsq_f32(vld1q_f32(x + i))));
  const uint32_t bits = vmaxvq_u32(max_bits);
  const float max = std::bit_cast<float>(bits);
  const bool finite = bits < 0x7f800000u, zero = !finite || max < 0x1p-100f;
  *scale = finite ? (zero ? 0.0f : max / 127.0f) : std::bit_cast<float>(0x7fc00000u);
  if (zero) {
    std::memset(q, 0, span);
    std::memset(sums, 0, span / 16 * sizeof(int16_t));
    return;
  }
  const float32x4_t r = vdupq_n_f32(127.0f / max);
  for (int i = 0; i < span / 16; i++) {
    int16x4_t words[4];
    for (int j = 0; j < 4; j++)
      words[j] = vmovn_s32(vcvtnq_s32_f32(vmulq_f32(vld1q_f32(x + 16 * i + 4 * j), r)));
    const int16x8_t low = vcombine_s16(words[0], words[1]), high = vcombine_s16(words[2], words[3]);
    vst1q_s8(q + 16 * i, vcombine_s8(vmovn_s16(low), vmovn_s16(high)));
    sums[i] = vaddvq_s16(vaddq_s16(low, high));
  }
}

// rows weight rows with one activation row: enough independent sums to hide the latency of fma.
template <int rows>
void float_dots(const float* w, int64_t stride, int64_t cols, const float* x, float* out) {
  float32x4_t sums[rows][4];
  for (int n = 0; n < rows; n++) {
    for (int j = 0; j < 4; j++) sums[n][j] = vdupq_n_f32(0.0f);
  }
  int64_t i = 0;
  for (; i + 16 <= cols; i += 16) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
      const float32x4_t inputs = vld1q_f32(x + i + 4 * j);
#pragma GCC unroll 4
      for (int n = 0; n < rows; n++)
        sums[n][j] = vfmaq_f32(sums[n][j], inputs, vld1q_f32(w + n * stride + i + 4 * j));
    }
  }
  for (int n = 0; n < rows; n++) {
    float p[16];
    for (int j = 0; j < 4; j++) vst1q_f32(p + 4 * j, sums[n][j]);
    for (int64_t j = i; j < cols; j++) p[j - i] = fma(x[j], w[n * stride + j], p[j - i]);
    out[n] = sum_lanes_16(p);
  }
}

// Register i of `count` of each of four rows becomes four registers of the four rows: 32 bits of each to
// to(4 i) … to(4 i + 3).
template <int count, typename From, typename To>
void transpose_rows(const From& from, const To& to) {
  for (int i = 0; i < count; i++) {
    int32x4_t square[4] = {from(0, i), from(1, i), from(2, i), from(3, i)};
    transpose_4x4(square);
    for (int k = 0; k < 4; k++) vst1q_s32(to(4 * i + k), square[k]);
  }
}

// Up to 4 rows to rows first … first + 3 of a tile; missing ones become zeros.
void pack_unit(const ActivationRow* x, int num_rows, ActivationForm form, int64_t g, int first,
               ActivationTile& tile) {
  const auto exists = [&](int t) { return t < num_rows; };
  const auto codes = [&](int t, int i) {
    return exists(t) ? vreinterpretq_s32_s8(vld1q_s8(x[t].q + g * group_elements + 16 * i)) : vdupq_n_s32(0);
  };
  transpose_rows<16>(codes, [&](int k) { return reinterpret_cast<int32_t*>(tile.q[k][first]); });
  const auto sums = [&](int t, int i) {
    return exists(t) ? vld1q_s16(x[t].sums + g * 16 + 8 * i) : vdupq_n_s16(0);
  };
  if (form == ActivationForm::by_group) {
    transpose_rows<2>([&](int t, int i) { return vreinterpretq_s32_s16(sums(t, i)); },
                      [&](int k) { return reinterpret_cast<int32_t*>(tile.sums_16[k][first]); });
  }
  transpose_rows<1>([&](int t, int) { return vreinterpretq_s32_s16(vpaddq_s16(sums(t, 0), sums(t, 1))); },
                    [&](int k) { return reinterpret_cast<int32_t*>(tile.sums_32[k][first]); });
  for (int t = 0; t < 4; t++) {
    if (form == ActivationForm::by_group) {
      tile.scales[first + t] = exists(t) ? x[t].scales[g] : 0.0f;
    } else {
      for (int b = 0; b < blocks_per_group; b++)
        tile.block_scales[b][first + t] = exists(t) ? x[t].scales[g * blocks_per_group + b] : 0.0f;
    }
  }
}

}  // namespace

void quantize_row_neon(const float* x, int64_t cols, ActivationRow out) {
  for (int64_t g = 0; g < num_groups(cols); g++) {
    const int64_t rest = cols - g * group_elements;
    const float* from = x + g * group_elements;
    float padded[group_elements] = {};
    if (rest < group_elements) {
      std::memcpy(padded, from, static_cast<size_t>(rest) * sizeof(float));
      from = padded;
    }
    int8_t* q = out.q + g * group_elements;
    int16_t* sums = out.sums + g * 16;
    if (out.form == ActivationForm::by_group) {
      quantize_span<group_elements>(from, q, sums, out.scales + g);
      continue;
    }
    for (int b = 0; b < blocks_per_group; b++) {
      quantize_span<block_elements>(from + b * block_elements, q + b * block_elements, sums + 2 * b,
                                    out.scales + g * blocks_per_group + b);
    }
  }
}

void pack_neon(const ActivationRow* x, int num_rows, int64_t cols, ActivationTile* out) {
  for (int64_t g = 0; g < num_groups(cols); g++) {
    for (int first = 0; first < tile_rows; first += 4)
      pack_unit(x + first, num_rows - first, x->form, g, first, out[g]);
  }
}

void float_product_neon(const float* w, int64_t stride, int64_t count, int64_t cols, const float* const* x,
                        int num_rows, float* const* out) {
  for (int t = 0; t < num_rows; t++) {
    int64_t n = 0;
    for (; n + 4 <= count; n += 4) float_dots<4>(w + n * stride, stride, cols, x[t], out[t] + n);
    for (; n < count; n++) float_dots<1>(w + n * stride, stride, cols, x[t], out[t] + n);
  }
}

void swiglu_neon(const float* gate, const float* up, int64_t count, float* out) {
  for (int64_t i = 0; i < count; i++) out[i] = silu(gate[i]) * up[i];
}

}  // namespace coldstream

#endif
