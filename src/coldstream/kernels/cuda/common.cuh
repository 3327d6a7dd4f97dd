// The pieces that every kernel shares: what a kernel has of the launches around it, of lanes and of memory.
#pragma once

#include "cuda/arithmetic.cuh"

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

// The trees of sum_of_eight and sum_of_sixteen over lanes: accumulator j is held by the lanes whose index has j
// in the bits from `stride` up; every lane of the eight (sixteen) groups gets the sum. Addition commutes, so all
// get the same bits.
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
