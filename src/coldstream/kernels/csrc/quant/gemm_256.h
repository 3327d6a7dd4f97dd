// Products with many activation rows in 256-bit registers: four codes of a weight row, broadcast, times those
// of 8 activation rows. `Form<Q>` says how a tier multiplies bytes:
// - offset: what codes in a panel have added;
// - stored(codes): codes as Traits has them to those of a panel;
// - spread_scales(eight): eight int16 to the int32 that `add_span` multiplies by;
// - rows_at_a_time<units>: weight rows whose sums are under way together, for so many units of activations;
// - add_span(w, x, n, j, total): adds the products of sub-block j, scaled, for weight rows n and following.
#pragma once

#include "quant/blocks_avx2.h"
#include "quant/dequantize.h"
#include "quant/dispatch.h"
#include "quant/eight_lanes.h"
#include "quant/gemm_panels.h"
#include "quant/gemv_avx2.h"
#include "quant/kernels.h"
#include "quant/rows_avx2.h"
#include "shuffles_avx2.h"

namespace coldstream {

namespace {

constexpr int unit_rows = 8;  // activation rows of a register: half a tile

struct alignas(64) Panel256 {
  uint8_t codes[panel_rows][256];
  int32_t scales[panel_rows][16];  // of each sub-block
  // Factors of the sums over the inputs of sub-blocks, in pairs: the minimums, or minus the offset of the
  // codes, scaled.
  int32_t factors[panel_rows][8];
  float d[8][panel_rows];     // one for each block of 32, or the first for a super-block
  float dmin[8][panel_rows];  // likewise
};

// Here the compiler may not add in another order: it would take all products first, which no registers hold.
inline void keep_order(__m256i& v) { asm("" : "+x"(v)); }

template <QuantType Q, class Form>
struct Kernel256 {
  using T = Traits<Q>;
  using Panel = Panel256;
  using Scales = WideScales<Q, Form::offset>;
  static constexpr int offset = Form::offset;
  template <int units>
  static constexpr int rows_at_a_time = Form::template rows_at_a_time<units>;
  static constexpr bool has_factors = T::super_block && Scales::has_factors;

  static void load(Panel& to, int row, const typename T::Block* b) {
    const Codes256 codes = load_codes<Q>(b);
    for (int j = 0; j < 8; j++)
      _mm256_store_si256(reinterpret_cast<__m256i*>(to.codes[row] + 32 * j), Form::stored(codes.part[j]));
    if constexpr (T::super_block) {
      to.d[0][row] = scale_of<Q>(*b);
      if constexpr (T::has_mins) to.dmin[0][row] = half_bits_to_float(T::half_dmin(*b));
      store_integers(to, row, Scales(b));
    } else {
      alignas(32) float d[8];
      _mm256_store_ps(d, load_small_scales<Q>(b));
      for (int j = 0; j < 8; j++) to.d[j][row] = d[j];
      if constexpr (T::has_mins) {
        _mm256_store_ps(d, load_small_mins<Q>(b));
        for (int j = 0; j < 8; j++) to.dmin[j][row] = d[j];
      }
    }
  }

  static void store_integers(Panel& to, int row, const Scales& from) {
    auto* scales = reinterpret_cast<__m256i*>(to.scales[row]);
    _mm256_store_si256(scales, Form::spread_scales(_mm256_castsi256_si128(from.scales)));
    if constexpr (T::sub_block == 16)
      _mm256_store_si256(scales + 1, Form::spread_scales(_mm256_extracti128_si256(from.scales, 1)));
    if constexpr (has_factors && T::sub_block == 32) {
      _mm_store_si128(reinterpret_cast<__m128i*>(to.factors[row]), from.factors_32);
    } else if constexpr (has_factors) {
      _mm256_store_si256(reinterpret_cast<__m256i*>(to.factors[row]), from.factors);
    }
  }

  static void clear(Panel& to, int row) {
    std::memset(to.codes[row], 0, sizeof to.codes[row]);
    std::memset(to.scales[row], 0, sizeof to.scales[row]);
    std::memset(to.factors[row], 0, sizeof to.factors[row]);
    for (int i = 0; i < 8; i++) to.d[i][row] = to.dmin[i][row] = 0.0f;
  }

  static void multiply(Panel& w, const ActivationTile* x, int64_t stride, int num_rows, int64_t g,
                       int num_blocks, Accumulators* p) {
    for (int first = 0, tile = 0; first < num_rows; first += tile_rows, tile++) {
      if (num_rows - first > unit_rows) {
        multiply_tile<2>(w, x[tile * stride], g, num_blocks, p[tile]);
      } else {
        multiply_tile<1>(w, x[tile * stride], g, num_blocks, p[tile]);
      }
    }
  }

  template <int units>
  static void multiply_tile(const Panel& w, const ActivationTile& x, int64_t g, int num_blocks,
                            Accumulators& p) {
    for (int n = 0; n < panel_rows; n += rows_at_a_time<units>) {
      if constexpr (T::super_block) {
        multiply_super_blocks<units>(w, x, n, g, p);
      } else {
        for (int b = 0; b < num_blocks; b++) multiply_blocks<units>(w, x, n, b, g == 0, p);
      }
    }
  }

  // The sums over the inputs of sub-blocks times the factors of weight row n.
  static __m256i sum_factors(const Panel& w, const ActivationTile& x, int n, int unit) {
    __m256i total = _mm256_setzero_si256();
    for (int k = 0; k < 128 / T::sub_block; k++) {
      const auto& sums = T::sub_block == 32 ? x.sums_32[k] : x.sums_16[k];
      const __m256i factors = _mm256_set1_epi32(w.factors[n][k]);
      total = _mm256_add_epi32(total, _mm256_madd_epi16(load_256(sums[unit * unit_rows]), factors));
    }
    return total;
  }

  template <int units>
  static void multiply_super_blocks(const Panel& w, const ActivationTile& x, int n, int64_t g,
                                    Accumulators& p) {
    __m256i total[rows_at_a_time<units>][units];
    for (int r = 0; r < rows_at_a_time<units>; r++) {
      for (int u = 0; u < units; u++)
        total[r][u] = offset == 0 ? _mm256_setzero_si256() : sum_factors(w, x, n + r, u);
    }
    for (int j = 0; j < 256 / T::sub_block; j++) Form::template add_span<units>(w, x, n, j, total);
    for (int u = 0; u < units; u++) {
      const __m256 a = _mm256_loadu_ps(x.scales + u * unit_rows);
      for (int r = 0; r < rows_at_a_time<units>; r++) {
        float* at = p.lane[g % 8][n + r] + u * unit_rows;
        __m256 sum = g < 8 ? _mm256_setzero_ps() : _mm256_load_ps(at);
        const __m256 d = _mm256_mul_ps(_mm256_set1_ps(w.d[0][n + r]), a);
        sum = _mm256_fmadd_ps(d, _mm256_cvtepi32_ps(total[r][u]), sum);
        if constexpr (T::has_mins) {
          const __m256 dmin = _mm256_mul_ps(_mm256_set1_ps(w.dmin[0][n + r]), a);
          sum = _mm256_fnmadd_ps(dmin, _mm256_cvtepi32_ps(sum_factors(w, x, n + r, u)), sum);
        }
        _mm256_store_ps(at, sum);
      }
    }
  }

  template <int units>
  static void multiply_blocks(const Panel& w, const ActivationTile& x, int n, int b, bool first,
                              Accumulators& p) {
    __m256i total[rows_at_a_time<units>][units], inputs[units];
    for (int u = 0; u < units; u++) {
      __m256i start = _mm256_setzero_si256();
      if constexpr (offset != 0 || T::has_mins) {
        // Of the pair of sums, only that of this block.
        const __m256i pairs = load_256(x.sums_32[b / 2][u * unit_rows]);
        inputs[u] = _mm256_madd_epi16(pairs, _mm256_set1_epi32(b % 2 == 0 ? 1 : 0x10000));
      }
      if constexpr (offset != 0) start = _mm256_mullo_epi32(inputs[u], _mm256_set1_epi32(-offset));
      for (int r = 0; r < rows_at_a_time<units>; r++) total[r][u] = start;
    }
    Form::template add_span<units>(w, x, n, b, total);
    for (int u = 0; u < units; u++) {
      const __m256 a = _mm256_loadu_ps(x.block_scales[b] + u * unit_rows);
      for (int r = 0; r < rows_at_a_time<units>; r++) {
        float* at = p.lane[b][n + r] + u * unit_rows;
        __m256 sum = first ? _mm256_setzero_ps() : _mm256_load_ps(at);
        const __m256 scale = _mm256_mul_ps(_mm256_set1_ps(w.d[b][n + r]), a);
        sum = _mm256_fmadd_ps(scale, _mm256_cvtepi32_ps(total[r][u]), sum);
        if constexpr (T::has_mins) {
          const __m256 min = _mm256_mul_ps(_mm256_set1_ps(w.dmin[b][n + r]), a);
          sum = _mm256_fmadd_ps(min, _mm256_cvtepi32_ps(inputs[u]), sum);
        }
        _mm256_store_ps(at, sum);
      }
    }
  }

  static void store(const Accumulators& p, int num_lanes, int num_rows, float* const* out, int64_t n) {
    for (int t = 0; t < tile_rows; t += unit_rows) {
      if (out[t] == nullptr) return;
      for (int i = 0; i < num_rows; i += 8) store_part(p, num_lanes, i, num_rows - i, out, t, n + i);
    }
  }

  // Weight rows i … i + 7, of which `num_rows` exist, for activation rows t … t + 7.
  static void store_part(const Accumulators& p, int num_lanes, int i, int num_rows, float* const* out, int t,
                         int64_t n) {
    __m256i sums[8];
    for (int r = 0; r < 8; r++) {
      __m256 lane[8];
      for (int j = 0; j < 8; j++)
        lane[j] = j < num_lanes ? _mm256_load_ps(p.lane[j][i + r] + t) : _mm256_setzero_ps();
      sums[r] = _mm256_castps_si256(sum_accumulators(lane));
    }
    transpose_8x8(sums);
    for (int u = 0; u < 8 && out[t + u] != nullptr; u++) {
      if (num_rows >= 8) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out[t + u] + n), sums[u]);
      } else {
        _mm256_maskstore_epi32(reinterpret_cast<int*>(out[t + u] + n), first_lanes(num_rows), sums[u]);
      }
    }
  }
};

template <template <QuantType> class Form>
void gemm_256(const WeightRows& w, const ActivationTile* x, int num_tiles, float* const* out,
              std::byte* memory) {
  dispatch_integer(
      w.type, [&]<QuantType Q>() { gemm_of_type<Q, Kernel256<Q, Form<Q>>>(w, x, num_tiles, out, memory); });
}

// The table of a tier that multiplies bytes as `Form` says.
template <template <QuantType> class Form, int gemm_min_rows>
constexpr QuantKernels kernels_256() {
  return {
      .quantize_row = quantize_row_avx2,
      .interleaves_blocks = true,
      .gemv = gemv_avx2,
      .gemm = gemm_256<Form>,
      .gemm_bytes = panel_memory<Panel256>(),
      .gemm_min_rows = [](QuantType) { return gemm_min_rows; },
      .pack = pack_avx2,
      .float_product = float_product_avx2,
      .dequantize_row = dequantize_row_avx2,
      .glu = glu_avx2,
  };
}

}  // namespace

}  // namespace coldstream
