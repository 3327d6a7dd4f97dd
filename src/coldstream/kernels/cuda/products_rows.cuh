// Products of a few rows of activations with many weight rows by dp4a, as products_gemv.cuh for one row: a
// warp keeps the codes of a pass of its unit in registers, and multiplies them with one row after the other.
// For up to about four rows this takes fewer instructions than a tile of the tensor cores, which costs the
// same for one row and for eight.
#pragma once

#include "cuda/products_gemv.cuh"

namespace coldstream {

// Quantised rows in shared memory: the codes of all, then their sums, then their scales.
struct SharedRows {
  SharedRow first;
  int count;
  int row_scales;  // of a row

  __device__ __forceinline__ SharedRow row(int t) const {
    return {first.codes + t * group_elements * first.groups, first.sums + t * 16 * first.groups,
            first.scales + t * row_scales, first.groups};
  }
};

// `room`: the most rows, on which the layout depends.
__device__ __forceinline__ SharedRows shared_rows(uint8_t* memory, int room, int count, int groups) {
  uint8_t* sums = memory + room * group_elements * groups;
  return {{memory, sums, reinterpret_cast<float*>(sums + room * 16 * groups), groups}, count, groups};
}

// For weights in blocks of 32.
__device__ __forceinline__ SharedRows shared_block_rows(uint8_t* memory, int room, int count, int groups) {
  uint8_t* scales = memory + room * group_elements * groups;
  return {{memory, memory, reinterpret_cast<float*>(scales), groups}, count, groups * scales_in_group};
}

// Copies quantised rows by the whole block, without a barrier; the codes are a group of asynchronous copies
// of its own. Row t is row index_of(t) of the arrays.
template <typename IndexOf>
__device__ __forceinline__ void copy_rows(const SharedRows& x, const int8_t* q, const float* scales,
                                          const int16_t* sums, IndexOf&& index_of) {
  const int groups = x.first.groups;
#pragma unroll 1
  for (int t = 0; t < x.count; t++) {
    const int8_t* from = q + int64_t(index_of(t)) * groups * group_elements;
    const SharedRow row = x.row(t);
#pragma unroll 1
    for (int k = threadIdx.x; k < groups * 16; k += blockDim.x)
      copy_async_16(row.codes + swizzled(k) * 16, from + k * 16);
  }
  commit_copies();
#pragma unroll 1
  for (int i = threadIdx.x; i < x.count * groups; i += blockDim.x) {
    const int t = i / groups, group = i - t * groups;
    const int64_t at = int64_t(index_of(t)) * groups + group;
    const uint4 a = reinterpret_cast<const uint4*>(sums)[2 * at],
                b = reinterpret_cast<const uint4*>(sums)[2 * at + 1];
    const SharedRow row = x.row(t);
    store_sums(row.sums, row.scales, group, a, b, scales[at]);
  }
}

// Quantises rows of floats, aligned to 16 bytes, by the whole block, without a barrier. Row t is at
// row_at(t).
template <int scale_elements, typename RowAt>
__device__ __forceinline__ void quantize_rows(const SharedRows& x, int cols, RowAt&& row_at) {
  constexpr int at_once = 2;  // groups whose loads are under way together
  const int groups = x.first.groups, total = x.count * groups, step = blockDim.x / warp_size;
#pragma unroll 1
  for (int first = threadIdx.x / warp_size; first < total; first += at_once * step) {
    float share_of[at_once][8];
#pragma unroll
    for (int b = 0; b < at_once; b++) {
      const int i = first + b * step, t = i / groups, at = (i - t * groups) * group_elements;
      if (i < total) load_share(row_at(t) + at, cols - at, share_of[b]);
    }
#pragma unroll
    for (int b = 0; b < at_once; b++) {
      const int i = first + b * step, t = i / groups;
      if (i < total)
        keep_group<scale_elements>(x.row(t), i - t * groups, quantize_group<scale_elements>(share_of[b]));
    }
  }
}

// A unit's accumulators between two passes, and its sums behind the last one, in a warp's own shared memory.
// Rows of one pass need no room for accumulators.
struct RowSums {
  float* accumulators;  // [room, lanes]
  float* sums;          // [room, unit_rows]

  __device__ __forceinline__ float start(int t, int pass) const {
    return pass == 0 ? 0.0f : accumulators[t * warp_size + threadIdx.x % warp_size];
  }

  // Keeps p, or the sum if this was the last pass.
  __device__ __forceinline__ void keep(int t, int pass, const MatrixShape& shape, float p) const {
    if (pass + 1 < shape.num_passes) {
      accumulators[t * warp_size + threadIdx.x % warp_size] = p;
      return;
    }
    const float sum = sum_up_groups(p, shape.spread);
    const LaneRow lane(shape);
    if (lane.writes) sums[t * shape.unit_rows + lane.row] = sum;
  }
};

template <class Weights>
__device__ __forceinline__ void add_super_blocks_of_rows(const Staged& staged, const MatrixShape& shape,
                                                         int pass, const SharedRows& x, const RowSums& kept) {
  constexpr bool is_aligned = Weights::alignment == 16,
                 has_run_mins = Weights::has_mins && !Weights::has_header;
  const LanePlace place(shape, pass, x.first.groups);
  const int offset = place.g * Weights::bytes;
  const uint8_t* own = staged.row<is_aligned>(place.quad * 4 + place.s) + offset;
  uint32_t codes[4][16], scales[4], mins[4];
  HeaderK header;
  if constexpr (Weights::has_header) {
    header = header_of<Weights>(own);
    exchange_scales(header.scales, place.s, scales);
  }
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const uint8_t* block = staged.row<is_aligned>(place.quad * 4 + (place.s ^ i)) + offset;
    if constexpr (!Weights::has_header) scales[i] = Weights::scales(block, place.s);
    if constexpr (has_run_mins) mins[i] = Weights::mins(block, place.s);
    Weights::unpack(block, place.s, codes[i]);
    if constexpr (!Weights::overlaps_rows) __syncwarp();
  }
  if constexpr (!Weights::has_header) header = header_of<Weights>(own);
#pragma unroll 1
  for (int t = 0; t < x.count; t++) {
    const SharedRow row = x.row(t);
    uint32_t codes_x[16];
    load_quarter<Weights>(row, place, codes_x);
    Shares shares;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      shares.products[i] = Weights::dot(codes[i], codes_x, scales[i]);
      if constexpr (has_run_mins) shares.mins[i] = RunSums(codes_x).dot(mins[i]);
    }
    kept.keep(t, pass, shape, add_super_block<Weights>(header, shares, row, place, kept.start(t, pass)));
  }
}

template <class Weights>
__device__ __forceinline__ void add_blocks_of_rows(const Staged& staged, const MatrixShape& shape, int pass,
                                                   const SharedRows& x, const RowSums& kept) {
  const int lane = threadIdx.x % warp_size, j = lane / 4;
  const uint8_t* row = staged.row<false>(lane % 4);
  const int num_blocks = min(64, shape.num_cols / 32 - pass * 64);
  uint32_t codes[8][8];
  float d[8], m[8];
#pragma unroll
  for (int g = 0; g < 8; g++) {
    const SmallPlace<Weights> place(row, g * 8 + j < num_blocks ? g * 8 + j : 0);
    place.unpack(codes[g]);
    d[g] = Weights::d(place.block);
    m[g] = minimum_of<Weights>(place.block);
  }
#pragma unroll 1
  for (int t = 0; t < x.count; t++) {
    const SharedRow own = x.row(t);
    float p = kept.start(t, pass);
#pragma unroll
    for (int g = 0; g < 8; g++) {
      if (g * 8 + j >= num_blocks) break;
      const int group = pass * 8 + g;
      uint32_t codes_x[8];
      load_block(own, group, j, codes_x);
      p = add_block<Weights>(Weights::dot(codes[g], codes_x), d[g], m[g],
                             Weights::has_mins ? sum_of_words<8>(codes_x) : 0, own.scales[group * 8 + j], p);
    }
    __syncwarp();
    kept.keep(t, pass, shape, p);
  }
}

// One pass of one unit of an integer type with all rows.
template <Types types>
__device__ __forceinline__ void add_pass_of_rows(const Staged& staged, const MatrixShape& shape, int pass,
                                                 const SharedRows& x, const RowSums& kept) {
  with_weights<types>(shape.type, [&](auto weights) {
    using Weights = decltype(weights);
    if constexpr (Weights::is_super)
      add_super_blocks_of_rows<Weights>(staged, shape, pass, x, kept);
    else
      add_blocks_of_rows<Weights>(staged, shape, pass, x, kept);
  });
}

// Calls store(t, row, place of its sum) for all sums of a unit, by one warp.
template <typename Store>
__device__ __forceinline__ void for_each_sum(const MatrixShape& shape, int count, int first_row,
                                             Store&& store) {
#pragma unroll 1
  for (int i = threadIdx.x % warp_size; i < count * shape.unit_rows; i += warp_size) {
    const int t = i / (4 << shape.spread), row = first_row + i % (4 << shape.spread);
    if (row < shape.num_rows) store(t, row, i);
  }
}

// All units of the warp. Calls finish(first row of a unit) by all lanes when its sums are in `kept`, which
// the finish leaves to the next unit.
template <Types types, typename Finish>
__device__ __forceinline__ void multiply_rows(const Work& work, const Ring& ring, Cursor ahead,
                                              const SharedRows& x, RowSums& kept, Finish&& finish) {
  const MatrixShape& shape = work.shape;
  const auto add = [&](const Staged& staged, int pass) {
    add_pass_of_rows<types>(staged, shape, pass, x, kept);
  };
  walk_units(work, ring, ahead, add, finish);
}

}  // namespace coldstream
