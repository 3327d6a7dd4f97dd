// What CUDA C++ has of itself, for the host's compiler: included before every source, and without headers of
// the system, since kernels define the integer types themselves.
#pragma once

#include "threads.h"

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __noinline__ [[gnu::noinline]]
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(bytes)
#define __shared__ thread_local  // a variable of its own for every block that runs; see grid.cpp

struct int2 {
  int x, y;
};
struct alignas(8) uint2 {
  unsigned int x, y;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(16) uint4 {
  unsigned int x, y, z, w;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
inline int2 make_int2(int x, int y) { return {x, y}; }
inline uint2 make_uint2(unsigned int x, unsigned int y) { return {x, y}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint4 make_uint4(unsigned int x, unsigned int y, unsigned int z, unsigned int w) {
  return {x, y, z, w};
}
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

inline void __syncthreads() { meet_in_block(false, 0); }
inline int __syncthreads_or(int value) { return meet_in_block(true, value); }
inline void __syncwarp() { meet_in_warp(Meeting::sync, 0xffffffffu, 0, 0); }

template <class T>
T shuffle(Meeting how, unsigned int lanes, T value, unsigned int argument) {
  unsigned long long bits = 0;
  __builtin_memcpy(&bits, &value, sizeof value);
  bits = meet_in_warp(how, lanes, bits, argument);
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}

template <class T>
T __shfl_xor_sync(unsigned int lanes, T value, int mask) {
  return shuffle(Meeting::shuffle_xor, lanes, value, mask);
}
template <class T>
T __shfl_up_sync(unsigned int lanes, T value, int distance) {
  return shuffle(Meeting::shuffle_up, lanes, value, distance);
}
template <class T>
T __shfl_sync(unsigned int lanes, T value, int from) {
  return shuffle(Meeting::shuffle_from, lanes, value, from);
}
inline unsigned int __ballot_sync(unsigned int lanes, bool value) {
  return meet_in_warp(Meeting::ballot, lanes, value, 0);
}
inline int __any_sync(unsigned int lanes, bool value) { return __ballot_sync(lanes, value) != 0; }
inline unsigned int __reduce_add_sync(unsigned int lanes, unsigned int value) {
  return meet_in_warp(Meeting::add, lanes, value, 0);
}
inline unsigned int __reduce_min_sync(unsigned int lanes, unsigned int value) {
  return meet_in_warp(Meeting::least, lanes, value, 0);
}
inline int __reduce_max_sync(unsigned int lanes, int value) {
  return meet_in_warp(Meeting::greatest_signed, lanes, static_cast<unsigned int>(value), 0);
}

// A thread runs until it meets others, so that nothing comes between.
template <class T>
T atomicAdd(T* to, T value) {
  const T before = *to;
  *to += value;
  return before;
}
template <class T>
T atomicExch(T* to, T value) {
  const T before = *to;
  *to = value;
  return before;
}
inline unsigned int atomicAdd(unsigned int* to, unsigned int value) {
  return atomicAdd<unsigned int>(to, value);
}
inline unsigned long long atomicExch(unsigned long long* to, unsigned long long value) {
  return atomicExch<unsigned long long>(to, value);
}
inline unsigned int atomicExch(unsigned int* to, unsigned int value) {
  return atomicExch<unsigned int>(to, value);
}
inline unsigned long long atomicMax(unsigned long long* to, unsigned long long value) {
  const unsigned long long before = *to;
  if (value > before) *to = value;
  return before;
}
inline unsigned int atomicMin(unsigned int* to, unsigned int value) {
  const unsigned int before = *to;
  if (value < before) *to = value;
  return before;
}
inline unsigned int atomicOr(unsigned int* to, unsigned int value) {
  const unsigned int before = *to;
  *to |= value;
  return before;
}
inline unsigned int atomicInc(unsigned int* to, unsigned int last) {
  const unsigned int before = *to;
  *to = before >= last ? 0 : before + 1;
  return before;
}
inline void __threadfence() {}
inline void __threadfence_system() {}

template <class T>
T __ldcg(const T* from) {
  return *from;
}
template <class T>
T __ldcs(const T* from) {
  return *from;
}
template <class T>
void __stcg(T* to, T value) {
  *to = value;
}

template <class To, class From>
To same_bits(From value) {
  static_assert(sizeof(To) == sizeof(From), "a cast of bits");
  To bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  return bits;
}
inline unsigned int __float_as_uint(float value) { return same_bits<unsigned int>(value); }
inline int __float_as_int(float value) { return same_bits<int>(value); }
inline float __uint_as_float(unsigned int bits) { return same_bits<float>(bits); }
inline float __int_as_float(int bits) { return same_bits<float>(bits); }
inline double __longlong_as_double(long long bits) { return same_bits<double>(bits); }

inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline int __ffsll(long long bits) { return __builtin_ffsll(bits); }
inline unsigned int __brev(unsigned int bits) {
  unsigned int result = 0;
  for (int i = 0; i < 32; i++) result |= (bits >> i & 1) << (31 - i);
  return result;
}
inline void __trap() { __builtin_trap(); }
inline int __popc(unsigned int bits) { return __builtin_popcount(bits); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}
inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline float sqrtf(float x) { return __builtin_sqrtf(x); }
inline float logf(float x) { return __builtin_logf(x); }
inline float fabsf(float x) { return __builtin_fabsf(x); }
inline float fminf(float a, float b) { return __builtin_fminf(a, b); }
inline float fmaxf(float a, float b) { return __builtin_fmaxf(a, b); }
inline double rint(double x) { return __builtin_rint(x); }
inline double floor(double x) { return __builtin_floor(x); }
inline float cosf(float x) { return __builtin_cosf(x); }
inline float sinf(float x) { return __builtin_sinf(x); }
inline double ceil(double x) { return __builtin_ceil(x); }
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline unsigned int max(unsigned int a, unsigned int b) { return a > b ? a : b; }
inline int __float2int_rn(float x) { return int(__builtin_rintf(x)); }
// Four bytes of eight, by the low nibbles of the selector.
inline unsigned int __byte_perm(unsigned int low, unsigned int high, unsigned int selector) {
  const unsigned long long bytes = static_cast<unsigned long long>(high) << 32 | low;
  unsigned int result = 0;
  for (int i = 0; i < 4; i++) result |= unsigned(bytes >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
  return result;
}
inline unsigned long long max(unsigned long long a, unsigned long long b) { return a > b ? a : b; }
inline unsigned int __funnelshift_r(unsigned int low, unsigned int high, unsigned int shift) {
  return static_cast<unsigned int>((static_cast<unsigned long long>(high) << 32 | low) >> (shift & 31));
}
// Sums of products of signed bytes, or of signed halves and the low or high two bytes.
inline int __dp4a(int a, int b, int sum) {
  for (int i = 0; i < 32; i += 8) sum += static_cast<signed char>(a >> i) * static_cast<signed char>(b >> i);
  return sum;
}
inline int __dp2a_lo(int a, int b, int sum) {
  return sum + static_cast<short>(a) * static_cast<signed char>(b) +
         (a >> 16) * static_cast<signed char>(b >> 8);
}
inline int __dp2a_hi(int a, int b, int sum) { return __dp2a_lo(a, b >> 16, sum); }
