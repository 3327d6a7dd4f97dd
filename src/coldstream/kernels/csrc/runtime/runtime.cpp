#include "runtime/runtime.h"

#include <algorithm>
#include <stdexcept>

namespace coldstream {

Graph::Graph(std::shared_ptr<ThreadPool> pool, int capacity) : pool_(std::move(pool)), capacity_(capacity) {}

Graph::~Graph() = default;

void Graph::add(std::unique_ptr<Op> next) { ops_.push_back(std::move(next)); }

size_t Graph::scratch_bytes() const {
  size_t private_bytes = 0, shared_bytes = 0;
  for (const auto& next : ops_) {
    private_bytes = std::max(private_bytes, next->scratch_bytes());
    shared_bytes = std::max(shared_bytes, next->shared_bytes());
  }
  return static_cast<size_t>(pool_->size()) * private_bytes + shared_bytes;
}

void Graph::check_rows(int rows) const {
  if (rows < 1 || rows > capacity_) {
    throw std::invalid_argument("a graph captured for " + std::to_string(capacity_) + " rows cannot run " +
                                std::to_string(rows));
  }
}

void Graph::run(int rows) {
  check_rows(rows);
  pool_->run(ops_, rows);
}

std::vector<std::pair<std::string, double>> Graph::profile(int rows) {
  check_rows(rows);
  std::vector<double> seconds(ops_.size());
  pool_->run(ops_, rows, seconds.data());
  std::vector<std::pair<std::string, double>> result;
  for (size_t i = 0; i < ops_.size(); i++) result.emplace_back(ops_[i]->name(), seconds[i]);
  return result;
}

Runtime::Runtime(int threads, Tier t) : tier_(t) {
  if (!tier_supported(t)) {
    throw std::invalid_argument(std::string("this machine cannot run the ") + tier_name(t) +
                                " kernels, its best are " + tier_name(tier_best()));
  }
  pool_ = std::make_shared<ThreadPool>(threads);
}

Runtime::~Runtime() = default;

void Runtime::begin_capture(int capacity) {
  if (capturing()) throw std::invalid_argument("a capture is already under way: call end_capture first");
  if (capacity < 1) throw std::invalid_argument("a graph needs a capacity of at least 1 row");
  capture_ = std::make_shared<Graph>(pool_, capacity);
}

std::shared_ptr<Graph> Runtime::end_capture() {
  if (!capturing()) throw std::invalid_argument("no capture is under way: call begin_capture first");
  return std::move(capture_);
}

void Runtime::submit(std::unique_ptr<Op> next, int rows, std::vector<std::shared_ptr<void>> /*owners*/) {
  if (capturing()) {
    if (rows != capture_->capacity()) {
      throw std::invalid_argument("the graph under capture has " + std::to_string(capture_->capacity()) +
                                  " rows and the arrays of this call have " + std::to_string(rows));
    }
    capture_->add(std::move(next));
  } else if (rows > 0) {
    std::vector<std::unique_ptr<Op>> ops;
    ops.push_back(std::move(next));
    pool_->run(ops, rows);
  }
}

}  // namespace coldstream
