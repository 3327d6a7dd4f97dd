// A fixed number of worker threads that help the calling thread with a list of ops. The caller is worker 0
// and takes part in every stage; helpers join stages that are open. A stage ends when the caller finds no
// task left and all helpers that joined have left it, so that it never waits for a helper that sleeps or has
// no core. A stage that the caller runs alone is not opened. A pool of one has no threads.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <vector>

#include "runtime/op.h"

namespace coldstream {

// The pool's threads exist only in the process that made it.
struct ForkedError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class ThreadPool {
 public:
  // threads in 1 … max_threads, otherwise std::invalid_argument. Throws std::system_error when the system
  // refuses one.
  explicit ThreadPool(int threads);
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;
  ~ThreadPool();

  static constexpr int max_threads = 1024;

  int size() const { return size_; }

  // How many workers take part in the runs that begin from now on, of 1 … size, otherwise
  // std::invalid_argument. The others sleep, so that they take no core from anybody.
  void activate(int count);
  int active() const { return active_.load(std::memory_order_relaxed); }

  // While one of these exists the threads do not sleep between runs.
  class Awake {
   public:
    explicit Awake(ThreadPool& pool);
    Awake(const Awake&) = delete;
    Awake& operator=(const Awake&) = delete;
    ~Awake();

   private:
    ThreadPool& pool_;
  };

  bool stays_awake() const { return sleepless_.load(std::memory_order_relaxed) > 0; }

  // Runs `ops` in order and returns when all workers are done; concurrent callers are serialised. With
  // `seconds` [ops.size()], the time of each op. Throws ModelChangedError, ForkedError, std::bad_alloc,
  // and std::invalid_argument with the message of an op that failed; the pool stays usable after each of
  // them.
  void run(const std::vector<std::unique_ptr<Op>>& ops, int rows, double* seconds = nullptr);

 private:
  // The open stage; written while none is open, read by helpers that joined it.
  struct StageWork {
    Op* next = nullptr;
    int stage = 0;
    int rows = 0;
    int count = 1;        // workers that may take part
    uint64_t serial = 0;  // one more than that of the stage before
  };

  void start_workers();
  void stop_workers();
  void help(int index);
  bool join_stage(int index, uint64_t* last_serial);
  void walk(const std::vector<std::unique_ptr<Op>>& ops, int rows, double* seconds);
  bool run_stage(StageWork work);
  void run_share(int index);
  bool failed() const;
  void reserve_memory(const std::vector<std::unique_ptr<Op>>& ops);

  const int size_;
  const pid_t owner_;
  std::unique_ptr<Scratch[]> memory_;     // one per worker
  std::unique_ptr<TasksTaken[]> shares_;  // one per worker
  Scratch shared_;
  std::unique_ptr<std::vector<std::thread>> threads_;
  std::mutex callers_;
  StageWork work_;

  // Whether a helper takes part in the open stage.
  struct alignas(64) Place {
    std::atomic<bool> is_inside{false};
  };
  std::unique_ptr<Place[]> places_;  // one per worker

  // On separate cache lines: the word that all workers poll and only the caller writes, and the counter of
  // tasks.
  alignas(64) std::atomic<uint64_t> state_{0};  // see thread_pool.cpp
  alignas(64) std::atomic<int64_t> next_task_{0};
  alignas(64) std::atomic<uint32_t> calls_{
      0};  // number of runs, plus one at the end; idle workers sleep on it
  std::atomic<int> sleepless_{0};
  std::atomic<int> active_;  // workers from here on sleep on it
  std::atomic<bool> stopping_{false};
  std::atomic<const void*> fault_{nullptr};
  std::atomic<const char*> failure_{nullptr};
};

}  // namespace coldstream
