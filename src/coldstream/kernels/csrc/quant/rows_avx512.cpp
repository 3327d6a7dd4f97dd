#include "quant/rows_avx512.h"

#if defined(__AVX512VNNI__)

#include "arithmetic.h"
#include "quant/transpose_avx512.h"

namespace coldstream {

namespace {

// Codes and scale of `vectors` times 16 inputs that share it.
template <int vectors>
inline __attribute__((always_inline)) void quantize_span(const __m512* values, int8_t* q, float* scale) {
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
  __m512i max_bits = _mm512_setzero_si512();  // of absolute values: ordered like them, non-finite ones on top
  for (int i = 0; i < vectors; i++)
    max_bits = _mm512_max_epu32(max_bits, _mm512_and_si512(_mm512_castps_si512(values[i]), magnitude));
  const SpanScale found = span_scale(_mm512_reduce_max_epu32(max_bits));
  *scale = found.scale;
  const __m512 r = _mm512_set1_ps(found.inverse);
  for (int i = 0; i < vectors; i++) {
    const __m512i rounded =
        found.is_zero ? _mm512_setzero_si512() : _mm512_cvtps_epi32(_mm512_mul_ps(values[i], r));
    _mm_store_si128(reinterpret_cast<__m128i*>(q + 16 * i), _mm512_cvtepi32_epi8(rounded));
  }
}

// Group `g` of a row, of whose inputs `count` exist.
template <ActivationForm form>
inline __attribute__((always_inline)) void quantize_group(const float* x, int64_t count, int64_t g,
                                                          const ActivationRow& out) {
  __m512 values[16];
  for (int i = 0; i < 16; i++) {
    const int64_t rest = count - 16 * i;
    const auto present = static_cast<__mmask16>(rest >= 16 ? 0xffff : rest > 0 ? (1 << rest) - 1 : 0);
    values[i] = _mm512_maskz_loadu_ps(present, x + 16 * i);
  }
  alignas(64) int8_t q[group_elements];
  if constexpr (form == ActivationForm::by_group) {
    quantize_span<16>(values, q, out.scales + g);
  } else {
    for (int b = 0; b < blocks_per_group; b++)
      quantize_span<2>(values + 2 * b, q + b * block_elements, out.scales + g * blocks_per_group + b);
  }
  const __m512i ones = _mm512_set1_epi8(1);
  __m512i parts[4], quads[4];
  for (int k = 0; k < 4; k++) {
    parts[k] = _mm512_load_si512(q + 64 * k);
    quads[k] = _mm512_dpbusd_epi32(_mm512_setzero_si512(), ones, parts[k]);
  }
  if constexpr (form == ActivationForm::by_block) transpose_8x4_64(parts);
  for (int k = 0; k < 4; k++) _mm512_store_si512(out.q + g * group_elements + 64 * k, parts[k]);
  // Lane 4l + k holds the sum of part k's 128-bit lane l, which belongs at 4k + l.
  const __m512i by_lane = merge_64(merge_32(quads[0], quads[1]), merge_32(quads[2], quads[3]));
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const __m256i ordered = _mm512_cvtepi32_epi16(_mm512_permutexvar_epi32(order, by_lane));
  _mm256_store_si256(reinterpret_cast<__m256i*>(out.sums + g * 16), ordered);
}

// Weight rows with activation rows: enough independent sums to hide the latency of fma.
template <int rows, int inputs>
void float_dots(const float* w, int64_t stride, int64_t cols, const float* const* x, float* const* out,
                int64_t n) {
  __m512 p[rows][inputs];
  for (int r = 0; r < rows; r++) {
    for (int t = 0; t < inputs; t++) p[r][t] = _mm512_setzero_ps();
  }
  for (int64_t i = 0; i < cols; i += 16) {
    const auto present = static_cast<__mmask16>(cols - i >= 16 ? 0xffff : (1 << (cols - i)) - 1);
    __m512 value[inputs];
    for (int t = 0; t < inputs; t++) value[t] = _mm512_maskz_loadu_ps(present, x[t] + i);
    for (int r = 0; r < rows; r++) {
      const __m512 weight = _mm512_maskz_loadu_ps(present, w + (n + r) * stride + i);
      for (int t = 0; t < inputs; t++) p[r][t] = _mm512_mask3_fmadd_ps(value[t], weight, p[r][t], present);
    }
  }
  for (int r = 0; r < rows; r++) {
    for (int t = 0; t < inputs; t++) {
      alignas(64) float lanes[16];
      _mm512_store_ps(lanes, p[r][t]);
      out[t][n + r] = sum_lanes_16(lanes);
    }
  }
}

// The inputs of group g.
template <bool narrow>
inline __attribute__((always_inline)) void pack_inputs(const ActivationRow* x, int num_rows, int64_t g,
                                                       ActivationTile& tile) {
  const ActivationForm form = x[0].form;
  constexpr int rows = narrow ? narrow_tile_rows : tile_rows;
  __m512i v[rows];
  for (int part = 0; part < 4; part++) {
    for (int t = 0; t < rows; t++) {
      v[t] =
          t < num_rows ? _mm512_loadu_si512(x[t].q + g * group_elements + 64 * part) : _mm512_setzero_si512();
    }
    if constexpr (narrow) {
      transpose_8x8_64(v);
    } else {
      transpose_16x16(v);
    }
    // By block, a register has eight inputs of each block.
    constexpr int per_block = narrow ? 4 : 8, step = per_block / 4;
    for (int i = 0; i < rows; i++) {
      const int at =
          form == ActivationForm::by_group ? rows * part + i : i / step * per_block + part * step + i % step;
      _mm512_store_si512(tile.q[at], v[i]);
    }
  }
}

// The same of a narrow tile in quarters.
inline __attribute__((always_inline)) void pack_quarters(const ActivationRow* x, int num_rows, int64_t g,
                                                         ActivationTile& tile) {
  int8_t* q = tile.q[0][0];
  for (int first = 0; first < narrow_tile_rows; first += 4) {
    for (int part = 0; part < 4; part++, q += 256) {
      __m512i v[4];
      for (int t = 0; t < 4; t++) {
        v[t] = first + t < num_rows ? _mm512_loadu_si512(x[first + t].q + g * group_elements + 64 * part)
                                    : _mm512_setzero_si512();
      }
      transpose_4x4_128(v);
      for (int i = 0; i < 4; i++) _mm512_store_si512(q + 64 * i, v[i]);
    }
  }
}

template <bool has_narrow_blocks>
inline __attribute__((always_inline)) void pack(const ActivationRow* x, int num_rows, int64_t cols,
                                                ActivationTile* out) {
  const __m512i zero = _mm512_setzero_si512(), ones = _mm512_set1_epi16(1),
                low_half = _mm512_set1_epi32(0xffff);
  for (int64_t g = 0; g < num_groups(cols); g++) {
    ActivationTile& tile = out[g];
    const bool is_narrow = num_rows <= narrow_tile_rows, by_group = x[0].form == ActivationForm::by_group;
    if (is_narrow && by_group) {
      pack_quarters(x, num_rows, g, tile);
    } else if (is_narrow && has_narrow_blocks) {
      pack_inputs<true>(x, num_rows, g, tile);
    } else {
      pack_inputs<false>(x, num_rows, g, tile);
    }
    __m512i v[tile_rows];
    for (int t = 0; t < tile_rows; t++) {
      v[t] = zero;
      if (t < num_rows) {
        v[t] =
            _mm512_zextsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x[t].sums + g * 16)));
      }
    }
    transpose_16x16(v);
    if (x[0].form == ActivationForm::by_group) {
      for (int i = 0; i < 8; i++) _mm512_store_si512(tile.sums_16[i], v[i]);
    }
    for (int i = 0; i < 4; i++) {
      const __m512i even = _mm512_madd_epi16(v[2 * i], ones), odd = _mm512_madd_epi16(v[2 * i + 1], ones);
      const __m512i pairs = _mm512_or_si512(_mm512_and_si512(even, low_half), _mm512_slli_epi32(odd, 16));
      _mm512_store_si512(tile.sums_32[i], pairs);
    }
    pack_scales(x, num_rows, tile_rows, x[0].form, g, 0, tile);
  }
}

}  // namespace

void quantize_row_avx512(const float* x, int64_t cols, ActivationRow out) {
  for (int64_t g = 0; g < num_groups(cols); g++) {
    const float* group = x + g * group_elements;
    const int64_t count = cols - g * group_elements;
    if (out.form == ActivationForm::by_group) {
      quantize_group<ActivationForm::by_group>(group, count, g, out);
    } else {
      quantize_group<ActivationForm::by_block>(group, count, g, out);
    }
  }
}

void pack_avx512(const ActivationRow* x, int num_rows, int64_t cols, ActivationTile* out) {
  pack<false>(x, num_rows, cols, out);
}

void pack_vnni(const ActivationRow* x, int num_rows, int64_t cols, ActivationTile* out) {
  pack<true>(x, num_rows, cols, out);
}

void float_product_avx512(const float* w, int64_t stride, int64_t count, int64_t cols, const float* const* x,
                          int num_rows, float* const* out) {
  int64_t n = 0;
  for (; n + 4 <= count; n += 4) {
    int t = 0;
    for (; t + 4 <= num_rows; t += 4) float_dots<4, 4>(w, stride, cols, x + t, out + t, n);
    for (; t < num_rows; t++) float_dots<4, 1>(w, stride, cols, x + t, out + t, n);
  }
  for (; n < count; n++) {
    for (int t = 0; t < num_rows; t++) float_dots<1, 1>(w, stride, cols, x + t, out + t, n);
  }
}

void glu_avx512(const Glu& unit, const float* gate, const float* up, int64_t count, float* out) {
  glu(unit, gate, up, count, out);
}

}  // namespace coldstream

#endif
