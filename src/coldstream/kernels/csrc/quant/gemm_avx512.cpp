// Products with many activation rows by VNNI: four inputs of a weight row, broadcast, times those of 16
// activation rows.
#include "quant/dequantize.h"
#include "quant/dispatch.h"
#include "quant/gemv_avx512.h"
#include "quant/kernels.h"
#include "quant/rows_avx512.h"

#if defined(__AVX512VNNI__)

#include "quant/gemm_512.h"
#include "quant/vnni_lanes.h"

namespace coldstream {

namespace {

constexpr int half_tile_rows = tile_rows / 2;

// Unsigned codes, and what scales the sums over sub-blocks of `span` inputs.
struct alignas(64) PanelVnni {
  uint8_t codes[panel_rows][256];
  int32_t scales[panel_rows][16];
  int32_t mins[panel_rows][4];  // two int16 minimums each
  float d[8][panel_rows];       // one for each block of 32, or the first for a super-block
  float dmin[panel_rows];
  int32_t starts[2][16]
                [tile_rows];  // of two tiles: minus the offset of the codes times the sum over each sub-block
};

template <QuantType Q>
struct KernelVnni : Kernel512 {
  using Format = Format512<Q>;
  using Panel = PanelVnni;
  static constexpr int span = Format::super_block && !Format::has_mins ? 16 : 32;
  static constexpr int num_spans = 256 / span;

  static void load(Panel& to, int row, const typename Format::Block* b) {
    const Codes512 codes = Format::load(b);
    for (int k = 0; k < 4; k++) _mm512_store_si512(to.codes[row] + 64 * k, codes.part[k]);
    if constexpr (!Format::super_block) {
      alignas(32) float d[8];
      _mm256_store_ps(d, load_d_8(b, 8));
      for (int i = 0; i < 8; i++) to.d[i][row] = d[i];
    } else {
      const SpreadScales<Q> scales(b);
      to.d[0][row] = _cvtsh_ss(load_u16(b->d));
      _mm512_store_si512(to.scales[row], _mm512_cvtepi16_epi32(scales.packed));
      if constexpr (Format::has_mins) {
        to.dmin[row] = _cvtsh_ss(load_u16(b->dmin));
        _mm_store_si128(reinterpret_cast<__m128i*>(to.mins[row]), _mm256_extracti128_si256(scales.packed, 1));
      }
    }
  }

  static void clear(Panel& to, int row) {
    std::memset(to.codes[row], 0, sizeof to.codes[row]);
    std::memset(to.scales[row], 0, sizeof to.scales[row]);
    std::memset(to.mins[row], 0, sizeof to.mins[row]);
    for (int i = 0; i < 8; i++) to.d[i][row] = 0.0f;
    to.dmin[row] = 0.0f;
  }

  static void multiply(Panel& w, const ActivationTile* x, int64_t stride, int num_rows, int64_t g,
                       int num_blocks, Accumulators* p) {
    const int last = num_tiles(num_rows) - 1;
    const bool ends_early = num_rows - last * tile_rows <= half_tile_rows;
    int tile = 0;
    for (; tile + 2 <= last + !ends_early; tile += 2)
      multiply_tiles<Lanes16, 4, 2>(w, x + tile * stride, stride, g, num_blocks, p + tile);
    if (tile < last + !ends_early) {
      multiply_tiles<Lanes16, 8, 1>(w, x + tile * stride, stride, g, num_blocks, p + tile);
    }
    if (ends_early) multiply_tiles<Lanes8, 8, 1>(w, x + last * stride, stride, g, num_blocks, p + last);
  }

  template <typename L, int rows, int tiles>
  static void multiply_tiles(Panel& w, const ActivationTile* x, int64_t stride, int64_t g, int num_blocks,
                             Accumulators* p) {
    for (int i = 0; i < tiles; i++) fill_starts<L>(w.starts[i], x[i * stride]);
    for (int n = 0; n < panel_rows; n += rows) {
      if constexpr (Format::super_block) {
        multiply_super_blocks<L, rows, tiles>(w, x, stride, n, g, p);
      } else {
        for (int b = 0; b < num_blocks; b++) multiply_blocks<L, rows, tiles>(w, x, stride, n, b, g == 0, p);
      }
    }
  }

  template <typename L>
  static void fill_starts(int32_t (*starts)[tile_rows], const ActivationTile& x) {
    for (int j = 0; j < num_spans; j++) {
      auto start = L::zero();
      if constexpr (!Format::has_mins) {
        const auto pairs = L::load(span == 16 ? x.sums_16[j / 2] : x.sums_32[j / 2]);
        const auto sums = L::shift_right(j % 2 == 0 ? L::shift_left(pairs, 16) : pairs, 16);
        start = L::sub(start, L::shift_left(sums, Format::offset_bits));
      }
      L::store(starts[j], start);
    }
  }

  // The integer dot products of one sub-block.
  template <typename L, int rows, int tiles>
  static void dot_span(const Panel& w, const ActivationTile* x, int64_t stride, int n, int j,
                       typename L::Ints (&dot)[rows][tiles]) {
    for (int i = 0; i < tiles; i++) {
      const auto start = L::load(w.starts[i][j]);
      for (int r = 0; r < rows; r++) dot[r][i] = start;
    }
#pragma GCC unroll 8
    for (int k = j * span / 4; k < (j + 1) * span / 4; k++) {
      typename L::Ints inputs[tiles];
      for (int i = 0; i < tiles; i++) inputs[i] = L::load(x[i * stride].q[k]);
      for (int r = 0; r < rows; r++) {
        const auto codes = L::splat(static_cast<int>(load_u32(w.codes[n + r] + 4 * k)));
        for (int i = 0; i < tiles; i++) dot[r][i] = L::dot_bytes(dot[r][i], codes, inputs[i]);
      }
    }
  }

  template <typename L, int rows, int tiles>
  static void multiply_super_blocks(const Panel& w, const ActivationTile* x, int64_t stride, int n, int64_t g,
                                    Accumulators* p) {
    typename L::Ints total[rows][tiles];
    for (int r = 0; r < rows; r++) {
      for (int i = 0; i < tiles; i++) total[r][i] = L::zero();
    }
    for (int j = 0; j < num_spans; j++) {
      typename L::Ints dot[rows][tiles];
      dot_span<L, rows, tiles>(w, x, stride, n, j, dot);
      for (int r = 0; r < rows; r++) {
        const auto scale = L::splat(w.scales[n + r][j]);
        for (int i = 0; i < tiles; i++) total[r][i] = L::add(total[r][i], L::mul(dot[r][i], scale));
      }
    }
    for (int i = 0; i < tiles; i++) {
      const ActivationTile& tile = x[i * stride];
      const auto a = L::load_floats(tile.scales);
      for (int r = 0; r < rows; r++) {
        float* at = p[i].lane[g % 8][n + r];
        auto sum = g < 8 ? L::zero_floats() : L::load_floats(at);
        sum = L::fma(L::mul(L::splat_float(w.d[0][n + r]), a), L::to_floats(total[r][i]), sum);
        if constexpr (Format::has_mins) {
          auto min_dot = L::zero();
          for (int k = 0; k < 4; k++) {
            min_dot = L::dot_pairs(min_dot, L::load(tile.sums_32[k]), L::splat(w.mins[n + r][k]));
          }
          sum = L::minus_fma(L::mul(L::splat_float(w.dmin[n + r]), a), L::to_floats(min_dot), sum);
        }
        L::store_floats(at, sum);
      }
    }
  }

  template <typename L, int rows, int tiles>
  static void multiply_blocks(const Panel& w, const ActivationTile* x, int64_t stride, int n, int b,
                              bool first, Accumulators* p) {
    typename L::Ints dot[rows][tiles];
    dot_span<L, rows, tiles>(w, x, stride, n, b, dot);
    for (int i = 0; i < tiles; i++) {
      const auto a = L::load_floats(x[i * stride].block_scales[b]);
      for (int r = 0; r < rows; r++) {
        float* at = p[i].lane[b][n + r];
        const auto sum = first ? L::zero_floats() : L::load_floats(at);
        const auto scale = L::mul(L::splat_float(w.d[b][n + r]), a);
        L::store_floats(at, L::fma(scale, L::to_floats(dot[r][i]), sum));
      }
    }
  }
};

void gemm(const WeightRows& w, const ActivationTile* x, int num_tiles, float* const* out, std::byte* memory) {
  dispatch_integer(w.type,
                   [&]<QuantType Q>() { gemm_of_type<Q, KernelVnni<Q>>(w, x, num_tiles, out, memory); });
}

}  // namespace

constinit const QuantKernels quant_kernels_avx512 = {
    .quantize_row = quantize_row_avx512,
    .gemv = gemv_avx512,
    .gemm = gemm,
    .gemm_bytes = panel_memory<PanelVnni>(),
    .gemm_min_rows = 7,
    .pack = pack_avx512,
    .float_product = float_product_avx512,
    .dequantize_row = dequantize_row_avx512,
    .swiglu = swiglu_avx512,
};

}  // namespace coldstream

#endif
