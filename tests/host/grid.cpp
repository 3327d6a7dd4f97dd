// Runs the threads of a kernel's grid on one thread of the host, each as a fiber that runs until it meets
// others.
//
// In which order is random but for what barriers say: between two barriers of a block one warp after another
// runs as far as it can, so that what is missing between a write and a read of two warps, or of two lanes, is
// seen. Up to three blocks are under way at a time, and alternate after some warps. A block's shared memory
// is what the kernels' library has of memory for each thread: it is brought in and out when another block
// takes its turn, full of poison at first. Unit of work: one launch.
#include <string.h>
#include <time.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fibers.h"
#include "random_bits.h"
#include "shared_memory.h"
#include "threads.h"

dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace {

constexpr size_t most_blocks = 3;
constexpr int warp_size = 32, warps_at_once = 8;
constexpr unsigned long long tick_ns = 1'000'000;

// Where some threads of a block meet.
struct NamedBarrier {
  int arrived = 0;
  unsigned int times = 0;
};

// Some of a block's threads.
struct WarpOfThreads {
  Fiber** lanes;
  int count;

  Fiber** begin() const { return lanes; }
  Fiber** end() const { return lanes + count; }
};

struct Block {
  dim3 index;
  std::vector<Fiber*> threads;
  std::vector<WarpOfThreads> warps;  // that have yet to come to the next barrier
  SharedMemory::OfBlock shared;
  NamedBarrier barriers[16] = {};
  unsigned int changes = 0, changes_seen = 0, idle_warps = 0;
};

RandomBits random_numbers;
Block* running_block = nullptr;
unsigned int given_bytes = 0;
unsigned long long clock_ns = 0;
bool is_clock_real = false;
std::string error;

[[noreturn]] void fail(const Block& at, const Fiber& thread, const char* what) {
  throw Failure{"block " + std::to_string(at.index.x) + ", " + std::to_string(at.index.y) + ", thread " +
                std::to_string(thread.thread.x) + ": " + what};
}

// The lanes of a mask, from the first on.
template <class F>
void for_each_lane(unsigned int lanes, F visit) {
  for (; lanes; lanes &= lanes - 1) visit(__builtin_ctz(lanes));
}

// The values of the warp's lanes that meet in the same way, made into what each gets.
void answer(const Block& at, const WarpOfThreads& warp, unsigned int lanes) {
  unsigned long long values[warp_size];
  for_each_lane(lanes, [&](int i) { values[i] = warp.lanes[i]->value; });
  const Fiber& first = *warp.lanes[__builtin_ctz(lanes)];
  const auto each_gets = [&](auto result) {
    for_each_lane(lanes, [&](int i) { warp.lanes[i]->result = result(i); });
  };
  const auto all_get = [&](auto first_result, auto combine) {
    unsigned long long result = first_result;
    for_each_lane(lanes, [&](int i) { result = combine(result, values[i], i); });
    each_gets([&](int) { return result; });
  };
  // A lane that does not meet the others has no value to give.
  const auto value_of = [&](unsigned int lane) {
    return lanes >> lane & 1 ? values[lane] : 0xa5a5a5a5a5a5a5a5ull;
  };
  const auto argument = [&](int i) { return warp.lanes[i]->argument; };
  switch (first.how) {
    case Meeting::sync:
      break;
    case Meeting::ballot:
      all_get(0ull, [](auto sum, auto value, int i) { return sum | (value ? 1ull << i : 0); });
      break;
    case Meeting::add:
      all_get(0ull, [](auto sum, auto value, int) { return sum + value; });
      break;
    case Meeting::least:
      all_get(~0ull, [](auto least, auto value, int) { return std::min(least, value); });
      break;
    case Meeting::greatest_signed:
      all_get(0x80000000ull, [](auto greatest, auto value, int) {
        return static_cast<unsigned long long>(
            static_cast<unsigned int>(std::max(int(greatest), int(value))));
      });
      break;
    case Meeting::compute: {
      void* given[warp_size];
      for_each_lane(lanes, [&](int i) { given[i] = reinterpret_cast<void*>(values[i]); });
      if (!first.compute(given)) fail(at, first, "gives other operands than its warp");
      break;
    }
    case Meeting::shuffle_xor:
      each_gets([&](int i) { return value_of(i ^ argument(i)); });
      break;
    case Meeting::shuffle_from:
      each_gets([&](int i) { return value_of(argument(i)); });
      break;
    case Meeting::shuffle_up:
      each_gets([&](int i) { return value_of(unsigned(i) >= argument(i) ? i - argument(i) : i); });
      break;
  }
  for_each_lane(lanes, [&](int i) { warp.lanes[i]->now = State::ready; });
}

// Lets lanes that wait for each other go on; false if none could.
bool meet(const Block& at, const WarpOfThreads& warp) {
  unsigned int meeting = 0, in_block = 0, running = 0;
  for (int i = 0; i < warp.count; i++) {
    const State now = warp.lanes[i]->now;
    meeting |= unsigned(now == State::in_warp) << i;
    in_block |= unsigned(now == State::in_block) << i;
    running |= unsigned(now == State::ready || now == State::waiting) << i;
  }
  bool any = false;
  for (unsigned int left = meeting; left;) {
    const unsigned int own = left & -left;
    const Fiber& first = *warp.lanes[__builtin_ctz(left)];
    const unsigned int lanes = first.lanes;
    if (lanes & ~(meeting | in_block | running)) fail(at, first, "waits for a lane that is not there");
    if (lanes & in_block) fail(at, first, "waits for a lane that waits for the block");
    left &= ~own;
    if (lanes & ~meeting) continue;
    for_each_lane(lanes, [&](int i) {
      const Fiber& other = *warp.lanes[i];
      if (other.how != first.how || other.lanes != lanes || other.compute != first.compute)
        fail(at, first, "meets other instructions");
    });
    answer(at, warp, lanes);
    left &= ~lanes;
    any = true;
  }
  return any;
}

template <class T>
void shuffle(T* items, size_t count) {
  for (size_t left = count; left > 1; left--) std::swap(items[left - 1], items[random_numbers.below(left)]);
}

// One warp, as far as it gets without the others of its block.
void run_warp(const Block& at, const WarpOfThreads& warp) {
  Fiber* order[warp_size];
  std::copy(warp.begin(), warp.end(), order);
  do {
    shuffle(order, warp.count);
    run_turn(order, order + warp.count);
  } while (meet(at, warp) ||
           std::any_of(warp.begin(), warp.end(), [](Fiber* thread) { return thread->now == State::ready; }));
}

void begin_warps(Block& at) {
  const int count = int(at.threads.size());
  for (int i = 0; i < count; i += warp_size)
    at.warps.push_back({&at.threads[i], std::min(warp_size, count - i)});
  shuffle(at.warps.data(), at.warps.size());
}

// Puts a warp of which lanes wait for a change behind the others, which may not all wait too.
void wait_in_line(Block& at, const WarpOfThreads& warp) {
  const bool waits =
      std::any_of(warp.begin(), warp.end(), [](Fiber* thread) { return thread->now == State::waiting; });
  if (at.changes != at.changes_seen || !waits) at.idle_warps = 0;
  at.changes_seen = at.changes;
  if (!waits) return;
  for (Fiber* thread : warp) {
    if (thread->now == State::waiting) thread->now = State::ready;
  }
  if (at.idle_warps++ > at.warps.size()) fail(at, *warp.lanes[0], "waits for a change that does not come");
  at.warps.insert(at.warps.begin(), warp);
}

// Some warps, or all to the block's next barrier; false at the end.
bool run_block(Block& at) {
  running_block = &at;
  if (at.warps.empty()) begin_warps(at);
  while (!at.warps.empty()) {
    const WarpOfThreads warp = at.warps.back();
    at.warps.pop_back();
    run_warp(at, warp);
    wait_in_line(at, warp);
    if (random_numbers() % warps_at_once == 0) return true;
  }
  const Fiber* first = nullptr;
  int any = 0;
  for (const Fiber* thread : at.threads) {
    if (thread->now == State::ended) continue;
    if (thread->now != State::in_block) fail(at, *thread, "waits for lanes that do not come");
    if (!first) first = thread;
    if (thread->counts != first->counts) fail(at, *thread, "meets other instructions");
    any |= thread->value != 0;
  }
  for (Fiber* thread : at.threads) {
    if (thread->now == State::ended) continue;
    thread->result = any;
    thread->now = State::ready;
  }
  return first != nullptr;
}

class GridRun {
 public:
  GridRun(dim3 grid, unsigned int threads, const unsigned char* dynamic, size_t given, size_t available)
      : shared_(dynamic, given, available), threads_(threads) {
    for (unsigned int z = 0; z < grid.z; z++)
      for (unsigned int y = 0; y < grid.y; y++)
        for (unsigned int x = 0; x < grid.x; x++) waiting_.push_back({x, y, z});
    shuffle(waiting_.data(), waiting_.size());
  }

  void run() {
    const size_t at_once = 1 + random_numbers() % most_blocks;
    for (;;) {
      while (active_.size() < at_once && !waiting_.empty()) begin_block();
      if (active_.empty()) return;
      const size_t which = random_numbers() % active_.size();
      Block& at = *active_[which].first;
      shared_.bring_in(at.shared);
      blockIdx = at.index;
      const bool goes_on = run_block(at);
      // Bytes behind what the launch was given are the same for all blocks: who wrote there is known before
      // another runs.
      if ((!goes_on || active_.size() > 1) && !shared_.is_whole())
        fail(at, *at.threads[0], "something was written behind the dynamic shared memory");
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
    auto next = std::make_unique<Block>();
    next->index = waiting_.back();
    next->shared = shared_.of_new_block();
    waiting_.pop_back();
    for (unsigned int i = 0; i < threads_; i++)
      next->threads.push_back(&fiber_for(place * 1024 + i, {i, 0, 0}));
    active_.emplace_back(std::move(next), place);
  }

  SharedMemory shared_;
  unsigned int threads_;
  std::vector<dim3> waiting_;
  std::vector<std::pair<std::unique_ptr<Block>, size_t>> active_;
  std::vector<size_t> free_;
};

}  // namespace

unsigned long long meet_in_warp(Meeting how, unsigned int lanes, unsigned long long value,
                                unsigned int argument) {
  running->how = how;
  running->compute = nullptr;
  running->lanes = lanes;
  running->value = value;
  running->argument = argument;
  running->now = State::in_warp;
  yield();
  return running->result;
}

void compute_in_warp(WarpComputation compute, void* own) {
  running->how = Meeting::compute;
  running->compute = compute;
  running->lanes = 0xffffffffu;
  running->value = reinterpret_cast<unsigned long long>(own);
  running->now = State::in_warp;
  yield();
}

int meet_in_block(bool counts, int value) {
  running->counts = counts;
  running->value = value != 0;
  running->now = State::in_block;
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
  running->now = State::waiting;
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

// A copy may arrive as soon as it is asked for, over what others still read, or when it is waited for.
void begin_copy(void* to, const void* from, unsigned int bytes) {
  if (random_numbers() % 2)
    memcpy(to, from, bytes);
  else
    running->copies.give({to, from, bytes});
}

void end_group_of_copies() { running->copies.end_group(); }

void wait_for_groups(int pending) {
  while (const Copy* each = running->copies.take(pending)) memcpy(each->to, each->from, each->bytes);
}

void keep_product(void* product) { running->products.give(product); }

void begin_product_group() { running->products.end_group(); }

void* take_product(int pending) {
  void* const* oldest = running->products.take(pending);
  return oldest ? *oldest : nullptr;
}

const char* run_grid(void (*function)(void**), void** arguments, const unsigned int* grid,
                     unsigned int threads, unsigned char* dynamic, unsigned long given,
                     unsigned long available, unsigned long long seed, bool keeps_time) {
  if (given > available) return "more dynamic shared memory than a block has";
  random_numbers.seed(seed);
  is_clock_real = keeps_time;
  kernel = function;
  kernel_arguments = arguments;
  given_bytes = static_cast<unsigned int>(given);
  gridDim = {grid[0], grid[1], grid[2]};
  blockDim = {threads, 1, 1};
  try {
    GridRun({grid[0], grid[1], grid[2]}, threads, dynamic, given, available).run();
  } catch (const std::exception& what) {
    error = what.what();
    return error.c_str();
  }
  return nullptr;
}
