// Registers whose lanes are activation rows of a tile: all sixteen, or the first eight in half a register,
// which takes half the time.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace coldstream {

struct lanes_16 {
  using ints = __m512i;
  using floats = __m512;
  static ints load(const void* p) { return _mm512_load_si512(p); }
  static floats load_floats(const float* p) { return _mm512_load_ps(p); }
  static void store(void* p, ints v) { _mm512_store_si512(p, v); }
  static void store_floats(float* p, floats v) { _mm512_store_ps(p, v); }
  static ints zero() { return _mm512_setzero_si512(); }
  static floats zero_floats() { return _mm512_setzero_ps(); }
  static ints splat(int32_t x) { return _mm512_set1_epi32(x); }
  static floats splat_float(float x) { return _mm512_set1_ps(x); }
  static ints add(ints a, ints b) { return _mm512_add_epi32(a, b); }
  static ints sub(ints a, ints b) { return _mm512_sub_epi32(a, b); }
  static ints mul(ints a, ints b) { return _mm512_mullo_epi32(a, b); }
  static ints shift_left(ints a, int bits) { return _mm512_slli_epi32(a, static_cast<unsigned>(bits)); }
  static ints shift_right(ints a, int bits) { return _mm512_srai_epi32(a, static_cast<unsigned>(bits)); }
  static ints dot_bytes(ints sum, ints a, ints b) { return _mm512_dpbusd_epi32(sum, a, b); }
  static ints dot_pairs(ints sum, ints a, ints b) { return _mm512_dpwssd_epi32(sum, a, b); }
  static floats to_floats(ints a) { return _mm512_cvtepi32_ps(a); }
  static floats mul(floats a, floats b) { return _mm512_mul_ps(a, b); }
  static floats fma(floats a, floats b, floats c) { return _mm512_fmadd_ps(a, b, c); }
  static floats minus_fma(floats a, floats b, floats c) { return _mm512_fnmadd_ps(a, b, c); }
};

struct lanes_8 {
  using ints = __m256i;
  using floats = __m256;
  static ints load(const void* p) { return _mm256_load_si256(static_cast<const __m256i*>(p)); }
  static floats load_floats(const float* p) { return _mm256_load_ps(p); }
  static void store(void* p, ints v) { _mm256_store_si256(static_cast<__m256i*>(p), v); }
  static void store_floats(float* p, floats v) { _mm256_store_ps(p, v); }
  static ints zero() { return _mm256_setzero_si256(); }
  static floats zero_floats() { return _mm256_setzero_ps(); }
  static ints splat(int32_t x) { return _mm256_set1_epi32(x); }
  static floats splat_float(float x) { return _mm256_set1_ps(x); }
  static ints add(ints a, ints b) { return _mm256_add_epi32(a, b); }
  static ints sub(ints a, ints b) { return _mm256_sub_epi32(a, b); }
  static ints mul(ints a, ints b) { return _mm256_mullo_epi32(a, b); }
  static ints shift_left(ints a, int bits) { return _mm256_slli_epi32(a, bits); }
  static ints shift_right(ints a, int bits) { return _mm256_srai_epi32(a, bits); }
  static ints dot_bytes(ints sum, ints a, ints b) { return _mm256_dpbusd_epi32(sum, a, b); }
  static ints dot_pairs(ints sum, ints a, ints b) { return _mm256_dpwssd_epi32(sum, a, b); }
  static floats to_floats(ints a) { return _mm256_cvtepi32_ps(a); }
  static floats mul(floats a, floats b) { return _mm256_mul_ps(a, b); }
  static floats fma(floats a, floats b, floats c) { return _mm256_fmadd_ps(a, b, c); }
  static floats minus_fma(floats a, floats b, floats c) { return _mm256_fnmadd_ps(a, b, c); }
};

}  // namespace coldstream
