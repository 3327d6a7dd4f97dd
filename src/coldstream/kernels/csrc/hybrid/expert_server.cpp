#include "hybrid/expert_server.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <string>
#include <utility>

#include "runtime/mapped_file.h"
#include "runtime/signals_blocked.h"
#include "runtime/spin.h"

namespace coldstream {

namespace {

constexpr int ROWS_SHIFT = 16;
constexpr uint32_t LAYER_MASK = (1u << ROWS_SHIFT) - 1;
// Polling for a request, between two checks of the phase.
constexpr auto LOOK = std::chrono::microseconds(200);
// Longer than the time between two tokens.
constexpr auto LINGER = std::chrono::milliseconds(5);

}  // namespace

expert_server::expert_server(std::shared_ptr<thread_pool> threads, const quant_kernels& kernels, mailbox box,
                             bool is_prefill)
    : threads_(std::move(threads)), kernels_(kernels), box_(box), is_prefill_(is_prefill), owner_(getpid()) {
  std::atomic_ref(*box_.request).store(0, std::memory_order_relaxed);
  std::atomic_ref(*box_.done).store(1, std::memory_order_release);
  signals_blocked blocked;
  thread_ = std::make_unique<std::thread>(&expert_server::serve, this);
}

expert_server::~expert_server() {
  if (getpid() != owner_) {
    // In a forked child there is nothing to join, and a joinable std::thread must not be destroyed.
    static_cast<void>(thread_.release());
    return;
  }
  phase_.store(STOPPING, std::memory_order_release);
  phase_.notify_all();
  thread_->join();
}

int expert_server::add_layer(const weight& gate, const weight& up, const weight& down,
                             std::shared_ptr<expert_pool> pool, int pool_layer) {
  const int64_t stride = down.num_rows;
  routed_experts_args args = {box_.x, box_.ids, box_.num_ranks, box_.num_ranks,          gate,
                              up,     down,     box_.out,       stride * box_.num_ranks, stride};
  layer next;
  if (pool != nullptr) {
    const pooled_layer from = {pool, pool_layer, box_.ids, box_.num_ranks, box_.num_ranks};
    next.arriving.push_back(std::make_unique<pooled_experts_op>(kernels_, args, from, box_.capacity));
  }
  next.num_experts = gate.num_matrices;
  next.pool = std::move(pool);
  next.pool_layer = pool_layer;
  next.few.push_back(std::make_unique<few_experts_op>(kernels_, args));
  next.many.push_back(std::make_unique<routed_experts_op>(kernels_, std::move(args), box_.capacity));
  std::lock_guard lock(layers_lock_);
  if (layers_.size() == LAYER_MASK - 1) throw std::invalid_argument("a mailbox has no word for more layers");
  layers_.push_back(std::move(next));
  work_.push_back({0, 0, 0.0});
  return static_cast<int>(layers_.size()) - 1;
}

void expert_server::begin() {
  if (getpid() != owner_)
    throw forked_error("this server of experts was made before fork(): load the model again");
  phase_.store(SERVING, std::memory_order_release);
  phase_.notify_all();
}

void expert_server::end() {
  uint32_t serving = SERVING;
  phase_.compare_exchange_strong(serving, LINGERING, std::memory_order_acq_rel);
}

void expert_server::check() {
  std::lock_guard lock(error_lock_);
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
}

void expert_server::serve() {
  for (;;) {
    phase_.wait(RESTING, std::memory_order_acquire);
    if (phase_.load(std::memory_order_acquire) == STOPPING) return;
    thread_pool::awake awake(*threads_);
    serve_requests();
  }
}

void expert_server::serve_requests() {
  std::atomic_ref request(*box_.request);
  auto last_served = std::chrono::steady_clock::now();
  for (;;) {
    uint32_t phase = phase_.load(std::memory_order_acquire);
    if (phase == STOPPING) return;
    const auto now = std::chrono::steady_clock::now();
    if (phase == SERVING) last_served = now;
    if (phase == LINGERING && now - last_served > LINGER &&
        phase_.compare_exchange_strong(phase, RESTING, std::memory_order_acq_rel)) {
      return;
    }
    uint32_t found = 0;
    if (spin([&] { return (found = request.load(std::memory_order_acquire)) != 0; }, LOOK)) answer(found);
  }
}

void expert_server::answer(uint32_t found) {
  std::atomic_ref(*box_.request).store(0, std::memory_order_relaxed);
  const uint32_t layer = (found & LAYER_MASK) - 1, rows = found >> ROWS_SHIFT;
  try {
    compute(layer, rows);
  } catch (...) {
    std::lock_guard lock(error_lock_);
    if (!error_) error_ = std::current_exception();
  }
  std::atomic_ref(*box_.done).store(1, std::memory_order_release);
}

void expert_server::compute(uint32_t layer, uint32_t rows) {
  const auto start = std::chrono::steady_clock::now();
  std::lock_guard lock(layers_lock_);
  if (layer >= layers_.size() || rows < 1 || rows > static_cast<uint32_t>(box_.capacity)) {
    throw std::invalid_argument("a request for layer " + std::to_string(layer) + " and " +
                                std::to_string(rows) + " rows, which the mailbox does not have");
  }
  const auto& of = layers_[layer];
  of.pool == nullptr ? compute(of, static_cast<int>(rows)) : compute_pooled(of, static_cast<int>(rows));
  const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
  work_[layer].requests++;
  work_[layer].pairs += num_pairs(static_cast<int>(rows));
  work_[layer].seconds += taken.count();
}

// Of a request: those that are computed here.
int64_t expert_server::num_pairs(int rows) const {
  const int64_t all = int64_t{rows} * box_.num_ranks;
  return all - std::count(box_.ids, box_.ids + all, not_here);
}

void expert_server::compute(const layer& of, int rows) {
  // A kernel for few rows reads the expert again for each few_max_rows of them.
  const bool reads_once = of.num_experts > 1 || rows <= few_max_rows;
  threads_->run(reads_once && num_pairs(rows) <= few_experts_op::max_pairs ? of.few : of.many, rows);
}

void expert_server::compute_pooled(const layer& of, int rows) {
  expert_pool& pool = *of.pool;
  std::lock_guard lock(pool.clients());
  pool.follow(of.pool_layer, is_prefill_);
  if (const char* problem = pool.request(of.pool_layer, box_.ids, rows, box_.num_ranks, box_.num_ranks)) {
    if (pool.reader().failed()) throw model_changed_error(pool.reader().failure());
    throw std::invalid_argument(problem);
  }
  if (pool.is_pending()) {
    threads_->run(of.arriving, rows);
  } else {
    compute(of, rows);
  }
}

std::vector<layer_work> expert_server::work() {
  std::lock_guard lock(layers_lock_);
  return work_;
}

}  // namespace coldstream
