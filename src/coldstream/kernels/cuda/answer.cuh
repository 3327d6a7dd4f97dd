// The answer of a CPU that was asked for experts; see experts/mailbox.py.
#pragma once

#include "cuda/stamps.cuh"

namespace coldstream {

// Where the CPU says that its rows are there, and is told that nobody waits for them any more.
struct Answer {
  const uint32_t* done;
  uint32_t* late;
};

constexpr uint64_t longest_wait_ns = 60'000'000'000;

// By one thread. It sleeps between its looks, so that it costs neither bandwidth nor power to speak of.
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
