// Registers whose lanes are activation rows of a tile: all sixteen, or the eight of a narrow tile, which
// takes half the time.
//
// Dots are sums of products of codes and inputs before `sum_dots`, always sixteen. Wide: a lane is a row.
// Narrow: lanes 2r and 2r + 1 are of row r, the second one of the next four inputs.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "quant/blocks.h"

namespace coldstream {

struct Lanes16 {
  using Ints = __m512i;
  using Floats = __m512;
  static constexpr int step_inputs = 4;
  static __m512i splat_codes(const uint8_t* codes) { return splat(static_cast<int>(load_u32(codes))); }
  static void store_start(void* p, Ints v) { _mm512_store_si512(p, v); }
  static Ints sum_dots(__m512i v) { return v; }
  static Ints load(const void* p) { return _mm512_load_si512(p); }
  static Floats load_floats(const float* p) { return _mm512_load_ps(p); }
  static void store_floats(float* p, Floats v) { _mm512_store_ps(p, v); }
  static Ints zero() { return _mm512_setzero_si512(); }
  static Floats zero_floats() { return _mm512_setzero_ps(); }
  static Ints splat(int32_t x) { return _mm512_set1_epi32(x); }
  static Floats splat_float(float x) { return _mm512_set1_ps(x); }
  static Ints sub(Ints a, Ints b) { return _mm512_sub_epi32(a, b); }
  static Ints mul(Ints a, Ints b) { return _mm512_mullo_epi32(a, b); }
  static Ints shift_left(Ints a, int bits) { return _mm512_slli_epi32(a, static_cast<unsigned>(bits)); }
  static Ints shift_right(Ints a, int bits) { return _mm512_srai_epi32(a, static_cast<unsigned>(bits)); }
  static Ints dot_pairs(Ints sum, Ints a, Ints b) { return _mm512_dpwssd_epi32(sum, a, b); }
  static Floats to_floats(Ints a) { return _mm512_cvtepi32_ps(a); }
  static Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
  static Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
  static Floats minus_fma(Floats a, Floats b, Floats c) { return _mm512_fnmadd_ps(a, b, c); }
};

struct Lanes8 {
  using Ints = __m256i;
  using Floats = __m256;
  static constexpr int step_inputs = 8;
  static __m512i splat_codes(const uint8_t* codes) {
    return _mm512_set1_epi64(static_cast<int64_t>(load_u64(codes)));
  }
  static void store_start(void* p, Ints v) { _mm512_store_si512(p, _mm512_cvtepu32_epi64(v)); }
  static Ints sum_dots(__m512i v) {
    return _mm512_cvtepi64_epi32(_mm512_add_epi32(v, _mm512_srli_epi64(v, 32)));
  }
  static Ints load(const void* p) { return _mm256_load_si256(static_cast<const __m256i*>(p)); }
  static Floats load_floats(const float* p) { return _mm256_load_ps(p); }
  static void store_floats(float* p, Floats v) { _mm256_store_ps(p, v); }
  static Ints zero() { return _mm256_setzero_si256(); }
  static Floats zero_floats() { return _mm256_setzero_ps(); }
  static Ints splat(int32_t x) { return _mm256_set1_epi32(x); }
  static Floats splat_float(float x) { return _mm256_set1_ps(x); }
  static Ints sub(Ints a, Ints b) { return _mm256_sub_epi32(a, b); }
  static Ints mul(Ints a, Ints b) { return _mm256_mullo_epi32(a, b); }
  static Ints shift_left(Ints a, int bits) { return _mm256_slli_epi32(a, bits); }
  static Ints shift_right(Ints a, int bits) { return _mm256_srai_epi32(a, bits); }
  static Ints dot_pairs(Ints sum, Ints a, Ints b) { return _mm256_dpwssd_epi32(sum, a, b); }
  static Floats to_floats(Ints a) { return _mm256_cvtepi32_ps(a); }
  static Floats mul(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
  static Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
  static Floats minus_fma(Floats a, Floats b, Floats c) { return _mm256_fnmadd_ps(a, b, c); }
};

}  // namespace coldstream
