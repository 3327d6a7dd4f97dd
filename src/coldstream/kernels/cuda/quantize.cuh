// Quantised activations (docs/arithmetic.md): groups of 256 inputs become int8 codes, one scale or, for
// weights in blocks of 32, one for each 32 of them, and the sums of each 16 codes.
//
// A row of K inputs takes `padded` = K rounded up to 256 codes, padded / scale_elements scales and padded /
// 16 sums; inputs from K on count as zeros, so their codes and sums are 0. K is a multiple of 8.
#pragma once

#include "cuda/common.cuh"

namespace coldstream {

constexpr int group_elements = 256;  // inputs that a warp takes, and that share one scale or eight
constexpr int block_elements = 32;
constexpr int scales_in_group = group_elements / block_elements;
constexpr int sum_elements = 16;  // inputs that share one sum

// The scale of a group from its maximum, and the factor from inputs to codes.
struct GroupScale {
  float scale;
  float factor;
};

// `max_bits` is the greatest of the bits of |x|, which are ordered like |x| with everything non-finite on
// top.
__device__ __forceinline__ uint32_t magnitude_bits(float x) { return __float_as_uint(x) & 0x7fffffffu; }

__device__ __forceinline__ GroupScale group_scale(uint32_t max_bits) {
  if (max_bits >= 0x7f800000u) return {__uint_as_float(0x7fc00000u), 0.0f};
  const float max = __uint_as_float(max_bits);
  if (max < 0x1p-100f) return {0.0f, 0.0f};
  return {max / 127.0f, 127.0f / max};
}

// −127 … 127. With the factor 0 of a group that is not finite, infinity and NaN give NaN, which converts to
// 0.
__device__ __forceinline__ int quantize_value(float x, float factor) { return __float2int_rn(x * factor); }

// A lane's share of a group: inputs 8 · lane … 8 · lane + 7.
struct GroupShare {
  uint2 codes;  // eight int8
  float scale;  // of the group or of the lane's block, in every lane of it
  int sum;      // of the 16 codes that this lane and its neighbour (lane ^ 1) hold
};

// One group by a whole warp; x holds the lane's eight inputs, of which `scale_elements` share a scale.
template <int scale_elements = group_elements>
__device__ __forceinline__ GroupShare quantize_group(const float (&x)[8]) {
  uint32_t max_bits = 0;
#pragma unroll
  for (int i = 0; i < 8; i++) max_bits = max(max_bits, magnitude_bits(x[i]));
  if constexpr (scale_elements == group_elements) {
    max_bits = greatest_of_lanes(max_bits);
  } else {
#pragma unroll
    for (int step = 1; step < scale_elements / 8; step *= 2)
      max_bits = max(max_bits, __shfl_xor_sync(all_lanes, max_bits, step));
  }
  const GroupScale found = group_scale(max_bits);
  uint32_t words[2] = {0, 0};
  int sum = 0;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const int code = quantize_value(x[i], found.factor);
    sum += code;
    words[i / 4] |= (uint32_t(code) & 0xffu) << (8 * (i % 4));
  }
  sum += __shfl_xor_sync(all_lanes, sum, 1);
  return {{words[0], words[1]}, found.scale, sum};
}

// The lane's eight inputs of a group, of which `count` exist; x is 16-byte aligned (global or shared memory).
__device__ __forceinline__ void load_share(const float* x, int count, float (&values)[8]) {
  const int first = 8 * (threadIdx.x % warp_size);
  float4 low = {0, 0, 0, 0}, high = {0, 0, 0, 0};
  if (first < count) {
    low = *reinterpret_cast<const float4*>(x + first);
    high = *reinterpret_cast<const float4*>(x + first + 4);
  }
  values[0] = low.x, values[1] = low.y, values[2] = low.z, values[3] = low.w;
  values[4] = high.x, values[5] = high.y, values[6] = high.z, values[7] = high.w;
}

// A quantised row in global memory: codes 8-byte aligned.
struct QuantRow {
  int8_t* q;
  float* scales;
  int16_t* sums;
};

// Row `row` of activations with `padded` codes a row.
template <int scale_elements = group_elements>
__device__ __forceinline__ QuantRow quant_row(int8_t* q, float* scales, int16_t* sums, int64_t row,
                                              int padded) {
  return {q + row * padded, scales + row * (padded / scale_elements), sums + row * (padded / sum_elements)};
}

// Writes group `group` of a row by a whole warp.
template <int scale_elements = group_elements>
__device__ __forceinline__ void store_group(const GroupShare& share, QuantRow row, int group) {
  const int lane = threadIdx.x % warp_size;
  reinterpret_cast<uint2*>(row.q)[group * (group_elements / 8) + lane] = share.codes;
  if (lane % 2 == 0) row.sums[group * (group_elements / sum_elements) + lane / 2] = int16_t(share.sum);
  constexpr int scale_lanes = scale_elements / 8;
  if (lane % scale_lanes == 0) row.scales[(group * warp_size + lane) / scale_lanes] = share.scale;
}

// Quantises group `group` of the `cols` inputs x (16-byte aligned) by a whole warp.
template <int scale_elements = group_elements>
__device__ __forceinline__ void quantize_group_of(const float* x, int cols, int group, QuantRow row) {
  float values[8];
  load_share(x + group * group_elements, cols - group * group_elements, values);
  store_group<scale_elements>(quantize_group<scale_elements>(values), row, group);
}

}  // namespace coldstream
