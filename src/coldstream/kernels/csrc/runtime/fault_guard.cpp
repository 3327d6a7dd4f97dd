#include "runtime/fault_guard.h"

#include <csetjmp>
#include <csignal>
#include <cstdint>
#include <mutex>

namespace coldstream {

// Entries are never freed, only reused, so that the handler can walk the list at any moment without a lock.
struct RegionEntry {
  std::atomic<uintptr_t> begin{0};
  std::atomic<uintptr_t> end{0};  // 0: free
  std::string name;               // under `registry_mutex`
  RegionEntry* next = nullptr;
};

namespace {

std::mutex registry_mutex;
std::atomic<RegionEntry*> registry{nullptr};
struct sigaction previous_action;

struct JumpTarget {
  sigjmp_buf environment;
  const void* address;
};

// Initial-exec: the handler must not be the first to touch a lazily allocated thread-local.
__attribute__((tls_model("initial-exec"))) thread_local JumpTarget* active_target = nullptr;

bool contains(const RegionEntry& e, uintptr_t address) {
  return address >= e.begin.load(std::memory_order_acquire) &&
         address < e.end.load(std::memory_order_acquire);
}

const RegionEntry* find_entry(uintptr_t address) {
  for (const RegionEntry* e = registry.load(std::memory_order_acquire); e != nullptr; e = e->next) {
    if (contains(*e, address)) return e;
  }
  return nullptr;
}

void call_previous(int signal, siginfo_t* info, void* context) {
  if (previous_action.sa_flags & SA_SIGINFO) {
    previous_action.sa_sigaction(signal, info, context);
  } else if (previous_action.sa_handler == SIG_DFL ||
             (previous_action.sa_handler == SIG_IGN && info->si_code > 0)) {
    // A fault repeats on return and then has its default effect; a sent signal must be sent again.
    ::signal(signal, SIG_DFL);
    if (info->si_code <= 0) raise(signal);
  } else if (previous_action.sa_handler != SIG_IGN) {
    previous_action.sa_handler(signal);
  }
}

void on_bus_error(int signal, siginfo_t* info, void* context) {
  JumpTarget* target = active_target;
  if (target != nullptr && info->si_code > 0 &&
      find_entry(reinterpret_cast<uintptr_t>(info->si_addr)) != nullptr) {
    target->address = info->si_addr;
    active_target = nullptr;
    siglongjmp(target->environment, 1);
  }
  call_previous(signal, info, context);
}

// SA_NODEFER leaves the signal mask unchanged, so that siglongjmp need not restore it and the guard needs no
// system call.
void install_handler() {
  struct sigaction action = {};
  action.sa_sigaction = on_bus_error;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  sigemptyset(&action.sa_mask);
  sigaction(SIGBUS, &action, &previous_action);
}

RegionEntry* free_entry() {
  for (RegionEntry* e = registry.load(std::memory_order_relaxed); e != nullptr; e = e->next) {
    if (e->end.load(std::memory_order_relaxed) == 0) return e;
  }
  if (registry.load(std::memory_order_relaxed) == nullptr) install_handler();
  auto* fresh = new RegionEntry;
  fresh->next = registry.load(std::memory_order_relaxed);
  registry.store(fresh, std::memory_order_release);
  return fresh;
}

}  // namespace

GuardedRegion::GuardedRegion(const void* begin, size_t size, std::string name) {
  std::lock_guard lock(registry_mutex);
  entry_ = free_entry();
  entry_->name = std::move(name);
  entry_->begin.store(reinterpret_cast<uintptr_t>(begin), std::memory_order_release);
  entry_->end.store(reinterpret_cast<uintptr_t>(begin) + size, std::memory_order_release);
}

GuardedRegion::~GuardedRegion() {
  std::lock_guard lock(registry_mutex);
  entry_->end.store(0, std::memory_order_release);
  entry_->name.clear();
}

const void* run_guarded(Op& next, int stage, int rows, Worker& w) {
  JumpTarget here;
  here.address = nullptr;
  if (sigsetjmp(here.environment, 0) == 0) {
    active_target = &here;
    next.run(stage, rows, w);
    active_target = nullptr;
    return nullptr;
  }
  return here.address;
}

std::string describe_fault(const void* address) {
  std::lock_guard lock(registry_mutex);
  const auto where = reinterpret_cast<uintptr_t>(address);
  const RegionEntry* found = find_entry(where);
  const std::string name = found ? found->name : "the model file";
  const std::string offset = found ? std::to_string(where - found->begin.load()) : "?";
  return name + " changed while in use: byte " + offset +
         " can no longer be read (the file shrank or its disk failed); restore the file and load the model "
         "again";
}

}  // namespace coldstream
