// With VNNI in 256-bit registers, four products of unsigned and signed bytes are added to an int32 at once.
// Signed codes have 128 added in a panel.
#if defined(__AVXVNNI__)

#include "quant/gemm_256.h"

namespace coldstream {

namespace {

template <QuantType Q>
struct VnniForm {
  using T = Traits<Q>;
  static constexpr int offset = T::is_signed ? 128 : T::offset;
  static constexpr int span_steps = T::sub_block / 4;
  // Eight sums, as a sum waits for four products.
  template <int units>
  static constexpr int rows_at_a_time = 8 / units;

  static __m256i stored(__m256i codes) {
    return T::is_signed ? _mm256_xor_si256(codes, _mm256_set1_epi8(-128)) : codes;
  }
  static __m256i spread_scales(__m128i eight) { return _mm256_cvtepi16_epi32(eight); }

  template <int units>
  static void add_span(const Panel256& w, const ActivationTile& x, int n, int j,
                       __m256i (&total)[rows_at_a_time<units>][units]) {
    __m256i sums[rows_at_a_time<units>][units];
#pragma GCC unroll 8
    for (int k = 0; k < span_steps; k++) {
      const int step = j * span_steps + k;
#pragma GCC unroll 8
      for (int r = 0; r < rows_at_a_time<units>; r++) {
        const __m256i codes = _mm256_set1_epi32(static_cast<int>(load_u32(w.codes[n + r] + 4 * step)));
#pragma GCC unroll 4
        for (int u = 0; u < units; u++) {
          const __m256i inputs = load_256(x.q[step][u * unit_rows]);
          const __m256i start = k == 0 ? _mm256_setzero_si256() : sums[r][u];
          sums[r][u] = _mm256_dpbusd_avx_epi32(start, codes, inputs);
        }
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows_at_a_time<units>; r++) {
#pragma GCC unroll 4
      for (int u = 0; u < units; u++) {
        __m256i scaled = sums[r][u];
        if constexpr (T::super_block)
          scaled = _mm256_mullo_epi32(scaled, _mm256_set1_epi32(w.scales[n + r][j]));
        total[r][u] = _mm256_add_epi32(total[r][u], scaled);
      }
    }
  }
};

}  // namespace

constinit const QuantKernels quant_kernels_avx_vnni = kernels_256<VnniForm, 4>();

}  // namespace coldstream

#endif
