// docs/arithmetic.md in CUDA C++: the pieces that every kernel shares. Compiled without contraction, so that
// `a * b + c` rounds twice and only __fmaf_rn rounds once.
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

constexpr int warp_size = 32;
constexpr uint32_t all_lanes = 0xffffffffu;

// Programmatic dependent launch: a kernel that was launched with `overlap` may run before the kernels in front
// of it are done, and touches nothing they read or write until it has waited. Without `overlap` both do nothing,
// as on devices before sm_90.
__device__ __forceinline__ void wait_for_previous_grid() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void release_next_grid() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

constexpr float least_exponent = -87.33654f, greatest_exponent = 88.37626f;

// Of an x between these two, or NaN.
__device__ __forceinline__ float exact_exp_within(float x) {
  constexpr float round_to_integer = 12582912.0f;  // 1.5 * 2^23: adding it leaves no fraction bits, ties to even
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

// The same trees over lanes: accumulator j is held by the lanes whose index has j in the bits from `stride` up;
// every lane of the eight (sixteen) groups gets the sum. Addition commutes, so all get the same bits.
__device__ __forceinline__ float sum_of_eight_lanes(float p, int stride) {
  p += __shfl_xor_sync(all_lanes, p, 4 * stride);
  p += __shfl_xor_sync(all_lanes, p, 2 * stride);
  p += __shfl_xor_sync(all_lanes, p, stride);
  return p;
}

__device__ __forceinline__ float sum_of_sixteen_lanes(float p, int stride) {
  p += __shfl_xor_sync(all_lanes, p, 8 * stride);
  return sum_of_eight_lanes(p, stride);
}

__device__ __forceinline__ float half_to_float(uint16_t h) {
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
  return f;
}

__device__ __forceinline__ uint16_t float_to_half(float f) {
  uint16_t h;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
  return h;
}

__device__ __forceinline__ float bfloat16_to_float(uint16_t h) { return __uint_as_float(uint32_t(h) << 16); }

// Asynchronous copies from global to shared memory, 16 aligned bytes a thread.
__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ void copy_async_16(void* shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(shared)), "l"(global) : "memory");
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int pending>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

}  // namespace coldstream
