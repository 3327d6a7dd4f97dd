// The scalar functions of docs/arithmetic.md in C++ that any compiler takes which has the few intrinsics:
// tests compile it for the host. Without contraction, so that `a * b + c` rounds twice and only __fmaf_rn
// once.
#pragma once

using int8_t = signed char;
using uint8_t = unsigned char;
using int16_t = short;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long long;
using uint64_t = unsigned long long;

namespace coldstream {

constexpr float least_exponent = -87.33654f, greatest_exponent = 88.37626f;

// exp(x) for an x between these two, or NaN.
__device__ __forceinline__ float exact_exp_within(float x) {
  constexpr float round_to_integer =
      12582912.0f;  // 1.5 * 2^23: adding it leaves no fraction bits, ties to even
  const float shifted = x * 1.44269504088896341f + round_to_integer;
  const float n = shifted - round_to_integer;
  const float t = __fmaf_rn(n, 2.12194440e-4f, __fmaf_rn(n, -0.693359375f, x));
  float r = 1.0f / 5040.0f;
  r = __fmaf_rn(r, t, 1.0f / 720.0f);
  r = __fmaf_rn(r, t, 1.0f / 120.0f);
  r = __fmaf_rn(r, t, 1.0f / 24.0f);
  r = __fmaf_rn(r, t, 1.0f / 6.0f);
  r = __fmaf_rn(r, t, 0.5f);
  r = __fmaf_rn(r, t, 1.0f);
  r = __fmaf_rn(r, t, 1.0f);
  const uint32_t exponent = __float_as_uint(shifted) - __float_as_uint(round_to_integer) + 127u;
  return r * __uint_as_float(exponent << 23);
}

// NaN stays NaN; the result of a finite x is never subnormal, zero or infinite.
__device__ __forceinline__ float exact_exp(float x) {
  x = x < least_exponent ? least_exponent : x;
  x = x > greatest_exponent ? greatest_exponent : x;
  return exact_exp_within(x);
}

__device__ __forceinline__ float exact_sigmoid(float x) { return 1.0f / (1.0f + exact_exp(-x)); }
__device__ __forceinline__ float exact_silu(float x) { return x * exact_sigmoid(x); }
__device__ __forceinline__ float exact_swiglu(float gate, float up) { return exact_silu(gate) * up; }

__device__ __forceinline__ float exact_softplus(float x) {
  const float t = exact_exp(-fabsf(x));
  const float s = t / (2.0f + t);
  const float z = s * s;
  float r = 1.0f / 15.0f;
  r = __fmaf_rn(r, z, 1.0f / 13.0f);
  r = __fmaf_rn(r, z, 1.0f / 11.0f);
  r = __fmaf_rn(r, z, 1.0f / 9.0f);
  r = __fmaf_rn(r, z, 1.0f / 7.0f);
  r = __fmaf_rn(r, z, 1.0f / 5.0f);
  r = __fmaf_rn(r, z, 1.0f / 3.0f);
  r = __fmaf_rn(r, z, 1.0f);
  return (x > 0.0f ? x : 0.0f) + (2.0f * s) * r;
}

// x · sigmoid(x · (linear + cubic · x²)), the GELU with tanh.
__device__ __forceinline__ float exact_gelu(float x) {
  return x * exact_sigmoid(x * __fmaf_rn(x * x, 0.07135481282553224f, 1.5957691216057308f));
}

// NaN stays NaN.
__device__ __forceinline__ float exact_clamped_swiglu(float gate, float up, float limit) {
  gate = gate > limit ? limit : gate;
  up = up > limit ? limit : up;
  up = up < -limit ? -limit : up;
  return gate * exact_sigmoid(gate * 1.702f) * (up + 1.0f);
}

// Gated units, numbered as `GATED_UNITS` of kernels/ops.py.
constexpr int swiglu_unit = 0, clamped_unit = 1, geglu_unit = 2;

template <int unit>
__device__ __forceinline__ float exact_glu(float gate, float up, float limit) {
  if constexpr (unit == clamped_unit)
    return exact_clamped_swiglu(gate, up, limit);
  else if constexpr (unit == geglu_unit)
    return exact_gelu(gate) * up;
  else
    return exact_swiglu(gate, up);
}

__device__ __forceinline__ float inverse_sqrt(float x) { return 1.0f / sqrtf(x); }

// The final order of every sum: eight accumulators to one, sixteen to one.
__device__ __forceinline__ float sum_of_eight(const float* p) {
  return ((p[0] + p[4]) + (p[2] + p[6])) + ((p[1] + p[5]) + (p[3] + p[7]));
}

__device__ __forceinline__ float sum_of_sixteen(const float* p) {
  float q[8];
#pragma unroll
  for (int j = 0; j < 8; j++) q[j] = p[j] + p[j + 8];
  return sum_of_eight(q);
}

__device__ __forceinline__ float bfloat16_to_float(uint16_t h) { return __uint_as_float(uint32_t(h) << 16); }

}  // namespace coldstream
