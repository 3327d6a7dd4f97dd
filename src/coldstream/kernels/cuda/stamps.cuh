// When the parts of a layer begin and end where the GPU holds some of its experts only; see experts/stamps.py.
#pragma once

#include "cuda/common.cuh"

namespace coldstream {

constexpr int num_sums = 6;

// What a router leaves for the kernel that ends its layer.
struct RouterStamps {
  uint64_t begins;
  uint64_t ends;
  uint64_t pairs;  // that come over the bus; 0 again once they are counted
};

// Of one layer, in the device's memory, in nanoseconds of the device's clock.
struct LayerStamps {
  RouterStamps router;
  // Of all steps.
  uint64_t bus_pairs;
  // Of steps without and with such pairs: how many, and the sums, modulo 2^64, of when the router began and ended,
  // the sum of experts began, the CPU's answer was there, and the sum ended.
  uint64_t sums[2][num_sums];
};
static_assert(sizeof(LayerStamps) == 16 * 8);

// By one thread, which has read what the router left. Returns the sums that `note_end` completes.
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
