// The norm in front of a router, computed by every block of its launch for itself: a launch less for each
// layer.
#pragma once

#include "rms_norm/norm_row.cuh"

namespace coldstream {

constexpr int max_normed_tokens = 8;

// The router's x is the norm of x + update. Of the first blocks each also writes a token's sum and norm.
struct Norming {
  const float* x;       // [tokens, cols]
  const float* update;  // [tokens, cols]
  const float* bias;    // [cols], which is added to the update first; null: none
  float* sum;           // [tokens, cols], neither of the two
  Norm norm;            // cols are a multiple of 4
  NormOutputs out;
  int is_unweighted;  // the router's x is the norm without its weights; read for routers with a rule
};

// A warp's first group of columns, of those of all tokens one after the other.
__device__ __forceinline__ int first_group(const Norm& norm) {
  return threadIdx.x / warp_size % (norm.padded / group_elements);
}

__device__ __forceinline__ bool writes_token(int t) { return int(blockIdx.x) == t % int(gridDim.x); }

// Writes the norms of all tokens to `rows` in shared memory, `stride` floats apart and padded with zeros, by
// the whole block of `threads`. first_weights: those of `first_group`, loaded before any wait.
template <int threads, bool has_rule>
__device__ __forceinline__ void stage_norms(const Norming& from, int num_tokens, float* rows, int stride,
                                            Eight first_weights) {
  __shared__ float scales[max_normed_tokens];
  constexpr int num_warps = threads / warp_size;
  const Norm& norm = from.norm;
  const int warp = threadIdx.x / warp_size, num_groups = norm.padded / group_elements;
  const Eight ones = {{1.0f, 1.0f, 1.0f, 1.0f}, {1.0f, 1.0f, 1.0f, 1.0f}};
#pragma unroll 1
  for (int t = 0; t < num_tokens; t++) {
    const int64_t begin = int64_t(t) * norm.cols;
#pragma unroll 1
    for (int i = 4 * threadIdx.x; i < norm.padded; i += 4 * threads) {
      float4 v = {0.0f, 0.0f, 0.0f, 0.0f};
      if (i < norm.cols) {
        float4 added = load_four<true>(from.update + begin, i, norm.cols);
        if (from.bias) added = added + load_four<true>(from.bias, i, norm.cols);
        v = load_four<true>(from.x + begin, i, norm.cols) + added;
        if (writes_token(t)) store_four<true>(from.sum + begin, i, norm.cols, v);
      }
      store_four<true>(rows + t * stride, i, norm.padded, v);
    }
  }
  __syncthreads();
  if (warp < num_tokens) {
    const float found = inverse_norm(norm, rows + warp * stride);
    if (threadIdx.x % warp_size == 0) scales[warp] = found;
  }
  __syncthreads();
#pragma unroll 1
  for (int i = warp; i < num_tokens * num_groups; i += num_warps) {
    const int t = i / num_groups, group = i - t * num_groups;
    float* row = rows + t * stride;
    const Eight w = i == warp ? first_weights : load_eight<true>(norm.weight, group, norm.cols);
    const Eight x = load_eight<true>(row, group, norm.padded);
    const float scale = scales[t];
    float y[8];
    if (has_rule && from.is_unweighted) {
      scale_eight(x, scale, ones, y);
      store_eight<true>(row, group, norm.cols, y);
    }
    scale_eight(x, scale, w, y);
    if (!has_rule || !from.is_unweighted) store_eight<true>(row, group, norm.cols, y);
    if (!writes_token(t)) continue;
    store_eight<true>(from.out.y + int64_t(t) * norm.cols, group, norm.cols, y);
    store_group(quantize_group(y), quant_row(from.out.q, from.out.scales, from.out.sums, t, norm.padded),
                group);
  }
}

}  // namespace coldstream
