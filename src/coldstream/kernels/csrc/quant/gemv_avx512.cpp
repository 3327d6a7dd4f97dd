#include "quant/gemv_avx512.h"

#if defined(__AVX512VNNI__)

#include "quant/blocks_avx512.h"
#include "quant/dispatch.h"
#include "quant/gemv_lanes.h"
#include "quant/transpose_avx512.h"

namespace coldstream {

namespace {

// Lane i: the sum of all lanes of v[i].
__m256i sum_each(const __m512i v[8]) {
  const __m512i low = merge_64(merge_32(v[0], v[1]), merge_32(v[2], v[3]));
  const __m512i high = merge_64(merge_32(v[4], v[5]), merge_32(v[6], v[7]));
  const __m512i quarters =
      _mm512_add_epi32(_mm512_shuffle_i64x2(low, high, 0x44), _mm512_shuffle_i64x2(low, high, 0xee));
  const __m512i even = _mm512_shuffle_i64x2(quarters, quarters, 0x08),
                odd = _mm512_shuffle_i64x2(quarters, quarters, 0x0d);
  return _mm512_castsi512_si256(_mm512_add_epi32(even, odd));
}

__m256i sum_each(const __m256i v[8]) {
  __m512i joined[4];
  for (int i = 0; i < 4; i++) joined[i] = join_256(v[i], v[i + 4]);
  const __m512i sums = merge_64(merge_32(joined[0], joined[1]), merge_32(joined[2], joined[3]));
  const __m512i even = _mm512_shuffle_i64x2(sums, sums, 0x08), odd = _mm512_shuffle_i64x2(sums, sums, 0x0d);
  return _mm512_castsi512_si256(_mm512_add_epi32(even, odd));
}

// Codes as maddubs takes them: unsigned, or magnitudes with signs that the inputs take over.
template <QuantType Q>
struct PairCodes {
  Codes512 bytes;
  __mmask64 negative[4];

  inline __attribute__((always_inline)) explicit PairCodes(const typename Traits<Q>::Block* b)
      : bytes(load_codes<Q>(b)) {
    if constexpr (Traits<Q>::is_signed) {
      for (int k = 0; k < 4; k++) {
        negative[k] = _mm512_movepi8_mask(bytes.part[k]);
        bytes.part[k] = _mm512_abs_epi8(bytes.part[k]);
      }
    }
  }

  // Products with 64 inputs of part k, added in pairs as int16.
  inline __attribute__((always_inline)) __m512i multiply(int k, __m512i inputs) const {
    if constexpr (Traits<Q>::is_signed)
      inputs = _mm512_mask_sub_epi8(inputs, negative[k], _mm512_setzero_si512(), inputs);
    return _mm512_maddubs_epi16(bytes.part[k], inputs);
  }
};

template <QuantType Q>
struct KernelGemv {
  using T = Traits<Q>;
  using Scales = SpreadScales<Q>;
  static constexpr int most_fixed_rows = 2;

  template <int rows, bool full, Eight E>
  inline __attribute__((always_inline)) static void add_super_blocks(const uint8_t* data, int64_t stride,
                                                                     int count, const ActivationRow* x,
                                                                     int64_t g, int num_rows, __m256* p) {
    using Block = typename T::Block;
    if constexpr (full) count = 8;
    __m512i dots[capacity_of<rows>][8];
    __m256i min_dots[capacity_of<rows>][8];
    const int64_t ahead = distance_ahead<E>(stride);
    for (int i = 0; i < count; i++) {
      const auto* b = reinterpret_cast<const Block*>(data + i * stride);
      const int64_t group = E == Eight::of_a_row ? g + i : g;
      prefetch_weights(b, sizeof *b, ahead);
      const PairCodes<Q> codes(b);
      const Scales scales(b);
      for (int t = 0; t < num_rows; t++) {
        const int8_t* q = x[t].q + group * group_elements;
        __m256i min_dot = _mm256_setzero_si256();
        if constexpr (Scales::has_factors) {
          const auto* sums = reinterpret_cast<const __m256i*>(x[t].sums + group * 16);
          min_dot = _mm256_madd_epi16(scales.factors, _mm256_loadu_si256(sums));
        }
        __m512i dot = T::has_mins ? _mm512_setzero_si512() : _mm512_zextsi256_si512(min_dot);
        for (int k = 0; k < 4; k++) {
          const __m512i pairs = codes.multiply(k, _mm512_loadu_si512(q + 64 * k));
          dot = _mm512_dpwssd_epi32(dot, pairs, scales.part[k]);
        }
        dots[t][i] = dot;
        if constexpr (T::has_mins) min_dots[t][i] = min_dot;
      }
    }
    const __m256 d = load_scales<Q>(data, stride, count);
    __m256 dmin;
    if constexpr (T::has_mins) dmin = load_min_scales<Q>(data, stride, count);
    const auto present = static_cast<__mmask8>((1 << count) - 1);
    for (int t = 0; t < num_rows; t++) {
      for (int i = count; i < 8; i++) {
        dots[t][i] = _mm512_setzero_si512();
        if constexpr (T::has_mins) min_dots[t][i] = _mm256_setzero_si256();
      }
      const __m256 a = E == Eight::of_a_row ? _mm256_maskz_loadu_ps(present, x[t].scales + g)
                                            : _mm256_set1_ps(x[t].scales[g]);
      p[t] = _mm256_fmadd_ps(_mm256_mul_ps(d, a), _mm256_cvtepi32_ps(sum_each(dots[t])), p[t]);
      if constexpr (T::has_mins) {
        p[t] = _mm256_fnmadd_ps(_mm256_mul_ps(dmin, a), _mm256_cvtepi32_ps(sum_each(min_dots[t])), p[t]);
      }
    }
  }

  inline __attribute__((always_inline)) static void add_small_blocks(const typename T::Block* b, int count,
                                                                     const ActivationRow* x, int64_t g,
                                                                     int num_rows, __m256* p) {
    constexpr int offset = unsigned_offset<Q>;
    const Codes512 codes = load_codes_by_block<Q>(b);
    const auto present = static_cast<__mmask8>((1 << count) - 1);
    const __m256 d = _mm256_maskz_mov_ps(present, load_small_scales<Q>(b));
    __m256 m;
    if constexpr (T::has_mins) m = _mm256_maskz_mov_ps(present, load_small_mins<Q>(b));
    for (int t = 0; t < num_rows; t++) {
      const int8_t* q = x[t].q + g * group_elements;
      __m512i pairs = _mm512_setzero_si512();
      for (int k = 0; k < 4; k++)
        pairs = _mm512_dpbusd_epi32(pairs, codes.part[k], _mm512_loadu_si512(q + 64 * k));
      __m256i dot = _mm512_cvtepi64_epi32(_mm512_add_epi32(pairs, _mm512_srli_epi64(pairs, 32)));
      __m256i sums = _mm256_setzero_si256();
      if constexpr (offset != 0 || T::has_mins) {
        sums = _mm256_madd_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x[t].sums + g * 16)),
                                 _mm256_set1_epi16(1));
      }
      if constexpr (offset != 0)
        dot = _mm256_sub_epi32(dot, _mm256_mullo_epi32(sums, _mm256_set1_epi32(offset)));
      const __m256 a = _mm256_loadu_ps(x[t].scales + g * blocks_per_group);
      p[t] = _mm256_fmadd_ps(_mm256_mul_ps(d, a), _mm256_cvtepi32_ps(dot), p[t]);
      if constexpr (T::has_mins) p[t] = _mm256_fmadd_ps(_mm256_mul_ps(m, a), _mm256_cvtepi32_ps(sums), p[t]);
    }
  }
};

}  // namespace

void gemv_avx512(const WeightRows& w, const ActivationRow* x, int num_rows, float* const* out) {
  dispatch_integer(w.type, [&]<QuantType Q>() { gemv_of_type<KernelGemv<Q>>(w, x, num_rows, out); });
}

}  // namespace coldstream

#endif
