// Stands for the package's cuda/common.cuh where its scalar device code is compiled for the host: what CUDA
// itself has of it, with the same results.
#pragma once

#define __device__
#define __forceinline__ inline

struct uint4 {
  unsigned int x, y, z, w;
};

inline unsigned int __float_as_uint(float value) {
  unsigned int bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float __uint_as_float(unsigned int bits) {
  float value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}

inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline float sqrtf(float x) { return __builtin_sqrtf(x); }

// Declared for inline functions that are not called here.
int __dp4a(int a, int b, int sum);
unsigned int __funnelshift_r(unsigned int low, unsigned int high, unsigned int shift);
unsigned int __byte_perm(unsigned int low, unsigned int high, unsigned int selector);

#include "cuda/arithmetic.cuh"

namespace coldstream {

inline float half_to_float(uint16_t bits) {
  const float sign = bits >> 15 ? -1.0f : 1.0f;
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  if (exponent == 31) return sign * (fraction ? __builtin_nanf("") : __builtin_inff());
  if (exponent == 0) return sign * float(fraction) * 0x1p-24f;
  return sign * __uint_as_float(uint32_t(exponent + 112) << 23 | uint32_t(fraction) << 13);
}

}  // namespace coldstream
