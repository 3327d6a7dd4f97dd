// The interface of a kernel launcher, and what it may use while it runs.
//
// An op is bound to its buffers when it is made and may be run many times with any number of rows up to the
// capacity of those buffers. It runs in stages: inside a stage the workers take tasks from a shared counter
// in any order; a stage is over when all tasks are done, so a later one (and a later op) sees everything an
// earlier one wrote. Worker 0 takes part in every stage, the others only if they arrive in time: work is
// shared out only by `take` and `take_near`, never by a worker's index alone. Results must not depend on
// which worker does what. A stage of so little work that meeting the others would take longer is worker 0's
// alone.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "tier.h"

namespace coldstream {

// Memory kept between runs: private to one worker, or shared by all. The pool grows it before a run, never
// during one.
class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch();
  // 64-byte aligned; contents are undefined afterwards. Throws std::bad_alloc.
  void reserve(size_t num_bytes);
  std::byte* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  std::byte* data_ = nullptr;
  size_t size_ = 0;
};

// How many tasks of its own share of a stage a worker or others have taken, below the stage's serial number.
// What an earlier stage left counts as none.
struct alignas(64) TasksTaken {
  static constexpr int serial_shift = 24;
  std::atomic<uint64_t> word{0};

  // The number of the next task, or a number from `size` on.
  int64_t take(uint64_t serial, int64_t size) {
    uint64_t found = word.load(std::memory_order_relaxed);
    for (;;) {
      const bool is_first = found >> serial_shift != serial;
      const auto next = is_first ? 0 : static_cast<int64_t>(found & ((uint64_t{1} << serial_shift) - 1));
      // Without a write, which would take the line from all others that look here.
      if (next >= size) return size;
      const uint64_t taken = is_first ? (serial << serial_shift) + 1 : found + 1;
      if (word.compare_exchange_weak(found, taken, std::memory_order_relaxed)) return next;
    }
  }
};

struct Worker {
  int index;                        // 0 … count - 1; worker 0 is the calling thread
  int count;                        // at most this many take part
  std::atomic<int64_t>* next_task;  // zero at the start of each stage
  Scratch* memory;                  // private: undefined at the start of each stage
  Scratch* shared;  // of all workers: undefined at the start of an op, kept between its stages
  std::atomic<const char*>* failure;  // null, or the message of the first failing worker
  TasksTaken* shares;                 // [count]
  uint64_t serial;                    // of the stage
  int others = 0;                     // whose shares `take_near` has looked at behind its own

  // The next task of this stage, or a number >= num_tasks when there is none left.
  int64_t take() { return next_task->fetch_add(1, std::memory_order_relaxed); }

  // The same for a stage of `total` tasks, all of which are taken by this function. A worker gets the tasks
  // of its own share first, in order, then what the others have left. So it finds in its caches what it read
  // in an earlier stage of as many tasks.
  int64_t take_near(int64_t total) {
    for (; others < count; others++) {
      const int64_t owner = (index + others) % count;
      const int64_t begin = owner * total / count, size = (owner + 1) * total / count - begin;
      const int64_t next = shares[owner].take(serial, size);
      if (next < size) return begin + next;
    }
    return total;
  }

  // For data that an op finds out of range (an id, a position): all later stages are skipped and the run ends
  // in std::invalid_argument with this message, a string literal. The caller still returns from its stage in
  // order.
  void fail(const char* message) {
    const char* none = nullptr;
    failure->compare_exchange_strong(none, message, std::memory_order_relaxed);
  }
};

// About this many floats of simple work (a sum, a norm, rounding) take as long as the workers' meeting.
inline constexpr int64_t small_work = 8192;

class Op {
 public:
  virtual ~Op() = default;
  // The name in a profile.
  virtual const char* name() const = 0;
  virtual int num_stages() const { return 1; }
  // Bytes that this op needs of each worker's private memory, and of the shared memory.
  virtual size_t scratch_bytes() const { return 0; }
  virtual size_t shared_bytes() const { return 0; }
  // Runs on every worker that takes part; `rows` <= the capacity the op was made with. Must not throw, must
  // not allocate and must hold nothing that needs a destructor while it reads a mapped file: a vanished page
  // leaves the stage by longjmp.
  virtual void run(int stage, int rows, Worker& w) = 0;
  // Whether worker 0 runs this stage without the others. Asked by worker 0, after all earlier stages.
  virtual bool runs_alone(int /*stage*/, int /*rows*/) const { return false; }
  // Called by worker 0 after the last stage: whether to run all stages again, for an op that computes a part
  // of its work while it waits for other data.
  virtual bool repeats() { return false; }
  // Called after a failed run: throws an exception if this op failed and a literal cannot describe it.
  virtual void throw_failure() {}
};

}  // namespace coldstream
