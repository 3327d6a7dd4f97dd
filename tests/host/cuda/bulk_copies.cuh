// Stands for the package's cuda/bulk_copies.cuh where its kernels are compiled for the host: a copy has
// arrived when it is asked for, and a barrier's other eight bytes count what it still expects. Clusters need
// a GPU.
#pragma once

#include "cuda/common.cuh"
#include "cuda/tensor_cores.cuh"

namespace coldstream {

constexpr int bulk_barrier_bytes = 16;

inline int& expected_at(uint32_t barrier) { return *reinterpret_cast<int*>(shared_at(barrier + 8)); }

inline void init_bulk_barrier(uint32_t barrier, int count) {
  init_barrier(barrier, count);
  expected_at(barrier) = 0;
}
inline void publish_barriers() {}
inline void expect_bytes(uint32_t barrier, int bytes) { expected_at(barrier) += bytes; }
// Others run before it looks again, the threads of other blocks too.
inline bool is_phase_over(uint32_t barrier, int phase) {
  if (barrier_at(barrier).phase != phase) return true;
  __nanosleep(1);
  return false;
}
inline void arrive_at_peer(uint32_t, int) { __trap(); }

inline void copy_bulk(uint32_t to, const void* from, int bytes, uint32_t barrier) {
  if (bytes % 16 || to % 16 || reinterpret_cast<uint64_t>(from) % 16 || bytes > expected_at(barrier))
    __trap();
  __builtin_memcpy(shared_at(to), from, bytes);
  if ((expected_at(barrier) -= bytes) == 0) arrive_barrier(barrier);
}
inline void bring_piece_near(const void* from, int bytes) {
  for (int i = 0; i < bytes; i += 64) __builtin_prefetch(static_cast<const uint8_t*>(from) + i);
}
inline void order_with_copies() {}

inline void add_release(uint32_t* counter, uint32_t value) { *counter += value; }
inline uint32_t add_and_look(uint32_t* counter, uint32_t value) { return (*counter += value) - value; }
inline void store_relaxed(float* to, float x) { *to = x; }
// Others run before who finds nothing looks again.
template <class T>
T load_relaxed(const T* from) {
  __nanosleep(1);
  return *from;
}
inline void pause(int ns) { __nanosleep(ns > 0 ? ns : 1); }
// Of the clock's ticks, which is a million nanoseconds.
inline uint32_t cycles() { return uint32_t(look_at_clock() / 1'000'000); }
inline int rank_in_cluster() { return 0; }
inline void meet_in_cluster() {}

}  // namespace coldstream
