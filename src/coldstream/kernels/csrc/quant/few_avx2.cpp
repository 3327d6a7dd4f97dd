#include "quant/few_avx2.h"

#if defined(__AVX2__)

#include "quant/blocks_avx2.h"
#include "quant/dispatch.h"

namespace coldstream {

namespace {

constexpr int prefetch_bytes = 8192;  // see few_avx512.cpp

void prefetch(const void* block, size_t bytes) {
  const auto* p = static_cast<const char*>(block) + prefetch_bytes;
  for (size_t i = 0; i < bytes; i += 64) _mm_prefetch(p + i, _MM_HINT_T1);
}

// Lane i: the sum of all lanes of v[i].
__m256i sum_each(const __m256i v[8]) {
  const __m256i low = _mm256_hadd_epi32(_mm256_hadd_epi32(v[0], v[1]), _mm256_hadd_epi32(v[2], v[3]));
  const __m256i high = _mm256_hadd_epi32(_mm256_hadd_epi32(v[4], v[5]), _mm256_hadd_epi32(v[6], v[7]));
  return _mm256_add_epi32(_mm256_permute2x128_si256(low, high, 0x20),
                          _mm256_permute2x128_si256(low, high, 0x31));
}

float sum_lanes(__m256 p) {
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(p), _mm256_extractf128_ps(p, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

// A super-block's scales, spread over the int16 lanes that they multiply.
template <quant_type Q>
struct spread_scales {
  __m256i part[8];
  // Factors of the sums over 16 inputs: the minimums, or −32 times the scales to subtract the offset.
  __m256i factors;

  explicit spread_scales(const typename format_256<Q>::block* b) {
    if constexpr (format_256<Q>::has_mins) {
      const scales_k4 bytes = unpack_scales_k4(b->scales);
      const __m128i scales = _mm_cvtepu8_epi16(_mm_cvtsi64_si128(static_cast<int64_t>(bytes.scales)));
      const __m256i all = _mm256_set_m128i(scales, scales);
      for (int j = 0; j < 8; j++)
        part[j] = _mm256_shuffle_epi8(all, _mm256_set1_epi16(static_cast<short>((2 * j + 1) << 8 | 2 * j)));
      const __m128i mins = _mm_cvtsi64_si128(static_cast<int64_t>(bytes.mins));
      factors = _mm256_cvtepu8_epi16(_mm_unpacklo_epi8(mins, mins));
    } else {
      const __m256i scales =
          _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(b->scales)));
      const __m256i halves[2] = {_mm256_permute2x128_si256(scales, scales, 0x00),
                                 _mm256_permute2x128_si256(scales, scales, 0x11)};
      for (int j = 0; j < 8; j++) {
        const int even = 4 * (j % 4), odd = even + 2;
        const __m256i index = _mm256_set_m128i(_mm_set1_epi16(static_cast<short>((odd + 1) << 8 | odd)),
                                               _mm_set1_epi16(static_cast<short>((even + 1) << 8 | even)));
        part[j] = _mm256_shuffle_epi8(halves[j / 4], index);
      }
      factors =
          _mm256_sub_epi16(_mm256_setzero_si256(), _mm256_slli_epi16(scales, format_256<Q>::offset_bits));
    }
  }
};

// The float16 fields at byte `offset` of up to eight blocks.
template <typename block>
__m256 load_halves(const block* b, size_t offset, int count) {
  uint16_t bits[8] = {};
  for (int i = 0; i < count; i++) bits[i] = load_u16(reinterpret_cast<const uint8_t*>(b + i) + offset);
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bits)));
}

// Up to eight super-blocks of one weight row.
template <quant_type Q>
void add_super_blocks(const typename format_256<Q>::block* b, int count, const activation_row* x, int64_t g,
                      int num_rows, __m256* p) {
  using format = format_256<Q>;
  __m256i dots[few_max_rows][8], min_dots[few_max_rows][8];
  for (int i = 0; i < count; i++) {
    prefetch(b + i, sizeof *b);
    const codes_256 codes = format::load(b + i);
    const spread_scales<Q> scales(b + i);
    for (int t = 0; t < num_rows; t++) {
      const int8_t* q = x[t].q + (g + i) * group_elements;
      const __m256i min_dot = _mm256_madd_epi16(scales.factors, load_256(x[t].sums + (g + i) * 16));
      __m256i dot = format::has_mins ? _mm256_setzero_si256() : min_dot;
      for (int j = 0; j < 8; j++) {
        const __m256i pairs = _mm256_maddubs_epi16(codes.part[j], load_256(q + 32 * j));
        dot = _mm256_add_epi32(dot, _mm256_madd_epi16(pairs, scales.part[j]));
      }
      dots[t][i] = dot;
      if constexpr (format::has_mins) min_dots[t][i] = min_dot;
    }
  }
  const __m256 d = load_halves(b, offsetof(typename format::block, d), count);
  for (int t = 0; t < num_rows; t++) {
    float scales[8] = {};
    for (int i = 0; i < count; i++) scales[i] = x[t].scales[g + i];
    const __m256 a = _mm256_loadu_ps(scales);
    for (int i = count; i < 8; i++) dots[t][i] = min_dots[t][i] = _mm256_setzero_si256();
    p[t] = _mm256_fmadd_ps(_mm256_mul_ps(d, a), _mm256_cvtepi32_ps(sum_each(dots[t])), p[t]);
    if constexpr (format::has_mins) {
      const __m256 dmin = load_halves(b, offsetof(typename format::block, dmin), count);
      p[t] = _mm256_fnmadd_ps(_mm256_mul_ps(dmin, a), _mm256_cvtepi32_ps(sum_each(min_dots[t])), p[t]);
    }
  }
}

// Eight blocks of 32: one activation group.
template <quant_type Q>
void add_blocks(const typename format_256<Q>::block* b, const activation_row* x, int64_t g, int num_rows,
                __m256* p) {
  const codes_256 codes = format_256<Q>::load(b);
  const __m256 d = load_halves(b, 0, 8);
  for (int t = 0; t < num_rows; t++) {
    const int8_t* q = x[t].q + g * group_elements;
    __m256i dots[8];
    for (int j = 0; j < 8; j++) {
      // |w| is unsigned and x takes w's sign; two products of at most 128 · 127 fit int16.
      const __m256i signed_x = _mm256_sign_epi8(load_256(q + 32 * j), codes.part[j]);
      const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(codes.part[j]), signed_x);
      dots[j] = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
    }
    p[t] = _mm256_fmadd_ps(_mm256_mul_ps(d, _mm256_loadu_ps(x[t].scales + g * blocks_per_group)),
                           _mm256_cvtepi32_ps(sum_each(dots)), p[t]);
  }
}

template <quant_type Q>
void few_of_type(const weight_rows& w, const activation_row* x, int num_rows, float* const* out) {
  using format = format_256<Q>;
  using block = typename format::block;
  const int64_t num_blocks = w.cols / (format::super_block ? 256 : 32);
  for (int64_t n = 0; n < w.count; n++) {
    const auto* row = reinterpret_cast<const block*>(w.data + n * w.row_bytes);
    __m256 p[few_max_rows];
    for (int t = 0; t < num_rows; t++) p[t] = _mm256_setzero_ps();
    for (int64_t b = 0; b < num_blocks; b += 8) {
      const int count = static_cast<int>(num_blocks - b < 8 ? num_blocks - b : 8);
      if constexpr (format::super_block) {
        add_super_blocks<Q>(row + b, count, x, b, num_rows, p);
      } else if (count == 8) {
        prefetch(row + b, 8 * sizeof(block));
        add_blocks<Q>(row + b, x, b / 8, num_rows, p);
      } else {
        block padded[8] = {};
        std::memcpy(padded, row + b, static_cast<size_t>(count) * sizeof(block));
        add_blocks<Q>(padded, x, b / 8, num_rows, p);
      }
    }
    for (int t = 0; t < num_rows; t++) out[t][n] = sum_lanes(p[t]);
  }
}

}  // namespace

void few_avx2(const weight_rows& w, const activation_row* x, int num_rows, float* const* out) {
  dispatch_integer(w.type, [&]<quant_type Q>() { few_of_type<Q>(w, x, num_rows, out); });
}

}  // namespace coldstream

#endif
