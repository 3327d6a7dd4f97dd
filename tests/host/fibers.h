// The fibers that run threads of a kernel on one thread of the host: one after another, each until it is left
// where it waits.
#pragma once

#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <memory>
#include <stdexcept>
#include <vector>

#include "groups.h"
#include "threads.h"

namespace {

constexpr size_t stack_bytes = 64 << 10;
constexpr size_t stack_step = 9 * 64, most_offset = 16 << 10;  // of cache lines, see stack_offset

// Where something goes on. GCC's own jumps where they are known to switch stacks, since those of the C
// library took a tenth of a whole test of models. They leave all registers to be saved by who sets a place,
// which must not be inlined.
#if defined(__GNUC__) && !defined(__clang__) && defined(__x86_64__)
using Place = void* [5];
#define SET_PLACE(at) __builtin_setjmp(at)
[[noreturn, gnu::noipa]] void jump(Place& to) { __builtin_longjmp(to, 1); }
#else
using Place = jmp_buf;
#define SET_PLACE(at) _setjmp(at)
[[noreturn]] void jump(Place& to) { _longjmp(to, 1); }
#endif

enum class State { ready, in_warp, in_block, waiting, ended };

struct Copy {
  void* to;
  const void* from;
  unsigned int bytes;
};

struct Fiber {
  State now = State::ready;
  Meeting how;
  unsigned int lanes, argument;
  unsigned long long value, result;
  dim3 thread;
  bool is_started = false, counts;
  Place goes_on;
  WarpComputation compute;
  InGroups<Copy> copies;
  InGroups<void*> products;
  unsigned char* stack = nullptr;
  // Stacks that began at the same bits of an address would share few lines of the cache.
  size_t stack_offset = 0;
};

struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

void (*kernel)(void**) = nullptr;
void** kernel_arguments = nullptr;
Place scheduler;
Fiber* running = nullptr;
Fiber **next_in_turn = nullptr, **end_of_turn = nullptr;

// The next of the turn that can go on, or null.
Fiber* next_ready() {
  while (next_in_turn != end_of_turn && (*next_in_turn)->now != State::ready) next_in_turn++;
  return next_in_turn == end_of_turn ? nullptr : *next_in_turn;
}

void take_turn(Fiber& next) {
  next_in_turn++;
  running = &next;
  threadIdx = next.thread;
}

// Lets the others of the turn run; one that has not begun, the scheduler begins.
[[gnu::noinline, gnu::noipa]] void yield() {
  if (SET_PLACE(running->goes_on)) return;
  Fiber* const next = next_ready();
  if (!next || !next->is_started) jump(scheduler);
  take_turn(*next);
  jump(next->goes_on);
}

void run_threads() {
  for (;;) {
    kernel(kernel_arguments);
    running->now = State::ended;
    yield();
  }
}

void start(Fiber& thread) {
  if (!thread.stack) {
    void* memory = mmap(nullptr, stack_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw Failure{"no memory for a stack"};
    thread.stack = static_cast<unsigned char*>(memory);
  }
  thread.is_started = true;
  ucontext_t context;
  getcontext(&context);
  context.uc_stack.ss_sp = thread.stack;
  context.uc_stack.ss_size = stack_bytes - thread.stack_offset;
  context.uc_link = nullptr;
  makecontext(&context, run_threads, 0);
  setcontext(&context);
}

// The turn from its next on, until one has to begin or none is left.
[[gnu::noinline, gnu::noipa]] void go_on() {
  if (SET_PLACE(scheduler)) return;
  Fiber& next = **next_in_turn;
  take_turn(next);
  if (!next.is_started) start(next);
  jump(next.goes_on);
}

// Those of `order` that are ready, one after another, until each meets others or ends.
void run_turn(Fiber** begin, Fiber** end) {
  next_in_turn = begin;
  end_of_turn = end;
  while (next_ready()) go_on();
}

// The one of this number, for a new thread; they stay for the next launch.
Fiber& fiber_for(size_t number, dim3 thread) {
  static std::vector<std::unique_ptr<Fiber>> fibers;
  while (fibers.size() <= number) fibers.push_back(std::make_unique<Fiber>());
  Fiber& found = *fibers[number];
  found.stack_offset = number * stack_step % most_offset;
  if (found.now != State::ended) found.is_started = false;
  found.thread = thread;
  found.now = State::ready;
  found.copies.clear();
  found.products.clear();
  return found;
}

}  // namespace
