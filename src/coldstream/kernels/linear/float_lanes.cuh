// The sums of products of floats with several rows: sixteen neighbouring lanes have the sixteen accumulators
// of docs/arithmetic.md.
#pragma once

#include "cuda/common.cuh"

namespace coldstream {

constexpr int lanes = 16;

// A lane keeps `half` elements, its upper or its lower ones, and gives the others for the other addends of
// those.
template <int half>
__device__ __forceinline__ void exchange_halves(float (&p)[16], int lane) {
  const bool upper = lane & half;
#pragma unroll
  for (int i = 0; i < half; i++) {
    const float kept = upper ? p[i + half] : p[i], given = upper ? p[i] : p[i + half];
    p[i] = kept + __shfl_xor_sync(all_lanes, given, half);
  }
}

// Sixteen lanes have sixteen sums each; lane r gets the sum over the lanes of element r.
__device__ __forceinline__ float sum_of_lanes(float (&p)[16], int lane) {
  exchange_halves<8>(p, lane);
  exchange_halves<4>(p, lane);
  exchange_halves<2>(p, lane);
  exchange_halves<1>(p, lane);
  return p[0];
}

}  // namespace coldstream
