// Runs the threads of a kernel's grid on one thread of the host, each as a fiber that runs until it meets others.
//
// In which order is random but for what barriers say: between two barriers of a block one warp after another runs
// as far as it can, so that what is missing between a write and a read of two warps, or of two lanes, is seen.
// Up to three blocks are under way at a time, and take turns after some warps. A block's
// shared memory is what the kernels' library has of memory for each thread: it is brought in and out when another
// block takes its turn, full of poison at first. Unit of work: one launch.
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <ucontext.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "groups.h"
#include "random_bits.h"
#include "shared_memory.h"
#include "threads.h"

dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace {

constexpr size_t stack_bytes = 64 << 10, most_blocks = 3;
constexpr size_t stack_step = 9 * 64, most_offset = 16 << 10;  // of cache lines, see stack_offset
constexpr int warp_size = 32, warps_at_once = 8;
constexpr unsigned long long tick_ns = 1'000'000;

enum class state { ready, in_warp, in_block, waiting, ended };

struct copy {
  void* to;
  const void* from;
  unsigned int bytes;
};

// Where a thread goes on. Jumps of the compiler itself, since those of the C library took a tenth of a whole test of models.
using place = void* [5];

// Runs one thread after another, until one of them is left where it waits.
struct fiber {
  dim3 thread;
  bool is_started = false;
  state now = state::ready;
  meeting how;
  unsigned int lanes, argument;
  unsigned long long value, result;
  bool counts;
  in_groups<copy> copies;
  in_groups<void*> products;
  place goes_on;
  unsigned char* stack = nullptr;
  size_t stack_offset = 0;  // stacks that began at the same bits of an address would share few lines of the cache
};

// Where some threads of a block meet.
struct named_barrier {
  int arrived = 0;
  unsigned int times = 0;
};

struct block {
  dim3 index;
  std::vector<fiber*> threads;
  std::vector<std::vector<fiber*>> warps;  // that have yet to come to the next barrier
  shared_memory::of_block shared;
  named_barrier barriers[16] = {};
  unsigned int changes = 0, changes_seen = 0, idle_warps = 0;
};

struct failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

random_bits random_numbers;
place scheduler;
fiber* running = nullptr;
block* running_block = nullptr;
unsigned int given_bytes = 0;
unsigned long long clock_ns = 0;
bool is_clock_real = false;
void (*kernel)(void**) = nullptr;
void** kernel_arguments = nullptr;
std::string error;

// Apart from where a place is set, as the compiler asks. Callers must not rely on registers that these seem to leave alone.
[[noreturn, gnu::noipa]] void jump(place& to) { __builtin_longjmp(to, 1); }

[[gnu::noipa]] void yield() {
  if (!__builtin_setjmp(running->goes_on)) jump(scheduler);
}

void run_threads() {
  for (;;) {
    kernel(kernel_arguments);
    running->now = state::ended;
    yield();
  }
}

void start(fiber& thread) {
  if (!thread.stack) {
    void* memory = mmap(nullptr, stack_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw failure{"no memory for a stack"};
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

// Until it meets others or ends.
[[gnu::noipa]] void resume(fiber& thread) {
  running = &thread;
  threadIdx = thread.thread;
  if (__builtin_setjmp(scheduler)) return;
  if (!thread.is_started) start(thread);
  jump(thread.goes_on);
}

// The one of this number, for a new thread; they stay for the next launch.
fiber& fiber_for(size_t number, dim3 thread) {
  static std::vector<std::unique_ptr<fiber>> fibers;
  while (fibers.size() <= number) fibers.push_back(std::make_unique<fiber>());
  fiber& found = *fibers[number];
  found.stack_offset = number * stack_step % most_offset;
  if (found.now != state::ended) found.is_started = false;
  found.thread = thread;
  found.now = state::ready;
  found.copies.clear();
  found.products.clear();
  return found;
}

[[noreturn]] void fail(const block& at, const fiber& thread, const char* what) {
  throw failure{"block " + std::to_string(at.index.x) + ", " + std::to_string(at.index.y) + ", thread " +
                std::to_string(thread.thread.x) + ": " + what};
}

// The values of the warp's lanes that meet, made into what each gets.
void answer(const std::vector<fiber*>& warp, unsigned int lanes) {
  static unsigned long long values[warp_size];
  unsigned long long ballot = 0, sum = 0, least = ~0ull;
  int greatest_signed = -0x80000000ll;
  for (size_t i = 0; i < warp.size(); i++) {
    if (!(lanes >> i & 1)) continue;
    const unsigned long long value = values[i] = warp[i]->value;
    ballot |= static_cast<unsigned long long>(value != 0) << i;
    sum += value;
    least = std::min(least, value);
    greatest_signed = std::max(greatest_signed, static_cast<int>(value));
  }
  for (size_t i = 0; i < warp.size(); i++) {
    if (!(lanes >> i & 1)) continue;
    fiber& thread = *warp[i];
    size_t from = i;
    switch (thread.how) {
      case meeting::sync: break;
      case meeting::ballot: thread.result = ballot; break;
      case meeting::add: thread.result = sum; break;
      case meeting::least: thread.result = least; break;
      case meeting::greatest_signed: thread.result = static_cast<unsigned int>(greatest_signed); break;
      case meeting::gather: thread.result = reinterpret_cast<unsigned long long>(values); break;
      case meeting::shuffle_xor: from = i ^ thread.argument; break;
      case meeting::shuffle_from: from = thread.argument; break;
      case meeting::shuffle_up: from = i >= thread.argument ? i - thread.argument : i; break;
    }
    if (thread.how == meeting::shuffle_xor || thread.how == meeting::shuffle_up ||
        thread.how == meeting::shuffle_from) {
      // A lane that does not meet the others has no value to give.
      thread.result = lanes >> from & 1 ? warp[from]->value : 0xa5a5a5a5a5a5a5a5ull;
    }
    thread.now = state::ready;
  }
}

// Lets lanes that wait for each other go on; false if none could.
bool meet(const block& at, const std::vector<fiber*>& warp) {
  bool any = false;
  for (fiber* first : warp) {
    if (first->now != state::in_warp) continue;
    bool are_there = true;
    for (int i = 0; i < warp_size; i++) {
      if (!(first->lanes >> i & 1)) continue;
      if (i >= int(warp.size()) || warp[i]->now == state::ended) fail(at, *first, "waits for a lane that is not there");
      if (warp[i]->now == state::in_block) fail(at, *first, "waits for a lane that waits for the block");
      are_there &= warp[i]->now == state::in_warp;
    }
    if (!are_there) continue;
    for (int i = 0; i < warp_size; i++) {
      if (!(first->lanes >> i & 1)) continue;
      if (warp[i]->how != first->how || warp[i]->lanes != first->lanes) fail(at, *first, "meets other instructions");
    }
    answer(warp, first->lanes);
    any = true;
  }
  return any;
}

// One warp, as far as it gets without the others of its block.
void run_warp(const block& at, const std::vector<fiber*>& warp) {
  std::vector<fiber*> order = warp;
  do {
    std::shuffle(order.begin(), order.end(), random_numbers);
    for (fiber* thread : order) {
      if (thread->now == state::ready) resume(*thread);
    }
  } while (meet(at, warp) ||
           std::any_of(warp.begin(), warp.end(), [](fiber* thread) { return thread->now == state::ready; }));
}

void begin_warps(block& at) {
  for (size_t i = 0; i < at.threads.size(); i += warp_size) {
    const size_t end = std::min(i + warp_size, at.threads.size());
    at.warps.emplace_back(at.threads.begin() + i, at.threads.begin() + end);
  }
  std::shuffle(at.warps.begin(), at.warps.end(), random_numbers);
}

// Puts a warp of which lanes wait for a change behind the others, which may not all wait too.
void wait_in_line(block& at, std::vector<fiber*>& warp) {
  const bool waits = std::any_of(warp.begin(), warp.end(), [](fiber* thread) { return thread->now == state::waiting; });
  if (at.changes != at.changes_seen || !waits) at.idle_warps = 0;
  at.changes_seen = at.changes;
  if (!waits) return;
  for (fiber* thread : warp) {
    if (thread->now == state::waiting) thread->now = state::ready;
  }
  if (at.idle_warps++ > at.warps.size()) fail(at, *warp[0], "waits for a change that does not come");
  at.warps.insert(at.warps.begin(), std::move(warp));
}

// Some warps, or all to the block's next barrier; false at the end.
bool run_block(block& at) {
  running_block = &at;
  if (at.warps.empty()) begin_warps(at);
  while (!at.warps.empty()) {
    std::vector<fiber*> warp = std::move(at.warps.back());
    at.warps.pop_back();
    run_warp(at, warp);
    wait_in_line(at, warp);
    if (random_numbers() % warps_at_once == 0) return true;
  }
  const fiber* first = nullptr;
  int any = 0;
  for (const fiber* thread : at.threads) {
    if (thread->now == state::ended) continue;
    if (thread->now != state::in_block) fail(at, *thread, "waits for lanes that do not come");
    if (!first) first = thread;
    if (thread->counts != first->counts) fail(at, *thread, "meets other instructions");
    any |= thread->value != 0;
  }
  for (fiber* thread : at.threads) {
    if (thread->now == state::ended) continue;
    thread->result = any;
    thread->now = state::ready;
  }
  return first != nullptr;
}

class grid_run {
 public:
  grid_run(dim3 grid, unsigned int threads, const unsigned char* dynamic, size_t given, size_t available)
      : shared_(dynamic, given, available), threads_(threads) {
    for (unsigned int z = 0; z < grid.z; z++)
      for (unsigned int y = 0; y < grid.y; y++)
        for (unsigned int x = 0; x < grid.x; x++) waiting_.push_back({x, y, z});
    std::shuffle(waiting_.begin(), waiting_.end(), random_numbers);
  }

  void run() {
    const size_t at_once = 1 + random_numbers() % most_blocks;
    for (;;) {
      while (active_.size() < at_once && !waiting_.empty()) begin_block();
      if (active_.empty()) return;
      const size_t which = random_numbers() % active_.size();
      block& at = *active_[which].first;
      shared_.bring_in(at.shared);
      blockIdx = at.index;
      const bool goes_on = run_block(at);
      if (!shared_.is_whole()) fail(at, *at.threads[0], "something was written behind the dynamic shared memory");
      if (goes_on) continue;
      shared_.leave();
      free_.push_back(active_[which].second);
      active_.erase(active_.begin() + which);
    }
  }

 private:
  void begin_block() {
    size_t place = active_.size();
    if (!free_.empty()) {
      place = free_.back();
      free_.pop_back();
    }
    auto next = std::make_unique<block>();
    next->index = waiting_.back();
    next->shared = shared_.of_new_block();
    waiting_.pop_back();
    for (unsigned int i = 0; i < threads_; i++) next->threads.push_back(&fiber_for(place * 1024 + i, {i, 0, 0}));
    active_.emplace_back(std::move(next), place);
  }

  shared_memory shared_;
  unsigned int threads_;
  std::vector<dim3> waiting_;
  std::vector<std::pair<std::unique_ptr<block>, size_t>> active_;
  std::vector<size_t> free_;
};

}  // namespace

unsigned long long meet_in_warp(meeting how, unsigned int lanes, unsigned long long value, unsigned int argument) {
  running->how = how;
  running->lanes = lanes;
  running->value = value;
  running->argument = argument;
  running->now = state::in_warp;
  yield();
  return running->result;
}

int meet_in_block(bool counts, int value) {
  running->counts = counts;
  running->value = value != 0;
  running->now = state::in_block;
  yield();
  return int(running->result);
}

void __nanosleep(unsigned int ns) {
  const timespec least = {0, 1};
  if (is_clock_real) nanosleep(&least, nullptr);
  clock_ns += ns;
  yield();
}

unsigned long long look_at_clock() {
  if (!is_clock_real) return clock_ns += tick_ns;
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1'000'000'000ull + now.tv_nsec;
}

void wait_for_change() {
  running->now = state::waiting;
  yield();
}

void note_change() { running_block->changes++; }

void meet_some(int barrier, int count) {
  const unsigned int times = running_block->barriers[barrier].times;
  if (++running_block->barriers[barrier].arrived == count) {
    running_block->barriers[barrier] = {0, times + 1};
    note_change();
  }
  while (running_block->barriers[barrier].times == times) wait_for_change();
}

unsigned int given_shared_bytes() { return given_bytes; }

// A copy may land as soon as it is asked for, over what others still read, or when it is waited for.
void begin_copy(void* to, const void* from, unsigned int bytes) {
  if (random_numbers() % 2) memcpy(to, from, bytes);
  else running->copies.give({to, from, bytes});
}

void end_group_of_copies() { running->copies.end_group(); }

void wait_for_groups(int pending) {
  while (const copy* each = running->copies.take(pending)) memcpy(each->to, each->from, each->bytes);
}

void keep_product(void* product) { running->products.give(product); }

void begin_product_group() { running->products.end_group(); }

void* take_product(int pending) {
  void* const* oldest = running->products.take(pending);
  return oldest ? *oldest : nullptr;
}

const char* run_grid(void (*function)(void**), void** arguments, const unsigned int* grid, unsigned int threads,
                     unsigned char* dynamic, unsigned long given, unsigned long available, unsigned long long seed,
                     bool keeps_time) {
  if (given > available) return "more dynamic shared memory than a block has";
  random_numbers.seed(seed);
  is_clock_real = keeps_time;
  kernel = function;
  kernel_arguments = arguments;
  given_bytes = static_cast<unsigned int>(given);
  gridDim = {grid[0], grid[1], grid[2]};
  blockDim = {threads, 1, 1};
  try {
    grid_run({grid[0], grid[1], grid[2]}, threads, dynamic, given, available).run();
  } catch (const std::exception& what) {
    error = what.what();
    return error.c_str();
  }
  return nullptr;
}
