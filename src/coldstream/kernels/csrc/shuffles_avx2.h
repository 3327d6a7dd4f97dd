// Transposes and sums across lanes, shared by the 256-bit kernels of all folders.
#pragma once

#include <immintrin.h>

namespace coldstream {

// 8 rows of 8 32-bit values, in place.
static inline void transpose_8x8(__m256i v[8]) {
  __m256i a[8];
  for (int i = 0; i < 8; i += 2) {
    a[i] = _mm256_unpacklo_epi32(v[i], v[i + 1]);
    a[i + 1] = _mm256_unpackhi_epi32(v[i], v[i + 1]);
  }
  // Now each 128-bit lane of b[4i + c] holds column c (of four) for rows 4i … 4i + 3.
  __m256i b[8];
  for (int i = 0; i < 8; i += 4) {
    b[i] = _mm256_unpacklo_epi64(a[i], a[i + 2]);
    b[i + 1] = _mm256_unpackhi_epi64(a[i], a[i + 2]);
    b[i + 2] = _mm256_unpacklo_epi64(a[i + 1], a[i + 3]);
    b[i + 3] = _mm256_unpackhi_epi64(a[i + 1], a[i + 3]);
  }
  for (int c = 0; c < 4; c++) {
    v[c] = _mm256_permute2x128_si256(b[c], b[c + 4], 0x20);
    v[c + 4] = _mm256_permute2x128_si256(b[c], b[c + 4], 0x31);
  }
}

// Lane i: the sum of all lanes of v[i].
static inline __m256i sum_each(const __m256i v[8]) {
  const __m256i low = _mm256_hadd_epi32(_mm256_hadd_epi32(v[0], v[1]), _mm256_hadd_epi32(v[2], v[3]));
  const __m256i high = _mm256_hadd_epi32(_mm256_hadd_epi32(v[4], v[5]), _mm256_hadd_epi32(v[6], v[7]));
  return _mm256_add_epi32(_mm256_permute2x128_si256(low, high, 0x20),
                          _mm256_permute2x128_si256(low, high, 0x31));
}

}  // namespace coldstream
