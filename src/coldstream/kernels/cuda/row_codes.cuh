// Codes of a row of activations in a block's shared memory: copied, or quantised on the way.
#pragma once

#include "cuda/quantize.cuh"
#include "cuda/weight_types.cuh"

namespace coldstream {

// A quantised row of `groups` groups of 256 in shared memory, for weights with super-blocks or, if it is one
// of several, in blocks of 32.
struct SharedRow {
  uint8_t* codes;  // 16-byte chunks, swizzled
  uint8_t* sums;   // int16 sums of 32 codes: 16 bytes a group; not for blocks of 32
  float* scales;   // of each group, or of each 32 inputs
  int groups;
};

// Of 32 inputs: their scale and, in rows with columns, the sum of their codes.
template <bool has_columns>
struct BlockScale {
  float scale;
};
template <>
struct BlockScale<true> {
  float scale;
  int sum;
};

// A single row for weights in blocks of 32. With `has_columns` each group's codes are there by columns too,
// behind them and in the same places (see `BlockCodes`).
template <bool has_columns>
struct LoneRow {
  using Scale = BlockScale<has_columns>;
  static constexpr int code_bytes = (has_columns ? 2 : 1) * group_elements;  // of a group
  static constexpr int group_bytes = code_bytes + scales_in_group * int(sizeof(Scale));

  uint8_t* codes;
  int groups;

  __device__ __forceinline__ Scale* scales() const {
    return reinterpret_cast<Scale*>(codes + code_bytes * groups);
  }
};
template <Types types>
using LoneRowOf = LoneRow<keeps_columns<types>>;

__device__ __forceinline__ SharedRow shared_row(uint8_t* memory, int groups) {
  return {memory, memory + 256 * groups, reinterpret_cast<float*>(memory + 272 * groups), groups};
}

// Of one of several rows for weights in blocks of 32, for each group.
constexpr int block_row_bytes = group_elements + scales_in_group * int(sizeof(float));

// The place of chunk k of a row, chosen so that the lanes read different banks in every format.
__device__ __forceinline__ int swizzled(int k) { return k ^ ((k >> 3 & 1) * 5) ^ (k >> 3 & 2); }

__device__ __forceinline__ uint4 load_chunk(const SharedRow& x, int k) {
  return load_16(x.codes + swizzled(k) * 16);
}

// Two words of sums of 16 codes to one of sums of 32.
__device__ __forceinline__ uint32_t add_pairs(uint32_t a, uint32_t b) {
  const int low = int16_t(a) + (int(a) >> 16), high = int16_t(b) + (int(b) >> 16);
  return (uint32_t(low) & 0xffff) | uint32_t(high) << 16;
}

__device__ __forceinline__ void store_sums(uint8_t* pair_sums, float* scales, int group, uint4 a, uint4 b,
                                           float scale) {
  const uint4 pairs = {add_pairs(a.x, a.y), add_pairs(a.z, a.w), add_pairs(b.x, b.y), add_pairs(b.z, b.w)};
  *reinterpret_cast<uint4*>(pair_sums + 16 * group) = pairs;
  scales[group] = scale;
}

// A row of quantised activations in global memory, and what a thread has asked for of it: its first chunks
// and the sums of a group. Loads that begin before the copies of a ring do not come behind them.
class CodesAhead {
 public:
  CodesAhead() = default;
  __device__ __forceinline__ CodesAhead(const int8_t* q, const float* scales, const int16_t* sums, int groups)
      : codes(reinterpret_cast<const uint4*>(q)), scales(scales), sums(reinterpret_cast<const uint4*>(sums)) {
    const int count = groups * 16, group = min(int(threadIdx.x), groups - 1);
#pragma unroll
    for (int i = 0; i < depth; i++) chunks[i] = codes[min(int(threadIdx.x + i * blockDim.x), count - 1)];
    a = this->sums[2 * group], b = this->sums[2 * group + 1];
    scale = scales[group];
  }

  // Copies the row into shared memory by the whole block.
  __device__ __forceinline__ void keep(const SharedRow& x) const {
    const int count = x.groups * 16, stride = blockDim.x;
    int k = threadIdx.x;
    if (k < x.groups) store_sums(x.sums, x.scales, k, a, b, scale);
#pragma unroll
    for (int i = 0; i < depth; i++, k += stride)
      if (k < count) store(x, k, chunks[i]);
#pragma unroll 1
    for (; k < count; k += stride) store(x, k, codes[k]);
#pragma unroll 1
    for (int group = threadIdx.x + stride; group < x.groups; group += stride)
      store_sums(x.sums, x.scales, group, sums[2 * group], sums[2 * group + 1], scales[group]);
  }

 private:
  static constexpr int depth = 2;

  __device__ static __forceinline__ void store(const SharedRow& x, int k, uint4 chunk) {
    *reinterpret_cast<uint4*>(x.codes + swizzled(k) * 16) = chunk;
  }

  const uint4* codes;
  const float* scales;
  const uint4* sums;
  uint4 chunks[depth], a, b;
  float scale;
};

__device__ __forceinline__ void copy_row(const SharedRow& x, const int8_t* q, const float* scales,
                                         const int16_t* sums) {
  CodesAhead(q, scales, sums, x.groups).keep(x);
}

// Keeps group `group` of a row, quantised by the whole warp.
template <int scale_elements>
__device__ __forceinline__ void keep_group(const SharedRow& x, int group, const GroupShare& share) {
  const int lane = threadIdx.x % warp_size;
  uint8_t* chunk = x.codes + swizzled(group * 16 + lane / 2) * 16;
  reinterpret_cast<uint2*>(chunk)[lane % 2] = share.codes;
  if constexpr (scale_elements == block_elements) {
    if (lane % 4 == 0) x.scales[group * scales_in_group + lane / 4] = share.scale;
  } else {
    const int sum = share.sum + __shfl_xor_sync(all_lanes, share.sum, 2);
    if (lane % 4 == 0) reinterpret_cast<int16_t*>(x.sums)[group * 8 + lane / 4] = int16_t(sum);
    if (lane == 0) x.scales[group] = share.scale;
  }
}

// Keeps a group by columns: a lane has eight codes of the eight columns of a block.
__device__ __forceinline__ void keep_columns(uint8_t* codes, const GroupShare& share) {
  const int lane = threadIdx.x % warp_size, block = lane / 4;
#pragma unroll
  for (int k = 0; k < 8; k++)
    codes[swizzled(2 * block + k / 4) * 16 + k % 4 * 4 + lane % 4] =
        uint8_t((k < 4 ? share.codes.x : share.codes.y) >> (8 * (k % 4)));
}

template <Types types>
__device__ __forceinline__ void keep_lone_group(const LoneRowOf<types>& x, int group,
                                                const GroupShare& share) {
  const int lane = threadIdx.x % warp_size;
  uint8_t* codes = x.codes + group * x.code_bytes;
  if constexpr (interleaves_x<types>) {
    // A lane has two words of the eight of a block, and exchanges one with the lane that has those four
    // behind.
    const bool is_second = lane & 2;
    const uint32_t other = __shfl_xor_sync(all_lanes, is_second ? share.codes.x : share.codes.y, 2);
    const uint32_t a = is_second ? other : share.codes.x, b = is_second ? share.codes.y : other;
    uint8_t* chunk = codes + swizzled(lane / 4 * 2 + lane % 2) * 16;
    reinterpret_cast<uint2*>(chunk)[is_second] = {interleave_low(a, b), interleave_high(a, b)};
  } else {
    reinterpret_cast<uint2*>(codes + swizzled(lane / 2) * 16)[lane % 2] = share.codes;
  }
  typename LoneRowOf<types>::Scale scale = {share.scale};
  if constexpr (keeps_columns<types>) {
    keep_columns(codes + group_elements, share);
    scale.sum = share.sum + __shfl_xor_sync(all_lanes, share.sum, 2);
  }
  if (lane % 4 == 0) x.scales()[group * scales_in_group + lane / 4] = scale;
}

// A row of floats, aligned to 16 bytes, and the inputs of the warp's next groups of it, which have been asked
// for. The warps of a block take one group after the other.
class GroupsAhead {
 public:
  GroupsAhead() = default;
  __device__ __forceinline__ GroupsAhead(const float* values, int groups, int cols)
      : values(values), groups(groups), cols(cols) {
#pragma unroll
    for (int i = 0; i < depth; i++) ask(i, threadIdx.x / warp_size + i * num_warps());
  }

  // Calls keep(group, share) for all groups.
  template <int scale_elements, typename Keep>
  __device__ __forceinline__ void quantize(Keep&& keep) {
#pragma unroll 1
    for (int group = threadIdx.x / warp_size; group < groups; group += num_warps()) {
      keep(group, quantize_group<scale_elements>(next[0]));
#pragma unroll
      for (int i = 0; i + 1 < depth; i++)
#pragma unroll
        for (int k = 0; k < 8; k++) next[i][k] = next[i + 1][k];
      ask(depth - 1, group + depth * num_warps());
    }
  }

 private:
  static constexpr int depth = 3;

  __device__ static __forceinline__ int num_warps() { return blockDim.x / warp_size; }
  __device__ __forceinline__ void ask(int i, int group) {
    if (group < groups) load_share(values + group * group_elements, cols - group * group_elements, next[i]);
  }

  const float* values;
  int groups, cols;
  float next[depth][8];
};

// Quantises one row into shared memory by the whole block.
__device__ __forceinline__ void quantize_into(const SharedRow& x, const float* values, int cols) {
  GroupsAhead(values, x.groups, cols).quantize<group_elements>([&](int group, const GroupShare& share) {
    keep_group<group_elements>(x, group, share);
  });
}

template <Types types>
__device__ __forceinline__ void quantize_lone_into(const LoneRowOf<types>& x, GroupsAhead ahead) {
  ahead.quantize<block_elements>(
      [&](int group, const GroupShare& share) { keep_lone_group<types>(x, group, share); });
}

}  // namespace coldstream
