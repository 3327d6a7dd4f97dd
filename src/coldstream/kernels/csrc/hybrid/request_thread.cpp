#include "hybrid/request_thread.h"

#include <unistd.h>

#include <chrono>
#include <optional>
#include <utility>

#include "runtime/signals_blocked.h"
#include "runtime/spin.h"

namespace coldstream {

namespace {

// Polling for a request, between two checks of the phase.
constexpr auto look_time = std::chrono::microseconds(200);
// Longer than the time between two tokens.
constexpr auto linger = std::chrono::milliseconds(5);

}  // namespace

RequestThread::RequestThread(std::function<bool()> is_asked, std::function<void()> act,
                             std::shared_ptr<ThreadPool> helpers, bool stays_awake)
    : is_asked_(std::move(is_asked)),
      act_(std::move(act)),
      helpers_(std::move(helpers)),
      stays_awake_(stays_awake),
      owner_(getpid()) {
  SignalsBlocked blocked;
  thread_ = std::make_unique<std::thread>(&RequestThread::serve, this);
}

RequestThread::~RequestThread() {
  if (getpid() != owner_) {
    // In a forked child there is nothing to join, and a joinable std::thread must not be destroyed.
    static_cast<void>(thread_.release());
    return;
  }
  phase_.store(stopping, std::memory_order_release);
  phase_.notify_all();
  thread_->join();
}

void RequestThread::begin() {
  if (getpid() != owner_)
    throw ForkedError("the thread that answers a GPU was made before fork(): load the model again");
  phase_.store(serving, std::memory_order_release);
  phase_.notify_all();
}

void RequestThread::end() {
  uint32_t phase = serving;
  phase_.compare_exchange_strong(phase, lingering, std::memory_order_acq_rel);
}

void RequestThread::serve() {
  for (;;) {
    phase_.wait(idle, std::memory_order_acquire);
    if (phase_.load(std::memory_order_acquire) == stopping) return;
    look();
  }
}

void RequestThread::look() {
  std::optional<ThreadPool::Awake> awake;
  auto last_served = std::chrono::steady_clock::now(), last_act = last_served;
  for (;;) {
    uint32_t phase = phase_.load(std::memory_order_acquire);
    if (phase == stopping) return;
    const auto now = std::chrono::steady_clock::now();
    if (phase == serving) last_served = now;
    const bool is_awake = helpers_ != nullptr && (stays_awake_ || now - last_act < awake_for());
    if (!is_awake) awake.reset();
    if (is_awake && !awake) awake.emplace(*helpers_);
    if (phase == lingering && now - last_served > linger &&
        phase_.compare_exchange_strong(phase, idle, std::memory_order_acq_rel)) {
      return;
    }
    if (!spin(is_asked_, look_time)) continue;
    act_();
    last_act = std::chrono::steady_clock::now();
  }
}

}  // namespace coldstream
