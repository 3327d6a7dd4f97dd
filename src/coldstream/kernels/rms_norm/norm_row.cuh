// The norm of a row in shared memory, by whichever kernel needs it.
#pragma once

#include "cuda/quantize.cuh"
#include "cuda/vectors.cuh"

namespace coldstream {

struct Norm {
  const float* weight;  // [cols]
  int cols;
  int padded;  // cols rounded up to 256
  float eps;
};

// Norms of an update before it is added to a row, and what the row is multiplied by then.
struct PostNorm {
  const float* weight;  // [cols], of the update
  const float* routed;  // [cols], of the sum of the routed experts; null if only the update is normed
  const float* shared;  // [cols], of what is computed beside them
  const float* scale;   // one; null for 1
};

// Results: [rows, cols], and quantised; either may be null.
struct NormOutputs {
  float* y;
  int8_t* q;
  float* scales;
  int16_t* sums;
};

// 1 / sqrt(mean of squares + eps) of a row in shared memory that is padded with zeros, in all lanes of a
// warp. Loads of an accumulator's next sixteen values overlap with additions.
__device__ __forceinline__ float inverse_norm(const Norm& norm, const float* row) {
  constexpr int steps = group_elements / 16;
  row += threadIdx.x % 16;
  float x[steps], next[steps];
#pragma unroll
  for (int j = 0; j < steps; j++) x[j] = row[j * 16];
  float p = 0.0f;
#pragma unroll 1
  for (int i = group_elements; i <= norm.padded; i += group_elements) {
    const int ahead = i < norm.padded ? i : 0;
#pragma unroll
    for (int j = 0; j < steps; j++) next[j] = row[ahead + j * 16];
#pragma unroll
    for (int j = 0; j < steps; j++) p = __fmaf_rn(x[j], x[j], p);
#pragma unroll
    for (int j = 0; j < steps; j++) x[j] = next[j];
  }
  return inverse_sqrt(sum_of_sixteen_lanes(p, 1) / float(norm.cols) + norm.eps);
}

// (x · s) · w of a lane's columns.
__device__ __forceinline__ void scale_eight(const Eight& x, float s, const Eight& w, float (&y)[8]) {
  y[0] = x.low.x * s * w.low.x, y[1] = x.low.y * s * w.low.y;
  y[2] = x.low.z * s * w.low.z, y[3] = x.low.w * s * w.low.w;
  y[4] = x.high.x * s * w.high.x, y[5] = x.high.y * s * w.high.y;
  y[6] = x.high.z * s * w.high.z, y[7] = x.high.w * s * w.high.w;
}

}  // namespace coldstream
