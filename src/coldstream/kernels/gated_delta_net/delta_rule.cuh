// The gated delta rule on a block of 32 value columns of one head, by 128 threads.
//
// A sum over the key dimension has four chains (docs/arithmetic.md); a thread has one of them for one column.
// Chain c of column j is in lane 8 · c + j % 8 of warp j / 8, which keeps the state's rows i = c, c + 4, … in
// registers. Vectors over the key dimension lie in shared memory by chains: i is at i % 4 · chain_floats<D> +
// i / 4.
#pragma once

#include "cuda/common.cuh"

namespace coldstream {

constexpr int num_chains = 4;
constexpr int delta_threads = 128;

template <int D>
constexpr int chain_keys = D / num_chains;

// Four floats apart from a multiple of the 32 banks, so that the chains of a warp read different ones.
template <int D>
constexpr int chain_floats = chain_keys<D> + 4;

template <int D>
constexpr int vector_floats = num_chains * chain_floats<D>;

__device__ __forceinline__ int own_chain() { return threadIdx.x % warp_size / 8; }
__device__ __forceinline__ int own_column() { return threadIdx.x / warp_size * 8 + threadIdx.x % 8; }

// (c0 + c1) + (c2 + c3), in all lanes of the column.
__device__ __forceinline__ float sum_of_chains(float chain) {
  chain += __shfl_xor_sync(all_lanes, chain, 8);
  return chain + __shfl_xor_sync(all_lanes, chain, 16);
}

// The thread's part of the state at `state`, the block's first column of key row 0.
template <int D>
__device__ __forceinline__ void load_state(const float* state, float (&s)[chain_keys<D>]) {
  const float* from = state + own_chain() * D + own_column();
#pragma unroll
  for (int m = 0; m < chain_keys<D>; m++) s[m] = from[m * num_chains * D];
}

template <int D>
__device__ __forceinline__ void store_state(float* state, const float (&s)[chain_keys<D>]) {
  float* to = state + own_chain() * D + own_column();
#pragma unroll
  for (int m = 0; m < chain_keys<D>; m++) to[m * num_chains * D] = s[m];
}

// Entries 4 m … 4 m + 3 of the thread's chain of a vector in shared memory.
template <int D>
__device__ __forceinline__ float4 four_of(const float* vector, int m) {
  return reinterpret_cast<const float4*>(vector + own_chain() * chain_floats<D>)[m];
}

// The first half of a token: decays the state and returns the chain of the prediction.
template <int D>
__device__ __forceinline__ float predict(float (&s)[chain_keys<D>], const float* key, float decay) {
  float prediction = 0.0f;
#pragma unroll
  for (int m = 0; m < chain_keys<D>; m += 4) {
    const float4 four = four_of<D>(key, m / 4);
    const float k[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      s[m + i] = s[m + i] * decay;
      prediction = __fmaf_rn(k[i], s[m + i], prediction);
    }
  }
  return prediction;
}

// The second half: the state takes in `change`; returns the chain of the output.
template <int D>
__device__ __forceinline__ float update(float (&s)[chain_keys<D>], const float* key, const float* query,
                                        float change) {
  float output = 0.0f;
#pragma unroll
  for (int m = 0; m < chain_keys<D>; m += 4) {
    const float4 four_k = four_of<D>(key, m / 4), four_q = four_of<D>(query, m / 4);
    const float k[4] = {four_k.x, four_k.y, four_k.z, four_k.w},
                q[4] = {four_q.x, four_q.y, four_q.z, four_q.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      s[m + i] = __fmaf_rn(k[i], change, s[m + i]);
      output = __fmaf_rn(q[i], s[m + i], output);
    }
  }
  return output;
}

}  // namespace coldstream
