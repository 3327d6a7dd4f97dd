// Runs the threads of a kernel's grid on one thread of the host, each as a fiber that runs until it meets
// others.
//
// In which order is random but for what barriers say: between two barriers of a block one warp after another
// runs as far as it can, so that what is missing between a write and a read of two warps, or of two lanes, is
// seen. Now and then some lanes of a warp stay behind, so that it is seen where one of them tells other warps
// what is true of itself alone. Up to three blocks are under way at a time, and alternate after some warps.
// If all of them wait for other blocks, one more begins, up to these three. Of a launch whose blocks stay
// together all are under way at once. A block's shared memory is what the kernels' library has of memory for
// each thread: it is brought in and out when another block takes its turn, full of poison at first. Unit of
// work: one launch.
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
constexpr int warps_at_once = 8, orders = 256, one_is_short_in = 8;
constexpr int idle_runs_in_vain = 100, most_idle_runs = 1000;  // of blocks that all wait for others
constexpr unsigned long long tick_ns = 1'000'000;

// Where some threads of a block meet.
struct NamedBarrier {
  int arrived = 0;
  unsigned int times = 0;
};

struct Block {
  dim3 index;
  std::vector<Warp> warps;
  std::vector<Warp*> line;  // that have yet to come to the next barrier
  SharedMemory::OfBlock shared;
  NamedBarrier barriers[16] = {};
  int any_vote = 0;  // at the last barrier
  unsigned int changes = 0, changes_seen = 0, idle_warps = 0;
  bool waits_for_blocks = false;  // since its last turn
};

RandomBits random_numbers;
Block* running_block = nullptr;
unsigned int given_bytes = 0;
int idle_runs = 0;  // one after another
unsigned long long clock_ns = 0;
bool is_clock_real = false;
std::string error;

[[noreturn]] void fail(const Block& at, const Fiber& thread, const char* what) {
  throw Failure{"block " + std::to_string(at.index.x) + ", " + std::to_string(at.index.y) + ", thread " +
                std::to_string(thread.thread.x) + ": " + what};
}

const Fiber& first_of(const Warp& warp, unsigned int lanes) { return *warp.lanes[__builtin_ctz(lanes)]; }

// The lanes of a mask, from the first on.
template <class F>
void for_each_lane(unsigned int lanes, F visit) {
  for (; lanes; lanes &= lanes - 1) visit(__builtin_ctz(lanes));
}

// The values of the warp's lanes that meet in the same way, made into what each gets.
void answer(const Block& at, Warp& warp, unsigned int lanes) {
  const unsigned long long* const values = warp.values;
  const auto each_gets = [&](auto result) {
    for_each_lane(lanes, [&](int i) { warp.results[i] = result(i); });
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
  const auto argument = [&](int i) { return warp.arguments[i]; };
  const Instruction& first = warp.instructions[__builtin_ctz(lanes)];
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
      if (!first.compute(given)) fail(at, first_of(warp, lanes), "gives other operands than its warp");
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
  warp.in_warp &= ~lanes;
  warp.ready |= lanes;
}

// Lets lanes that wait for each other go on; false if none could.
bool meet(const Block& at, Warp& warp) {
  const unsigned int meeting = warp.in_warp;
  if (!meeting) return false;
  if (warp.agree && warp.instructions[__builtin_ctz(meeting)].lanes == meeting) {
    answer(at, warp, meeting);
    return true;
  }
  const unsigned int in_block = warp.in_block, running_lanes = warp.ready | warp.waiting;
  bool any = false;
  for (unsigned int left = meeting; left;) {
    const unsigned int own = left & -left;
    const Instruction& first = warp.instructions[__builtin_ctz(left)];
    const Fiber& thread = first_of(warp, left);
    const unsigned int lanes = first.lanes;
    if (lanes & ~(meeting | in_block | running_lanes)) fail(at, thread, "waits for a lane that is not there");
    if (lanes & in_block) fail(at, thread, "waits for a lane that waits for the block");
    left &= ~own;
    if (lanes & ~meeting) continue;
    for_each_lane(lanes, [&](int i) {
      if (!(warp.instructions[i] == first)) fail(at, thread, "meets other instructions");
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

// Orders of a warp's lanes, of which each turn takes one and flips bits of all its lanes. To shuffle the
// lanes themselves took as long as a meeting of them does.
class Orders {
 public:
  Orders() {
    for (auto& order : lanes_) {
      for (int i = 0; i < warp_size; i++) order[i] = static_cast<unsigned char>(i);
      shuffle(order, warp_size);
    }
  }

  Turn turn_of(const Warp& warp) const {
    const unsigned long long bits = random_numbers();
    const bool is_short = (bits >> 32) % one_is_short_in == 0;
    const int end = is_short ? 1 + int((bits >> 48) % (warp_size - 1)) : warp_size;
    return {&warp, lanes_[bits % orders], static_cast<unsigned int>(bits / orders % warp_size), end};
  }

 private:
  unsigned char lanes_[orders][warp_size];
};

// One warp, as far as it gets without the others of its block. Now and then only some of its lanes go on to
// where they meet others, and the rest later: a barrier of their warp is all that keeps lanes together.
void run_warp(const Block& at, Warp& warp) {
  static const Orders any_order;
  do {
    const Turn next = any_order.turn_of(warp);
    run_turn(next);
    if (next.end != warp_size && warp.ready) return;
  } while (meet(at, warp) || warp.ready);
}

// Puts a warp of which lanes can go on, or wait for a change, behind the others, which may not all wait too.
void wait_in_line(Block& at, Warp& warp) {
  if (at.changes != at.changes_seen || !warp.waiting || warp.ready || at.waits_for_blocks) at.idle_warps = 0;
  at.changes_seen = at.changes;
  if (!warp.waiting && !warp.ready) return;
  warp.ready |= warp.waiting;
  warp.waiting = 0;
  if (at.idle_warps++ > at.line.size()) fail(at, *warp.lanes[0], "waits for a change that does not come");
  at.line.insert(at.line.begin(), &warp);
}

// All threads of the block that have not ended are at its barrier, or have failed; false at the end.
bool meet_at_barrier(Block& at) {
  bool is_first = true, counts = false;
  at.any_vote = 0;
  for (Warp& warp : at.warps) {
    if (warp.in_warp) fail(at, first_of(warp, warp.in_warp), "waits for lanes that do not come");
    const unsigned int there = warp.in_block;
    if (!there) continue;
    if (is_first) counts = warp.counting & there;
    is_first = false;
    const unsigned int others = counts ? there & ~warp.counting : warp.counting;
    if (others) fail(at, first_of(warp, others), "meets other instructions");
    at.any_vote |= warp.votes != 0;
    warp.ready = there;
    warp.in_block = warp.votes = warp.counting = 0;
  }
  return !is_first;
}

// Some warps, or all to the block's next barrier; false at the end.
bool run_block(Block& at) {
  running_block = &at;
  if (at.line.empty()) {
    for (Warp& warp : at.warps) at.line.push_back(&warp);
    shuffle(at.line.data(), at.line.size());
  }
  while (!at.line.empty()) {
    Warp& warp = *at.line.back();
    at.line.pop_back();
    run_warp(at, warp);
    wait_in_line(at, warp);
    if (at.waits_for_blocks || random_numbers() % warps_at_once == 0) return true;
  }
  return meet_at_barrier(at);
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

  void run(bool together) {
    size_t at_once = together ? waiting_.size() : 1 + random_numbers() % most_blocks;
    idle_runs = 0;
    for (;;) {
      while (active_.size() < at_once && !waiting_.empty()) begin_block();
      if (active_.empty()) return;
      const bool all_wait = std::all_of(active_.begin(), active_.end(),
                                        [](const auto& each) { return each.first->waits_for_blocks; });
      if (all_wait && at_once < most_blocks && !waiting_.empty()) {
        at_once++;
        continue;
      }
      idle_runs = all_wait ? idle_runs + 1 : 0;
      if (idle_runs > most_idle_runs) {
        const Block& first = *active_[0].first;
        fail(first, *first.warps[0].lanes[0], "waits for blocks that do not come");
      }
      const size_t which = random_numbers() % active_.size();
      Block& at = *active_[which].first;
      shared_.bring_in(at.shared);
      blockIdx = at.index;
      const bool goes_on = run_block(at);
      // Bytes behind what the launch was given are the same for all blocks: who wrote there is known before
      // another runs.
      if ((!goes_on || active_.size() > 1) && !shared_.is_whole())
        fail(at, *at.warps[0].lanes[0], "something was written behind the dynamic shared memory");
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
    next->warps.resize((threads_ + warp_size - 1) / warp_size);
    for (unsigned int i = 0; i < threads_; i++)
      fiber_for(place * 1024 + i, {i, 0, 0}, next->warps[i / warp_size], int(i % warp_size));
    active_.emplace_back(std::move(next), place);
  }

  SharedMemory shared_;
  unsigned int threads_;
  std::vector<dim3> waiting_;
  std::vector<std::pair<std::unique_ptr<Block>, size_t>> active_;
  std::vector<size_t> free_;
};

// The running lane is one of those of its warp that wait in a way, until others have come.
void wait_among(unsigned int Warp::* those) {
  Warp& warp = *running->warp;
  const unsigned int own = 1u << running->lane;
  warp.ready &= ~own;
  warp.*those |= own;
  yield();
}

unsigned long long meet(const Instruction& own, unsigned long long value, unsigned int argument) {
  Warp& warp = *running->warp;
  const int lane = running->lane;
  warp.agree = !warp.in_warp || (warp.agree && warp.instructions[__builtin_ctz(warp.in_warp)] == own);
  warp.instructions[lane] = own;
  warp.values[lane] = value;
  warp.arguments[lane] = argument;
  wait_among(&Warp::in_warp);
  return warp.results[lane];
}

}  // namespace

unsigned long long meet_in_warp(Meeting how, unsigned int lanes, unsigned long long value,
                                unsigned int argument) {
  return meet({how, lanes, nullptr}, value, argument);
}

void compute_in_warp(WarpComputation compute, void* own) {
  meet({Meeting::compute, 0xffffffffu, compute}, reinterpret_cast<unsigned long long>(own), 0);
}

int meet_in_block(bool counts, int value) {
  Warp& warp = *running->warp;
  warp.counting |= unsigned(counts) << running->lane;
  warp.votes |= unsigned(value != 0) << running->lane;
  wait_among(&Warp::in_block);
  return running_block->any_vote;
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

void wait_for_change() { wait_among(&Warp::waiting); }

void note_change() { running_block->changes++; }

bool wait_for_other_blocks() {
  running_block->waits_for_blocks = true;
  wait_among(&Warp::waiting);
  running_block->waits_for_blocks = false;
  return idle_runs < idle_runs_in_vain;
}

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
                     unsigned long available, unsigned long long seed, bool keeps_time, bool together) {
  if (given > available) return "more dynamic shared memory than a block has";
  random_numbers.seed(seed);
  is_clock_real = keeps_time;
  kernel = function;
  kernel_arguments = arguments;
  given_bytes = static_cast<unsigned int>(given);
  gridDim = {grid[0], grid[1], grid[2]};
  blockDim = {threads, 1, 1};
  try {
    GridRun({grid[0], grid[1], grid[2]}, threads, dynamic, given, available).run(together);
  } catch (const std::exception& what) {
    error = what.what();
    return error.c_str();
  }
  return nullptr;
}
