// What a kernel launcher implements, and what it may use while it runs.
//
// An op is bound to its buffers when it is made and may be run many times with any number of rows up to the capacity
// of those buffers. It runs in stages: inside a stage the workers take tasks from a shared counter in any order; between
// stages (and between ops) all workers meet at a barrier, so a later stage sees everything an earlier one wrote.
// An op must give the same bits whatever the number of workers and the order in which tasks are taken.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "tier.h"

namespace coldstream {

// A worker's private memory, kept between runs. Grows in `reserve` (called with the GIL held while ops are made, never
// while they run).
class scratch {
 public:
  scratch() = default;
  scratch(const scratch&) = delete;
  scratch& operator=(const scratch&) = delete;
  ~scratch();
  void reserve(size_t num_bytes);  // 64-byte aligned; contents are undefined afterwards
  std::byte* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  std::byte* data_ = nullptr;
  size_t size_ = 0;
};

struct worker {
  int index;                          // 0 … count - 1; worker 0 is the calling thread
  int count;
  std::atomic<int64_t>* next_task;    // zero at the start of each stage
  scratch* memory;

  // The next task of this stage, or a number >= num_tasks when there is none left.
  int64_t take() { return next_task->fetch_add(1, std::memory_order_relaxed); }
};

class op {
 public:
  virtual ~op() = default;
  virtual int num_stages() const { return 1; }
  // Bytes of worker-private scratch this op wants.
  virtual size_t scratch_bytes() const { return 0; }
  // Runs on every worker. `rows` <= the capacity the op was made with. Must not throw and must not allocate; a stage of
  // little work may be done by worker 0 alone.
  virtual void run(int stage, int rows, worker& w) = 0;
};

}  // namespace coldstream
