// Products with many activation rows by VNNI: four inputs of a weight row, broadcast, times those of 16
// activation rows.
#include "quant/dequantize.h"
#include "quant/dispatch.h"
#include "quant/gemv_avx512.h"
#include "quant/kernels.h"
#include "quant/rows_avx512.h"

#if defined(__AVX512VNNI__)

#include "quant/gemm_512.h"
#include "quant/gemm_quarters.h"
#include "quant/vnni_lanes.h"

namespace coldstream {

namespace {

// Unsigned codes, and what scales the sums over sub-blocks.
struct alignas(64) PanelVnni {
  uint8_t codes[panel_rows][256];
  int32_t scales[panel_rows][16];
  int32_t mins[panel_rows][8];  // two int16 minimums each
  float d[8][panel_rows];       // one for each block of 32, or the first for a super-block
  float dmin[8][panel_rows];    // likewise
  // Of up to three tiles: minus the offset of the codes times the sum over each sub-block.
  int32_t starts[3][16][tile_rows];
  ActivationTile narrow;  // a tile of quarters with eight inputs of a row together
};

// Codes that still fit a byte once they are multiplied by the scale of their sub-block, which makes one sum
// of a super-block: how far unsigned products lie above the signed ones, or −1.
template <QuantType Q>
inline constexpr int scaled_offset = -1;
template <>
inline constexpr int scaled_offset<QuantType::q2_k> = 0;  // 3 · 15
template <>
inline constexpr int scaled_offset<QuantType::q3_k> = 124;  // −4 · 31 … −4 · −32
template <>
inline constexpr int scaled_offset<QuantType::tq2_0> = 1;

template <QuantType Q>
struct KernelVnni : Kernel512 {
  using T = Traits<Q>;
  using Panel = PanelVnni;
  static constexpr bool is_scaled = scaled_offset<Q> >= 0;
  static constexpr int span = is_scaled ? 256 : T::sub_block, num_spans = 256 / span;
  static constexpr int offset = is_scaled ? scaled_offset<Q> : unsigned_offset<Q>;

  static void load(Panel& to, int row, const typename T::Block* b) {
    if constexpr (!is_scaled) {
      const Codes512 codes = load_unsigned_codes<Q>(b);
      for (int k = 0; k < 4; k++) _mm512_store_si512(to.codes[row] + 64 * k, codes.part[k]);
    }
    if constexpr (T::super_block) {
      const SpreadScales<Q> scales(b);
      to.d[0][row] = scale_of<Q>(*b);
      if constexpr (is_scaled) {
        const Codes512 codes = load_codes<Q>(b);
        for (int k = 0; k < 4; k++) {
          const ScaledCodes scaled = scale_codes<Q>(codes.part[k], scales.part[k]);
          const __m512i bytes = interleave_bytes(scaled.even, scaled.odd);
          _mm512_store_si512(to.codes[row] + 64 * k, _mm512_add_epi8(bytes, _mm512_set1_epi8(offset)));
        }
      } else {
        _mm512_store_si512(to.scales[row], _mm512_cvtepi16_epi32(scales.packed));
      }
      if constexpr (T::has_mins) {
        to.dmin[0][row] = half_bits_to_float(T::half_dmin(*b));
        store_mins<Q>(scales, to.mins[row]);
      }
    } else {
      alignas(32) float d[8];
      _mm256_store_ps(d, load_small_scales<Q>(b));
      for (int i = 0; i < 8; i++) to.d[i][row] = d[i];
      if constexpr (T::has_mins) {
        _mm256_store_ps(d, load_small_mins<Q>(b));
        for (int i = 0; i < 8; i++) to.dmin[i][row] = d[i];
      }
    }
  }

  static void clear(Panel& to, int row) {
    std::memset(to.codes[row], 0, sizeof to.codes[row]);
    std::memset(to.scales[row], 0, sizeof to.scales[row]);
    std::memset(to.mins[row], 0, sizeof to.mins[row]);
    for (int i = 0; i < 8; i++) to.d[i][row] = to.dmin[i][row] = 0.0f;
  }

  static void multiply(Panel& w, const ActivationTile* x, int64_t stride, int num_rows, int64_t g,
                       int num_blocks, Accumulators* p) {
    const int last = num_tiles(num_rows) - 1;
    const bool ends_early = num_rows - last * tile_rows <= narrow_tile_rows;
    int tile = 0;
    if constexpr (is_scaled) {  // without scales to load, registers are left for a third tile
      for (; tile + 3 <= last + !ends_early; tile += 3)
        multiply_tiles<Lanes16, 4, 3>(w, x + tile * stride, stride, g, num_blocks, p + tile);
    }
    for (; tile + 2 <= last + !ends_early; tile += 2)
      multiply_tiles<Lanes16, 4, 2>(w, x + tile * stride, stride, g, num_blocks, p + tile);
    if (tile < last + !ends_early) {
      multiply_tiles<Lanes16, 8, 1>(w, x + tile * stride, stride, g, num_blocks, p + tile);
    }
    if (!ends_early) return;
    const ActivationTile* narrow = x + last * stride;
    if constexpr (T::super_block) {
      regroup_quarters<8>(*narrow, w.narrow);
      narrow = &w.narrow;
    }
    multiply_tiles<Lanes8, 8, 1>(w, narrow, stride, g, num_blocks, p + last);
  }

  template <typename L, int rows, int tiles>
  static void multiply_tiles(Panel& w, const ActivationTile* x, int64_t stride, int64_t g, int num_blocks,
                             Accumulators* p) {
    for (int i = 0; i < tiles; i++) fill_starts<L>(w.starts[i], x[i * stride]);
    for (int n = 0; n < panel_rows; n += rows) {
      if constexpr (T::super_block) {
        multiply_super_blocks<L, rows, tiles>(w, x, stride, n, g, p);
      } else {
        for (int b = 0; b < num_blocks; b++) multiply_blocks<L, rows, tiles>(w, x, stride, n, b, g == 0, p);
      }
    }
  }

  // Two consecutive sums over 16 or 32 inputs, in the halves of a lane.
  template <typename L>
  static auto sum_pairs(const ActivationTile& x, int pair) {
    if constexpr (T::super_block && T::sub_block == 16) return L::load(x.sums_16[pair]);
    return L::load(x.sums_32[pair]);
  }

  template <typename L>
  static void fill_starts(int32_t (*starts)[tile_rows], const ActivationTile& x) {
    for (int j = 0; j < num_spans; j++) {
      auto start = L::zero();
      if constexpr (offset != 0 && is_scaled) {
        for (int k = 0; k < 4; k++)
          start = L::dot_pairs(start, L::load(x.sums_32[k]),
                               L::splat(static_cast<int>(static_cast<uint16_t>(-offset) * 0x10001u)));
      } else if constexpr (offset != 0) {
        start = L::sub(start, L::mul(sum_of_span<L>(x, j), L::splat(offset)));
      }
      L::store_start(starts[j], start);
    }
  }

  template <typename L>
  static auto sum_of_span(const ActivationTile& x, int j) {
    const auto pairs = sum_pairs<L>(x, j / 2);
    return L::shift_right(j % 2 == 0 ? L::shift_left(pairs, 16) : pairs, 16);
  }

  // The integer dot products of one sub-block.
  template <typename L, int rows, int tiles>
  static void dot_span(const Panel& w, const ActivationTile* x, int64_t stride, int n, int j,
                       __m512i (&dot)[rows][tiles]) {
    for (int i = 0; i < tiles; i++) {
      const __m512i start = _mm512_load_si512(w.starts[i][j]);
      for (int r = 0; r < rows; r++) dot[r][i] = start;
    }
    constexpr int steps = span / L::step_inputs;
#pragma GCC unroll 8
    for (int step = 0; step < steps; step++) {
      const int k = j * steps + step;
      __m512i inputs[tiles];
      for (int i = 0; i < tiles; i++) inputs[i] = _mm512_load_si512(x[i * stride].q[k]);
      for (int r = 0; r < rows; r++) {
        const auto codes = L::splat_codes(w.codes[n + r] + L::step_inputs * k);
        for (int i = 0; i < tiles; i++) dot[r][i] = _mm512_dpbusd_epi32(dot[r][i], codes, inputs[i]);
      }
    }
  }

  // The integer sums of super-blocks.
  template <typename L, int rows, int tiles>
  static void sum_super_block(const Panel& w, const ActivationTile* x, int64_t stride, int n,
                              __m512i (&total)[rows][tiles]) {
    if constexpr (is_scaled) {
      dot_span<L, rows, tiles>(w, x, stride, n, 0, total);
      return;
    }
    for (int r = 0; r < rows; r++) {
      for (int i = 0; i < tiles; i++) total[r][i] = _mm512_setzero_si512();
    }
    for (int j = 0; j < num_spans; j++) {
      __m512i dot[rows][tiles];
      dot_span<L, rows, tiles>(w, x, stride, n, j, dot);
      for (int r = 0; r < rows; r++) {
        const __m512i scale = _mm512_set1_epi32(w.scales[n + r][j]);
        for (int i = 0; i < tiles; i++)
          total[r][i] = _mm512_add_epi32(total[r][i], _mm512_mullo_epi32(dot[r][i], scale));
      }
    }
  }

  // The sums over the inputs of sub-blocks times their minimums.
  template <typename L, int rows, int tiles>
  static void sum_mins(const Panel& w, const ActivationTile* x, int64_t stride, int n,
                       typename L::Ints (&min_dots)[rows][tiles]) {
    for (int r = 0; r < rows; r++) {
      for (int i = 0; i < tiles; i++) min_dots[r][i] = L::zero();
    }
#pragma GCC unroll 8
    for (int k = 0; k < 128 / T::sub_block; k++) {
      for (int r = 0; r < rows; r++) {
        const auto mins = L::splat(w.mins[n + r][k]);
        for (int i = 0; i < tiles; i++)
          min_dots[r][i] = L::dot_pairs(min_dots[r][i], sum_pairs<L>(x[i * stride], k), mins);
      }
    }
  }

  template <typename L, int rows, int tiles>
  static void multiply_super_blocks(const Panel& w, const ActivationTile* x, int64_t stride, int n, int64_t g,
                                    Accumulators* p) {
    __m512i total[rows][tiles];
    sum_super_block<L, rows, tiles>(w, x, stride, n, total);
    typename L::Ints min_dots[rows][tiles];
    if constexpr (T::has_mins) sum_mins<L, rows, tiles>(w, x, stride, n, min_dots);
    for (int i = 0; i < tiles; i++) {
      const ActivationTile& tile = x[i * stride];
      const auto a = L::load_floats(tile.scales);
      for (int r = 0; r < rows; r++) {
        float* at = p[i].lane[g % 8][n + r];
        auto sum = g < 8 ? L::zero_floats() : L::load_floats(at);
        sum = L::fma(L::mul(L::splat_float(w.d[0][n + r]), a), L::to_floats(L::sum_dots(total[r][i])), sum);
        if constexpr (T::has_mins) {
          const auto min_dot = L::to_floats(min_dots[r][i]);
          sum = L::minus_fma(L::mul(L::splat_float(w.dmin[0][n + r]), a), min_dot, sum);
        }
        L::store_floats(at, sum);
      }
    }
  }

  template <typename L, int rows, int tiles>
  static void multiply_blocks(const Panel& w, const ActivationTile* x, int64_t stride, int n, int b,
                              bool first, Accumulators* p) {
    __m512i dot[rows][tiles];
    dot_span<L, rows, tiles>(w, x, stride, n, b, dot);
    for (int i = 0; i < tiles; i++) {
      const auto a = L::load_floats(x[i * stride].block_scales[b]);
      for (int r = 0; r < rows; r++) {
        float* at = p[i].lane[b][n + r];
        const auto sum = first ? L::zero_floats() : L::load_floats(at);
        const auto products = L::to_floats(L::sum_dots(dot[r][i]));
        auto total = L::fma(L::mul(L::splat_float(w.d[b][n + r]), a), products, sum);
        if constexpr (T::has_mins) {
          const auto inputs = L::to_floats(sum_of_span<L>(x[i * stride], b));
          total = L::fma(L::mul(L::splat_float(w.dmin[b][n + r]), a), inputs, total);
        }
        L::store_floats(at, total);
      }
    }
  }
};

void gemm(const WeightRows& w, const ActivationTile* x, int num_tiles, float* const* out, std::byte* memory) {
  if (gemm_quarters(w, x, num_tiles, out, memory)) return;
  dispatch_integer(w.type,
                   [&]<QuantType Q>() { gemm_of_type<Q, KernelVnni<Q>>(w, x, num_tiles, out, memory); });
}

}  // namespace

constinit const QuantKernels quant_kernels_avx512 = {
    .quantize_row = quantize_row_avx512,
    .interleaves_blocks = true,
    .gemv = gemv_avx512,
    .gemm = gemm,
    .gemm_bytes = std::max(panel_memory<PanelVnni>(), panel_memory<PanelQuarters>()),
    .gemm_min_rows = [](QuantType type) { return std::min(7, quarters_min_rows(type)); },
    .pack = pack_vnni,
    .float_product = float_product_avx512,
    .dequantize_row = dequantize_row_avx512,
    .glu = glu_avx512,
};

}  // namespace coldstream

#endif
