// Times at which the parts of a layer begin and end, for layers of which only some experts are on the GPU;
// see experts/stamps.py.
#pragma once

#include "cuda/common.cuh"

namespace coldstream {

constexpr int num_sums = 6;

// Written by the router, read by the kernel that ends its layer.
struct RouterStamps {
  uint64_t begins;
  uint64_t ends;
  uint64_t pairs;  // whose experts come over the bus; set back to 0 once they are counted
};

// The times of one layer, in device memory, in nanoseconds of the device's clock.
struct LayerStamps {
  RouterStamps router;
  // Summed over all steps.
  uint64_t bus_pairs;
  // For steps without such pairs (0) and with them (1): their number, then sums modulo 2^64 of five times:
  // the router's begin and end, the begin of the sum over experts, the arrival of the CPU's rows, the end of
  // the sum.
  uint64_t sums[2][num_sums];
};
static_assert(sizeof(LayerStamps) == 16 * 8);

// By one thread, with the router's stamps as it has read them. Returns the sums that `note_end` adds to.
__device__ __forceinline__ uint64_t* note_router(LayerStamps* stamps, const RouterStamps& router) {
  uint64_t* sums = stamps->sums[router.pairs != 0];
  add_up(sums, 1);
  add_up(sums + 1, router.begins);
  add_up(sums + 2, router.ends);
  if (router.pairs != 0) {
    add_up(&stamps->bus_pairs, router.pairs);
    stamps->router.pairs = 0;
  }
  return sums;
}

// By the same thread.
__device__ __forceinline__ void note_end(uint64_t* sums, uint64_t begins, uint64_t answered) {
  add_up(sums + 3, begins);
  add_up(sums + 4, answered);
  add_up(sums + 5, now_ns());
}

}  // namespace coldstream
