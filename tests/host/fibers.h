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

constexpr int warp_size = 32;
constexpr size_t stack_bytes = 64 << 10;
constexpr size_t stack_step = 9 * 64, most_offset = 16 << 10;  // of cache lines, see stack_offset

#if defined(__GNUC__) && defined(__x86_64__)
// Where something goes on: the end of its stack, which holds the registers that functions keep. Who leaves by
// a call and comes back by a return is predicted by the processor. Jumps of the compiler or the C library
// leave calls without a return, so that each later return was mispredicted: they took twice as long.
using Place = void**;

extern "C" [[gnu::visibility("hidden")]] void change_places(Place& from, const Place& to);
asm(R"(
	.text
	.p2align 4
	.type change_places, @function
change_places:
	pushq %rbp
	pushq %rbx
	pushq %r12
	pushq %r13
	pushq %r14
	pushq %r15
	movq %rsp, (%rdi)
	movq (%rsi), %rsp
	popq %r15
	popq %r14
	popq %r13
	popq %r12
	popq %rbx
	popq %rbp
	ret
	.size change_places, .-change_places
)");

// Where a function begins on the stack that ends at an address of 16 bytes.
Place beginning(unsigned char* end, void (*function)()) {
  constexpr int registers = 6;
  Place top = reinterpret_cast<Place>(end);
  *--top = nullptr;  // it returns to nobody
  *--top = reinterpret_cast<void*>(function);
  return top - registers;
}
#else
struct Place {
  jmp_buf registers;
  unsigned char* end = nullptr;  // of the stack, until the function has begun there
  void (*function)();
};

[[gnu::noipa]] void change_places(Place& from, Place& to) {
  if (_setjmp(from.registers)) return;
  if (!to.end) _longjmp(to.registers, 1);
  ucontext_t context;
  getcontext(&context);
  context.uc_stack.ss_size = stack_bytes - most_offset;
  context.uc_stack.ss_sp = to.end - context.uc_stack.ss_size;
  context.uc_link = nullptr;
  to.end = nullptr;
  makecontext(&context, to.function, 0);
  setcontext(&context);
}

Place beginning(unsigned char* end, void (*function)()) {
  Place found;
  found.end = end;
  found.function = function;
  return found;
}
#endif

struct Copy {
  void* to;
  const void* from;
  unsigned int bytes;
};

struct Warp;

struct Fiber {
  Place goes_on;
  Warp* warp;
  int lane;
  dim3 thread;
  InGroups<Copy> copies;
  InGroups<void*> products;
  unsigned char* stack = nullptr;
};

// How a lane meets others. Those of a mask must agree in all of it.
struct Instruction {
  Meeting how;
  unsigned int lanes;
  WarpComputation compute;

  bool operator==(const Instruction& other) const {
    return how == other.how && lanes == other.lanes && compute == other.compute;
  }
};

// Masks are of lanes. A lane that has ended is in none of them.
struct Warp {
  Fiber* lanes[warp_size] = {};
  unsigned int ready = 0, in_warp = 0, in_block = 0, waiting = 0;
  unsigned int counting = 0, votes = 0;  // of those that wait for the block
  bool agree = true;                     // whether all that meet in the warp do so in the same way
  Instruction instructions[warp_size];
  unsigned int arguments[warp_size];
  unsigned long long values[warp_size], results[warp_size];
};

struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

void (*kernel)(void**) = nullptr;
void** kernel_arguments = nullptr;
Place scheduler;
Fiber* running = nullptr;

// Lanes of a warp in an order, each of which runs once.
struct Turn {
  const Warp* warp;
  const unsigned char* order;
  unsigned int flipped;  // bits of each of the order's lanes
  int end;               // of the lanes that run, in the order
  int next = 0;

  // The next that can go on, or null.
  Fiber* take() {
    while (next != end) {
      const unsigned int lane = order[next++] ^ flipped;
      if (warp->ready >> lane & 1) return warp->lanes[lane];
    }
    return nullptr;
  }
};
Turn turn;

void begin_turn_of(Fiber& next) {
  running = &next;
  threadIdx = next.thread;
}

// Lets the next of the turn run, or the scheduler.
[[gnu::noinline]] void yield() {
  Fiber& own = *running;
  Fiber* const next = turn.take();
  if (next) begin_turn_of(*next);
  change_places(own.goes_on, next ? next->goes_on : scheduler);
}

void run_thread() {
  kernel(kernel_arguments);
  running->warp->ready &= ~(1u << running->lane);
  yield();
}

// Those of a warp that are ready, one after another, until each meets others or ends.
void run_turn(const Turn& those) {
  turn = those;
  Fiber* const first = turn.take();
  if (!first) return;
  begin_turn_of(*first);
  change_places(scheduler, first->goes_on);
}

// The one of this number, for a new thread; they stay for the next launch.
Fiber& fiber_for(size_t number, dim3 thread, Warp& warp, int lane) {
  static std::vector<std::unique_ptr<Fiber>> fibers;
  while (fibers.size() <= number) fibers.push_back(std::make_unique<Fiber>());
  Fiber& found = *fibers[number];
  if (!found.stack) {
    void* memory = mmap(nullptr, stack_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw Failure{"no memory for a stack"};
    found.stack = static_cast<unsigned char*>(memory);
  }
  // Stacks that ended at the same bits of an address would share few lines of the cache.
  const size_t stack_offset = number * stack_step % most_offset;
  found.goes_on = beginning(found.stack + stack_bytes - stack_offset, run_thread);
  found.warp = &warp;
  found.lane = lane;
  found.thread = thread;
  found.copies.clear();
  found.products.clear();
  warp.lanes[lane] = &found;
  warp.ready |= 1u << lane;
  return found;
}

}  // namespace
