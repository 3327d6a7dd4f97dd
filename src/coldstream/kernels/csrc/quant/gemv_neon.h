// Products with few activation rows on the tiers of AArch64. Included by one file for each of them.
#pragma once

#include "quant/blocks_neon.h"
#include "quant/dispatch.h"
#include "quant/gemv_lanes.h"
#include "shuffles_neon.h"

namespace coldstream {

namespace {

// The sums of the integers of eight blocks, as floats.
inline __attribute__((always_inline)) FloatLanes sums_to_floats(const int32x4_t v[8]) {
  return {vcvtq_f32_s32(sum_each(v)), vcvtq_f32_s32(sum_each(v + 4))};
}

template <QuantType Q>
struct KernelGemv {
  using T = Traits<Q>;
  // With more rows, or if their number is not known, a block's codes and scales go through memory.
  static constexpr int most_fixed_rows = 4;
  static constexpr int registers = T::sub_block / 16;  // of the codes that share a scale

  // The scales of a super-block as int32, four to a register.
  struct Scales {
    int32x4_t part[4];

    inline __attribute__((always_inline)) explicit Scales(const ScaleBytes& bytes) {
      const WideBytes wide(bytes);
      part[0] = vmovl_s16(vget_low_s16(wide.low));
      part[1] = vmovl_high_s16(wide.low);
      part[2] = vmovl_s16(vget_low_s16(wide.high));
      part[3] = vmovl_high_s16(wide.high);
    }
  };

  // The products of one super-block and its inputs, sub-blocks scaled, in any lanes.
  static inline __attribute__((always_inline)) int32x4_t dot(const Codes256& codes, const Scales& scales,
                                                             const int8_t* q) {
    int32x4_t total = vdupq_n_s32(0);
#pragma GCC unroll 16
    for (int j = 0; j < 16 / registers; j++) {
      int32x4_t sum = vdupq_n_s32(0);
#pragma GCC unroll 2
      for (int i = j * registers; i < (j + 1) * registers; i++)
        sum = add_dots(sum, codes.part[i], vld1q_s8(q + 16 * i));
      total = vmlaq_s32(total, sum, vdupq_n_s32(scales.part[j / 4][j % 4]));
    }
    return total;
  }

  // The same of the minimums and the sums of 16 inputs.
  static inline __attribute__((always_inline)) int32x4_t dot_mins(const WideBytes& mins,
                                                                  const int16_t* sums) {
    int16x8_t low = vld1q_s16(sums), high = vld1q_s16(sums + 8);
    if constexpr (T::sub_block == 32) {
      low = vpaddq_s16(low, high);
      return vmlal_high_s16(vmull_s16(vget_low_s16(low), vget_low_s16(mins.low)), low, mins.low);
    }
    const int32x4_t first = vmull_s16(vget_low_s16(low), vget_low_s16(mins.low));
    const int32x4_t second = vmull_s16(vget_low_s16(high), vget_low_s16(mins.high));
    return vaddq_s32(vmlal_high_s16(first, low, mins.low), vmlal_high_s16(second, high, mins.high));
  }

  template <int rows, bool full, Eight E>
  inline __attribute__((always_inline)) static void add_super_blocks(const uint8_t* data, int64_t stride,
                                                                     int count, const ActivationRow* x,
                                                                     int64_t g, int num_rows, FloatLanes* p) {
    using Block = typename T::Block;
    if constexpr (full) count = 8;
    int32x4_t dots[capacity_of<rows>][8], min_dots[capacity_of<rows>][8];
    const int64_t ahead = distance_ahead<E>(stride);
    for (int i = 0; i < count; i++) {
      const auto* b = reinterpret_cast<const Block*>(data + i * stride);
      const int64_t group = E == Eight::of_a_row ? g + i : g;
      prefetch_weights(b, sizeof *b, ahead);
      const Codes256 codes = load_codes<Q>(b);
      const Scales scales(T::scales(*b));
      for (int t = 0; t < num_rows; t++) {
        dots[t][i] = dot(codes, scales, x[t].q + group * group_elements);
        if constexpr (T::has_mins) min_dots[t][i] = dot_mins(WideBytes(T::mins(*b)), x[t].sums + group * 16);
      }
    }
    const FloatLanes d = load_scales<Q>(data, stride, count);
    FloatLanes dmin;
    if constexpr (T::has_mins) dmin = load_min_scales<Q>(data, stride, count);
    for (int t = 0; t < num_rows; t++) {
      for (int i = count; i < 8; i++) {
        dots[t][i] = vdupq_n_s32(0);
        if constexpr (T::has_mins) min_dots[t][i] = vdupq_n_s32(0);
      }
      const FloatLanes a = E == Eight::of_a_row ? load_lanes(x[t].scales + g) : splat_lanes(x[t].scales[g]);
      p[t] = fma_lanes(multiply_lanes(d, a), sums_to_floats(dots[t]), p[t]);
      if constexpr (T::has_mins) p[t] = fms_lanes(multiply_lanes(dmin, a), sums_to_floats(min_dots[t]), p[t]);
    }
  }

  inline __attribute__((always_inline)) static void add_small_blocks(const typename T::Block* b, int count,
                                                                     const ActivationRow* x, int64_t g,
                                                                     int num_rows, FloatLanes* p) {
    const Codes256 codes = load_codes<Q>(b);
    const FloatLanes d = load_small_scales<Q>(b, count);
    FloatLanes m;
    if constexpr (T::has_mins) {
      static_assert(T::block_inputs == 32);
      m = load_min_scales<Q>(reinterpret_cast<const uint8_t*>(b), sizeof *b, count);
    }
    for (int t = 0; t < num_rows; t++) {
      const int8_t* q = x[t].q + g * group_elements;
      int32x4_t dots[8];
#pragma GCC unroll 8
      for (int j = 0; j < 8; j++) {
        const int32x4_t first = add_dots(vdupq_n_s32(0), codes.part[2 * j], vld1q_s8(q + 32 * j));
        dots[j] = add_dots(first, codes.part[2 * j + 1], vld1q_s8(q + 32 * j + 16));
      }
      const FloatLanes a = load_lanes(x[t].scales + g * blocks_per_group);
      p[t] = fma_lanes(multiply_lanes(d, a), sums_to_floats(dots), p[t]);
      if constexpr (T::has_mins) {
        const int16_t* sums = x[t].sums + g * 16;
        const FloatLanes inputs = {vcvtq_f32_s32(vpaddlq_s16(vld1q_s16(sums))),
                                   vcvtq_f32_s32(vpaddlq_s16(vld1q_s16(sums + 8)))};
        p[t] = fma_lanes(multiply_lanes(m, a), inputs, p[t]);
      }
    }
  }
};

void gemv(const WeightRows& w, const ActivationRow* x, int num_rows, float* const* out) {
  dispatch_integer(w.type, [&]<QuantType Q>() { gemv_of_type<KernelGemv<Q>>(w, x, num_rows, out); });
}

}  // namespace

}  // namespace coldstream
