#include "hybrid/expert_server.h"

#include <algorithm>
#include <atomic>
#include <bitset>
#include <chrono>
#include <stdexcept>
#include <string>
#include <utility>

#include "runtime/mapped_file.h"

namespace coldstream {

namespace {

constexpr int rows_shift = 16;
constexpr uint32_t layer_mask = (1u << rows_shift) - 1;
constexpr int most_counted = 1024;  // experts of a layer: those beyond are not counted

}  // namespace

ExpertServer::ExpertServer(std::shared_ptr<ThreadPool> threads, const QuantKernels& kernels, Mailbox box,
                           bool is_prefill)
    : threads_(std::move(threads)),
      kernels_(kernels),
      box_(box),
      is_prefill_(is_prefill),
      ahead_(threads_->size()) {
  read_ahead_.push_back(std::make_unique<ReadAheadOp>(ahead_, [request = box_.request] {
    return std::atomic_ref(*request).load(std::memory_order_relaxed) != 0;
  }));
  std::atomic_ref(*box_.request).store(0, std::memory_order_relaxed);
  std::atomic_ref(*box_.done).store(1, std::memory_order_release);
  thread_ = std::make_unique<RequestThread>([this] { return has_work(); }, [this] { work_once(); }, threads_,
                                            !is_prefill);
}

int ExpertServer::add_layer(const Weight& gate, const Weight& up, const Weight& down, const ExpertGlu& glu,
                            std::shared_ptr<ExpertPool> pool, int pool_layer) {
  const int64_t stride = down.num_rows;
  RoutedExpertsArgs args = {box_.x, box_.ids, box_.num_ranks,          box_.num_ranks, gate, up,
                            down,   box_.out, stride * box_.num_ranks, stride,         glu};
  Layer next;
  if (pool != nullptr) {
    const PooledLayer from = {pool, pool_layer, box_.ids, box_.num_ranks, box_.num_ranks};
    next.arriving.push_back(std::make_unique<PooledExpertsOp>(kernels_, args, from, box_.capacity));
  }
  next.num_experts = gate.num_matrices;
  next.pool = std::move(pool);
  next.pool_layer = pool_layer;
  next.decode.push_back(std::make_unique<DecodeExpertsOp>(kernels_, args));
  next.prefill.push_back(std::make_unique<RoutedExpertsOp>(kernels_, std::move(args), box_.capacity));
  std::lock_guard lock(layers_lock_);
  if (layers_.size() == layer_mask - 1) throw std::invalid_argument("a mailbox has no word for more layers");
  layers_.push_back(std::move(next));
  work_.push_back({0, 0, 0.0});
  expected_.push_back({0, 0, 0});
  return static_cast<int>(layers_.size()) - 1;
}

void ExpertServer::check() {
  std::lock_guard lock(error_lock_);
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
}

bool ExpertServer::has_work() const {
  return std::atomic_ref(*box_.request).load(std::memory_order_acquire) != 0 || is_expecting() || may_read_;
}

void ExpertServer::work_once() {
  const uint32_t found = std::atomic_ref(*box_.request).load(std::memory_order_acquire);
  found != 0 ? answer(found) : read_ahead();
}

bool ExpertServer::is_expecting() const {
  return box_.ahead != nullptr && std::atomic_ref(*box_.ahead).load(std::memory_order_relaxed) != 0;
}

void ExpertServer::read_ahead() {
  std::lock_guard lock(layers_lock_);
  if (is_expecting()) note_expected();
  may_read_ = false;
  if (ahead_.is_empty()) return;
  try {
    threads_->run(read_ahead_, 1);
  } catch (...) {
    std::lock_guard error_lock(error_lock_);
    if (!error_) error_ = std::current_exception();
  }
}

void ExpertServer::note_expected() {
  const auto said = [&](int rank) {
    return std::atomic_ref(box_.ahead[rank]).load(std::memory_order_relaxed);
  };
  const uint32_t number = said(0) >> rows_shift;
  ExpertList list;
  const bool exists = number >= 1 && number <= layers_.size();
  for (int rank = 0; exists && rank < std::min(box_.num_ranks, ExpertList::max_experts); rank++) {
    const uint32_t word = said(rank), id = (word & layer_mask) - 1;
    // The client may be writing what it expects of the next layer.
    if (word >> rows_shift == number && id < layers_[number - 1].num_experts) list.ids[list.count++] = id;
  }
  std::atomic_ref(*box_.ahead).store(0, std::memory_order_relaxed);
  if (!exists) return;
  std::sort(list.ids, list.ids + list.count);
  Layer& of = layers_[number - 1];
  of.expected_ids.assign(list.ids, list.ids + list.count);
  expected_[number - 1].experts += list.count;
  if (of.pool != nullptr) return;
  const RoutedExpertsArgs& args = static_cast<DecodeExpertsOp&>(*of.decode.front()).args();
  ahead_.expect(number - 1, args.gate, args.up, args.down, list);
}

// Of a request: each expert once, however many rows chose it.
void ExpertServer::count_expected(uint32_t layer, uint32_t rows) {
  std::bitset<most_counted> asked;
  for (int64_t pair = 0; pair < int64_t{rows} * box_.num_ranks; pair++) {
    const int32_t id = box_.ids[pair];
    if (id >= 0 && id < most_counted) asked.set(id);
  }
  expected_[layer].asked += asked.count();
  for (const int32_t id : layers_[layer].expected_ids) {
    if (id < most_counted) expected_[layer].right += asked.test(id);
  }
  layers_[layer].expected_ids.clear();
}

void ExpertServer::answer(uint32_t found) {
  std::atomic_ref(*box_.request).store(0, std::memory_order_relaxed);
  const uint32_t layer = (found & layer_mask) - 1, rows = found >> rows_shift;
  try {
    compute(layer, rows);
  } catch (...) {
    std::lock_guard lock(error_lock_);
    if (!error_) error_ = std::current_exception();
  }
  std::atomic_ref(*box_.done).store(1, std::memory_order_release);
  ahead_.forget(layer);
  may_read_ = !ahead_.is_empty();
}

void ExpertServer::compute(uint32_t layer, uint32_t rows) {
  const auto start = std::chrono::steady_clock::now();
  std::lock_guard lock(layers_lock_);
  if (layer >= layers_.size() || rows < 1 || rows > static_cast<uint32_t>(box_.capacity)) {
    throw std::invalid_argument("a request for layer " + std::to_string(layer) + " and " +
                                std::to_string(rows) + " rows, which the mailbox does not have");
  }
  if (is_expecting()) note_expected();
  if (box_.ahead != nullptr) count_expected(layer, rows);
  const auto& of = layers_[layer];
  of.pool == nullptr ? compute(of, static_cast<int>(rows)) : compute_pooled(of, static_cast<int>(rows));
  const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
  work_[layer].requests++;
  work_[layer].pairs += num_pairs(static_cast<int>(rows));
  work_[layer].seconds += taken.count();
}

// Of a request: those that are computed here.
int64_t ExpertServer::num_pairs(int rows) const {
  const int64_t all = int64_t{rows} * box_.num_ranks;
  return all - std::count(box_.ids, box_.ids + all, not_here);
}

void ExpertServer::compute(const Layer& of, int rows) {
  // GEMV reads the expert again for each gemv_max_rows rows.
  const bool reads_once = of.num_experts > 1 || rows <= gemv_max_rows;
  threads_->run(reads_once && num_pairs(rows) <= DecodeExpertsOp::max_pairs ? of.decode : of.prefill, rows);
}

void ExpertServer::compute_pooled(const Layer& of, int rows) {
  ExpertPool& pool = *of.pool;
  std::lock_guard lock(pool.clients());
  pool.follow(of.pool_layer, is_prefill_);
  if (const char* problem = pool.request(of.pool_layer, box_.ids, rows, box_.num_ranks, box_.num_ranks)) {
    if (pool.reader().failed()) throw ModelChangedError(pool.reader().failure());
    throw std::invalid_argument(problem);
  }
  if (pool.is_pending()) {
    threads_->run(of.arriving, rows);
  } else {
    compute(of, rows);
  }
}

std::vector<Expected> ExpertServer::expected() {
  std::lock_guard lock(layers_lock_);
  return expected_;
}

int64_t ExpertServer::read_ahead_bytes() {
  std::lock_guard lock(layers_lock_);
  return ahead_.num_bytes();
}

std::vector<LayerWork> ExpertServer::work() {
  std::lock_guard lock(layers_lock_);
  return work_;
}

}  // namespace coldstream
