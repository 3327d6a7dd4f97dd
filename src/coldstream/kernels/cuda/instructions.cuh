// Instructions without an equivalent in CUDA C++: overlap of a kernel with the launches around it, accesses
// to memory that are ordered between threads, asynchronous copies, the clock. All other code is C++, which
// tests compile for the host with another file in place of this one.
#pragma once

#include "cuda/arithmetic.cuh"

namespace coldstream {

// Programmatic dependent launch: a kernel that was launched with `overlap` may run before the kernels before
// it have ended, and must not touch what they read or write until it has waited. Without `overlap` both do
// nothing, as on devices without it.
__device__ __forceinline__ void wait_for_previous_grid() {
#if COLDSTREAM_OVERLAP
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void release_next_grid() {
#if COLDSTREAM_OVERLAP
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// In the device's memory, for its threads. What was written before a release is seen after the acquire that
// reads it.
__device__ __forceinline__ uint32_t load_acquire(const uint32_t* from) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];"
               : "=r"(value)
               : "l"(__cvta_generic_to_global(from))
               : "memory");
  return value;
}

__device__ __forceinline__ void store_release(uint32_t* to, uint32_t value) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(__cvta_generic_to_global(to)), "r"(value)
               : "memory");
}

// Increments, or resets to 0 after `last`; acquires and releases. Returns the old value.
__device__ __forceinline__ uint32_t count_up_to(uint32_t* count, uint32_t last) {
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(__cvta_generic_to_global(count)), "r"(last)
               : "memory");
  return before;
}

// Nanoseconds of the device's clock.
__device__ __forceinline__ uint64_t now_ns() {
  uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

// Until a count that other blocks increment is at least so much, and what it is then; acquires. All of these
// blocks should have a place on the device at once. If they have not come within `most_ns`, it is less.
__device__ __forceinline__ uint32_t wait_for_count(const uint32_t* count, uint32_t least, uint64_t most_ns) {
  constexpr uint32_t looks_between = 256;  // readings of the clock
  uint64_t begin = 0;
  uint32_t found = load_acquire(count);
  for (uint32_t looks = 1; found < least; looks++) {
    if (looks % looks_between == 0) {
      const uint64_t now = now_ns();
      if (begin == 0) begin = now;
      if (now - begin > most_ns) break;
    }
    found = load_acquire(count);
  }
  return found;
}

// As one step for all that count.
__device__ __forceinline__ void set_bits(uint32_t* to, uint32_t bits) {
  asm volatile("red.release.gpu.global.or.b32 [%0], %1;" ::"l"(__cvta_generic_to_global(to)), "r"(bits)
               : "memory");
}

// An addition without a result, so that the thread does not wait for it.
__device__ __forceinline__ void add_up(uint64_t* sum, uint64_t value) {
  asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(__cvta_generic_to_global(sum)), "l"(value));
}

// In memory that the host's threads see too.
__device__ __forceinline__ uint32_t load_acquire_system(const uint32_t* from) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];"
               : "=r"(value)
               : "l"(__cvta_generic_to_global(from))
               : "memory");
  return value;
}

// Words that arrive one by one, in any order.
__device__ __forceinline__ uint32_t load_relaxed_system(const uint32_t* from) {
  uint32_t value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(__cvta_generic_to_global(from)));
  return value;
}

__device__ __forceinline__ float load_relaxed_system(const float* from) {
  float value;
  asm volatile("ld.relaxed.sys.global.f32 %0, [%1];" : "=f"(value) : "l"(__cvta_generic_to_global(from)));
  return value;
}

__device__ __forceinline__ float4 load_relaxed_system(const float4* from) {
  float4 v;
  asm volatile("ld.relaxed.sys.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "l"(__cvta_generic_to_global(from)));
  return v;
}

__device__ __forceinline__ void store_relaxed_system(uint32_t* to, uint32_t value) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(__cvta_generic_to_global(to)), "r"(value)
               : "memory");
}

__device__ __forceinline__ void store_release_system(uint32_t* to, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(__cvta_generic_to_global(to)), "r"(value)
               : "memory");
}

// Prefetches the cache line of `from`.
__device__ __forceinline__ void bring_near(const void* from) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(from)));
}

// Prefetches the sector of a float into the first-level cache.
__device__ __forceinline__ void bring_close(const float* from) {
  asm volatile("prefetch.global.L1 [%0];" ::"l"(__cvta_generic_to_global(from)));
}

// sum + unsigned bytes times signed ones.
__device__ __forceinline__ int dot_unsigned(uint32_t weights, uint32_t x, int sum) {
  int result;
  asm("dp4a.u32.s32 %0, %1, %2, %3;" : "=r"(result) : "r"(weights), "r"(x), "r"(sum));
  return result;
}

// Byte i of a word, with its sign: a selector of 8 + i takes the sign of byte i, which __byte_perm does not
// offer.
__device__ __forceinline__ int signed_byte(uint32_t word, int i) {
  int byte;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(byte) : "r"(word), "r"(0x8880 + 0x1111 * i));
  return byte;
}

// Bytes of two words by the low four nibbles of the selector; with bit 3 of a nibble, eight times the sign of
// its byte. __byte_perm masks nibbles first.
__device__ __forceinline__ uint32_t permute(uint32_t low, uint32_t high, uint32_t selector) {
  uint32_t bytes;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(low), "r"(high), "r"(selector));
  return bytes;
}

// A number in a register: of a constant the compiler does not know it, and it does not rearrange a sum.
__device__ __forceinline__ uint32_t in_register(uint32_t number) {
  asm("" : "+r"(number));
  return number;
}

// The same where the assembler shall not know it either: it would move a constant of all lanes into a
// register for every permutation that takes it. It does not know that a lane's own bit is never 0.
__device__ __forceinline__ uint32_t in_own_register(uint32_t number) {
  uint32_t own;
  asm("{ .reg .pred p; .reg .u32 bit; mov.u32 bit, %%lanemask_eq; setp.ne.u32 p, bit, 0; selp.u32 %0, %1, 0, p; }"
      : "=r"(own)
      : "r"(number));
  return own;
}

// A barrier of `count` threads of the block, whole warps, with one of the numbers 1 … 15.
template <int count>
__device__ __forceinline__ void meet_at(int barrier) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(count) : "memory");
}

// The same if lanes of a warp may arrive one after the other.
template <int count>
__device__ __forceinline__ void meet_apart_at(int barrier) {
  asm volatile("barrier.cta.sync %0, %1;" ::"r"(barrier), "n"(count) : "memory");
}

__device__ __forceinline__ uint32_t dynamic_shared_bytes() {
  uint32_t bytes;
  asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(bytes));
  return bytes;
}

__device__ __forceinline__ float half_to_float(uint16_t h) {
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
  return f;
}

// To the nearest, of two the even one; beyond the greatest it is infinite.
__device__ __forceinline__ uint16_t float_to_half(float x) {
  uint16_t h;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(x));
  return h;
}

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// The other way.
__device__ __forceinline__ uint8_t* shared_at(uint32_t address) {
  return static_cast<uint8_t*>(__cvta_shared_to_generic(address));
}

// Loads from shared memory that stay where they are written, ahead of their use.
__device__ __forceinline__ void load_shared_1(uint32_t from, float& a) {
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(a) : "r"(from) : "memory");
}

__device__ __forceinline__ void load_shared_2(uint32_t from, float& a, float& b) {
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(a), "=f"(b) : "r"(from) : "memory");
}

__device__ __forceinline__ void load_shared_4(uint32_t from, float& a, float& b, float& c, float& d) {
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(a), "=f"(b), "=f"(c), "=f"(d)
               : "r"(from)
               : "memory");
}

__device__ __forceinline__ void store_shared_1(uint32_t to, float a) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(a) : "memory");
}

// What is copied before is not moved behind what follows.
__device__ __forceinline__ void end_of_copies() { asm volatile("" ::: "memory"); }

#if COLDSTREAM_ASYNC_COPIES

// Asynchronous copies from global to shared memory, 16 or 8 aligned bytes a thread.
__device__ __forceinline__ void copy_async_16(void* shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(shared)), "l"(global)
               : "memory");
}

__device__ __forceinline__ void copy_async_8(void* shared, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(shared_address(shared)), "l"(global)
               : "memory");
}

// Copies of 16 bytes, or of 4, by address, if index < limit: as operands of the copy alone, addresses need no
// conditional branches around them.
__device__ __forceinline__ void copy_if_below(int limit, int index, uint32_t to, const void* from) {
  asm volatile(
      "{ .reg .pred p; setp.lt.s32 p, %2, %3; @p cp.async.cg.shared.global [%0], [%1], 16; }" ::"r"(to),
      "l"(from), "r"(index), "r"(limit)
      : "memory");
}

__device__ __forceinline__ void copy_word_if_below(int limit, int index, uint32_t to, const void* from) {
  asm volatile(
      "{ .reg .pred p; setp.lt.s32 p, %2, %3; @p cp.async.ca.shared.global [%0], [%1], 4; }" ::"r"(to),
      "l"(from), "r"(index), "r"(limit)
      : "memory");
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int pending>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

#endif

}  // namespace coldstream

#if !COLDSTREAM_ASYNC_COPIES
#include "cuda/plain_copies.cuh"
#endif
