// The execution context of the CPU kernels: one thread pool, one tier, and capture of op sequences into graphs.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "runtime/op.h"
#include "tier.h"

namespace coldstream {

class thread_pool;

// A captured sequence of ops over fixed buffers: run it with any number of rows up to its capacity.
class graph {
 public:
  graph(std::shared_ptr<thread_pool> pool, int capacity);
  ~graph();
  void add(std::unique_ptr<op> next);
  void keep_alive(std::shared_ptr<void> owner);  // buffers the ops point into
  int capacity() const { return capacity_; }
  size_t num_ops() const { return ops_.size(); }
  // Runs all ops. Throws model_changed_error when a mapped page vanished, std::invalid_argument when rows is not in
  // 1 … capacity. Call without the GIL.
  void run(int rows);

 private:
  std::shared_ptr<thread_pool> pool_;
  int capacity_;
  std::vector<std::unique_ptr<op>> ops_;
  std::vector<std::shared_ptr<void>> owners_;
};

class runtime {
 public:
  // threads >= 1, the calling thread included.
  runtime(int threads, tier t);
  ~runtime();
  tier active_tier() const { return tier_; }
  int threads() const;

  // Between these two calls `submit` records instead of running.
  void begin_capture(int capacity);
  std::shared_ptr<graph> end_capture();
  bool capturing() const { return capture_ != nullptr; }

  // Runs `next` at once with `rows` rows, or appends it to the graph under capture (then rows must be its capacity).
  // `owners` are released after the run, or kept as long as the graph.
  void submit(std::unique_ptr<op> next, int rows, std::vector<std::shared_ptr<void>> owners);

 private:
  tier tier_;
  std::shared_ptr<thread_pool> pool_;
  std::shared_ptr<graph> capture_;
};

}  // namespace coldstream
