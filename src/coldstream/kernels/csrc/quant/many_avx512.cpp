// Products with many activation rows by VNNI: four inputs of a weight row, broadcast, times those of 16
// activation rows.
#include "quant/dequantize.h"
#include "quant/dispatch.h"
#include "quant/few_avx512.h"
#include "quant/kernels.h"
#include "quant/rows_avx512.h"

#if defined(__AVX512VNNI__)

#include "quant/many_512.h"

namespace coldstream {

namespace {

// Unsigned codes, and what scales the sums over sub-blocks of `span` inputs.
struct alignas(64) panel_vnni {
  uint8_t codes[panel_rows][256];
  int32_t scales[panel_rows][16];
  int32_t mins[panel_rows][4];  // two int16 minimums each
  float d[8][panel_rows];       // one for each block of 32, or the first for a super-block
  float dmin[panel_rows];
  int32_t starts[2][16]
                [tile_rows];  // of two tiles: minus the offset of the codes times the sum over each sub-block
};

template <quant_type Q>
struct kernel_vnni : kernel_512 {
  using format = format_512<Q>;
  using panel = panel_vnni;
  static constexpr int span = format::super_block && !format::has_mins ? 16 : 32;
  static constexpr int num_spans = 256 / span;

  static void load(panel& to, int row, const typename format::block* b) {
    const codes_512 codes = format::load(b);
    for (int k = 0; k < 4; k++) _mm512_store_si512(to.codes[row] + 64 * k, codes.part[k]);
    if constexpr (!format::super_block) {
      alignas(32) float d[8];
      _mm256_store_ps(d, load_d_8(b, 8));
      for (int i = 0; i < 8; i++) to.d[i][row] = d[i];
    } else {
      const spread_scales<Q> scales(b);
      to.d[0][row] = _cvtsh_ss(load_u16(b->d));
      _mm512_store_si512(to.scales[row], _mm512_cvtepi16_epi32(scales.packed));
      if constexpr (format::has_mins) {
        to.dmin[row] = _cvtsh_ss(load_u16(b->dmin));
        _mm_store_si128(reinterpret_cast<__m128i*>(to.mins[row]), _mm256_extracti128_si256(scales.packed, 1));
      }
    }
  }

  static void clear(panel& to, int row) {
    std::memset(to.codes[row], 0, sizeof to.codes[row]);
    std::memset(to.scales[row], 0, sizeof to.scales[row]);
    std::memset(to.mins[row], 0, sizeof to.mins[row]);
    for (int i = 0; i < 8; i++) to.d[i][row] = 0.0f;
    to.dmin[row] = 0.0f;
  }

  static void multiply(panel& w, const activation_tile* x, int64_t stride, int num_rows, int64_t g,
                       int num_blocks, accumulators* p) {
    int tile = 0;
    for (; tile + 2 <= num_tiles(num_rows); tile += 2)
      multiply_tiles<4, 2>(w, x + tile * stride, stride, g, num_blocks, p + tile);
    if (tile < num_tiles(num_rows)) multiply_tiles<8, 1>(w, x + tile * stride, stride, g, num_blocks, p + tile);
  }

  template <int ROWS, int TILES>
  static void multiply_tiles(panel& w, const activation_tile* x, int64_t stride, int64_t g, int num_blocks,
                             accumulators* p) {
    for (int i = 0; i < TILES; i++) fill_starts(w.starts[i], x[i * stride]);
    for (int n = 0; n < panel_rows; n += ROWS) {
      if constexpr (format::super_block) {
        multiply_super_blocks<ROWS, TILES>(w, x, stride, n, g, p);
      } else {
        for (int b = 0; b < num_blocks; b++) multiply_blocks<ROWS, TILES>(w, x, stride, n, b, g == 0, p);
      }
    }
  }

  static void fill_starts(int32_t (*starts)[tile_rows], const activation_tile& x) {
    const __m512i zero = _mm512_setzero_si512();
    for (int j = 0; j < num_spans; j++) {
      __m512i start = zero;
      if constexpr (!format::has_mins) {
        const __m512i pairs = _mm512_load_si512(span == 16 ? x.sums_16[j / 2] : x.sums_32[j / 2]);
        const __m512i sums = _mm512_srai_epi32(j % 2 == 0 ? _mm512_slli_epi32(pairs, 16) : pairs, 16);
        start = _mm512_sub_epi32(zero, _mm512_slli_epi32(sums, format::offset_bits));
      }
      _mm512_store_si512(starts[j], start);
    }
  }

  // The integer dot products of one sub-block.
  template <int ROWS, int TILES>
  static void dot_span(const panel& w, const activation_tile* x, int64_t stride, int n, int j,
                       __m512i (&dot)[ROWS][TILES]) {
    for (int i = 0; i < TILES; i++) {
      const __m512i start = _mm512_load_si512(w.starts[i][j]);
      for (int r = 0; r < ROWS; r++) dot[r][i] = start;
    }
#pragma GCC unroll 8
    for (int k = j * span / 4; k < (j + 1) * span / 4; k++) {
      __m512i inputs[TILES];
      for (int i = 0; i < TILES; i++) inputs[i] = _mm512_load_si512(x[i * stride].q[k]);
      for (int r = 0; r < ROWS; r++) {
        const __m512i codes = _mm512_set1_epi32(static_cast<int>(load_u32(w.codes[n + r] + 4 * k)));
        for (int i = 0; i < TILES; i++) dot[r][i] = _mm512_dpbusd_epi32(dot[r][i], codes, inputs[i]);
      }
    }
  }

  template <int ROWS, int TILES>
  static void multiply_super_blocks(const panel& w, const activation_tile* x, int64_t stride, int n,
                                    int64_t g, accumulators* p) {
    __m512i total[ROWS][TILES];
    for (int r = 0; r < ROWS; r++) {
      for (int i = 0; i < TILES; i++) total[r][i] = _mm512_setzero_si512();
    }
    for (int j = 0; j < num_spans; j++) {
      __m512i dot[ROWS][TILES];
      dot_span<ROWS, TILES>(w, x, stride, n, j, dot);
      for (int r = 0; r < ROWS; r++) {
        const __m512i scale = _mm512_set1_epi32(w.scales[n + r][j]);
        for (int i = 0; i < TILES; i++)
          total[r][i] = _mm512_add_epi32(total[r][i], _mm512_mullo_epi32(dot[r][i], scale));
      }
    }
    for (int i = 0; i < TILES; i++) {
      const activation_tile& tile = x[i * stride];
      const __m512 a = _mm512_load_ps(tile.scales);
      for (int r = 0; r < ROWS; r++) {
        float* at = p[i].lane[g % 8][n + r];
        __m512 sum = g < 8 ? _mm512_setzero_ps() : _mm512_load_ps(at);
        sum = _mm512_fmadd_ps(_mm512_mul_ps(_mm512_set1_ps(w.d[0][n + r]), a),
                              _mm512_cvtepi32_ps(total[r][i]), sum);
        if constexpr (format::has_mins) {
          __m512i min_dot = _mm512_setzero_si512();
          for (int k = 0; k < 4; k++) {
            const __m512i mins = _mm512_set1_epi32(w.mins[n + r][k]);
            min_dot = _mm512_dpwssd_epi32(min_dot, _mm512_load_si512(tile.sums_32[k]), mins);
          }
          sum = _mm512_fnmadd_ps(_mm512_mul_ps(_mm512_set1_ps(w.dmin[n + r]), a), _mm512_cvtepi32_ps(min_dot),
                                 sum);
        }
        _mm512_store_ps(at, sum);
      }
    }
  }

  template <int ROWS, int TILES>
  static void multiply_blocks(const panel& w, const activation_tile* x, int64_t stride, int n, int b,
                              bool first, accumulators* p) {
    __m512i dot[ROWS][TILES];
    dot_span<ROWS, TILES>(w, x, stride, n, b, dot);
    for (int i = 0; i < TILES; i++) {
      const __m512 a = _mm512_load_ps(x[i * stride].block_scales[b]);
      for (int r = 0; r < ROWS; r++) {
        float* at = p[i].lane[b][n + r];
        const __m512 sum = first ? _mm512_setzero_ps() : _mm512_load_ps(at);
        const __m512 scale = _mm512_mul_ps(_mm512_set1_ps(w.d[b][n + r]), a);
        _mm512_store_ps(at, _mm512_fmadd_ps(scale, _mm512_cvtepi32_ps(dot[r][i]), sum));
      }
    }
  }
};

void many(const weight_rows& w, const activation_tile* x, int num_tiles, float* const* out,
          std::byte* memory) {
  dispatch_integer(w.type,
                   [&]<quant_type Q>() { many_of_type<Q, kernel_vnni<Q>>(w, x, num_tiles, out, memory); });
}

}  // namespace

constinit const quant_kernels quant_kernels_avx512 = {
    .quantize_row = quantize_row_avx512,
    .few = few_avx512,
    .many = many,
    .many_bytes = panel_memory<panel_vnni>(),
    .many_min_rows = 9,
    .pack = pack_avx512,
    .float_product = float_product_avx512,
    .dequantize_row = dequantize_row_avx512,
    .swiglu = swiglu_avx512,
};

}  // namespace coldstream

#endif
