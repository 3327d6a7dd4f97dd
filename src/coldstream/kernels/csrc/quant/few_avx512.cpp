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

// Where eight super-blocks lie: one behind the other in a weight row, or below each other in eight rows.
enum class eight { of_a_row, of_rows };

// Eight super-blocks, `stride` bytes apart, or fewer at the end; the first one meets activation group g. Each
// adds to a lane of p. ROWS is the number of activation rows, or 0 if only known at run time.
template <quant_type Q, int ROWS, bool FULL, eight E>
inline __attribute__((always_inline)) void add_super_blocks(const uint8_t* data, int64_t stride, int count,
                                                            const activation_row* x, int64_t g, int num_rows,
                                                            __m256* p) {
  using format = format_512<Q>;
  using block = typename format::block;
  if constexpr (FULL) count = 8;
  constexpr int capacity = ROWS != 0 ? ROWS : few_max_rows;
  __m512i dots[capacity][8];
  __m256i min_dots[capacity][8];
  for (int i = 0; i < count; i++) {
    const auto* b = reinterpret_cast<const block*>(data + i * stride);
    const int64_t group = E == eight::of_a_row ? g + i : g;
    prefetch(b, sizeof *b);
    const codes_512 codes = format::load(b);
    const spread_scales<Q> scales(b);
    const __m256i factors = sum_factors<Q>(scales);
    for (int t = 0; t < num_rows; t++) {
      const int8_t* q = x[t].q + group * group_elements;
      const __m256i sums = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x[t].sums + group * 16));
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
  const auto* first = reinterpret_cast<const block*>(data);
  const __m256 d = load_halves_8(first->d, stride, count);
  __m256 dmin;
  if constexpr (format::has_mins) dmin = load_halves_8(first->dmin, stride, count);
  const auto present = static_cast<__mmask8>((1 << count) - 1);
  for (int t = 0; t < num_rows; t++) {
    for (int i = count; i < 8; i++) {
      dots[t][i] = _mm512_setzero_si512();
      if constexpr (format::has_mins) min_dots[t][i] = _mm256_setzero_si256();
    }
    const __m256 a = E == eight::of_a_row ? _mm256_maskz_loadu_ps(present, x[t].scales + g)
                                          : _mm256_set1_ps(x[t].scales[g]);
    p[t] = _mm256_fmadd_ps(_mm256_mul_ps(d, a), _mm256_cvtepi32_ps(sum_each(dots[t])), p[t]);
    if constexpr (format::has_mins) {
      p[t] = _mm256_fnmadd_ps(_mm256_mul_ps(dmin, a), _mm256_cvtepi32_ps(sum_each(min_dots[t])), p[t]);
    }
  }
}

// The eight accumulators of eight weight rows, added up in their order.
__m256 sum_accumulators(const __m256 p[8]) {
  const __m256 even = _mm256_add_ps(_mm256_add_ps(p[0], p[4]), _mm256_add_ps(p[2], p[6]));
  return _mm256_add_ps(even, _mm256_add_ps(_mm256_add_ps(p[1], p[5]), _mm256_add_ps(p[3], p[7])));
}

// Weight rows n … n + count - 1, at most eight, which are the lanes: for rows that do not fill eight lanes with
// their own super-blocks.
template <quant_type Q, int ROWS, bool FULL>
inline __attribute__((always_inline)) void multiply_eight_rows(const weight_rows& w, int64_t n, int count,
                                                               const activation_row* x, int num_rows,
                                                               float* const* out) {
  using block = typename format_512<Q>::block;
  constexpr int capacity = ROWS != 0 ? ROWS : few_max_rows;
  __m256 p[8][capacity];
  for (int lane = 0; lane < 8; lane++) {
    for (int t = 0; t < num_rows; t++) p[lane][t] = _mm256_setzero_ps();
  }
  const uint8_t* data = w.data + n * w.row_bytes;
  for (int64_t g = 0; g < w.cols / group_elements; g++) {
    add_super_blocks<Q, ROWS, FULL, eight::of_rows>(data + g * static_cast<int64_t>(sizeof(block)), w.row_bytes,
                                                    count, x, g, num_rows, p[g % 8]);
  }
  const auto present = static_cast<__mmask8>((1 << count) - 1);
  for (int t = 0; t < num_rows; t++) {
    const __m256 of_row[8] = {p[0][t], p[1][t], p[2][t], p[3][t], p[4][t], p[5][t], p[6][t], p[7][t]};
    _mm256_mask_storeu_ps(out[t] + n, present, sum_accumulators(of_row));
  }
}

// Eight blocks of 32, one activation group; those behind the first `count` belong to other rows.
template <quant_type Q>
inline __attribute__((always_inline)) void add_blocks(const typename format_512<Q>::block* b, int count,
                                                      const activation_row* x, int64_t g, int num_rows,
                                                      __m256* p) {
  using format = format_512<Q>;
  const codes_512 codes = format::load(b);
  const __m256 d = _mm256_maskz_mov_ps(static_cast<__mmask8>((1 << count) - 1), load_d_8(b, 8));
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

// The last `rest` blocks of weight row n. Blocks of the next rows are read with them, if there are any.
template <quant_type Q>
inline __attribute__((always_inline)) void add_last_blocks(const weight_rows& w, int64_t n, int64_t b, int rest,
                                                           const activation_row* x, int num_rows, __m256* p) {
  using block = typename format_512<Q>::block;
  const uint8_t* data = w.data + n * w.row_bytes + b * static_cast<int64_t>(sizeof(block));
  const uint8_t* end = w.data + (w.count - 1) * w.row_bytes + w.cols / block_elements * sizeof(block);
  if (data + 8 * sizeof(block) <= end) {
    prefetch(data, static_cast<size_t>(rest) * sizeof(block));
    add_blocks<Q>(reinterpret_cast<const block*>(data), rest, x, b / 8, num_rows, p);
  } else {
    block padded[8] = {};
    std::memcpy(padded, data, static_cast<size_t>(rest) * sizeof(block));
    add_blocks<Q>(padded, rest, x, b / 8, num_rows, p);
  }
}

// Weight rows n, n + distance, … of which each fills the eight lanes with its own super-blocks.
template <quant_type Q, int ROWS, int STREAMS>
inline __attribute__((always_inline)) void multiply_whole_rows(const weight_rows& w, int64_t n, int64_t distance,
                                                               const activation_row* x, int num_rows,
                                                               float* const* out) {
  using block = typename format_512<Q>::block;
  constexpr int capacity = ROWS != 0 ? ROWS : few_max_rows;
  __m256 p[STREAMS][capacity];
  for (int s = 0; s < STREAMS; s++) {
    for (int t = 0; t < num_rows; t++) p[s][t] = _mm256_setzero_ps();
  }
  for (int64_t b = 0; b < w.cols / group_elements; b += 8) {
    for (int s = 0; s < STREAMS; s++) {
      const uint8_t* data = w.data + (n + s * distance) * w.row_bytes + b * static_cast<int64_t>(sizeof(block));
      add_super_blocks<Q, ROWS, true, eight::of_a_row>(data, sizeof(block), 8, x, b, num_rows, p[s]);
    }
  }
  for (int s = 0; s < STREAMS; s++) {
    for (int t = 0; t < num_rows; t++) out[t][n + s * distance] = sum_lanes(p[s][t]);
  }
}

template <quant_type Q, int ROWS>
void few_of_super_blocks(const weight_rows& w, const activation_row* x, int num_rows, float* const* out) {
  if constexpr (ROWS != 0) num_rows = ROWS;
  int64_t n = 0;
  if (w.cols / group_elements % 8 != 0) {
    for (; n + 8 <= w.count; n += 8) multiply_eight_rows<Q, ROWS, true>(w, n, 8, x, num_rows, out);
    if (n < w.count)
      multiply_eight_rows<Q, ROWS, false>(w, n, static_cast<int>(w.count - n), x, num_rows, out);
    return;
  }
  // One activation row waits for memory, which gives more bytes to several places that are read in turn.
  constexpr int streams = 4;
  if constexpr (ROWS == 1) {
    const int64_t distance = w.count / streams;
    for (; n < distance; n++) multiply_whole_rows<Q, ROWS, streams>(w, n, distance, x, num_rows, out);
    n *= streams;
  }
  for (; n < w.count; n++) multiply_whole_rows<Q, ROWS, 1>(w, n, 0, x, num_rows, out);
}

template <quant_type Q, int ROWS>
void few_of_blocks(const weight_rows& w, const activation_row* x, int num_rows, float* const* out) {
  using block = typename format_512<Q>::block;
  if constexpr (ROWS != 0) num_rows = ROWS;
  const int64_t num_blocks = w.cols / block_elements;
  for (int64_t n = 0; n < w.count; n++) {
    const auto* row = reinterpret_cast<const block*>(w.data + n * w.row_bytes);
    __m256 p[ROWS != 0 ? ROWS : few_max_rows];
    for (int t = 0; t < num_rows; t++) p[t] = _mm256_setzero_ps();
    int64_t b = 0;
    for (; b + 8 <= num_blocks; b += 8) {
      prefetch(row + b, 8 * sizeof(block));
      add_blocks<Q>(row + b, 8, x, b / 8, num_rows, p);
    }
    if (b < num_blocks) add_last_blocks<Q>(w, n, b, static_cast<int>(num_blocks - b), x, num_rows, p);
    for (int t = 0; t < num_rows; t++) out[t][n] = sum_lanes(p[t]);
  }
}

}  // namespace

void few_avx512(const weight_rows& w, const activation_row* x, int num_rows, float* const* out) {
  dispatch_integer(w.type, [&]<quant_type Q>() {
    if constexpr (format_512<Q>::super_block) {
      num_rows == 1 ? few_of_super_blocks<Q, 1>(w, x, 1, out) : few_of_super_blocks<Q, 0>(w, x, num_rows, out);
    } else {
      num_rows == 1 ? few_of_blocks<Q, 1>(w, x, 1, out) : few_of_blocks<Q, 0>(w, x, num_rows, out);
    }
  });
}

}  // namespace coldstream

#endif
