// Operations of a warp on its 16 pairs of a row and a query head beside products: lane 4g + t has pairs g and
// g + 8, as in the tensor cores' accumulators.
#pragma once

#include "attention/grid.cuh"
#include "attention/integers.cuh"

namespace coldstream {

constexpr int pairs = 16;

// A number for each of the lane's two pairs.
template <class T>
using ForBoth = T[2];

// The greatest of the four lanes of a pair, NaN left out; of bits of magnitudes NaN is the greatest.
__device__ __forceinline__ float greatest_of_pair(float x) {
  x = fmaxf(x, __shfl_xor_sync(all_lanes, x, 1));
  return fmaxf(x, __shfl_xor_sync(all_lanes, x, 2));
}
__device__ __forceinline__ uint32_t greatest_of_pair(uint32_t x) {
  x = max(x, __shfl_xor_sync(all_lanes, x, 1));
  return max(x, __shfl_xor_sync(all_lanes, x, 2));
}

// Sums over 64 places of which a lane has 8n + 2t and the next one: place p belongs to accumulator p mod 16.
// halves: 1 if only pair g is wanted.
template <int halves = 2>
__device__ __forceinline__ void sum_in_order(const float (&weights)[block_positions / 8][4],
                                             ForBoth<float>& total) {
#pragma unroll
  for (int i = 0; i < halves; i++) {
    float sums[2];
#pragma unroll
    for (int b = 0; b < 2; b++) {
      float even = 0.0f, odd = 0.0f;
#pragma unroll
      for (int n = 0; n < block_positions / 8; n += 2) {
        even += weights[n][2 * i + b];
        odd += weights[n + 1][2 * i + b];
      }
      float sum = even + odd;
      sum += __shfl_xor_sync(all_lanes, sum, 2);
      sums[b] = sum + __shfl_xor_sync(all_lanes, sum, 1);
    }
    total[i] = sums[0] + sums[1];
  }
}

}  // namespace coldstream
