// The execution context of the CPU kernels: one thread pool, one tier, and capture of op sequences into
// graphs.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "runtime/op.h"
#include "runtime/thread_pool.h"
#include "tier.h"

namespace coldstream {

// A captured sequence of ops over fixed buffers, which outlive it: run it with any number of rows up to its
// capacity.
class Graph {
 public:
  Graph(std::shared_ptr<ThreadPool> pool, int capacity);
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  ~Graph();
  void add(std::unique_ptr<Op> next);
  int capacity() const { return capacity_; }
  size_t num_ops() const { return ops_.size(); }
  // Bound on the threads' memory in a run, which all graphs of a runtime share.
  size_t scratch_bytes() const;
  // Runs all ops. Throws std::invalid_argument when rows is not in 1 … capacity, and what ThreadPool::run
  // throws. Call without the GIL.
  void run(int rows);
  // The same, returning each op's name and seconds.
  std::vector<std::pair<std::string, double>> profile(int rows);

 private:
  void check_rows(int rows) const;

  std::shared_ptr<ThreadPool> pool_;
  int capacity_;
  std::vector<std::unique_ptr<Op>> ops_;
};

class Runtime {
 public:
  // threads >= 1, the calling thread included. Throws std::invalid_argument if this machine cannot run `t`.
  Runtime(int threads, Tier t);
  Runtime(const Runtime&) = delete;
  Runtime& operator=(const Runtime&) = delete;
  ~Runtime();
  Tier active_tier() const { return tier_; }
  int threads() const { return pool_->size(); }
  // See ThreadPool::activate.
  int active_threads() const { return pool_->active(); }
  void activate_threads(int count) { pool_->activate(count); }
  // Whether its threads poll between two runs, and do not sleep.
  bool stays_awake() const { return pool_->stays_awake(); }
  const std::shared_ptr<ThreadPool>& pool() const { return pool_; }

  // Between these two calls `submit` records instead of running. Nested or unmatched calls are
  // std::invalid_argument.
  void begin_capture(int capacity);
  std::shared_ptr<Graph> end_capture();
  bool capturing() const { return capture_ != nullptr; }

  // Runs `next` at once with `rows` rows, or appends it to the graph under capture (then rows must be its
  // capacity). `owners` live until the run is over. A graph does not own its buffers: its creator does, which
  // knows which of them may share memory. Without rows nothing happens.
  void submit(std::unique_ptr<Op> next, int rows, std::vector<std::shared_ptr<void>> owners);

 private:
  Tier tier_;
  std::shared_ptr<ThreadPool> pool_;
  std::shared_ptr<Graph> capture_;
};

}  // namespace coldstream
