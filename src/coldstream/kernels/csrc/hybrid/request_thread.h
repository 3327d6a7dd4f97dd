// A thread that looks for requests of a client that cannot call functions, as a GPU in the middle of a graph.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <thread>

#include "runtime/thread_pool.h"

namespace coldstream {

class RequestThread {
 public:
  // is_asked: whether there is something to do, called without pause; act: does it, and throws nothing. Both
  // outlive the thread. helpers: threads that stay awake while it looks, or, unless stays_awake, for a time
  // from `begin` and from each act on; null: none do. Throws std::system_error when the system refuses a
  // thread.
  RequestThread(std::function<bool()> is_asked, std::function<void()> act,
                std::shared_ptr<ThreadPool> helpers, bool stays_awake);
  RequestThread(const RequestThread&) = delete;
  RequestThread& operator=(const RequestThread&) = delete;
  ~RequestThread();

  // From here to `end`, and a few milliseconds longer so that the next `begin` need not wake threads, it
  // looks without pause. Throws ForkedError.
  void begin();
  void end();

  // The time that helpers stay awake for; 0 at first.
  std::chrono::nanoseconds awake_for() const { return awake_for_.load(std::memory_order_relaxed); }
  void stay_awake_for(std::chrono::nanoseconds time) { awake_for_.store(time, std::memory_order_relaxed); }

 private:
  void serve();
  void look();

  const std::function<bool()> is_asked_;
  const std::function<void()> act_;
  const std::shared_ptr<ThreadPool> helpers_;
  const bool stays_awake_;
  const pid_t owner_;
  std::atomic<std::chrono::nanoseconds> awake_for_{std::chrono::nanoseconds::zero()};
  std::atomic<uint32_t> phase_{idle};
  std::unique_ptr<std::thread> thread_;

  static constexpr uint32_t idle = 0, serving = 1, lingering = 2, stopping = 3;
};

}  // namespace coldstream
