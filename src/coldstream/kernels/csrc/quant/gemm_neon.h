// Products with many activation rows on the tiers of AArch64: four codes of a weight row times those of eight
// activation rows. Included by one file for each tier.
#pragma once

#include "quant/blocks_neon.h"
#include "quant/dispatch.h"
#include "quant/eight_lanes_neon.h"
#include "quant/gemm_panels.h"
#include "shuffles_neon.h"

namespace coldstream {

namespace {

constexpr int unit_rows = 8;  // activation rows of two registers: half a tile

struct alignas(64) PanelNeon {
  int8_t codes[panel_rows][256];
  int32_t scales[panel_rows][16];  // of each sub-block
  int16_t mins[panel_rows][16];    // of each sub-block; of those of 32 inputs, the first eight
  float d[8][panel_rows];          // one for each block of 32, or the first for a super-block
  float dmin[8][panel_rows];       // likewise
};

// Sums of integers of eight activation rows.
struct Sums8 {
  int32x4_t low, high;
};

inline __attribute__((always_inline)) FloatLanes to_floats(Sums8 v) {
  return {vcvtq_f32_s32(v.low), vcvtq_f32_s32(v.high)};
}

template <QuantType Q>
struct KernelNeon {
  using T = Traits<Q>;
  using Panel = PanelNeon;
  static constexpr int num_spans = 256 / T::sub_block;
  static constexpr int span_registers = T::sub_block / 16;  // of codes
  static constexpr int rows_at_a_time = 4;

  static void load(Panel& to, int row, const typename T::Block* b) {
    const Codes256 codes = load_codes<Q>(b);
    for (int j = 0; j < 16; j++) vst1q_s8(to.codes[row] + 16 * j, codes.part[j]);
    if constexpr (T::super_block) {
      const WideBytes scales(T::scales(*b));
      to.d[0][row] = scale_of<Q>(*b);
      store_widened(to.scales[row], scales.low);
      store_widened(to.scales[row] + 8, scales.high);
      if constexpr (T::has_mins) {
        const WideBytes mins(T::mins(*b));
        to.dmin[0][row] = half_bits_to_float(T::half_dmin(*b));
        vst1q_s16(to.mins[row], mins.low);
        vst1q_s16(to.mins[row] + 8, mins.high);
      }
    } else {
      constexpr int parts = T::block_inputs / 32;
      for (int j = 0; j < 8; j++) to.d[j][row] = scale_of<Q>(b[j / parts]);
      if constexpr (T::has_mins) {
        for (int j = 0; j < 8; j++) to.dmin[j][row] = half_bits_to_float(T::half_dmin(b[j]));
      }
    }
  }

  static void store_widened(int32_t* to, int16x8_t words) {
    vst1q_s32(to, vmovl_s16(vget_low_s16(words)));
    vst1q_s32(to + 4, vmovl_high_s16(words));
  }

  static void clear(Panel& to, int row) {
    std::memset(to.codes[row], 0, sizeof to.codes[row]);
    std::memset(to.scales[row], 0, sizeof to.scales[row]);
    std::memset(to.mins[row], 0, sizeof to.mins[row]);
    for (int i = 0; i < 8; i++) to.d[i][row] = to.dmin[i][row] = 0.0f;
  }

  static void multiply(Panel& w, const ActivationTile* x, int64_t stride, int num_rows, int64_t g,
                       int num_blocks, Accumulators* p) {
    for (int first = 0; first < num_rows; first += unit_rows) {
      const ActivationTile& tile = x[first / tile_rows * stride];
      for (int n = 0; n < panel_rows; n += rows_at_a_time) {
        if constexpr (T::super_block) {
          multiply_super_blocks(w, tile, first % tile_rows, n, g, p[first / tile_rows]);
        } else {
          for (int b = 0; b < num_blocks; b++)
            multiply_blocks(w, tile, first % tile_rows, n, b, g == 0, p[first / tile_rows]);
        }
      }
    }
  }

  // Activation rows `unit` … `unit` + 7 times the codes of sub-block j of weight rows n … n + 3.
  static inline __attribute__((always_inline)) void add_span(const Panel& w, const ActivationTile& x,
                                                             int unit, int n, int j,
                                                             Sums8 (&sums)[rows_at_a_time]) {
#pragma GCC unroll 2
    for (int k = j * span_registers; k < (j + 1) * span_registers; k++) {
      int8x16_t codes[rows_at_a_time];
#pragma GCC unroll 4
      for (int r = 0; r < rows_at_a_time; r++) codes[r] = vld1q_s8(w.codes[n + r] + 16 * k);
      add_fours<0>(x.q[4 * k][unit], codes, sums);
      add_fours<1>(x.q[4 * k + 1][unit], codes, sums);
      add_fours<2>(x.q[4 * k + 2][unit], codes, sums);
      add_fours<3>(x.q[4 * k + 3][unit], codes, sums);
    }
  }

  template <int four>
  static inline __attribute__((always_inline)) void add_fours(const int8_t* q,
                                                              const int8x16_t (&codes)[rows_at_a_time],
                                                              Sums8 (&sums)[rows_at_a_time]) {
    const int8x16_t low = vld1q_s8(q), high = vld1q_s8(q + 16);
#pragma GCC unroll 4
    for (int r = 0; r < rows_at_a_time; r++) {
      sums[r].low = add_rows<four>(sums[r].low, low, codes[r]);
      sums[r].high = add_rows<four>(sums[r].high, high, codes[r]);
    }
  }

  // Four activation rows of pairs of sums over inputs, times a pair of minimums.
  static inline __attribute__((always_inline)) int32x4_t add_pairs(int32x4_t total, const int16_t* sums,
                                                                   int16x8_t mins) {
    const int16x8_t pairs = vld1q_s16(sums);
    const int32x4_t low = vmull_s16(vget_low_s16(pairs), vget_low_s16(mins));
    return vaddq_s32(total, vpaddq_s32(low, vmull_high_s16(pairs, mins)));
  }

  // The sums over the inputs of sub-blocks times the minimums of weight row n.
  static inline __attribute__((always_inline)) Sums8 sum_mins(const Panel& w, const ActivationTile& x,
                                                              int unit, int n) {
    Sums8 total = {vdupq_n_s32(0), vdupq_n_s32(0)};
    for (int k = 0; k < num_spans / 2; k++) {
      const auto& sums = T::sub_block == 32 ? x.sums_32[k] : x.sums_16[k];
      int32_t pair;
      std::memcpy(&pair, w.mins[n] + 2 * k, sizeof pair);
      const int16x8_t mins = vreinterpretq_s16_s32(vdupq_n_s32(pair));
      total.low = add_pairs(total.low, sums[unit], mins);
      total.high = add_pairs(total.high, sums[unit + 4], mins);
    }
    return total;
  }

  static void multiply_super_blocks(const Panel& w, const ActivationTile& x, int unit, int n, int64_t g,
                                    Accumulators& p) {
    Sums8 total[rows_at_a_time];
    for (int r = 0; r < rows_at_a_time; r++) total[r] = {vdupq_n_s32(0), vdupq_n_s32(0)};
    for (int j = 0; j < num_spans; j++) {
      Sums8 sums[rows_at_a_time];
      for (int r = 0; r < rows_at_a_time; r++) sums[r] = {vdupq_n_s32(0), vdupq_n_s32(0)};
      add_span(w, x, unit, n, j, sums);
#pragma GCC unroll 4
      for (int r = 0; r < rows_at_a_time; r++) {
        total[r].low = vmlaq_n_s32(total[r].low, sums[r].low, w.scales[n + r][j]);
        total[r].high = vmlaq_n_s32(total[r].high, sums[r].high, w.scales[n + r][j]);
      }
    }
    const FloatLanes a = load_lanes(x.scales + unit);
    for (int r = 0; r < rows_at_a_time; r++) {
      float* at = p.lane[g % 8][n + r] + unit;
      FloatLanes sum = g < 8 ? zero_lanes() : load_lanes(at);
      sum = fma_lanes(multiply_lanes(splat_lanes(w.d[0][n + r]), a), to_floats(total[r]), sum);
      if constexpr (T::has_mins) {
        const FloatLanes dmin = multiply_lanes(splat_lanes(w.dmin[0][n + r]), a);
        sum = fms_lanes(dmin, to_floats(sum_mins(w, x, unit, n + r)), sum);
      }
      store_lanes(at, sum);
    }
  }

  static void multiply_blocks(const Panel& w, const ActivationTile& x, int unit, int n, int b, bool first,
                              Accumulators& p) {
    Sums8 total[rows_at_a_time];
    for (int r = 0; r < rows_at_a_time; r++) total[r] = {vdupq_n_s32(0), vdupq_n_s32(0)};
    add_span(w, x, unit, n, b, total);
    const FloatLanes a = load_lanes(x.block_scales[b] + unit);
    FloatLanes inputs;
    if constexpr (T::has_mins) {
      // Of the pair of sums, only that of this block.
      const int16x8_t one = vreinterpretq_s16_s32(vdupq_n_s32(b % 2 == 0 ? 1 : 0x10000));
      const auto& sums = x.sums_32[b / 2];
      const int32x4_t zero = vdupq_n_s32(0);
      inputs = to_floats({add_pairs(zero, sums[unit], one), add_pairs(zero, sums[unit + 4], one)});
    }
    for (int r = 0; r < rows_at_a_time; r++) {
      float* at = p.lane[b][n + r] + unit;
      FloatLanes sum = first ? zero_lanes() : load_lanes(at);
      sum = fma_lanes(multiply_lanes(splat_lanes(w.d[b][n + r]), a), to_floats(total[r]), sum);
      if constexpr (T::has_mins)
        sum = fma_lanes(multiply_lanes(splat_lanes(w.dmin[b][n + r]), a), inputs, sum);
      store_lanes(at, sum);
    }
  }

  static void store(const Accumulators& p, int num_lanes, int num_rows, float* const* out, int64_t n) {
    for (int t = 0; t < tile_rows; t += 4) {
      if (out[t] == nullptr) return;
      for (int i = 0; i < num_rows; i += 4) store_part(p, num_lanes, i, num_rows - i, out, t, n + i);
    }
  }

  // Weight rows i … i + 3, of which `num_rows` exist, for activation rows t … t + 3.
  static void store_part(const Accumulators& p, int num_lanes, int i, int num_rows, float* const* out, int t,
                         int64_t n) {
    int32x4_t sums[4];
    for (int r = 0; r < 4; r++) {
      float32x4_t lane[8];
      for (int j = 0; j < 8; j++)
        lane[j] = j < num_lanes ? vld1q_f32(p.lane[j][i + r] + t) : vdupq_n_f32(0.0f);
      const float32x4_t even = vaddq_f32(vaddq_f32(lane[0], lane[4]), vaddq_f32(lane[2], lane[6]));
      const float32x4_t odd = vaddq_f32(vaddq_f32(lane[1], lane[5]), vaddq_f32(lane[3], lane[7]));
      sums[r] = vreinterpretq_s32_f32(vaddq_f32(even, odd));
    }
    transpose_4x4(sums);
    for (int u = 0; u < 4 && out[t + u] != nullptr; u++) {
      float values[4];
      vst1q_f32(values, vreinterpretq_f32_s32(sums[u]));
      std::memcpy(out[t + u] + n, values, sizeof(float) * static_cast<size_t>(std::min(num_rows, 4)));
    }
  }
};

void gemm(const WeightRows& w, const ActivationTile* x, int num_tiles, float* const* out, std::byte* memory) {
  dispatch_integer(w.type,
                   [&]<QuantType Q>() { gemm_of_type<Q, KernelNeon<Q>>(w, x, num_tiles, out, memory); });
}

}  // namespace

}  // namespace coldstream
