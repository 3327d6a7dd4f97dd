// Stands for the package's cuda/instructions.cuh where its kernels are compiled for the host. Threads take
// turns, so that memory is in order by itself; copies arrive at once or when they are waited for, and each
// look at the clock advances it. What devices without asynchronous copies have instead is the package's.
#pragma once

#include "cuda/arithmetic.cuh"

extern thread_local float4 dynamic_shared[];

namespace coldstream {

inline void wait_for_previous_grid() {}
inline void release_next_grid() {}

inline uint32_t load_acquire(const uint32_t* from) { return *from; }
inline void store_release(uint32_t* to, uint32_t value) { *to = value; }
inline uint32_t count_up_to(uint32_t* count, uint32_t last) {
  const uint32_t before = *count;
  *count = before >= last ? 0 : before + 1;
  return before;
}
// Here it is in vain when all blocks that have a place wait.
inline uint32_t wait_for_count(const uint32_t* count, uint32_t least, uint64_t) {
  while (*count < least && wait_for_other_blocks()) {
  }
  return *count;
}
inline void set_bits(uint32_t* to, uint32_t bits) { *to |= bits; }
inline void add_up(uint64_t* sum, uint64_t value) { *sum += value; }
inline uint32_t load_acquire_system(const uint32_t* from) { return __atomic_load_n(from, __ATOMIC_ACQUIRE); }
inline uint32_t load_relaxed_system(const uint32_t* from) { return __atomic_load_n(from, __ATOMIC_RELAXED); }
inline float load_relaxed_system(const float* from) {
  return __uint_as_float(load_relaxed_system(reinterpret_cast<const uint32_t*>(from)));
}
inline float4 load_relaxed_system(const float4* from) {
  return {load_relaxed_system(&from->x), load_relaxed_system(&from->y), load_relaxed_system(&from->z),
          load_relaxed_system(&from->w)};
}
inline void store_relaxed_system(uint32_t* to, uint32_t value) {
  __atomic_store_n(to, value, __ATOMIC_RELAXED);
}
inline void store_release_system(uint32_t* to, uint32_t value) {
  __atomic_store_n(to, value, __ATOMIC_RELEASE);
}
inline void bring_near(const void* from) { __builtin_prefetch(from); }
inline void bring_close(const float* from) { __builtin_prefetch(from); }
inline uint64_t now_ns() { return look_at_clock(); }

inline float half_to_float(uint16_t bits) {
  const float sign = bits >> 15 ? -1.0f : 1.0f;
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  if (exponent == 31) return sign * (fraction ? __builtin_nanf("") : __builtin_inff());
  if (exponent == 0) return sign * float(fraction) * 0x1p-24f;
  return sign * __uint_as_float(uint32_t(exponent + 112) << 23 | uint32_t(fraction) << 13);
}

// To the nearest, of two the even one: subnormal results are multiples of 2^-24, and others have ten bits
// behind the first.
inline uint16_t float_to_half(float x) {
  const uint32_t bits = __float_as_uint(x), magnitude = bits & 0x7fffffffu;
  const uint16_t sign = uint16_t(bits >> 16 & 0x8000u);
  if (magnitude > 0x7f800000u) return uint16_t(sign | 0x7e00u);
  if (magnitude >= 0x477ff000u) return uint16_t(sign | 0x7c00u);
  if (magnitude < 0x38800000u) return uint16_t(sign | uint16_t(rint(double(fabsf(x)) * 0x1p24)));
  const uint32_t rounded = magnitude + 0xfffu + (magnitude >> 13 & 1);
  return uint16_t(sign | uint16_t((rounded >> 13) - (112u << 10)));
}

// sum + Σ of four products of bytes.
template <class A, class B>
int dot_bytes(uint32_t x, uint32_t y, int sum) {
  for (int i = 0; i < 32; i += 8) sum += A(x >> i) * B(y >> i);
  return sum;
}
inline int dot_unsigned(uint32_t weights, uint32_t x, int sum) {
  return dot_bytes<uint8_t, int8_t>(weights, x, sum);
}

inline int signed_byte(uint32_t word, int i) { return int8_t(word >> 8 * i); }

inline uint32_t in_register(uint32_t number) { return number; }
inline uint32_t in_own_register(uint32_t number) { return number; }

// Bit 3 of a nibble takes the sign of the byte.
inline uint32_t permute(uint32_t low, uint32_t high, uint32_t selector) {
  const uint32_t bytes = __byte_perm(low, high, selector),
                 signs = (selector >> 3 & 1) * 0xff | (selector >> 7 & 1) * 0xff00 |
                         (selector >> 11 & 1) * 0xff0000 | (selector >> 15 & 1) * 0xff000000;
  return (bytes & ~signs) | ((bytes >> 7 & 0x01010101u) * 255 & signs);
}

template <int count>
void meet_at(int barrier) {
  meet_some(barrier, count);
}
template <int count>
void meet_apart_at(int barrier) {
  meet_some(barrier, count);
}
inline uint32_t dynamic_shared_bytes() { return given_shared_bytes(); }

inline uint32_t shared_address(const void* p) {
  return uint32_t(static_cast<const uint8_t*>(p) - reinterpret_cast<const uint8_t*>(dynamic_shared));
}
// With a sign, for memory that a kernel declares itself may lie in front.
inline uint8_t* shared_at(uint32_t address) {
  return reinterpret_cast<uint8_t*>(dynamic_shared) + int32_t(address);
}

inline void load_shared_1(uint32_t from, float& a) { a = reinterpret_cast<const float*>(shared_at(from))[0]; }
inline void load_shared_2(uint32_t from, float& a, float& b) {
  load_shared_1(from, a);
  load_shared_1(from + 4, b);
}
inline void load_shared_4(uint32_t from, float& a, float& b, float& c, float& d) {
  load_shared_2(from, a, b);
  load_shared_2(from + 8, c, d);
}
inline void store_shared_1(uint32_t to, float a) { *reinterpret_cast<float*>(shared_at(to)) = a; }
inline void end_of_copies() {}

#if COLDSTREAM_ASYNC_COPIES
inline void copy_async_16(void* shared, const void* global) { begin_copy(shared, global, 16); }
inline void copy_async_8(void* shared, const void* global) { begin_copy(shared, global, 8); }
inline void copy_if_below(int limit, int index, uint32_t to, const void* from) {
  if (index < limit) begin_copy(shared_at(to), from, 16);
}
inline void copy_word_if_below(int limit, int index, uint32_t to, const void* from) {
  if (index < limit) begin_copy(shared_at(to), from, 4);
}
inline void commit_copies() { end_group_of_copies(); }
template <int pending>
void wait_for_copies() {
  wait_for_groups(pending);
}
#endif

}  // namespace coldstream

#if !COLDSTREAM_ASYNC_COPIES
#include "cuda/plain_copies.cuh"
#endif
