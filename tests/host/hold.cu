// Takes multiprocessors away from other launches for a while.
#include "cuda/common.cuh"

using namespace coldstream;

__global__ void hold_processors(int milliseconds) {
  const uint64_t begin = now_ns();
  while (now_ns() - begin < uint64_t(milliseconds) * 1'000'000) {
  }
}
