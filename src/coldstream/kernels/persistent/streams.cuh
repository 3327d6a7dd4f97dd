// What a launch is made of whose blocks stay for a whole token: counters that blocks wait for, and rings of
// stages that a warp fills ahead of their use. No wait is without an end: once the launch's time is over,
// every wait fails, the block goes through the rest of its list without waiting, and the report says who
// waited first.
#pragma once

#include "cuda/bulk_copies.cuh"
#include "cuda/common.cuh"

namespace coldstream {

constexpr int max_rings = 3, max_stages = 16;
constexpr int no_counter = -1000000;
constexpr int looks_a_time = 16;  // at a barrier or a counter, between two looks at the clock
constexpr int looks_after_failure = 1 << 16;

// A thread's view of the launch's time.
struct Watch {
  uint64_t deadline;
  // How many threads waited without end, and the first counter of all layers that one of them waited for.
  uint32_t* report;
  bool failed;
  int layer;

  // number: of the counter that is waited for among those of all layers, or -1.
  __device__ bool is_late(int number) {
    if (failed || now_ns() < deadline) return failed;
    failed = true;
    add_and_look(report, 1);
    atomicMin(report + 1, uint32_t(number));
    return true;
  }
};

// In a ring.
struct Place {
  int stage = 0, phase = 0;

  __device__ void advance(int stages) {
    if (++stage < stages) return;
    stage = 0;
    phase ^= 1;
  }
  __device__ void retreat(int stages) {
    if (--stage >= 0) return;
    stage = stages - 1;
    phase ^= 1;
  }
};

__device__ __forceinline__ bool wait_phase(uint32_t barrier, int phase, Watch& watch) {
  if (watch.failed) return false;
  for (int tries = 1; !is_phase_over(barrier, phase); tries++)
    if (tries % looks_a_time == 0 && watch.is_late(-1)) return false;
  return true;
}

// Those of all layers. A counter may be spread over some words, of which a block adds to one.
struct Counters {
  uint32_t* words;
  int of_layer;
  int splits;
  int stride;  // words from one to the next
  int backoff_ns;

  __device__ __forceinline__ uint32_t* at(int number) const {
    return words + int64_t(number) * splits * stride;
  }
  // By one thread, of what its block has written.
  __device__ __forceinline__ void raise(int layer, int counter) const {
    add_release(at(layer * of_layer + counter) + blockIdx.x % splits * stride, 1);
  }
};

// By one thread for a counter without splits, or by a warp. True for counters of the layer before the first.
template <bool by_warp>
__device__ __forceinline__ bool wait_counter(const Counters& counters, int counter, int target,
                                             Watch& watch) {
  const int number = watch.layer * counters.of_layer + counter;
  if (counter == no_counter || number < 0) return true;
  if (watch.failed) return false;
  const uint32_t* at = counters.at(number);
  const int lane = threadIdx.x % warp_size;
  for (int tries = 1;; tries++) {
    uint32_t seen;
    if constexpr (by_warp) {
      seen = sum_of_lanes(lane < counters.splits ? load_acquire(at + lane * counters.stride) : 0u);
    } else {
      seen = load_acquire(at);
    }
    if (seen >= uint32_t(target)) {
      if constexpr (by_warp) __syncwarp();
      return true;
    }
    bool late = tries % looks_a_time == 0 && watch.is_late(number);
    if constexpr (by_warp) late = __any_sync(all_lanes, late);
    if (late) {
      watch.failed = true;
      return false;
    }
    pause(counters.backoff_ns);
  }
}

// A ring's barriers: a stage is full when its bytes are there, and empty when all readers have left it.
struct alignas(16) RingBarriers {
  uint8_t full[max_stages][bulk_barrier_bytes];
  uint8_t empty[max_stages][bulk_barrier_bytes];

  __device__ void init(int readers) {
    for (int i = 0; i < max_stages; i++) {
      init_bulk_barrier(shared_address(full[i]), 1);
      init_bulk_barrier(shared_address(empty[i]), readers);
    }
  }
};

// A ring as its producer sees it, which is one warp.
struct FilledRing {
  RingBarriers& barriers;
  uint32_t memory;
  int stages, stage_bytes;
  Place next = {};
  int issued = 0;

  __device__ uint32_t full() const { return shared_address(barriers.full[next.stage]); }
  __device__ uint32_t stage() const { return memory + next.stage * stage_bytes; }

  // Waits until the next stage has been left.
  __device__ bool wait(Watch& watch) {
    const bool is_free = wait_phase(shared_address(barriers.empty[next.stage]), next.phase ^ 1, watch);
    if (__any_sync(all_lanes, !is_free)) watch.failed = true;
    return !watch.failed;
  }

  // Its copies have begun.
  __device__ void advance() {
    next.advance(stages);
    issued++;
  }

  // After a failure: what is on its way has to arrive before the block's memory goes.
  __device__ void drain(const Watch& watch) {
    for (int i = 0; i < min(stages, issued) && watch.failed; i++) {
      next.retreat(stages);
      for (int tries = 0; tries < looks_after_failure && !is_phase_over(full(), next.phase); tries++) {
      }
    }
  }
};

}  // namespace coldstream
