// Without VNNI, products of unsigned and signed bytes meet in pairs as int16, and as many pairs are added
// there as cannot overflow; only then are they multiplied by the scale of their sub-block and widened.
#if defined(__AVX2__)

#include "quant/gemm_256.h"

namespace coldstream {

namespace {

template <QuantType Q>
struct PairForm {
  using T = Traits<Q>;
  static constexpr int offset = T::is_signed ? 0 : T::offset;
  static constexpr int span_steps = T::sub_block / 4;
  // Steps of four inputs whose pairs of products an int16 holds.
  static constexpr int held = 32767 / (2 * 127 * T::greatest);
  static constexpr int most_steps = held >= 8 ? 8 : held >= 4 ? 4 : held >= 2 ? 2 : 1;
  static constexpr int steps = most_steps < span_steps ? most_steps : span_steps;
  // Fewer where totals are touched often, so that these stay in registers.
  template <int units>
  static constexpr int rows_at_a_time = steps >= 4 || units == 1 ? 4 : 2;

  static __m256i stored(__m256i codes) { return codes; }
  static __m256i spread_scales(__m128i eight) {  // each twice
    return _mm256_set_m128i(_mm_unpackhi_epi16(eight, eight), _mm_unpacklo_epi16(eight, eight));
  }

  template <int units>
  static void add_span(const Panel256& w, const ActivationTile& x, int n, int j,
                       __m256i (&total)[rows_at_a_time<units>][units]) {
    for (int first = j * span_steps; first < (j + 1) * span_steps; first += steps) {
      __m256i sums[rows_at_a_time<units>][units];
#pragma GCC unroll 8
      for (int k = 0; k < steps; k++) {
#pragma GCC unroll 4
        for (int r = 0; r < rows_at_a_time<units>; r++) {
          const __m256i codes =
              _mm256_set1_epi32(static_cast<int>(load_u32(w.codes[n + r] + 4 * (first + k))));
          const __m256i scale = T::super_block ? _mm256_set1_epi32(w.scales[n + r][j]) : _mm256_set1_epi16(1);
#pragma GCC unroll 4
          for (int u = 0; u < units; u++) {
            const __m256i inputs = load_256(x.q[first + k][u * unit_rows]);
            const __m256i pairs = multiply_pairs<T::is_signed>(codes, inputs);
            __m256i sum = k == 0 ? pairs : _mm256_add_epi16(sums[r][u], pairs);
            keep_order(sum);
            // At once: sums that are left to a loop of their own go through memory.
            if (k + 1 < steps) {
              sums[r][u] = sum;
            } else {
              total[r][u] = _mm256_add_epi32(total[r][u], _mm256_madd_epi16(sum, scale));
            }
          }
        }
      }
    }
  }
};

}  // namespace

constinit const QuantKernels quant_kernels_avx2 = kernels_256<PairForm, 6>();

}  // namespace coldstream

#endif
