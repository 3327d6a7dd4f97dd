// Products with many activation rows on AMX tiles.
//
// A super-block's integer part Σ sc·(q − offset)·x is one tile product over all 256 inputs if the weights are
// w = sc·(q − offset), at most 13 bits. They are split exactly into w = low + 128·high, 0 <= low < 128, two
// int8 planes: two tile products, and a single float step for a super-block.
#include "quant/kernels.h"

#if defined(__AMX_INT8__)

#include "quant/dequantize.h"
#include "quant/dispatch.h"
#include "quant/gemv_avx512.h"
#include "quant/gemm_512.h"
#include "quant/gemm_quarters.h"
#include "quant/rows_avx512.h"

namespace coldstream {

namespace {

// Tiles 0 … 3 accumulate, 4 and 5 hold weights (16 rows of inputs), 6 and 7 activations (inputs of 16 rows).
template <int inputs>
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, inputs, inputs, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, inputs / 4, inputs / 4};
};
static_assert(sizeof(TileConfig<64>) == 64);

struct alignas(64) PanelK {
  int8_t low[panel_rows][256];
  int8_t high[panel_rows][256];
  int32_t results[4][16][tile_rows];  // of the four accumulator tiles
  int32_t mins[panel_rows][8];        // two int16 minimums each
  float d[panel_rows], dmin[panel_rows];
  ActivationTile narrow;  // a tile of quarters with four inputs of a row together
};

template <QuantType Q>
struct KernelK : Kernel512 {
  using T = Traits<Q>;
  using Panel = PanelK;

  static void load(Panel& to, int row, const typename T::Block* b) {
    const Codes512 codes = load_codes<Q>(b);
    const SpreadScales<Q> scales(b);
    const __m512i seven_bits = _mm512_set1_epi8(0x7f);
    for (int k = 0; k < 4; k++) {
      const ScaledCodes scaled = scale_codes<Q>(codes.part[k], scales.part[k]);
      const __m512i low = interleave_bytes(scaled.even, scaled.odd);
      const __m512i high =
          interleave_bytes(_mm512_srai_epi16(scaled.even, 7), _mm512_srai_epi16(scaled.odd, 7));
      _mm512_store_si512(to.low[row] + 64 * k, _mm512_and_si512(low, seven_bits));
      _mm512_store_si512(to.high[row] + 64 * k, high);
    }
    to.d[row] = scale_of<Q>(*b);
    if constexpr (T::has_mins) {
      to.dmin[row] = half_bits_to_float(T::half_dmin(*b));
      store_mins<Q>(scales, to.mins[row]);
    }
  }

  static void clear(Panel& to, int row) {
    std::memset(to.low[row], 0, sizeof to.low[row]);
    std::memset(to.high[row], 0, sizeof to.high[row]);
    std::memset(to.mins[row], 0, sizeof to.mins[row]);
    to.d[row] = to.dmin[row] = 0.0f;
  }

  static void multiply(Panel& w, const ActivationTile* x, int64_t stride, int num_rows, int64_t g,
                       int /*num_blocks*/, Accumulators* p) {
    const int last = num_tiles(num_rows) - 1, lane = static_cast<int>(g % 8);
    const bool ends_early = num_rows - last * tile_rows <= narrow_tile_rows;
    if (ends_early) regroup_quarters<4>(x[last * stride], w.narrow);
    const auto inputs = [&](int tile) -> const ActivationTile& {
      return ends_early && tile == last ? w.narrow : x[tile * stride];
    };
    for (int tile = 0; tile <= last; tile++) {
      multiply_tile(w, inputs(tile));
      // The vector units scale the previous tile's results while the tile unit is busy with this one.
      if (tile > 0) add_results(w, x[(tile - 1) * stride], g < 8, p[tile - 1].lane[lane]);
      store_results(w);
    }
    add_results(w, inputs(last), g < 8, p[last].lane[lane]);
  }

  static void multiply_tile(const Panel& w, const ActivationTile& x) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++) {
      _tile_loadd(6, x.q[16 * k], 64);
      _tile_loadd(4, w.low[0] + 64 * k, 256);
      _tile_dpbssd(0, 4, 6);
      _tile_loadd(5, w.high[0] + 64 * k, 256);
      _tile_dpbssd(1, 5, 6);
      _tile_loadd(4, w.low[16] + 64 * k, 256);
      _tile_dpbssd(2, 4, 6);
      _tile_loadd(5, w.high[16] + 64 * k, 256);
      _tile_dpbssd(3, 5, 6);
    }
  }

  static void store_results(Panel& w) {
    _tile_stored(0, w.results[0], 64);
    _tile_stored(1, w.results[1], 64);
    _tile_stored(2, w.results[2], 64);
    _tile_stored(3, w.results[3], 64);
  }

  static void add_results(const Panel& w, const ActivationTile& x, bool first, float (*p)[tile_rows]) {
    const __m512 a = _mm512_load_ps(x.scales);
    constexpr int num_pairs = 128 / T::sub_block;
    __m512i sums[num_pairs];
    if constexpr (T::has_mins) {
      for (int i = 0; i < num_pairs; i++)
        sums[i] = T::sub_block == 32 ? _mm512_load_si512(x.sums_32[i]) : _mm512_load_si512(x.sums_16[i]);
    }
    for (int n = 0; n < panel_rows; n++) {
      const __m512i low = _mm512_load_si512(w.results[n / 16 * 2][n % 16]);
      const __m512i high = _mm512_load_si512(w.results[n / 16 * 2 + 1][n % 16]);
      const __m512 dot = _mm512_cvtepi32_ps(_mm512_add_epi32(low, _mm512_slli_epi32(high, 7)));
      __m512 sum = first ? _mm512_setzero_ps() : _mm512_load_ps(p[n]);
      sum = _mm512_fmadd_ps(_mm512_mul_ps(_mm512_set1_ps(w.d[n]), a), dot, sum);
      if constexpr (T::has_mins) {
        __m512i min_dot = _mm512_setzero_si512();
        for (int i = 0; i < num_pairs; i++)
          min_dot = _mm512_dpwssd_epi32(min_dot, sums[i], _mm512_set1_epi32(w.mins[n][i]));
        sum = _mm512_fnmadd_ps(_mm512_mul_ps(_mm512_set1_ps(w.dmin[n]), a), _mm512_cvtepi32_ps(min_dot), sum);
      }
      _mm512_store_ps(p[n], sum);
    }
  }
};

struct alignas(64) Panel32 {
  int8_t codes[panel_rows][256];
  int32_t results[4][16][tile_rows];
  float d[8][panel_rows], m[8][panel_rows];
};

// Blocks of 32 have a float scale each, so that a tile product spans 32 inputs only.
template <QuantType Q>
struct Kernel32 : Kernel512 {
  using T = Traits<Q>;
  using Panel = Panel32;

  static void load(Panel& to, int row, const typename T::Block* b) {
    const Codes512 codes = load_codes<Q>(b);
    for (int k = 0; k < 4; k++)
      _mm512_store_si512(to.codes[row] + 64 * k, _mm512_sub_epi8(codes.part[k], _mm512_set1_epi8(T::offset)));
    alignas(32) float d[8];
    _mm256_store_ps(d, load_small_scales<Q>(b));
    for (int i = 0; i < 8; i++) to.d[i][row] = d[i];
    if constexpr (T::has_mins) {
      _mm256_store_ps(d, load_small_mins<Q>(b));
      for (int i = 0; i < 8; i++) to.m[i][row] = d[i];
    }
  }

  static void clear(Panel& to, int row) {
    std::memset(to.codes[row], 0, sizeof to.codes[row]);
    for (int i = 0; i < 8; i++) to.d[i][row] = to.m[i][row] = 0.0f;
  }

  static void multiply(Panel& w, const ActivationTile* x, int64_t stride, int num_rows, int64_t g,
                       int /*num_blocks*/, Accumulators* p) {
    for (int tile = 0; tile < num_tiles(num_rows); tile++) {
      const ActivationTile& from = x[tile * stride];
      for (int pair = 0; pair < 4; pair++) {
        multiply_pair(w, from, pair);
        if (pair > 0) add_pair(w, from, pair - 1, g == 0, p[tile]);
        _tile_stored(0, w.results[0], 64);
        _tile_stored(1, w.results[1], 64);
        _tile_stored(2, w.results[2], 64);
        _tile_stored(3, w.results[3], 64);
      }
      add_pair(w, from, 3, g == 0, p[tile]);
    }
  }

  // Two blocks of 32 inputs.
  static void multiply_pair(const Panel& w, const ActivationTile& x, int pair) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_loadd(6, x.q[16 * pair], 64);
    _tile_loadd(7, x.q[16 * pair + 8], 64);
    _tile_loadd(4, w.codes[0] + 64 * pair, 256);
    _tile_dpbssd(0, 4, 6);
    _tile_loadd(5, w.codes[0] + 64 * pair + 32, 256);
    _tile_dpbssd(2, 5, 7);
    _tile_loadd(4, w.codes[16] + 64 * pair, 256);
    _tile_dpbssd(1, 4, 6);
    _tile_loadd(5, w.codes[16] + 64 * pair + 32, 256);
    _tile_dpbssd(3, 5, 7);
  }

  static void add_pair(const Panel& w, const ActivationTile& x, int pair, bool first, Accumulators& p) {
    for (int i = 0; i < 2; i++) {
      const int lane = 2 * pair + i;
      const __m512 a = _mm512_load_ps(x.block_scales[lane]);
      const __m512i pairs = _mm512_load_si512(x.sums_32[pair]);
      const __m512 inputs =
          _mm512_cvtepi32_ps(_mm512_srai_epi32(i == 0 ? _mm512_slli_epi32(pairs, 16) : pairs, 16));
      for (int n = 0; n < panel_rows; n++) {
        const __m512 dot = _mm512_cvtepi32_ps(_mm512_load_si512(w.results[2 * i + n / 16][n % 16]));
        __m512 sum = first ? _mm512_setzero_ps() : _mm512_load_ps(p.lane[lane][n]);
        sum = _mm512_fmadd_ps(_mm512_mul_ps(_mm512_set1_ps(w.d[lane][n]), a), dot, sum);
        if constexpr (T::has_mins)
          sum = _mm512_fmadd_ps(_mm512_mul_ps(_mm512_set1_ps(w.m[lane][n]), a), inputs, sum);
        _mm512_store_ps(p.lane[lane][n], sum);
      }
    }
  }
};

void gemm(const WeightRows& w, const ActivationTile* x, int num_tiles, float* const* out, std::byte* memory) {
  if (gemm_quarters(w, x, num_tiles, out, memory)) return;
  dispatch_integer(w.type, [&]<QuantType Q>() {
    if constexpr (Traits<Q>::super_block) {
      const TileConfig<64> config;
      _tile_loadconfig(&config);
      gemm_of_type<Q, KernelK<Q>>(w, x, num_tiles, out, memory);
    } else {
      const TileConfig<32> config;
      _tile_loadconfig(&config);
      gemm_of_type<Q, Kernel32<Q>>(w, x, num_tiles, out, memory);
    }
    _tile_release();
  });
}

}  // namespace

constinit const QuantKernels quant_kernels_amx = {
    .quantize_row = quantize_row_avx512,
    .interleaves_blocks = true,
    .gemv = gemv_avx512,
    .gemm = gemm,
    .gemm_bytes = std::max({panel_memory<PanelK>(), panel_memory<Panel32>(), panel_memory<PanelQuarters>()}),
    .gemm_min_rows = [](QuantType type) { return std::min(8, quarters_min_rows(type)); },
    .pack = pack_avx512,
    .float_product = float_product_avx512,
    .dequantize_row = dequantize_row_avx512,
    .glu = glu_avx512,
};

}  // namespace coldstream

#endif
