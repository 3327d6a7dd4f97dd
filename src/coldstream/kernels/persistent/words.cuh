// Numbers in global memory that say by themselves that they are there: their places hold `unwritten_bits`
// before, and who reads them looks until they hold something else.
#pragma once

#include "cuda/answer.cuh"
#include "persistent/streams.cuh"

namespace coldstream {

__device__ __forceinline__ bool is_written(float x) { return __float_as_uint(x) != unwritten_bits; }

// Floats or vectors of them, until all are written or the launch's time is over. is_patient: looks at the
// first alone until that is there, which reads less.
template <typename T, int count>
__device__ __forceinline__ void look(const T* const (&from)[count], T (&x)[count], bool is_patient,
                                     Watch& watch) {
  for (int tries = 1; is_patient; tries++) {
    x[0] = load_relaxed(from[0]);
    if (is_written(x[0]) || watch.failed) break;
    if (tries % looks_a_time == 0 && watch.is_late(-1)) break;
  }
  for (int tries = 1;; tries++) {
    bool is_there = true;
#pragma unroll
    for (int i = 0; i < count; i++) x[i] = load_relaxed(from[i]);
#pragma unroll
    for (int i = 0; i < count; i++) is_there &= is_written(x[i]);
    if (is_there || watch.failed) return;
    if (tries % looks_a_time == 0 && watch.is_late(-1)) return;
  }
}

__device__ __forceinline__ float look(const float* from, Watch& watch) {
  const float* const places[1] = {from};
  float x[1];
  look(places, x, false, watch);
  return x[0];
}

}  // namespace coldstream
