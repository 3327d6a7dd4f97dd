#include "quant/few_avx512.h"

#if defined(__AVX512VNNI__)

#include "quant/blocks_avx512.h"
#include "quant/dispatch.h"
#include "quant/transpose_avx512.h"

namespace coldstream {

namespace {

// Distance of prefetches of weights: the hardware does not prefetch across page boundaries.
constexpr int prefetch_bytes = 8192;

void prefetch(const void* block, size_t bytes) {
  const auto* p = static_cast<const char*>(block) + prefetch_bytes;
  for (size_t i = 0; i < bytes; i += 64) _mm_prefetch(p + i, _MM_HINT_T1);
}

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

// Lane 2k: the sum of the low half of v[k]; lane 2k + 1: of the high half.
__m256i sum_each_half(const __m512i v[4]) {
  const __m512i sums = merge_64(merge_32(v[0], v[1]), merge_32(v[2], v[3]));
  const __m512i even = _mm512_shuffle_i64x2(sums, sums, 0x08), odd = _mm512_shuffle_i64x2(sums, sums, 0x0d);
  const __m256i halves = _mm512_castsi512_si256(_mm512_add_epi32(even, odd));
  return _mm256_permutevar8x32_epi32(halves, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

float sum_lanes(__m256 p) {
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(p), _mm256_extractf128_ps(p, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

// What multiplies the sums over 16 inputs: the minimums, or for Q6_K −32 times the scales, which takes the
// codes' offset off.
template <quant_type Q>
__m256i sum_factors(const spread_scales<Q>& scales) {
  if constexpr (format_512<Q>::has_mins) {
    const __m256i twice = _mm256_setr_epi16(8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13, 14, 14, 15, 15);
    return _mm256_permutexvar_epi16(twice, scales.packed);
  } else {
    return _mm256_sub_epi16(_mm256_setzero_si256(),
                            _mm256_slli_epi16(scales.packed, format_512<Q>::offset_bits));
  }
}

// Eight super-blocks of one weight row, or fewer at its end. ROWS is the number of activation rows, or 0 if
// only known at run time.
template <quant_type Q, int ROWS, bool FULL>
inline __attribute__((always_inline)) void add_super_blocks(const typename format_512<Q>::block* b, int count,
                                                            const activation_row* x, int64_t g, int num_rows,
                                                            __m256* p) {
  using format = format_512<Q>;
  if constexpr (FULL) count = 8;
  constexpr int capacity = ROWS != 0 ? ROWS : few_max_rows;
  __m512i dots[capacity][8];
  __m256i min_dots[capacity][8];
  for (int i = 0; i < count; i++) {
    prefetch(b + i, sizeof *b);
    const codes_512 codes = format::load(b + i);
    const spread_scales<Q> scales(b + i);
    const __m256i factors = sum_factors<Q>(scales);
    for (int t = 0; t < num_rows; t++) {
      const int8_t* q = x[t].q + (g + i) * group_elements;
      const __m256i sums = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x[t].sums + (g + i) * 16));
      const __m256i min_dot = _mm256_madd_epi16(factors, sums);
      __m512i dot = format::has_mins ? _mm512_setzero_si512() : _mm512_zextsi256_si512(min_dot);
      for (int k = 0; k < 4; k++) {
        dot = _mm512_dpwssd_epi32(dot, _mm512_maddubs_epi16(codes.part[k], _mm512_loadu_si512(q + 64 * k)),
                                  scales.part[k]);
      }
      dots[t][i] = dot;
      if constexpr (format::has_mins) min_dots[t][i] = min_dot;
    }
  }
  const __m256 d = load_d_8(b, count);
  __m256 dmin;
  if constexpr (format::has_mins) dmin = load_halves_8(b->dmin, sizeof *b, count);
  const auto present = static_cast<__mmask8>((1 << count) - 1);
  for (int t = 0; t < num_rows; t++) {
    for (int i = count; i < 8; i++) {
      dots[t][i] = _mm512_setzero_si512();
      if constexpr (format::has_mins) min_dots[t][i] = _mm256_setzero_si256();
    }
    const __m256 a = _mm256_maskz_loadu_ps(present, x[t].scales + g);
    p[t] = _mm256_fmadd_ps(_mm256_mul_ps(d, a), _mm256_cvtepi32_ps(sum_each(dots[t])), p[t]);
    if constexpr (format::has_mins) {
      p[t] = _mm256_fnmadd_ps(_mm256_mul_ps(dmin, a), _mm256_cvtepi32_ps(sum_each(min_dots[t])), p[t]);
    }
  }
}

// Eight blocks of 32: one activation group.
template <quant_type Q>
inline __attribute__((always_inline)) void add_blocks(const typename format_512<Q>::block* b,
                                                      const activation_row* x, int64_t g, int num_rows,
                                                      __m256* p) {
  using format = format_512<Q>;
  const codes_512 codes = format::load(b);
  const __m256 d = load_d_8(b, 8);
  for (int t = 0; t < num_rows; t++) {
    const int8_t* q = x[t].q + g * group_elements;
    __m512i dots[4];
    for (int k = 0; k < 4; k++) {
      dots[k] = _mm512_dpbusd_epi32(_mm512_setzero_si512(), codes.part[k], _mm512_loadu_si512(q + 64 * k));
    }
    const __m256i sums = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x[t].sums + g * 16));
    const __m256i offset =
        _mm256_slli_epi32(_mm256_madd_epi16(sums, _mm256_set1_epi16(1)), format::offset_bits);
    const __m256i dot = _mm256_sub_epi32(sum_each_half(dots), offset);
    const __m256 a = _mm256_loadu_ps(x[t].scales + g * blocks_per_group);
    p[t] = _mm256_fmadd_ps(_mm256_mul_ps(d, a), _mm256_cvtepi32_ps(dot), p[t]);
  }
}

template <quant_type Q, int ROWS>
void few_of_type(const weight_rows& w, const activation_row* x, int num_rows, float* const* out) {
  using format = format_512<Q>;
  using block = typename format::block;
  if constexpr (ROWS != 0) num_rows = ROWS;
  constexpr int block_elements = format::super_block ? 256 : 32;
  const int64_t num_blocks = w.cols / block_elements;
  for (int64_t n = 0; n < w.count; n++) {
    const auto* row = reinterpret_cast<const block*>(w.data + n * w.row_bytes);
    __m256 p[ROWS != 0 ? ROWS : few_max_rows];
    for (int t = 0; t < num_rows; t++) p[t] = _mm256_setzero_ps();
    int64_t b = 0;
    for (; b + 8 <= num_blocks; b += 8) {
      if constexpr (format::super_block) {
        add_super_blocks<Q, ROWS, true>(row + b, 8, x, b, num_rows, p);
      } else {
        prefetch(row + b, 8 * sizeof(block));
        add_blocks<Q>(row + b, x, b / 8, num_rows, p);
      }
    }
    if (const int rest = static_cast<int>(num_blocks - b)) {
      if constexpr (format::super_block) {
        add_super_blocks<Q, ROWS, false>(row + b, rest, x, b, num_rows, p);
      } else {
        block padded[8] = {};
        std::memcpy(padded, row + b, static_cast<size_t>(rest) * sizeof(block));
        add_blocks<Q>(padded, x, b / 8, num_rows, p);
      }
    }
    for (int t = 0; t < num_rows; t++) out[t][n] = sum_lanes(p[t]);
  }
}

}  // namespace

void few_avx512(const weight_rows& w, const activation_row* x, int num_rows, float* const* out) {
  dispatch_integer(w.type, [&]<quant_type Q>() {
    if (num_rows == 1) {
      few_of_type<Q, 1>(w, x, 1, out);
    } else {
      few_of_type<Q, 0>(w, x, num_rows, out);
    }
  });
}

}  // namespace coldstream

#endif
