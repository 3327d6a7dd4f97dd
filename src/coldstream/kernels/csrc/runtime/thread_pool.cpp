#include "runtime/thread_pool.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <new>
#include <string>

#include "runtime/fault_guard.h"
#include "runtime/mapped_file.h"
#include "runtime/signals_blocked.h"
#include "runtime/spin.h"

namespace coldstream {

namespace {

using Clock = std::chrono::steady_clock;

// Short enough not to waste a core when idle. Python's work between two steps takes longer, so that threads
// sleep meanwhile.
constexpr auto idle_spin = std::chrono::microseconds(100);

// state_: whether the stage is open, whether a run is under way, and the stage's serial number.
constexpr uint64_t open = 1, running = 2;
constexpr int serial_shift = 2;

int checked_size(int threads) {
  if (threads < 1 || threads > ThreadPool::max_threads) {
    throw std::invalid_argument("threads must be in 1 … " + std::to_string(ThreadPool::max_threads) +
                                ", not " + std::to_string(threads));
  }
  return threads;
}

}  // namespace

Scratch::~Scratch() { ::operator delete(data_, std::align_val_t(64)); }

void Scratch::reserve(size_t num_bytes) {
  if (num_bytes <= size_) return;
  auto* larger = static_cast<std::byte*>(::operator new(num_bytes, std::align_val_t(64)));
  ::operator delete(data_, std::align_val_t(64));
  data_ = larger;
  size_ = num_bytes;
}

ThreadPool::ThreadPool(int threads)
    : size_(checked_size(threads)),
      owner_(getpid()),
      memory_(new Scratch[threads]),
      shares_(new TasksTaken[threads]),
      threads_(std::make_unique<std::vector<std::thread>>()),
      places_(new Place[threads]),
      active_(threads) {
  try {
    start_workers();
  } catch (...) {
    stop_workers();
    throw;
  }
}

ThreadPool::~ThreadPool() {
  if (getpid() == owner_) {
    stop_workers();
  } else {
    // In a forked child there is nothing to join, and a joinable std::thread must not be destroyed.
    static_cast<void>(threads_.release());
  }
}

ThreadPool::Awake::Awake(ThreadPool& pool) : pool_(pool) {
  pool_.sleepless_.fetch_add(1, std::memory_order_relaxed);
  pool_.calls_.fetch_add(1, std::memory_order_release);
  pool_.calls_.notify_all();
}

ThreadPool::Awake::~Awake() { pool_.sleepless_.fetch_sub(1, std::memory_order_relaxed); }

void ThreadPool::start_workers() {
  SignalsBlocked blocked;
  threads_->reserve(size_ - 1);
  for (int i = 1; i < size_; i++) threads_->emplace_back(&ThreadPool::help, this, i);
}

void ThreadPool::stop_workers() {
  stopping_.store(true, std::memory_order_relaxed);
  activate(size_);
  calls_.fetch_add(1, std::memory_order_release);
  calls_.notify_all();
  for (std::thread& t : *threads_) t.join();
}

void ThreadPool::activate(int count) {
  if (count < 1 || count > size_) {
    throw std::invalid_argument(std::to_string(count) + " active threads of " + std::to_string(size_));
  }
  if (active_.exchange(count, std::memory_order_release) != count) active_.notify_all();
}

void ThreadPool::reserve_memory(const std::vector<std::unique_ptr<Op>>& ops) {
  size_t private_bytes = 0, shared_bytes = 0;
  for (const auto& next : ops) {
    private_bytes = std::max(private_bytes, next->scratch_bytes());
    shared_bytes = std::max(shared_bytes, next->shared_bytes());
  }
  for (int i = 0; i < size_; i++) memory_[i].reserve(private_bytes);
  shared_.reserve(shared_bytes);
}

void ThreadPool::run(const std::vector<std::unique_ptr<Op>>& ops, int rows, double* seconds) {
  if (getpid() != owner_) {
    throw ForkedError(
        "this Runtime was made before fork() and its threads do not exist here: make a new one in the "
        "child process, or start it with the 'spawn' method");
  }
  if (ops.empty()) return;
  std::lock_guard caller(callers_);
  reserve_memory(ops);
  fault_.store(nullptr, std::memory_order_relaxed);
  failure_.store(nullptr, std::memory_order_relaxed);
  walk(ops, rows, seconds);
  if (const void* address = fault_.load(std::memory_order_relaxed)) {
    throw ModelChangedError(describe_fault(address));
  }
  if (const char* message = failure_.load(std::memory_order_relaxed)) {
    for (const auto& next : ops) next->throw_failure();
    throw std::invalid_argument(message);
  }
}

bool ThreadPool::failed() const {
  return fault_.load(std::memory_order_relaxed) != nullptr ||
         failure_.load(std::memory_order_relaxed) != nullptr;
}

void ThreadPool::walk(const std::vector<std::unique_ptr<Op>>& ops, int rows, double* seconds) {
  const int count = active();
  if (count > 1) {
    state_.store(work_.serial << serial_shift | running, std::memory_order_relaxed);
    calls_.fetch_add(1, std::memory_order_release);
    calls_.notify_all();
  }
  auto start = Clock::now();
  bool going = true;
  for (size_t i = 0; i < ops.size() && going; i++) {
    const int num_stages = ops[i]->num_stages();
    do {
      for (int stage = 0; stage < num_stages && going; stage++)
        going = run_stage({ops[i].get(), stage, rows, count});
    } while (going && ops[i]->repeats());
    if (seconds != nullptr) {
      const auto now = Clock::now();
      seconds[i] = std::chrono::duration<double>(now - start).count();
      start = now;
    }
  }
  if (count > 1) state_.store(work_.serial << serial_shift, std::memory_order_relaxed);
}

// Returns whether the run may go on.
bool ThreadPool::run_stage(StageWork work) {
  work.serial = work_.serial + 1;
  work_ = work;
  next_task_.store(0, std::memory_order_relaxed);
  if (work.count == 1 || work.next->runs_alone(work.stage, work.rows)) {
    run_share(0);
    return !failed();
  }
  const uint64_t closed = work_.serial << serial_shift | running;
  state_.store(closed | open, std::memory_order_seq_cst);
  run_share(0);
  state_.store(closed, std::memory_order_seq_cst);
  for (int i = 1; i < size_; i++) {
    spin([&] { return !places_[i].is_inside.load(std::memory_order_seq_cst); }, Clock::duration::max());
  }
  return !failed();
}

void ThreadPool::run_share(int index) {
  Worker w = {index,    work_.count, &next_task_,   &memory_[index],
              &shared_, &failure_,   shares_.get(), work_.serial};
  if (const void* address = run_guarded(*work_.next, work_.stage, work_.rows, w)) {
    fault_.store(address, std::memory_order_relaxed);
  }
}

// Takes part in the open stage, unless there is none or this helper has served it already. Returns whether it
// did. It goes inside before it looks again: either it sees that the stage is closed, or the caller, who
// closes it first, sees it inside. Helpers share no word that they write, which would go from core to core.
bool ThreadPool::join_stage(int index, uint64_t* last_serial) {
  uint64_t state = state_.load(std::memory_order_relaxed);
  if ((state & open) == 0 || state >> serial_shift == *last_serial) return false;
  places_[index].is_inside.store(true, std::memory_order_seq_cst);
  state = state_.load(std::memory_order_seq_cst);
  const bool in_time = (state & open) != 0;
  if (in_time) {
    *last_serial = state >> serial_shift;
    if (index < work_.count) run_share(index);  // otherwise it is about to sleep
  }
  places_[index].is_inside.store(false, std::memory_order_release);
  return in_time;
}

void ThreadPool::help(int index) {
  uint64_t last_serial = 0;
  uint32_t seen_calls = 0;
  for (;;) {
    const int active = active_.load(std::memory_order_acquire);
    if (index >= active) {
      active_.wait(active, std::memory_order_acquire);
      continue;
    }
    if (spin([&] { return join_stage(index, &last_serial); }, idle_spin)) continue;
    if (stopping_.load(std::memory_order_relaxed)) return;
    if ((state_.load(std::memory_order_relaxed) & running) != 0 ||
        sleepless_.load(std::memory_order_relaxed) > 0)
      continue;
    // Returns at once after a run in which this helper was awake: it then polls a while longer.
    calls_.wait(seen_calls, std::memory_order_acquire);
    seen_calls = calls_.load(std::memory_order_acquire);
  }
}

}  // namespace coldstream
