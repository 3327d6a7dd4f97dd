#include "quant/rows_avx2.h"

#if defined(__AVX2__)

#include <cstring>

#include "arithmetic.h"
#include "quant/blocks_avx2.h"
#include "shuffles_avx2.h"

namespace coldstream {

namespace {

uint32_t max_lane(__m256i v) {
  alignas(32) uint32_t lanes[8];
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), v);
  uint32_t max = 0;
  for (uint32_t lane : lanes) max = lane > max ? lane : max;
  return max;
}

// `span` inputs that share a scale.
template <int span>
void quantize_span(const float* x, int8_t* q, int16_t* sums, float* scale) {
  const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
  __m256i max_bits = _mm256_setzero_si256();  // of absolute values: ordered like them, non-finite ones on top
  for (int i = 0; i < span; i += 8) {
    max_bits =
        _mm256_max_epu32(max_bits, _mm256_and_si256(_mm256_castps_si256(_mm256_loadu_ps(x + i)), magnitude));
  }
  const uint32_t bits = max_lane(max_bits);
  const float max = std::bit_cast<float>(bits);
  const bool finite = bits < 0x7f800000u, zero = !finite || max < 0x1p-100f;
  *scale = finite ? (zero ? 0.0f : max / 127.0f) : std::bit_cast<float>(0x7fc00000u);
  if (zero) {
    std::memset(q, 0, span);
    std::memset(sums, 0, span / 16 * sizeof(int16_t));
    return;
  }
  const __m256 r = _mm256_set1_ps(127.0f / max);
  for (int i = 0; i < span / 16; i++) {
    const __m256i low = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 16 * i), r));
    const __m256i high = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 16 * i + 8), r));
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xd8);
    const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(q + 16 * i), bytes);
    // Sums of unsigned bytes in two halves, after moving the values up by 128.
    const __m128i halves = _mm_sad_epu8(_mm_xor_si128(bytes, _mm_set1_epi8(-128)), _mm_setzero_si128());
    sums[i] = static_cast<int16_t>(_mm_extract_epi16(halves, 0) + _mm_extract_epi16(halves, 4) - 16 * 128);
  }
}

// rows weight rows with one activation row: enough independent sums to hide the latency of fma.
template <int rows>
void float_dots(const float* w, int64_t stride, int64_t cols, const float* x, float* out) {
  __m256 low[rows], high[rows];
  for (int n = 0; n < rows; n++) low[n] = high[n] = _mm256_setzero_ps();
  int64_t i = 0;
  for (; i + 16 <= cols; i += 16) {
    const __m256 x_low = _mm256_loadu_ps(x + i), x_high = _mm256_loadu_ps(x + i + 8);
    for (int n = 0; n < rows; n++) {
      low[n] = _mm256_fmadd_ps(x_low, _mm256_loadu_ps(w + n * stride + i), low[n]);
      high[n] = _mm256_fmadd_ps(x_high, _mm256_loadu_ps(w + n * stride + i + 8), high[n]);
    }
  }
  for (int n = 0; n < rows; n++) {
    alignas(32) float p[16];
    _mm256_store_ps(p, low[n]);
    _mm256_store_ps(p + 8, high[n]);
    for (int64_t j = i; j < cols; j++) p[j - i] = fma(x[j], w[n * stride + j], p[j - i]);
    out[n] = sum_lanes_16(p);
  }
}

// The sums over 16 inputs of 8 rows, and those over 32, with the row innermost.
void pack_sums(const ActivationRow* x, int num_rows, ActivationForm form, int64_t g, int first,
               ActivationTile& tile) {
  __m256i v[8];
  for (int t = 0; t < 8; t++) v[t] = t < num_rows ? load_256(x[t].sums + g * 16) : _mm256_setzero_si256();
  transpose_8x8(v);
  if (form == ActivationForm::by_group) {
    for (int i = 0; i < 8; i++) _mm256_store_si256(reinterpret_cast<__m256i*>(tile.sums_16[i][first]), v[i]);
  }
  const __m256i ones = _mm256_set1_epi16(1);
  for (int i = 0; i < 4; i++) {
    const __m256i even = _mm256_madd_epi16(v[2 * i], ones), odd = _mm256_madd_epi16(v[2 * i + 1], ones);
    const __m256i pairs = _mm256_blend_epi16(even, _mm256_slli_epi32(odd, 16), 0xaa);
    _mm256_store_si256(reinterpret_cast<__m256i*>(tile.sums_32[i][first]), pairs);
  }
}

// Up to 8 rows to rows first … first + 7 of a tile; missing ones become zeros.
void pack_unit(const ActivationRow* x, int num_rows, ActivationForm form, int64_t g, int first,
               ActivationTile& tile) {
  for (int part = 0; part < 8; part++) {
    __m256i v[8];
    for (int t = 0; t < 8; t++)
      v[t] = t < num_rows ? load_256(x[t].q + g * group_elements + 32 * part) : _mm256_setzero_si256();
    transpose_8x8(v);
    for (int i = 0; i < 8; i++)
      _mm256_store_si256(reinterpret_cast<__m256i*>(tile.q[8 * part + i][first]), v[i]);
  }
  pack_sums(x, num_rows, form, g, first, tile);
  for (int t = 0; t < 8; t++) {
    const bool exists = t < num_rows;
    if (form == ActivationForm::by_group) {
      tile.scales[first + t] = exists ? x[t].scales[g] : 0.0f;
    } else {
      for (int b = 0; b < blocks_per_group; b++)
        tile.block_scales[b][first + t] = exists ? x[t].scales[g * blocks_per_group + b] : 0.0f;
    }
  }
}

}  // namespace

void quantize_row_avx2(const float* x, int64_t cols, ActivationRow out) {
  for (int64_t g = 0; g < num_groups(cols); g++) {
    const int64_t rest = cols - g * group_elements;
    const float* from = x + g * group_elements;
    float padded[group_elements] = {};
    if (rest < group_elements) {
      std::memcpy(padded, from, static_cast<size_t>(rest) * sizeof(float));
      from = padded;
    }
    int8_t* q = out.q + g * group_elements;
    int16_t* sums = out.sums + g * 16;
    if (out.form == ActivationForm::by_group) {
      quantize_span<group_elements>(from, q, sums, out.scales + g);
      continue;
    }
    for (int b = 0; b < blocks_per_group; b++) {
      quantize_span<block_elements>(from + b * block_elements, q + b * block_elements, sums + 2 * b,
                                    out.scales + g * blocks_per_group + b);
    }
  }
}

void pack_avx2(const ActivationRow* x, int num_rows, int64_t cols, ActivationTile* out) {
  for (int64_t g = 0; g < num_groups(cols); g++) {
    for (int first = 0; first < tile_rows; first += 8)
      pack_unit(x + first, num_rows - first, x->form, g, first, out[g]);
  }
}

void float_product_avx2(const float* w, int64_t stride, int64_t count, int64_t cols, const float* const* x,
                        int num_rows, float* const* out) {
  for (int t = 0; t < num_rows; t++) {
    int64_t n = 0;
    for (; n + 4 <= count; n += 4) float_dots<4>(w + n * stride, stride, cols, x[t], out[t] + n);
    for (; n < count; n++) float_dots<1>(w + n * stride, stride, cols, x[t], out[t] + n);
  }
}

void swiglu_avx2(const float* gate, const float* up, int64_t count, float* out) {
  for (int64_t i = 0; i < count; i++) out[i] = silu(gate[i]) * up[i];
}

}  // namespace coldstream

#endif
