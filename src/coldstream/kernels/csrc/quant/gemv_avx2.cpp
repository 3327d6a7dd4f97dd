#include "quant/gemv_avx2.h"

#if defined(__AVX2__)

#include "quant/blocks_avx2.h"
#include "quant/dispatch.h"
#include "quant/gemv_lanes.h"
#include "shuffles_avx2.h"

namespace coldstream {

namespace {

// A super-block's scales, spread over the int16 lanes that they multiply.
template <QuantType Q>
struct SpreadScales : WideScales<Q> {
  __m256i part[8];

  inline __attribute__((always_inline)) explicit SpreadScales(const typename Traits<Q>::Block* b)
      : WideScales<Q>(b) {
    if constexpr (Traits<Q>::sub_block == 32) {
      for (int j = 0; j < 8; j++) {
        const auto index = static_cast<short>((2 * j + 1) << 8 | 2 * j);
        part[j] = _mm256_shuffle_epi8(this->scales, _mm256_set1_epi16(index));
      }
    } else {
      const __m256i halves[2] = {_mm256_permute2x128_si256(this->scales, this->scales, 0x00),
                                 _mm256_permute2x128_si256(this->scales, this->scales, 0x11)};
      for (int j = 0; j < 8; j++) {
        const int even = 4 * (j % 4), odd = even + 2;
        const __m256i index = _mm256_set_m128i(_mm_set1_epi16(static_cast<short>((odd + 1) << 8 | odd)),
                                               _mm_set1_epi16(static_cast<short>((even + 1) << 8 | even)));
        part[j] = _mm256_shuffle_epi8(halves[j / 4], index);
      }
    }
  }
};

template <QuantType Q>
struct KernelGemv {
  using T = Traits<Q>;
  // With more rows, or if their number is not known, a block's codes and scales go through memory.
  static constexpr int most_fixed_rows = 4;

  template <int rows, bool full, Eight E>
  inline __attribute__((always_inline)) static void add_super_blocks(const uint8_t* data, int64_t stride,
                                                                     int count, const ActivationRow* x,
                                                                     int64_t g, int num_rows, __m256* p) {
    using Block = typename T::Block;
    if constexpr (full) count = 8;
    __m256i dots[capacity_of<rows>][8], min_dots[capacity_of<rows>][8];
    for (int i = 0; i < count; i++) {
      const auto* b = reinterpret_cast<const Block*>(data + i * stride);
      const int64_t group = E == Eight::of_a_row ? g + i : g;
      prefetch_weights(b, sizeof *b);
      const Codes256 codes = load_codes<Q>(b);
      const SpreadScales<Q> scales(b);
      for (int t = 0; t < num_rows; t++) {
        const int8_t* q = x[t].q + group * group_elements;
        __m256i min_dot = _mm256_setzero_si256();
        if constexpr (SpreadScales<Q>::has_factors)
          min_dot = _mm256_madd_epi16(scales.factors, load_256(x[t].sums + group * 16));
        __m256i dot = T::has_mins ? _mm256_setzero_si256() : min_dot;
        for (int j = 0; j < 8; j++) {
          const __m256i pairs = multiply_pairs<T::is_signed>(codes.part[j], load_256(q + 32 * j));
          dot = _mm256_add_epi32(dot, _mm256_madd_epi16(pairs, scales.part[j]));
        }
        dots[t][i] = dot;
        if constexpr (T::has_mins) min_dots[t][i] = min_dot;
      }
    }
    const __m256 d = load_scales<Q>(data, stride, count);
    __m256 dmin;
    if constexpr (T::has_mins) dmin = load_min_scales<Q>(data, stride, count);
    for (int t = 0; t < num_rows; t++) {
      for (int i = count; i < 8; i++) {
        dots[t][i] = _mm256_setzero_si256();
        if constexpr (T::has_mins) min_dots[t][i] = _mm256_setzero_si256();
      }
      const __m256 a =
          E == Eight::of_a_row ? _mm256_loadu_ps(x[t].scales + g) : _mm256_set1_ps(x[t].scales[g]);
      p[t] = _mm256_fmadd_ps(_mm256_mul_ps(d, a), _mm256_cvtepi32_ps(sum_each(dots[t])), p[t]);
      if constexpr (T::has_mins)
        p[t] = _mm256_fnmadd_ps(_mm256_mul_ps(dmin, a), _mm256_cvtepi32_ps(sum_each(min_dots[t])), p[t]);
    }
  }

  inline __attribute__((always_inline)) static void add_small_blocks(const typename T::Block* b, int count,
                                                                     const ActivationRow* x, int64_t g,
                                                                     int num_rows, __m256* p) {
    const Codes256 codes = load_codes<Q>(b);
    const __m256i ones = _mm256_set1_epi16(1);
    const __m256 present = _mm256_castsi256_ps(first_lanes(count));
    const __m256 d = _mm256_and_ps(load_small_scales<Q>(b), present);
    __m256 m;
    if constexpr (T::has_mins) m = _mm256_and_ps(load_small_mins<Q>(b), present);
    for (int t = 0; t < num_rows; t++) {
      const int8_t* q = x[t].q + g * group_elements;
      __m256i dots[8];
      for (int j = 0; j < 8; j++) {
        const __m256i pairs = multiply_pairs<T::is_signed>(codes.part[j], load_256(q + 32 * j));
        dots[j] = _mm256_madd_epi16(pairs, ones);
      }
      __m256i dot = sum_each(dots), sums = _mm256_setzero_si256();
      if constexpr (T::offset != 0 || T::has_mins)
        sums = _mm256_madd_epi16(load_256(x[t].sums + g * 16), ones);
      if constexpr (T::offset != 0)
        dot = _mm256_sub_epi32(dot, _mm256_mullo_epi32(sums, _mm256_set1_epi32(T::offset)));
      const __m256 a = _mm256_loadu_ps(x[t].scales + g * blocks_per_group);
      p[t] = _mm256_fmadd_ps(_mm256_mul_ps(d, a), _mm256_cvtepi32_ps(dot), p[t]);
      if constexpr (T::has_mins) p[t] = _mm256_fmadd_ps(_mm256_mul_ps(m, a), _mm256_cvtepi32_ps(sums), p[t]);
    }
  }
};

}  // namespace

void gemv_avx2(const WeightRows& w, const ActivationRow* x, int num_rows, float* const* out) {
  dispatch_integer(w.type, [&]<QuantType Q>() { gemv_of_type<KernelGemv<Q>>(w, x, num_rows, out); });
}

}  // namespace coldstream

#endif
