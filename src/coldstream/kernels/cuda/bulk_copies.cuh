// Copies of whole pieces of memory by one instruction, barriers that count their bytes, and numbers that the
// blocks of a grid wait for: what a launch is made of whose blocks stay for a whole token. For sm_90 and
// later. No wait here is without an end: each call looks once, and the caller decides how long it goes on.
#pragma once

#include "cuda/common.cuh"
#include "cuda/tensor_cores.cuh"

namespace coldstream {

constexpr int bulk_barrier_bytes = 16;

// A barrier of tensor_cores.cuh whose phase also waits for bytes: those of `expect_bytes`, which arrives
// once.
__device__ __forceinline__ void init_bulk_barrier(uint32_t barrier, int count) {
  init_barrier(barrier, count);
}

// Makes barriers that were initialised visible to copies and to other blocks of the cluster.
__device__ __forceinline__ void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void expect_bytes(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// Whether a phase is over. The hardware may wait for it a while.
__device__ __forceinline__ bool is_phase_over(uint32_t barrier, int phase) {
  uint32_t is_over;
  asm volatile(
      "{ .reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2; "
      "selp.u32 %0, 1, 0, p; }"
      : "=r"(is_over)
      : "r"(barrier), "r"(phase)
      : "memory");
  return is_over;
}

// One arrival at the barrier that lies at the same place in another block of the cluster.
__device__ __forceinline__ void arrive_at_peer(uint32_t barrier, int peer) {
  asm volatile(
      "{ .reg .b32 remote; mapa.shared::cluster.u32 remote, %0, %1; "
      "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [remote]; }" ::"r"(barrier),
      "r"(peer)
      : "memory");
}

// Of multiples of 16 bytes, from global memory; they count at the barrier when they are there.
__device__ __forceinline__ void copy_bulk(uint32_t to, const void* from, int bytes, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
      "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(barrier)
      : "memory");
}

// Asks for a piece of global memory in the second-level cache.
__device__ __forceinline__ void bring_piece_near(const void* from, int bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(__cvta_generic_to_global(from)), "r"(bytes)
               : "memory");
}

// Between what threads write or read and what copies read or write, of the same memory.
__device__ __forceinline__ void order_with_copies() { asm volatile("fence.proxy.async;" ::: "memory"); }

// Adds to a counter that other blocks wait for. Releases; `add_and_look` also acquires, and returns what was
// there before.
__device__ __forceinline__ void add_release(uint32_t* counter, uint32_t value) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(__cvta_generic_to_global(counter)), "r"(value)
               : "memory");
}

__device__ __forceinline__ uint32_t add_and_look(uint32_t* counter, uint32_t value) {
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(__cvta_generic_to_global(counter)), "r"(value)
               : "memory");
  return before;
}

// Numbers that say by themselves that they are there: other blocks look at their place until it holds them.
__device__ __forceinline__ void store_relaxed(float* to, float x) {
  asm volatile("st.relaxed.gpu.global.f32 [%0], %1;" ::"l"(__cvta_generic_to_global(to)), "f"(x) : "memory");
}

__device__ __forceinline__ float load_relaxed(const float* from) {
  float x;
  asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];"
               : "=f"(x)
               : "l"(__cvta_generic_to_global(from))
               : "memory");
  return x;
}

__device__ __forceinline__ float4 load_relaxed(const float4* from) {
  float4 x;
  asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "l"(__cvta_generic_to_global(from))
               : "memory");
  return x;
}

// Between two looks of a thread that waits.
__device__ __forceinline__ void pause(int ns) {
  if (ns > 0) __nanosleep(ns);
}

// Cycles of the multiprocessor, modulo 2^32.
__device__ __forceinline__ uint32_t cycles() {
  uint32_t count;
  asm volatile("mov.u32 %0, %%clock;" : "=r"(count)::"memory");
  return count;
}

__device__ __forceinline__ int rank_in_cluster() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return int(rank);
}

// All threads of the cluster's blocks that have not ended.
__device__ __forceinline__ void meet_in_cluster() {
  asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
}

}  // namespace coldstream
