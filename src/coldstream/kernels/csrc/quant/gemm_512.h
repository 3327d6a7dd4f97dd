// What products with many activation rows by VNNI and by AMX share beyond those of other tiers.
#pragma once

#include <immintrin.h>

#include <algorithm>

#include "quant/blocks_avx512.h"
#include "quant/eight_lanes.h"
#include "quant/gemm_panels.h"
#include "quant/transpose_avx512.h"

namespace coldstream {

// Signed codes of a super-block times their scales, as int16: of the even inputs of part k, and of the odd
// ones.
struct ScaledCodes {
  __m512i even, odd;
};

namespace {

template <QuantType Q>
inline __attribute__((always_inline)) ScaledCodes scale_codes(__m512i codes, __m512i scales) {
  if constexpr (Traits<Q>::is_signed) {
    return {_mm512_mullo_epi16(_mm512_srai_epi16(_mm512_slli_epi16(codes, 8), 8), scales),
            _mm512_mullo_epi16(_mm512_srai_epi16(codes, 8), scales)};
  }
  const __m512i even = _mm512_mullo_epi16(_mm512_and_si512(codes, _mm512_set1_epi16(0xff)), scales);
  const __m512i odd = _mm512_mullo_epi16(_mm512_srli_epi16(codes, 8), scales);
  if constexpr (Traits<Q>::offset == 0) return {even, odd};
  const __m512i offset = _mm512_mullo_epi16(scales, _mm512_set1_epi16(Traits<Q>::offset));
  return {_mm512_sub_epi16(even, offset), _mm512_sub_epi16(odd, offset)};
}

// The low bytes of even and odd inputs, alternating.
inline __attribute__((always_inline)) __m512i interleave_bytes(__m512i even, __m512i odd) {
  constexpr int select = 0xca;  // a ? b : c, bit by bit
  return _mm512_ternarylogic_epi64(_mm512_set1_epi16(0xff), even, _mm512_slli_epi16(odd, 8), select);
}

// The minimums of a super-block in pairs of int16: eight of 16 inputs each, or four of 32.
template <QuantType Q>
inline __attribute__((always_inline)) void store_mins(const SpreadScales<Q>& scales, int32_t (&to)[8]) {
  if constexpr (Traits<Q>::sub_block == 32) {
    _mm_store_si128(reinterpret_cast<__m128i*>(to), _mm256_extracti128_si256(scales.packed, 1));
  } else {
    _mm256_store_si256(reinterpret_cast<__m256i*>(to), scales.factors);
  }
}

}  // namespace

// A narrow tile in quarters as one with `inputs` consecutive inputs of a row together, of eight or 16 rows.
template <int inputs>
inline __attribute__((always_inline)) void regroup_quarters(const ActivationTile& from, ActivationTile& to) {
  static_assert(inputs == 4 || inputs == 8);
  constexpr int per_step = 16 / inputs;
  const __m512i fours = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 0, 0, 0, 0, 0, 0, 0);
  const __m512i eights = _mm512_setr_epi64(0, 2, 4, 6, 8, 10, 12, 14);
  const int8_t* q = from.q[0][0];
  for (int step = 0; step < 16; step++, q += 64) {
    const __m512i low = _mm512_load_si512(q), high = _mm512_load_si512(q + 16 * 64);
    for (int i = 0; i < per_step; i++) {
      const __m512i v =
          inputs == 8 ? _mm512_permutex2var_epi64(low, _mm512_add_epi64(eights, _mm512_set1_epi64(i)), high)
                      : _mm512_maskz_permutex2var_epi32(0xff, low,
                                                        _mm512_add_epi32(fours, _mm512_set1_epi32(i)), high);
      _mm512_store_si512(to.q[per_step * step + i], v);
    }
  }
  std::memcpy(to.sums_16, from.sums_16, sizeof from.sums_16);
  std::memcpy(to.sums_32, from.sums_32, sizeof from.sums_32);
  std::memcpy(to.scales, from.scales, sizeof from.scales);
}

// The sums of the first `num_lanes` accumulators of 16 lanes, where [i][at] is the i-th.
static inline __attribute__((always_inline)) __m512i sum_accumulators_at(const Accumulators& p, int at,
                                                                         int num_lanes) {
  __m512 lane[8];
  for (int j = 0; j < 8; j++) lane[j] = j < num_lanes ? _mm512_load_ps(p.lane[j][at]) : _mm512_setzero_ps();
  const __m512 even = _mm512_add_ps(_mm512_add_ps(lane[0], lane[4]), _mm512_add_ps(lane[2], lane[6]));
  const __m512 odd = _mm512_add_ps(_mm512_add_ps(lane[1], lane[5]), _mm512_add_ps(lane[3], lane[7]));
  return _mm512_castps_si512(_mm512_add_ps(even, odd));
}

// Weight rows i … i + 15 of a panel, of which `num_rows` exist, to n … n + 15.
static inline void store_half_panel(const Accumulators& p, int num_lanes, int i, int num_rows,
                                    float* const* out, int64_t n) {
  __m512i sums[16];
  for (int r = 0; r < 16; r++) sums[r] = sum_accumulators_at(p, i + r, num_lanes);
  transpose_16x16(sums);
  const auto present = static_cast<__mmask16>(num_rows >= 16 ? 0xffff : (1 << num_rows) - 1);
  for (int t = 0; t < tile_rows; t++) {
    if (out[t] != nullptr) _mm512_mask_storeu_epi32(out[t] + n, present, sums[t]);
  }
}

// The part of a kernel for `gemm_of_type` that does not depend on how it multiplies.
struct Kernel512 {
  static void store(const Accumulators& p, int num_lanes, int num_rows, float* const* out, int64_t n) {
    for (int i = 0; i < num_rows; i += 16) store_half_panel(p, num_lanes, i, num_rows - i, out, n + i);
  }

  static constexpr int num_tiles(int num_rows) { return (num_rows + tile_rows - 1) / tile_rows; }
};

}  // namespace coldstream
