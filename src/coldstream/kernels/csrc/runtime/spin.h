// Waiting for another thread by polling.
#pragma once

#include <chrono>
#include <thread>

namespace coldstream {

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

template <typename F>
bool poll(F done) {
  constexpr int polls_per_clock_read = 16;
  for (int i = 0; i < polls_per_clock_read; i++) {
    if (done()) return true;
    relax();
  }
  return false;
}

// Polls `done` for at most `limit`; returns whether it became true.
template <typename F>
bool spin(F done, std::chrono::steady_clock::duration limit) {
  using Clock = std::chrono::steady_clock;
  // After this time it yields between polls, as it may occupy the core that the awaited thread needs.
  constexpr auto exclusive = std::chrono::microseconds(5);
  if (poll(done)) return true;
  const auto start = Clock::now();
  for (auto waited = Clock::duration::zero(); waited < limit; waited = Clock::now() - start) {
    if (waited > exclusive) std::this_thread::yield();
    if (poll(done)) return true;
  }
  return false;
}

}  // namespace coldstream
