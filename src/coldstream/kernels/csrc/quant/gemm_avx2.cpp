// Four codes of a weight row, broadcast, times those of 8 activation rows. Products of unsigned and signed
// bytes meet in pairs as int16, and as many pairs are added there as cannot overflow; only then are they
// multiplied by the scale of their sub-block and widened.
#include "quant/dequantize.h"
#include "quant/dispatch.h"
#include "quant/gemv_avx2.h"
#include "quant/kernels.h"
#include "quant/rows_avx2.h"

#if defined(__AVX2__)

#include "quant/blocks_avx2.h"
#include "quant/eight_lanes.h"
#include "quant/gemm_panels.h"
#include "shuffles_avx2.h"

namespace coldstream {

namespace {

constexpr int unit_rows = 8;  // activation rows of a register: half a tile

struct alignas(64) PanelAvx2 {
  uint8_t codes[panel_rows][256];  // signed or unsigned, as Traits has them
  int32_t scales[panel_rows][16];  // of each sub-block, twice an int16
  // Factors of the sums over the inputs of sub-blocks, in pairs: the minimums, or minus the offset of the
  // codes, scaled.
  int32_t factors[panel_rows][8];
  float d[8][panel_rows];     // one for each block of 32, or the first for a super-block
  float dmin[8][panel_rows];  // likewise
};

// Here the compiler may not add in another order: it would take all products first, which no registers hold.
void keep_order(__m256i& v) { asm("" : "+x"(v)); }

__m256i twice_epi16(__m256i v) {  // each of the low 8 int16, twice
  const __m256i words = _mm256_permute4x64_epi64(v, 0x10);
  return _mm256_unpacklo_epi16(words, words);
}

template <QuantType Q>
struct KernelAvx2 {
  using T = Traits<Q>;
  using Panel = PanelAvx2;
  static constexpr int span = T::sub_block;
  static constexpr int num_spans = 256 / span, span_steps = span / 4;
  // Steps of four inputs whose pairs of products an int16 holds.
  static constexpr int held = 32767 / (2 * 127 * T::greatest);
  static constexpr int most_steps = held >= 8 ? 8 : held >= 4 ? 4 : held >= 2 ? 2 : 1;
  static constexpr int steps = most_steps < span_steps ? most_steps : span_steps;
  // Fewer weight rows at a time where totals are touched often, so that these stay in registers.
  static constexpr int rows_at_a_time = steps >= 4 ? 4 : 2;
  static constexpr bool has_factors = T::super_block && (T::has_mins || !T::is_signed);

  static void load(Panel& to, int row, const typename T::Block* b) {
    const Codes256 codes = load_codes<Q>(b);
    for (int j = 0; j < 8; j++)
      _mm256_store_si256(reinterpret_cast<__m256i*>(to.codes[row] + 32 * j), codes.part[j]);
    if constexpr (T::super_block) {
      to.d[0][row] = scale_of<Q>(*b);
      if constexpr (T::has_mins) to.dmin[0][row] = half_bits_to_float(T::half_dmin(*b));
      store_integers(to, row, WideScales<Q>(b));
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

  static void store_integers(Panel& to, int row, const WideScales<Q>& from) {
    auto* scales = reinterpret_cast<__m256i*>(to.scales[row]);
    _mm256_store_si256(scales, twice_epi16(from.scales));
    if constexpr (T::sub_block == 16)
      _mm256_store_si256(scales + 1, twice_epi16(_mm256_permute4x64_epi64(from.scales, 0x0e)));
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
    for (int n = 0; n < panel_rows; n += rows_at_a_time) {
      if constexpr (T::super_block) {
        multiply_super_blocks<units>(w, x, n, g, p);
      } else {
        for (int b = 0; b < num_blocks; b++) multiply_blocks<units>(w, x, n, b, g == 0, p);
      }
    }
  }

  // Adds the products of sub-block j, scaled, to `total`.
  template <int units>
  static void add_span(const Panel& w, const ActivationTile& x, int n, int j,
                       __m256i (&total)[rows_at_a_time][units]) {
    for (int first = j * span_steps; first < (j + 1) * span_steps; first += steps) {
      __m256i sums[rows_at_a_time][units];
#pragma GCC unroll 8
      for (int k = 0; k < steps; k++) {
#pragma GCC unroll 4
        for (int r = 0; r < rows_at_a_time; r++) {
          const __m256i codes =
              _mm256_set1_epi32(static_cast<int>(load_u32(w.codes[n + r] + 4 * (first + k))));
#pragma GCC unroll 4
          for (int u = 0; u < units; u++) {
            const __m256i inputs = load_256(x.q[first + k][u * unit_rows]);
            const __m256i pairs = multiply_pairs<T::is_signed>(codes, inputs);
            sums[r][u] = k == 0 ? pairs : _mm256_add_epi16(sums[r][u], pairs);
            keep_order(sums[r][u]);
          }
        }
      }
#pragma GCC unroll 4
      for (int r = 0; r < rows_at_a_time; r++) {
        const __m256i scale = T::super_block ? _mm256_set1_epi32(w.scales[n + r][j]) : _mm256_set1_epi16(1);
#pragma GCC unroll 4
        for (int u = 0; u < units; u++)
          total[r][u] = _mm256_add_epi32(total[r][u], _mm256_madd_epi16(sums[r][u], scale));
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
    __m256i total[rows_at_a_time][units];
    for (int r = 0; r < rows_at_a_time; r++) {
      for (int u = 0; u < units; u++)
        total[r][u] = T::has_mins || !has_factors ? _mm256_setzero_si256() : sum_factors(w, x, n + r, u);
    }
    for (int j = 0; j < num_spans; j++) add_span<units>(w, x, n, j, total);
    for (int u = 0; u < units; u++) {
      const __m256 a = _mm256_loadu_ps(x.scales + u * unit_rows);
      for (int r = 0; r < rows_at_a_time; r++) {
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
    __m256i total[rows_at_a_time][units], inputs[units];
    for (int u = 0; u < units; u++) {
      __m256i start = _mm256_setzero_si256();
      if constexpr (T::offset != 0 || T::has_mins) {
        // Of the pair of sums, only that of this block.
        const __m256i pairs = load_256(x.sums_32[b / 2][u * unit_rows]);
        inputs[u] = _mm256_madd_epi16(pairs, _mm256_set1_epi32(b % 2 == 0 ? 1 : 0x10000));
      }
      if constexpr (T::offset != 0) start = _mm256_mullo_epi32(inputs[u], _mm256_set1_epi32(-T::offset));
      for (int r = 0; r < rows_at_a_time; r++) total[r][u] = start;
    }
    add_span<units>(w, x, n, b, total);
    for (int u = 0; u < units; u++) {
      const __m256 a = _mm256_loadu_ps(x.block_scales[b] + u * unit_rows);
      for (int r = 0; r < rows_at_a_time; r++) {
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

void gemm(const WeightRows& w, const ActivationTile* x, int num_tiles, float* const* out, std::byte* memory) {
  dispatch_integer(w.type,
                   [&]<QuantType Q>() { gemm_of_type<Q, KernelAvx2<Q>>(w, x, num_tiles, out, memory); });
}

}  // namespace

constinit const QuantKernels quant_kernels_avx2 = {
    .quantize_row = quantize_row_avx2,
    .gemv = gemv_avx2,
    .gemm = gemm,
    .gemm_bytes = panel_memory<PanelAvx2>(),
    .gemm_min_rows = 6,
    .pack = pack_avx2,
    .float_product = float_product_avx2,
    .dequantize_row = dequantize_row_avx2,
    .swiglu = swiglu_avx2,
};

}  // namespace coldstream

#endif
