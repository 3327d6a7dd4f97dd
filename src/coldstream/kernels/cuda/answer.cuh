// Waiting for the rows of experts that the CPU computes; see experts/mailbox.py.
#pragma once

#include "cuda/stamps.cuh"

namespace coldstream {

// Two flags in host memory: the CPU sets `done` when its rows are written, and the GPU sets `late` when it
// has stopped waiting for them.
struct Answer {
  const uint32_t* done;
  uint32_t* late;
};

constexpr uint64_t longest_wait_ns = 60'000'000'000;

// By one thread. It sleeps between two reads of the flag, which keeps the traffic over the bus small.
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
    __nanosleep(200);
  }
}

}  // namespace coldstream
