// Waiting for the rows of experts that the CPU computes; see experts/mailbox.py.
#pragma once

#include "cuda/stamps.cuh"
#include "cuda/vectors.cuh"

namespace coldstream {

// Two flags in host memory: the CPU sets `done` when its rows are written, and the GPU sets `late` when it
// has stopped waiting for them.
struct Answer {
  const uint32_t* done;
  uint32_t* late;
  uint32_t rows_are_marked;  // as below, where they are not written yet
};

constexpr uint64_t longest_wait_ns = 60'000'000'000;
constexpr uint32_t nap_ns = 200;  // between two looks, which keeps the traffic over the bus small

// By one thread.
__device__ __forceinline__ void wait_for_answer(const Answer& answer) {
  uint64_t start = 0;
  for (;;) {
    if (load_acquire_system(answer.done)) return;
    const uint64_t now = now_ns();
    if (start == 0) start = now;
    if (now - start > longest_wait_ns) {
      *answer.late = 1;
      return;
    }
    __nanosleep(nap_ns);
  }
}

// What a row of the mailbox holds where the CPU has not written yet. Who has read a row writes it back.
constexpr uint32_t unwritten_bits = 0xffffffffu;

__device__ __forceinline__ bool is_written(float4 v) {
  return __float_as_uint(v.x) != unwritten_bits && __float_as_uint(v.y) != unwritten_bits &&
         __float_as_uint(v.z) != unwritten_bits && __float_as_uint(v.w) != unwritten_bits;
}

template <bool aligned>
__device__ __forceinline__ float4 look_at_four(const float* row, int begin, int n) {
  if constexpr (aligned) return load_relaxed_system(reinterpret_cast<const float4*>(row + begin));
  float4 v = {load_relaxed_system(row + begin), 0.0f, 0.0f, 0.0f};
  if (begin + 1 < n) v.y = load_relaxed_system(row + begin + 1);
  if (begin + 2 < n) v.z = load_relaxed_system(row + begin + 2);
  if (begin + 3 < n) v.w = load_relaxed_system(row + begin + 3);
  return v;
}

// Between two looks at rows that the CPU writes. Their floats say by themselves that they are there: a flag
// that is read first, and then the rows, would take two times of the bus. The flag is looked at now and then.
// It also says so of rows that happen to have those bits.
struct Looks {
  const Answer& answer;
  uint64_t start = 0;
  int count = 0;

  // Whether the rows are complete, or it is too late for them.
  __device__ __forceinline__ bool rest() {
    constexpr int looks_to_one_at_the_flag = 64;
    __nanosleep(nap_ns);
    if (++count % looks_to_one_at_the_flag != 0) return false;
    if (load_acquire_system(answer.done)) return true;
    const uint64_t now = now_ns();
    if (start == 0) start = now;
    if (now - start <= longest_wait_ns) return false;
    *answer.late = 1;
    return true;
  }
};

template <bool aligned>
__device__ __forceinline__ void mark_unwritten(float* row, int begin, int n) {
  const float mark = __uint_as_float(unwritten_bits);
  store_four<aligned>(row, begin, n, {mark, mark, mark, mark});
}

}  // namespace coldstream
