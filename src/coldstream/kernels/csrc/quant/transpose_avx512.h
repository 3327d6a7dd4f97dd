// Register transposes shared by the 512-bit kernels.
#pragma once

#include <immintrin.h>

namespace coldstream {

// 16 rows of 16 32-bit values, in place.
static inline void transpose_16x16(__m512i v[16]) {
  __m512i a[16];
  for (int i = 0; i < 16; i += 2) {
    a[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
    a[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
  }
  // Now each 128-bit lane of b[4i + c] holds column c (of four) for rows 4i … 4i + 3.
  __m512i b[16];
  for (int i = 0; i < 16; i += 4) {
    b[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]);
    b[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
    b[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]);
    b[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
  }
  for (int c = 0; c < 4; c++) {
    const __m512i low_even = _mm512_shuffle_i32x4(b[c], b[c + 4], 0x88),
                  low_odd = _mm512_shuffle_i32x4(b[c], b[c + 4], 0xdd);
    const __m512i high_even = _mm512_shuffle_i32x4(b[c + 8], b[c + 12], 0x88);
    const __m512i high_odd = _mm512_shuffle_i32x4(b[c + 8], b[c + 12], 0xdd);
    v[c] = _mm512_shuffle_i32x4(low_even, high_even, 0x88);
    v[c + 4] = _mm512_shuffle_i32x4(low_odd, high_odd, 0x88);
    v[c + 8] = _mm512_shuffle_i32x4(low_even, high_even, 0xdd);
    v[c + 12] = _mm512_shuffle_i32x4(low_odd, high_odd, 0xdd);
  }
}

// 8 rows of 8 64-bit values, in place.
static inline void transpose_8x8_64(__m512i v[8]) {
  __m512i a[8];  // each 128-bit lane l of a[2i + c] holds column 2l + c for rows 2i and 2i + 1
  for (int i = 0; i < 8; i += 2) {
    a[i] = _mm512_unpacklo_epi64(v[i], v[i + 1]);
    a[i + 1] = _mm512_unpackhi_epi64(v[i], v[i + 1]);
  }
  for (int c = 0; c < 2; c++) {
    const __m512i low_even = _mm512_shuffle_i64x2(a[c], a[c + 2], 0x88),
                  low_odd = _mm512_shuffle_i64x2(a[c], a[c + 2], 0xdd);
    const __m512i high_even = _mm512_shuffle_i64x2(a[c + 4], a[c + 6], 0x88),
                  high_odd = _mm512_shuffle_i64x2(a[c + 4], a[c + 6], 0xdd);
    v[c] = _mm512_shuffle_i64x2(low_even, high_even, 0x88);
    v[c + 2] = _mm512_shuffle_i64x2(low_odd, high_odd, 0x88);
    v[c + 4] = _mm512_shuffle_i64x2(low_even, high_even, 0xdd);
    v[c + 6] = _mm512_shuffle_i64x2(low_odd, high_odd, 0xdd);
  }
}

// 4 rows of 4 128-bit values, in place.
static inline __attribute__((always_inline)) void transpose_4x4_128(__m512i v[4]) {
  const __m512i a = _mm512_shuffle_i32x4(v[0], v[1], 0x44), b = _mm512_shuffle_i32x4(v[0], v[1], 0xee);
  const __m512i c = _mm512_shuffle_i32x4(v[2], v[3], 0x44), d = _mm512_shuffle_i32x4(v[2], v[3], 0xee);
  v[0] = _mm512_shuffle_i32x4(a, c, 0x88);
  v[1] = _mm512_shuffle_i32x4(a, c, 0xdd);
  v[2] = _mm512_shuffle_i32x4(b, d, 0x88);
  v[3] = _mm512_shuffle_i32x4(b, d, 0xdd);
}

// 256 bytes as 8 rows of 4 64-bit values, to 4 rows of 8, in place.
static inline void transpose_8x4_64(__m512i v[4]) {
  const __m512i first = _mm512_setr_epi64(0, 4, 8, 12, 1, 5, 9, 13),
                second = _mm512_setr_epi64(2, 6, 10, 14, 3, 7, 11, 15);
  const __m512i a = _mm512_permutex2var_epi64(v[0], first, v[1]),
                b = _mm512_permutex2var_epi64(v[2], first, v[3]);
  const __m512i c = _mm512_permutex2var_epi64(v[0], second, v[1]),
                d = _mm512_permutex2var_epi64(v[2], second, v[3]);
  v[0] = _mm512_shuffle_i64x2(a, b, 0x44);
  v[1] = _mm512_shuffle_i64x2(a, b, 0xee);
  v[2] = _mm512_shuffle_i64x2(c, d, 0x44);
  v[3] = _mm512_shuffle_i64x2(c, d, 0xee);
}

// Pairs of neighbours of a and b summed, so that half as many registers hold twice as many sums.
static inline __m512i merge_32(__m512i a, __m512i b) {
  return _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
}

static inline __m512i merge_64(__m512i a, __m512i b) {
  return _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
}

static inline __m512i merge_128(__m512i a, __m512i b) {
  return _mm512_add_epi32(_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xdd));
}

}  // namespace coldstream
