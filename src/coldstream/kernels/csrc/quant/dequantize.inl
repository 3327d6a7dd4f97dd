// Rows of any type to float32, in loops that each tier's compiler flags turn into its own vectors. Included
// by one file for each tier.
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "quant/blocks.h"
#include "quant/dequantize.h"
#include "quant/grids.h"

namespace coldstream {

namespace {

constexpr int8_t iq4_values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr int8_t e2m1_doubled[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

int nibble(const uint8_t* p, int i) { return p[i / 2] >> (i % 2 * 4) & 15; }

int bit(const uint8_t* p, int i) { return p[i / 8] >> i % 8 & 1; }

// Eight signs of which seven are stored and an even number is set.
uint32_t even_signs(uint32_t stored) {
  stored &= 127;
  return stored | (static_cast<uint32_t>(__builtin_popcount(stored)) & 1) << 7;
}

// Three inner loops are written out for registers of eight floats; everything else the compiler vectorises.
#if defined(__AVX2__)

__m256 widen_8(__m128i bytes) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)); }

void scale_signed_8(float d, uint64_t grid, uint32_t signs, float* y) {
  const __m256i to_top = _mm256_setr_epi32(31, 30, 29, 28, 27, 26, 25, 24),
                top = _mm256_set1_epi32(INT32_MIN);
  const __m256i flips =
      _mm256_and_si256(_mm256_sllv_epi32(_mm256_set1_epi32(static_cast<int>(signs)), to_top), top);
  const __m256 values =
      _mm256_mul_ps(_mm256_set1_ps(d), widen_8(_mm_cvtsi64_si128(static_cast<int64_t>(grid))));
  _mm256_storeu_ps(y, _mm256_xor_ps(values, _mm256_castsi256_ps(flips)));
}

void scale_shifted_8(float d, uint64_t grid, int shift, float* y) {
  const __m256i values =
      _mm256_slli_epi32(_mm256_cvtepi8_epi32(_mm_cvtsi64_si128(static_cast<int64_t>(grid))), 3);
  const __m256i shifted = _mm256_add_epi32(values, _mm256_set1_epi32(shift));
  _mm256_storeu_ps(y, _mm256_mul_ps(_mm256_set1_ps(d), _mm256_cvtepi32_ps(shifted)));
}

void scale_table_32(float d, const int8_t (&table)[16], const uint8_t* qs, float* y) {
  const __m128i mask = _mm_set1_epi8(15), packed = _mm_loadu_si128(reinterpret_cast<const __m128i*>(qs));
  const __m128i values = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  const __m128i low = _mm_shuffle_epi8(values, _mm_and_si128(packed, mask));
  const __m128i high = _mm_shuffle_epi8(values, _mm_and_si128(_mm_srli_epi16(packed, 4), mask));
  const __m256 scale = _mm256_set1_ps(d);
  _mm256_storeu_ps(y, _mm256_mul_ps(scale, widen_8(low)));
  _mm256_storeu_ps(y + 8, _mm256_mul_ps(scale, widen_8(_mm_srli_si128(low, 8))));
  _mm256_storeu_ps(y + 16, _mm256_mul_ps(scale, widen_8(high)));
  _mm256_storeu_ps(y + 24, _mm256_mul_ps(scale, widen_8(_mm_srli_si128(high, 8))));
}

#else

// Eight values of a grid, one per byte, times d; negated where a bit is set.
void scale_signed_8(float d, uint64_t grid, uint32_t signs, float* y) {
  for (int i = 0; i < 8; i++) {
    const int value = static_cast<int8_t>(grid >> 8 * i);
    y[i] = d * static_cast<float>(signs >> i & 1 ? -value : value);
  }
}

// Eight times the grid values plus `shift`, times d.
void scale_shifted_8(float d, uint64_t grid, int shift, float* y) {
  for (int i = 0; i < 8; i++) y[i] = d * static_cast<float>(8 * static_cast<int8_t>(grid >> 8 * i) + shift);
}

// 32 values of a table, 16 by the low nibbles, then 16 by the high ones, times d.
void scale_table_32(float d, const int8_t (&table)[16], const uint8_t* qs, float* y) {
  for (int i = 0; i < 16; i++) {
    y[i] = d * static_cast<float>(table[qs[i] & 15]);
    y[i + 16] = d * static_cast<float>(table[qs[i] >> 4]);
  }
}

#endif

uint64_t grid_8(const int8_t (&entry)[8]) {
  uint64_t values;
  std::memcpy(&values, entry, sizeof values);
  return values;
}

uint64_t grid_8(const int8_t (&low)[4], const int8_t (&high)[4]) {
  uint32_t values[2];
  std::memcpy(values, low, sizeof low);
  std::memcpy(values + 1, high, sizeof high);
  return values[0] | static_cast<uint64_t>(values[1]) << 32;
}

// Scales times codes are exact in float32, so only the sign of a zero depends on the order of these products.

void dequantize(const BlockQ4_0& b, float* __restrict y) {
  const float d = load_half(b.d);
  for (int i = 0; i < 16; i++) {
    y[i] = d * static_cast<float>((b.qs[i] & 15) - 8);
    y[i + 16] = d * static_cast<float>((b.qs[i] >> 4) - 8);
  }
}

void dequantize(const BlockQ4_1& b, float* __restrict y) {
  const float d = load_half(b.d), m = load_half(b.m);
  for (int i = 0; i < 16; i++) {
    y[i] = d * static_cast<float>(b.qs[i] & 15) + m;
    y[i + 16] = d * static_cast<float>(b.qs[i] >> 4) + m;
  }
}

void dequantize(const BlockQ5_0& b, float* __restrict y) {
  const float d = load_half(b.d);
  const uint32_t high = load_u32(b.qh);
  for (int i = 0; i < 16; i++) {
    y[i] = d * static_cast<float>((b.qs[i] & 15) + static_cast<int>(high >> i & 1) * 16 - 16);
    y[i + 16] = d * static_cast<float>((b.qs[i] >> 4) + static_cast<int>(high >> (i + 16) & 1) * 16 - 16);
  }
}

void dequantize(const BlockQ5_1& b, float* __restrict y) {
  const float d = load_half(b.d), m = load_half(b.m);
  const uint32_t high = load_u32(b.qh);
  for (int i = 0; i < 16; i++) {
    y[i] = d * static_cast<float>((b.qs[i] & 15) + static_cast<int>(high >> i & 1) * 16) + m;
    y[i + 16] = d * static_cast<float>((b.qs[i] >> 4) + static_cast<int>(high >> (i + 16) & 1) * 16) + m;
  }
}

void dequantize(const BlockQ8_0& b, float* __restrict y) {
  const float d = load_half(b.d);
  for (int i = 0; i < 32; i++) y[i] = d * static_cast<float>(static_cast<int8_t>(b.qs[i]));
}

void dequantize(const BlockIQ4_NL& b, float* __restrict y) {
  scale_table_32(load_half(b.d), iq4_values, b.qs, y);
}

void dequantize(const BlockMXFP4& b, float* __restrict y) {
  // 2^(e - 128) for every e; the two smallest are subnormal.
  const float d = std::bit_cast<float>(b.e < 2 ? 0x200000u << b.e : (b.e - 1u) << 23);
  scale_table_32(d, e2m1_doubled, b.qs, y);
}

void dequantize(const BlockQ2_K& b, float* __restrict y) {
  const float d = load_half(b.d), dmin = load_half(b.dmin);
  for (int j = 0; j < 16; j++) {
    const uint8_t* qs = b.qs + j / 8 * 32 + j % 2 * 16;
    const int shift = j % 8 / 2 * 2;
    const float scale = d * static_cast<float>(b.scales[j] & 15),
                min = dmin * static_cast<float>(b.scales[j] >> 4);
    for (int i = 0; i < 16; i++) y[16 * j + i] = scale * static_cast<float>(qs[i] >> shift & 3) - min;
  }
}

void dequantize(const BlockQ3_K& b, float* __restrict y) {
  const float d = load_half(b.d);
  for (int j = 0; j < 16; j++) {
    const uint8_t *qs = b.qs + j / 8 * 32 + j % 2 * 16, *high = b.hmask + j % 2 * 16;
    const int shift = j % 8 / 2 * 2, scale_low = j < 8 ? b.scales[j] & 15 : b.scales[j - 8] >> 4;
    const int scale_high = b.scales[8 + j % 4] >> (j / 4 * 2) & 3;
    const float scale = d * static_cast<float>(scale_low + 16 * scale_high - 32);
    for (int i = 0; i < 16; i++) {
      y[16 * j + i] = scale * static_cast<float>((qs[i] >> shift & 3) + (high[i] >> j / 2 & 1) * 4 - 4);
    }
  }
}

template <typename Block, typename CodeAt>
void dequantize_k4(const Block& b, float* __restrict y, CodeAt code) {
  const ScalesK4 bytes = unpack_scales_k4(b.scales);
  const float d = load_half(b.d), dmin = load_half(b.dmin);
  for (int j = 0; j < 8; j++) {
    const float scale = d * static_cast<float>(bytes.scales >> 8 * j & 255);
    const float min = dmin * static_cast<float>(bytes.mins >> 8 * j & 255);
    const uint8_t* qs = b.qs + j / 2 * 32;
    for (int i = 0; i < 32; i++)
      y[32 * j + i] = scale * static_cast<float>(code(qs[i] >> j % 2 * 4 & 15, i, j)) - min;
  }
}

void dequantize(const BlockQ4_K& b, float* __restrict y) {
  dequantize_k4(b, y, [](int low, int, int) { return low; });
}

void dequantize(const BlockQ5_K& b, float* __restrict y) {
  dequantize_k4(b, y, [&](int low, int i, int j) { return low + (b.qh[i] >> j & 1) * 16; });
}

void dequantize(const BlockQ6_K& b, float* __restrict y) {
  const float d = load_half(b.d);
  for (int j = 0; j < 16; j++) {
    const uint8_t *low = b.ql + j / 8 * 64 + j % 4 * 16, *high = b.qh + j / 8 * 32 + j % 2 * 16;
    const int low_shift = j % 8 / 4 * 4, high_shift = j % 8 / 2 * 2;
    const float scale = d * static_cast<float>(static_cast<int8_t>(b.scales[j]));
    for (int i = 0; i < 16; i++) {
      y[16 * j + i] =
          scale * static_cast<float>((low[i] >> low_shift & 15) + (high[i] >> high_shift & 3) * 16 - 32);
    }
  }
}

void dequantize(const BlockIQ4_XS& b, float* __restrict y) {
  const float d = load_half(b.d);
  const int scales_high = load_u16(b.scales_h);
  for (int j = 0; j < 8; j++) {
    const float scale = d * static_cast<float>(nibble(b.scales_l, j) + 16 * (scales_high >> 2 * j & 3) - 32);
    scale_table_32(scale, iq4_values, b.qs + 16 * j, y + 32 * j);
  }
}

void dequantize(const BlockIQ2_XXS& b, float* __restrict y) {
  const float d = load_half(b.d) * 0.125f;
  for (int g = 0; g < 32; g++) {  // groups of eight values; four of them share a word of signs and scale
    const uint8_t* quarter = b.qs + g / 4 * 8;
    const uint32_t word = load_u32(quarter + 4);
    const float scale = d * static_cast<float>(1 + 2 * (word >> 28));
    scale_signed_8(scale, grid_8(grid_iq2_xxs[quarter[g % 4]]), even_signs(word >> g % 4 * 7), y + 8 * g);
  }
}

void dequantize(const BlockIQ2_XS& b, float* __restrict y) {
  const float d = load_half(b.d) * 0.125f;
  for (int g = 0; g < 32; g++) {
    const uint32_t word = load_u16(b.qs + 2 * g);
    const float scale = d * static_cast<float>(1 + 2 * nibble(b.scales, g / 2));
    scale_signed_8(scale, grid_8(grid_iq2_xs[word & 511]), even_signs(word >> 9), y + 8 * g);
  }
}

void dequantize(const BlockIQ2_S& b, float* __restrict y) {
  const float d = load_half(b.d) * 0.125f;
  for (int g = 0; g < 32; g++) {
    const float scale = d * static_cast<float>(1 + 2 * nibble(b.scales, g / 2));
    const int index = b.qs[g] + 256 * (b.qh[g / 4] >> g % 4 * 2 & 3);
    scale_signed_8(scale, grid_8(grid_iq2_s[index]), b.signs[g], y + 8 * g);
  }
}

void dequantize(const BlockIQ3_XXS& b, float* __restrict y) {
  const float d = load_half(b.d) * 0.25f;
  for (int g = 0; g < 32; g++) {
    const uint32_t word = load_u32(b.scales_signs + g / 4 * 4), signs = even_signs(word >> g % 4 * 7);
    const float scale = d * static_cast<float>(1 + 2 * (word >> 28));
    scale_signed_8(scale, grid_8(grid_iq3_xxs[b.qs[2 * g]], grid_iq3_xxs[b.qs[2 * g + 1]]), signs, y + 8 * g);
  }
}

void dequantize(const BlockIQ3_S& b, float* __restrict y) {
  const float d = load_half(b.d);
  for (int g = 0; g < 32; g++) {
    const float scale = d * static_cast<float>(1 + 2 * nibble(b.scales, g / 4));
    const int low = b.qs[2 * g] + 256 * bit(b.qh, 2 * g), high = b.qs[2 * g + 1] + 256 * bit(b.qh, 2 * g + 1);
    scale_signed_8(scale, grid_8(grid_iq3_s[low], grid_iq3_s[high]), b.signs[g], y + 8 * g);
  }
}

void dequantize(const BlockIQ1_S& b, float* __restrict y) {
  for (int g = 0; g < 32; g++) {
    const int word = load_u16(b.qh + g / 4 * 2);
    const float d = load_half(b.d) * 0.125f * static_cast<float>(1 + 2 * (word >> 12 & 7));
    scale_shifted_8(d, grid_8(grid_iq1[b.qs[g] + 256 * (word >> g % 4 * 3 & 7)]), word >> 15 ? -1 : 1,
                    y + 8 * g);
  }
}

void dequantize(const BlockIQ1_M& b, float* __restrict y) {
  uint32_t d_bits = 0;  // spread over the top nibbles of the four scale words
  for (int i = 0; i < 4; i++) d_bits |= static_cast<uint32_t>(load_u16(b.scales + 2 * i) >> 12) << 4 * i;
  for (int g = 0; g < 32; g++) {
    const int high = nibble(b.qh, g), k = g / 2;
    const int scale = 1 + 2 * (load_u16(b.scales + k / 4 * 2) >> k % 4 * 3 & 7);
    const float d = half_to_float(static_cast<uint16_t>(d_bits)) * 0.125f * static_cast<float>(scale);
    scale_shifted_8(d, grid_8(grid_iq1[b.qs[g] + 256 * (high & 7)]), high >> 3 ? -1 : 1, y + 8 * g);
  }
}

template <typename Block>
void dequantize_blocks(const uint8_t* data, int64_t count, int elements, float* out) {
  const auto* blocks = reinterpret_cast<const Block*>(data);
  for (int64_t b = 0; b < count; b++) dequantize(blocks[b], out + b * elements);
}

void convert_row(QuantType type, const uint8_t* data, int64_t cols, float* out) {
  switch (type) {
    case QuantType::f32:
      std::memcpy(out, data, static_cast<size_t>(cols) * sizeof(float));
      return;
    case QuantType::f16:
      for (int64_t i = 0; i < cols; i++) out[i] = load_half(data + 2 * i);
      return;
    case QuantType::bf16:
      for (int64_t i = 0; i < cols; i++) out[i] = bfloat_to_float(load_u16(data + 2 * i));
      return;
    case QuantType::q4_0:
      return dequantize_blocks<BlockQ4_0>(data, cols / 32, 32, out);
    case QuantType::q4_1:
      return dequantize_blocks<BlockQ4_1>(data, cols / 32, 32, out);
    case QuantType::q5_0:
      return dequantize_blocks<BlockQ5_0>(data, cols / 32, 32, out);
    case QuantType::q5_1:
      return dequantize_blocks<BlockQ5_1>(data, cols / 32, 32, out);
    case QuantType::q8_0:
      return dequantize_blocks<BlockQ8_0>(data, cols / 32, 32, out);
    case QuantType::iq4_nl:
      return dequantize_blocks<BlockIQ4_NL>(data, cols / 32, 32, out);
    case QuantType::mxfp4:
      return dequantize_blocks<BlockMXFP4>(data, cols / 32, 32, out);
    case QuantType::q2_k:
      return dequantize_blocks<BlockQ2_K>(data, cols / 256, 256, out);
    case QuantType::q3_k:
      return dequantize_blocks<BlockQ3_K>(data, cols / 256, 256, out);
    case QuantType::q4_k:
      return dequantize_blocks<BlockQ4_K>(data, cols / 256, 256, out);
    case QuantType::q5_k:
      return dequantize_blocks<BlockQ5_K>(data, cols / 256, 256, out);
    case QuantType::q6_k:
      return dequantize_blocks<BlockQ6_K>(data, cols / 256, 256, out);
    case QuantType::iq2_xxs:
      return dequantize_blocks<BlockIQ2_XXS>(data, cols / 256, 256, out);
    case QuantType::iq2_xs:
      return dequantize_blocks<BlockIQ2_XS>(data, cols / 256, 256, out);
    case QuantType::iq2_s:
      return dequantize_blocks<BlockIQ2_S>(data, cols / 256, 256, out);
    case QuantType::iq3_xxs:
      return dequantize_blocks<BlockIQ3_XXS>(data, cols / 256, 256, out);
    case QuantType::iq3_s:
      return dequantize_blocks<BlockIQ3_S>(data, cols / 256, 256, out);
    case QuantType::iq1_s:
      return dequantize_blocks<BlockIQ1_S>(data, cols / 256, 256, out);
    case QuantType::iq1_m:
      return dequantize_blocks<BlockIQ1_M>(data, cols / 256, 256, out);
    case QuantType::iq4_xs:
      return dequantize_blocks<BlockIQ4_XS>(data, cols / 256, 256, out);
  }
}

}  // namespace

}  // namespace coldstream
