#include "quant/gemv_avx2.h"

#if defined(__AVX2__)

#include "quant/blocks_avx2.h"
#include "quant/dispatch.h"
#include "quant/gemv_lanes.h"
#include "quant/grid_avx2.h"
#include "shuffles_avx2.h"

namespace coldstream {

namespace {

// A super-block's scales, spread over the int16 lanes that they multiply.
template <QuantType Q, int offset = added_to_codes<Q>>
struct SpreadScales : WideScales<Q, offset> {
  __m256i part[8];

  inline __attribute__((always_inline)) explicit SpreadScales(const typename Traits<Q>::Block* b)
      : WideScales<Q, offset>(b) {
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
  // If the number is not known, a block's codes and scales go through memory.
  static constexpr int most_fixed_rows = 4;
  // Whether rows of a fixed number take codes as they are unpacked. IQ4_XS has too few registers for that.
  static constexpr bool is_direct = !T::is_signed;

  // Super-block i of eight with `rows` rows, which share its codes as they are unpacked. Sums of minimums go
  // to `min_dots`.
  template <int rows>
  inline __attribute__((always_inline)) static void multiply_directly(const typename T::Block* b, int i,
                                                                      const ActivationRow* x, int64_t group,
                                                                      __m256i (*dots)[8],
                                                                      __m256i (*min_dots)[8]) {
    // Signs of a grid's entries are given to the inputs, so that nothing is added to the magnitudes.
    using Scales = SpreadScales<Q, has_signs<Q> ? 0 : added_to_codes<Q>>;
    const Scales scales(b);
    const int8_t* q[rows];
    __m256i dot[rows];
    for (int t = 0; t < rows; t++) {
      q[t] = x[t].q + group * group_elements;
      dot[t] = _mm256_setzero_si256();
      if constexpr (Scales::has_factors) {
        const __m256i of_sums = _mm256_madd_epi16(scales.factors, load_256(x[t].sums + group * 16));
        if constexpr (T::has_mins) {
          min_dots[t][i] = of_sums;
        } else {
          dot[t] = of_sums;
        }
      }
    }
    const auto add = [&](__m256i codes, __m256i signs, int j, __m256i scale) __attribute__((always_inline)) {
#pragma GCC unroll 4
      for (int t = 0; t < rows; t++) {
        __m256i inputs = load_256(q[t] + 32 * j);
        if constexpr (has_signs<Q>) inputs = _mm256_sign_epi8(inputs, signs);
        const __m256i pairs = _mm256_maddubs_epi16(codes, inputs);
        dot[t] = _mm256_add_epi32(dot[t], _mm256_madd_epi16(pairs, scale));
      }
    };
    if constexpr (has_grid<Q>) {
      const GridCodes<Q> grid(*b);
#pragma GCC unroll 8
      for (int j = 0; j < 8; j++) {
        __m256i signs = _mm256_setzero_si256(), scale;
        if constexpr (has_signs<Q>) signs = grid.signs(j);
        if constexpr (GridCodes<Q>::in_place) {
          scale = grid.scales(j);
        } else {
          scale = scales.part[j];
        }
        add(grid.codes(j), signs, j, scale);
      }
    } else {
#pragma GCC unroll 4
      for (int k = 0; k < 4; k++) {
        const UnpackAvx2::Bytes codes = T::template codes<UnpackAvx2>(b, k);
        for (int h = 0; h < 2; h++)
          add(codes.half[h], _mm256_setzero_si256(), 2 * k + h, scales.part[2 * k + h]);
      }
    }
    for (int t = 0; t < rows; t++) dots[t][i] = dot[t];
  }

  template <int rows, bool full, Eight E>
  inline __attribute__((always_inline)) static void add_super_blocks(const uint8_t* data, int64_t stride,
                                                                     int count, const ActivationRow* x,
                                                                     int64_t g, int num_rows, __m256* p) {
    using Block = typename T::Block;
    if constexpr (full) count = 8;
    __m256i dots[capacity_of<rows>][8], min_dots[capacity_of<rows>][8];
    const int64_t ahead = distance_ahead<E>(stride);
    for (int i = 0; i < count; i++) {
      const auto* b = reinterpret_cast<const Block*>(data + i * stride);
      const int64_t group = E == Eight::of_a_row ? g + i : g;
      prefetch_weights(b, sizeof *b, ahead);
      if constexpr (rows != 0 && is_direct) {
        multiply_directly<rows>(b, i, x, group, dots, min_dots);
        continue;
      }
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

  // The products of four small blocks, in pairs of lanes. q: inputs of their half of the group.
  inline __attribute__((always_inline)) static __m256i multiply_half(const Codes128& codes, const int8_t* q) {
    // Products of a lane that are added as int16.
    constexpr int num_added = 2 * T::greatest * 127 * 4 < 0x8000 ? 4 : 1;
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i pairs[4];
    for (int j = 0; j < 4; j++) {
      pairs[j] = multiply_pairs<T::is_signed>(codes.part[j], load_256(q + 64 * j));
      if constexpr (num_added == 1) pairs[j] = _mm256_madd_epi16(pairs[j], ones);
    }
    if constexpr (num_added == 1) {
      return _mm256_add_epi32(_mm256_add_epi32(pairs[0], pairs[1]), _mm256_add_epi32(pairs[2], pairs[3]));
    } else {
      return _mm256_madd_epi16(
          _mm256_add_epi16(_mm256_add_epi16(pairs[0], pairs[1]), _mm256_add_epi16(pairs[2], pairs[3])), ones);
    }
  }

  // What small blocks of a group meet in an activation row.
  struct Inputs {
    const int8_t* q;
    __m256 scales;
    __m256i offsets;  // in the sums of products, for types whose codes have an offset
    __m256 sums;      // for types with minimums

    inline __attribute__((always_inline)) Inputs(const ActivationRow& x, int64_t g)
        : q(x.q + g * group_elements), scales(_mm256_loadu_ps(x.scales + g * blocks_per_group)) {
      const auto multiply_sums = [&](int factor) __attribute__((always_inline)) {
        return _mm256_madd_epi16(load_256(x.sums + g * 16), _mm256_set1_epi16(static_cast<short>(factor)));
      };
      if constexpr (T::offset != 0) offsets = multiply_sums(T::offset);
      if constexpr (T::has_mins) sums = _mm256_cvtepi32_ps(multiply_sums(1));
    }
  };

  // low, high: what multiply_half gives for the halves of the group.
  inline __attribute__((always_inline)) static __m256 add_product(__m256i low, __m256i high,
                                                                  const SmallScales<Q>& scales,
                                                                  const Inputs& x, __m256 p) {
    __m256i dot = _mm256_permute4x64_epi64(_mm256_hadd_epi32(low, high), 0xd8);
    if constexpr (T::offset != 0) dot = _mm256_sub_epi32(dot, x.offsets);
    p = _mm256_fmadd_ps(_mm256_mul_ps(scales.d, x.scales), _mm256_cvtepi32_ps(dot), p);
    if constexpr (T::has_mins) p = _mm256_fmadd_ps(_mm256_mul_ps(scales.m, x.scales), x.sums, p);
    return p;
  }

  inline __attribute__((always_inline)) static void add_small_blocks(const typename T::Block* b, int count,
                                                                     const ActivationRow* x, int64_t g,
                                                                     int num_rows, __m256* p) {
    const CodesByBlock<Q> codes(b);
    const Codes128 low = codes.half(0), high = codes.half(1);
    const __m256 present = _mm256_castsi256_ps(first_lanes(count));
    SmallScales<Q> scales(b);
    scales.d = _mm256_and_ps(scales.d, present);
    scales.m = _mm256_and_ps(scales.m, present);
    for (int t = 0; t < num_rows; t++) {
      const Inputs inputs(x[t], g);
      p[t] =
          add_product(multiply_half(low, inputs.q), multiply_half(high, inputs.q + 32), scales, inputs, p[t]);
    }
  }

  inline __attribute__((always_inline)) static void add_small_blocks_of_rows(const uint8_t* data,
                                                                             int64_t stride,
                                                                             const ActivationRow& x,
                                                                             __m256* p) {
    const Inputs inputs(x, 0);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
      const auto* b = reinterpret_cast<const typename T::Block*>(data + i * stride);
      prefetch_weights(b, group_elements / T::block_inputs * sizeof *b);
      const CodesByBlock<Q> codes(b);
      const __m256i low = multiply_half(codes.half(0), inputs.q);
      const __m256i high = multiply_half(codes.half(1), inputs.q + 32);
      p[i] = add_product(low, high, SmallScales<Q>(b), inputs, p[i]);
    }
  }

  static void store_sums(float* out, const __m256 p[4]) {
    __m256 four[2];  // lane i: accumulators i and i + 4, of rows 0 and 1 or 2 and 3
    for (int i = 0; i < 2; i++) {
      four[i] = _mm256_add_ps(_mm256_permute2f128_ps(p[2 * i], p[2 * i + 1], 0x20),
                              _mm256_permute2f128_ps(p[2 * i], p[2 * i + 1], 0x31));
    }
    const __m256 two =
        _mm256_add_ps(_mm256_shuffle_ps(four[0], four[1], 0x44), _mm256_shuffle_ps(four[0], four[1], 0xee));
    const __m256 sums = _mm256_add_ps(two, _mm256_movehdup_ps(two));  // rows 0, 2, 1, 3 in even lanes
    const __m128 odd_rows = _mm_moveldup_ps(_mm256_extractf128_ps(sums, 1));
    _mm_storeu_ps(out, _mm_blend_ps(_mm256_castps256_ps128(sums), odd_rows, 0xa));
  }
};

}  // namespace

void gemv_avx2(const WeightRows& w, const ActivationRow* x, int num_rows, float* const* out) {
  dispatch_integer(w.type, [&]<QuantType Q>() { gemv_of_type<KernelGemv<Q>>(w, x, num_rows, out); });
}

}  // namespace coldstream

#endif
