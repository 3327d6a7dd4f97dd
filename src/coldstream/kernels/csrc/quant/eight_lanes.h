// Registers of eight float lanes, which are the arithmetic's eight accumulators or eight weight rows.
#pragma once

#include <immintrin.h>

#include "quant/traits.h"

namespace coldstream {

using FloatLanes = __m256;

// To the second-level cache.
static inline __attribute__((always_inline)) void prefetch_line(const char* p) {
  _mm_prefetch(p, _MM_HINT_T1);
}

namespace {

// half(0) … half(count - 1), float16 bits, as floats. In scalar registers, whose units have nothing else to
// do.
template <typename F>
inline __attribute__((always_inline)) __m256 load_halves(int count, F&& half) {
  uint64_t words[2] = {};
  for (int i = 0; i < count; i++) words[i / 4] |= static_cast<uint64_t>(half(i)) << i % 4 * 16;
  return _mm256_cvtph_ps(_mm_set_epi64x(static_cast<int64_t>(words[1]), static_cast<int64_t>(words[0])));
}

// 2^(e - 128) of eight exponents; the two smallest are subnormal.
inline __m256 powers_of_two(__m256i e) {
  const __m256i normal = _mm256_slli_epi32(_mm256_sub_epi32(e, _mm256_set1_epi32(1)), 23);
  const __m256i subnormal = _mm256_sllv_epi32(_mm256_set1_epi32(0x200000), e);
  return _mm256_castsi256_ps(
      _mm256_blendv_epi8(normal, subnormal, _mm256_cmpgt_epi32(_mm256_set1_epi32(2), e)));
}

// What scales the integers of up to eight blocks, `stride` bytes apart.
template <QuantType Q>
inline __attribute__((always_inline)) __m256 load_scales(const uint8_t* data, int64_t stride, int count) {
  using T = Traits<Q>;
  const auto block = [&](int i) -> const typename T::Block& {
    return *reinterpret_cast<const typename T::Block*>(data + i * stride);
  };
  if constexpr (HasHalfScale<T>) {
    const __m256 d = load_halves(count, [&](int i) { return T::half_d(block(i)); });
    return T::d_factor == 1.0f ? d : _mm256_mul_ps(d, _mm256_set1_ps(T::d_factor));
  } else {
    uint64_t exponents = 0;
    for (int i = 0; i < count; i++) exponents |= static_cast<uint64_t>(block(i).e) << 8 * i;
    return powers_of_two(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(static_cast<int64_t>(exponents))));
  }
}

// What scales the minimums of up to eight blocks.
template <QuantType Q>
inline __attribute__((always_inline)) __m256 load_min_scales(const uint8_t* data, int64_t stride, int count) {
  return load_halves(count, [&](int i) {
    return Traits<Q>::half_dmin(*reinterpret_cast<const typename Traits<Q>::Block*>(data + i * stride));
  });
}

// Each of the first four lanes, twice.
inline __m256 each_twice(__m256 v) {
  return _mm256_permutevar8x32_ps(v, _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3));
}

// What scales each 32 of the 256 inputs of small blocks.
template <QuantType Q>
inline __attribute__((always_inline)) __m256 load_small_scales(const typename Traits<Q>::Block* b) {
  constexpr int count = 256 / Traits<Q>::block_inputs;
  const __m256 d = load_scales<Q>(reinterpret_cast<const uint8_t*>(b), sizeof *b, count);
  return count == 8 ? d : each_twice(d);
}

// What is added for each of eight small blocks, times the sum of its inputs.
template <QuantType Q>
inline __attribute__((always_inline)) __m256 load_small_mins(const typename Traits<Q>::Block* b) {
  static_assert(Traits<Q>::block_inputs == 32);
  return load_min_scales<Q>(reinterpret_cast<const uint8_t*>(b), sizeof *b, 8);
}

}  // namespace

// All ones in the first `count` of eight lanes.
static inline __m256i first_lanes(int count) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

static inline __attribute__((always_inline)) FloatLanes zero_lanes() { return _mm256_setzero_ps(); }

static inline __attribute__((always_inline)) void store_lanes(float* p, FloatLanes v) {
  _mm256_storeu_ps(p, v);
}

static inline __attribute__((always_inline)) void store_first_lanes(float* p, int count, FloatLanes v) {
  _mm256_maskstore_ps(p, first_lanes(count), v);
}

static inline float sum_lanes(__m256 p) {
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(p), _mm256_extractf128_ps(p, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

// The eight accumulators of eight weight rows, added up in their order.
static inline __m256 sum_accumulators(const __m256 p[8]) {
  const __m256 even = _mm256_add_ps(_mm256_add_ps(p[0], p[4]), _mm256_add_ps(p[2], p[6]));
  return _mm256_add_ps(even, _mm256_add_ps(_mm256_add_ps(p[1], p[5]), _mm256_add_ps(p[3], p[7])));
}

}  // namespace coldstream
