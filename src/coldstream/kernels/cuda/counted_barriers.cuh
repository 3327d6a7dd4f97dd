// The barriers of tensor_cores.cuh where shared memory has none: a word counts who has yet to arrive, the
// next one has the number of arrivals and, in its lowest bit, the phase. Who arrives last begins the next
// phase. A thread arrives in a phase only after it has seen the one before end.
#pragma once

namespace coldstream {

// A thread's copies are complete when it goes on, so that it arrives once.
__device__ constexpr int arrivals_of_copier() { return 1; }

__device__ __forceinline__ void init_barrier(uint32_t barrier, int count) {
  store_release_shared(barrier, uint32_t(count));
  store_release_shared(barrier + 4, uint32_t(count) << 1);
}

__device__ __forceinline__ void arrive_barrier(uint32_t barrier) {
  if (add_to_shared(barrier, uint32_t(-1)) != 1) return;
  const uint32_t state = load_acquire_shared(barrier + 4);
  store_release_shared(barrier, state >> 1);
  store_release_shared(barrier + 4, state ^ 1);
}

__device__ __forceinline__ void arrive_after_copies(uint32_t) {}

__device__ __forceinline__ void wait_barrier(uint32_t barrier, int phase) {
  while ((load_acquire_shared(barrier + 4) & 1) == uint32_t(phase)) look_again();
}

}  // namespace coldstream
