// Registers of eight float lanes, which are the arithmetic's eight accumulators or eight weight rows.
#pragma once

#include <immintrin.h>

#include "quant/blocks.h"

namespace coldstream {

// The float16 fields of up to eight blocks, `stride` bytes apart. In scalar registers, whose units have
// nothing else to do.
static inline __m256 load_halves_8(const uint8_t* field, size_t stride, int count) {
  uint64_t words[2] = {};
  for (int i = 0; i < count; i++)
    words[i / 4] |= static_cast<uint64_t>(load_u16(field + i * stride)) << i % 4 * 16;
  return _mm256_cvtph_ps(_mm_set_epi64x(static_cast<int64_t>(words[1]), static_cast<int64_t>(words[0])));
}

// The scales of up to eight blocks.
template <typename Block>
static inline __m256 load_d_8(const Block* b, int count) {
  return load_halves_8(b->d, sizeof *b, count);
}

// All ones in the first `count` of eight lanes.
static inline __m256i first_lanes(int count) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
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
