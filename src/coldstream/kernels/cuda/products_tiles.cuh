// Products of 2 to 64 rows of activations with many weight rows on the tensor cores, as products_gemv.cuh for
// one row by dp4a.
//
// A block takes units of sixteen weight rows times `1 << spread`, a pass of columns at a time, through one
// ring of shared memory. Its warps share a unit by accumulator: a warp has one p of docs/arithmetic.md, of
// all products of sixteen weight rows with all rows of x. The sums over the eight are taken across the warps.
// Rows of x come in slices of eight, which meet the same unpacked weights. Where two sets of eight warps
// share a block, each has half of the slices. In the integer products lane = 4 g + c has of the weights rows
// g and g + 8, of slice n row 8 n + g of x, and of the results of these rows (g, 2 c), (g, 2 c + 1), (g + 8,
// 2 c) and (g + 8, 2 c + 1).
#pragma once

#include "cuda/products_gemv.cuh"
#include "cuda/tensor_cores.cuh"

namespace coldstream {

constexpr int tile_warps = 8;  // of a set
constexpr int tile_threads = tile_warps * warp_size;
constexpr int slice_rows = 8;

__device__ __forceinline__ int tile_set() { return threadIdx.x / tile_threads; }
__device__ __forceinline__ int warp_of_set() { return threadIdx.x / warp_size % tile_warps; }

// Quantised rows in shared memory; rows of codes are 16 bytes apart from a multiple of 128.
struct TileRows {
  uint8_t* codes;
  uint8_t* sums;  // these and the scales as in SharedRow
  float* scales;
  int groups;
  int num_rows;
  int first = 0;  // row of the warp's set

  __device__ __forceinline__ int row_bytes() const { return groups * 256 + 16; }

  // Σ minimum · sum under group `at` of all rows' groups.
  __device__ __forceinline__ int add_mins(const uint32_t (&mins)[2], int at) const {
    return dot_mins(mins, load_16(sums + at * 16));
  }
};

__device__ __forceinline__ TileRows tile_rows(uint8_t* memory, int num_rows, int groups) {
  uint8_t* sums = memory + num_rows * (groups * 256 + 16);
  return {memory, sums, reinterpret_cast<float*>(sums + num_rows * groups * 16), groups, num_rows};
}

// For weights in blocks of 32.
__device__ __forceinline__ TileRows tile_block_rows(uint8_t* memory, int num_rows, int groups) {
  uint8_t* scales = memory + num_rows * (groups * 256 + 16);
  return {memory, nullptr, reinterpret_cast<float*>(scales), groups, num_rows};
}

// Quantises rows of floats, aligned to 16 bytes, for weights in blocks of 32, by the whole block; without a
// barrier.
__device__ __forceinline__ void quantize_tile_rows(const TileRows& x, const float* values, int stride,
                                                   int cols) {
  const int lane = threadIdx.x % warp_size;
  for (int i = threadIdx.x / warp_size; i < x.num_rows * x.groups; i += blockDim.x / warp_size) {
    const int t = i / x.groups, first = i % x.groups * group_elements;
    float share_of[8];
    load_share(values + int64_t(t) * stride + first, cols - first, share_of);
    const GroupShare share = quantize_group<block_elements>(share_of);
    reinterpret_cast<uint2*>(x.codes + t * x.row_bytes() + first)[lane] = share.codes;
    if (lane % 4 == 0) x.scales[i * scales_in_group + lane / 4] = share.scale;
  }
}

// Copies rows by the whole block, without a barrier. A thread starts all loads before it waits for the first.
__device__ __forceinline__ void copy_tile_rows(const TileRows& x, const int8_t* q, const float* scales,
                                               const int16_t* sums) {
  const int row_chunks = x.groups * 16, num_groups = x.num_rows * x.groups;
#pragma unroll 4
  for (int i = threadIdx.x; i < x.num_rows * row_chunks; i += blockDim.x) {
    const int t = i / row_chunks, group = min(i, num_groups - 1);
    const uint4 chunk = reinterpret_cast<const uint4*>(q)[i];
    const uint4 a = reinterpret_cast<const uint4*>(sums)[2 * group];
    const uint4 b = reinterpret_cast<const uint4*>(sums)[2 * group + 1];
    const float scale = scales[group];
    *reinterpret_cast<uint4*>(x.codes + t * 16 + i * 16) = chunk;
    if (i < num_groups) store_sums(x.sums, x.scales, i, a, b, scale);
  }
}

// A lane's part of a slice of x for one group of 256.
struct TileGroup {
  const uint8_t* codes;  // of row g, from input 4 c
  int at[2];             // the group of rows 2 c and 2 c + 1
};

__device__ __forceinline__ TileGroup tile_group(const TileRows& x, int slice, int group) {
  const int lane = threadIdx.x % warp_size, c = lane % 4, last = x.num_rows - 1;
  const int first = x.first + slice * slice_rows;
  return {x.codes + min(first + lane / 4, last) * x.row_bytes() + group * 256 + 4 * c,
          {min(first + 2 * c, last) * x.groups + group, min(first + 2 * c + 1, last) * x.groups + group}};
}

__device__ __forceinline__ uint32_t load_4(const uint8_t* p) { return *reinterpret_cast<const uint32_t*>(p); }

// sums += scale of the row · d.
__device__ __forceinline__ void add_scaled(int (&sums)[4], const int (&d)[4], int scale, int scale_8) {
  sums[0] += scale * d[0];
  sums[1] += scale * d[1];
  sums[2] += scale_8 * d[2];
  sums[3] += scale_8 * d[3];
}

// p += (d · a) · sums, one fma each; d and d_8 of weight rows g and g + 8, a of rows 2 c and 2 c + 1 of x.
__device__ __forceinline__ void add_products(float (&p)[4], const int (&sums)[4], float d, float d_8, float a,
                                             float a_1) {
  p[0] = __fmaf_rn(d * a, float(sums[0]), p[0]);
  p[1] = __fmaf_rn(d * a_1, float(sums[1]), p[1]);
  p[2] = __fmaf_rn(d_8 * a, float(sums[2]), p[2]);
  p[3] = __fmaf_rn(d_8 * a_1, float(sums[3]), p[3]);
}

// Q4_K and Q5_K: two sub-blocks share 32 bytes of low bits; sub-block j has bit j of the bytes of high bits.
template <bool has_fifth_bit, int slices, typename Rows>
__device__ __forceinline__ void add_block_k(const uint8_t* block, const uint8_t* block_8, const Rows& x,
                                            int group, float (&p)[slices][4]) {
  const int c = threadIdx.x % 4;
  const HeaderK header = unpack_header_k(load_16(block)), header_8 = unpack_header_k(load_16(block_8));
  uint32_t high[4] = {0, 0, 0, 0};
  if constexpr (has_fifth_bit) {
    high[0] = load_4(block + 16 + 4 * c), high[1] = load_4(block_8 + 16 + 4 * c);
    high[2] = load_4(block + 32 + 4 * c), high[3] = load_4(block_8 + 32 + 4 * c);
  }
  const int low_at = (has_fifth_bit ? 48 : 16) + 4 * c;
  TileGroup inputs[slices];
#pragma unroll
  for (int n = 0; n < slices; n++) inputs[n] = tile_group(x, n, group);
  int sums[slices][4] = {};
#pragma unroll
  for (int j = 0; j < 8; j += 2) {
    const uint32_t words[4] = {load_4(block + low_at + 16 * j), load_4(block_8 + low_at + 16 * j),
                               load_4(block + low_at + 16 * j + 16), load_4(block_8 + low_at + 16 * j + 16)};
#pragma unroll
    for (int k = j; k < j + 2; k++) {
      uint32_t a[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        a[i] = (words[i] >> (k % 2 * 4)) & 0x0f0f0f0f;
        if constexpr (has_fifth_bit) a[i] |= (k < 4 ? high[i] << (4 - k) : high[i] >> (k - 4)) & 0x10101010;
      }
      const int scale = int(byte_of(header.scales[k / 4], k % 4)),
                scale_8 = int(byte_of(header_8.scales[k / 4], k % 4));
#pragma unroll
      for (int n = 0; n < slices; n++) {
        int d[4];
        multiply_bytes(d, a, load_4(inputs[n].codes + 32 * k), load_4(inputs[n].codes + 32 * k + 16), 0);
        add_scaled(sums[n], d, scale, scale_8);
      }
    }
  }
#pragma unroll
  for (int n = 0; n < slices; n++) {
    const TileGroup& own = inputs[n];
    const float a = x.scales[own.at[0]], a_1 = x.scales[own.at[1]];
    add_products(p[n], sums[n], header.d, header_8.d, a, a_1);
    const int mins[4] = {x.add_mins(header.mins, own.at[0]), x.add_mins(header.mins, own.at[1]),
                         x.add_mins(header_8.mins, own.at[0]), x.add_mins(header_8.mins, own.at[1])};
    add_products(p[n], mins, -header.dmin, -header_8.dmin, a, a_1);
  }
}

// The super-blocks of weight rows g and g + 8.
template <class Weights>
using TwoBlocks = typename Weights::Near[2];

// sums += I with sixteen sub-blocks of 16, a product each.
template <class Weights, int slices>
__device__ __forceinline__ void add_sixteen(const TwoBlocks<Weights>& blocks,
                                            const TileGroup (&inputs)[slices], int (&sums)[slices][4]) {
  const int c = threadIdx.x % 4;
  uint32_t scales[2][4];
#pragma unroll
  for (int r = 0; r < 2; r++)
#pragma unroll
    for (int q = 0; q < 4; q++) scales[r][q] = Weights::scale_word(blocks[r], q);
#pragma unroll
  for (int part = 0; part < 4; part++) {
#pragma unroll
    for (int run = 0; run < 4; run++) {
      const int j = Weights::chunk(part, run);
      uint32_t a[2];
      int scale[2];
#pragma unroll
      for (int r = 0; r < 2; r++) {
        a[r] = Weights::shifted_word(blocks[r], SplitIndex{c, 4 * j});
        scale[r] = int8_t(byte_of(scales[r][j / 4], j % 4));
      }
#pragma unroll
      for (int n = 0; n < slices; n++) {
        int d[4];
        multiply_16_bytes(d, a[0], a[1], load_4(inputs[n].codes + 16 * j));
        add_scaled(sums[n], d, scale[0], scale[1]);
      }
    }
  }
}

// The same with eight sub-blocks of 32.
template <class Weights, int slices>
__device__ __forceinline__ void add_eight(const TwoBlocks<Weights>& blocks, const TileGroup (&inputs)[slices],
                                          int (&sums)[slices][4]) {
  const int c = threadIdx.x % 4;
#pragma unroll
  for (int j = 0; j < 8; j++) {
    uint32_t a[4];
#pragma unroll
    for (int i = 0; i < 4; i++) a[i] = Weights::shifted_word(blocks[i % 2], SplitIndex{c, 8 * j + i / 2 * 4});
    const int scale = Weights::scale(blocks[0], j), scale_8 = Weights::scale(blocks[1], j);
#pragma unroll
    for (int n = 0; n < slices; n++) {
      int d[4];
      multiply_bytes(d, a, load_4(inputs[n].codes + 32 * j), load_4(inputs[n].codes + 32 * j + 16), 0);
      add_scaled(sums[n], d, scale, scale_8);
    }
  }
}

// The same with scales that are factors of the codes; mins += M, whose factors are minima.
template <class Weights, int slices>
__device__ __forceinline__ void add_folded(const TwoBlocks<Weights>& blocks,
                                           const TileGroup (&inputs)[slices], int (&sums)[slices][4],
                                           int (&mins)[slices][4]) {
  const int c = threadIdx.x % 4;
#pragma unroll
  for (int j = 0; j < 8; j++) {
    uint32_t a[4], of_mins[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int run = 2 * j + i / 2;
      a[i] = Weights::folded_word(blocks[i % 2], SplitIndex{c, 4 * run});
      if constexpr (Weights::has_mins)
        of_mins[i] = byte_of(Weights::min_word(blocks[i % 2], run / 4), run % 4) * four_ones;
    }
#pragma unroll
    for (int n = 0; n < slices; n++) {
      const uint32_t first = load_4(inputs[n].codes + 32 * j), second = load_4(inputs[n].codes + 32 * j + 16);
      add_product(sums[n], a, first, second);
      if constexpr (Weights::has_mins) add_product(mins[n], of_mins, first, second);
    }
  }
}

// A super-block of a type without a header.
template <class Weights, int slices>
__device__ __forceinline__ void add_super(const uint8_t* block, const uint8_t* block_8, const TileRows& x,
                                          int group, float (&p)[slices][4]) {
  const TwoBlocks<Weights> blocks = {{block}, {block_8}};
  TileGroup inputs[slices];
#pragma unroll
  for (int n = 0; n < slices; n++) inputs[n] = tile_group(x, n, group);
  int sums[slices][4] = {}, mins[slices][4] = {};
  if constexpr (Weights::folds_scales)
    add_folded<Weights>(blocks, inputs, sums, mins);
  else if constexpr (Weights::sub_blocks == 16)
    add_sixteen<Weights>(blocks, inputs, sums);
  else
    add_eight<Weights>(blocks, inputs, sums);
  const float d = Weights::d(blocks[0]), d_8 = Weights::d(blocks[1]);
#pragma unroll
  for (int n = 0; n < slices; n++) {
    const float a = x.scales[inputs[n].at[0]], a_1 = x.scales[inputs[n].at[1]];
#pragma unroll
    for (int i = 0; i < 4; i++) sums[n][i] = of_folded<Weights>(sums[n][i]) >> Weights::shift;
    add_products(p[n], sums[n], d, d_8, a, a_1);
    if constexpr (Weights::has_mins)
      add_products(p[n], mins[n], -Weights::dmin(blocks[0]), -Weights::dmin(blocks[1]), a, a_1);
  }
}

// Blocks of 32 number `index` of the rows, block j of a group.
template <class Weights, int slices>
__device__ __forceinline__ void add_block_32(const uint8_t* row, const uint8_t* row_8, int index,
                                             const TileRows& x, int group, int j, float (&p)[slices][4]) {
  const int c = threadIdx.x % 4;
  const SmallPlace<Weights> place(row, index), place_8(row_8, index);
  const uint32_t a[4] = {Weights::shifted_word(place.block, place.first + c),
                         Weights::shifted_word(place_8.block, place.first + c),
                         Weights::shifted_word(place.block, place.first + 4 + c),
                         Weights::shifted_word(place_8.block, place.first + 4 + c)};
  const float d = Weights::d(place.block), d_8 = Weights::d(place_8.block);
#pragma unroll
  for (int n = 0; n < slices; n++) {
    const TileGroup own = tile_group(x, n, group);
    const uint32_t first = load_4(own.codes + 32 * j), second = load_4(own.codes + 32 * j + 16);
    int sums[4];
    multiply_bytes(sums, a, first, second, 0);
#pragma unroll
    for (int i = 0; i < 4; i++) sums[i] >>= Weights::shift;
    const float* scales = x.scales + j;
    const float scale = scales[own.at[0] * scales_in_group], scale_1 = scales[own.at[1] * scales_in_group];
    add_products(p[n], sums, d, d_8, scale, scale_1);
    if constexpr (Weights::has_mins) {
      const uint32_t ones[4] = {four_ones, four_ones, four_ones, four_ones};
      multiply_bytes(sums, ones, first, second, 0);
      add_products(p[n], sums, Weights::minimum(place.block), Weights::minimum(place_8.block), scale,
                   scale_1);
    }
  }
}

template <class Weights, int slices>
__device__ __forceinline__ void add_blocks_32(const uint8_t* row, const uint8_t* row_8, int pass,
                                              int num_blocks, const TileRows& x, float (&p)[slices][4]) {
  const int j = warp_of_set();
  for (int g = 0; g < 8; g++) {
    const int group = pass * 8 + g;
    if (group * 8 + j >= num_blocks) return;
    add_block_32<Weights>(row, row_8, g * 8 + j, x, group, j, p);
  }
}

// The super-blocks of a group, `index` in the rows.
template <class Weights, int slices, typename Rows>
__device__ __forceinline__ void add_super_block_of(const uint8_t* row, const uint8_t* row_8, int index,
                                                   const Rows& x, int group, float (&p)[slices][4]) {
  const uint8_t *block = row + index * Weights::bytes, *block_8 = row_8 + index * Weights::bytes;
  if constexpr (Weights::has_header)
    add_block_k<Weights::type == q5_k>(block, block_8, x, group, p);
  else
    add_super<Weights>(block, block_8, x, group, p);
}

// One pass of one unit into the warp's accumulators.
template <Types types, int slices>
__device__ __forceinline__ void add_tile(const Staged& staged, const MatrixShape& shape, int pass,
                                         const TileRows& x, float (&p)[slices][4]) {
  const int warp = warp_of_set(), g = warp & ((8 >> shape.spread) - 1), group = pass * 8 + g;
  const int first_row = (warp >> (3 - shape.spread)) * 16 + threadIdx.x % warp_size / 4;
  const uint8_t *row = staged.row<false>(first_row), *row_8 = staged.row<false>(first_row + 8);
  with_weights<types>(shape.type, [&](auto weights) {
    using Weights = decltype(weights);
    if constexpr (!Weights::is_super)
      add_blocks_32<Weights>(row, row_8, pass, shape.num_cols / 32, x, p);
    else if (group < x.groups)
      add_super_block_of<Weights>(row, row_8, g, x, group, p);
  });
}

// Starts the copies of one pass of a unit by the whole block, a row by each warp in turn.
__device__ __forceinline__ void stage_tile(uint8_t* memory, const MatrixShape& shape, const uint8_t* data,
                                           int unit, int pass) {
  const int first_row = unit * shape.unit_rows, rows = min(shape.unit_rows, shape.num_rows - first_row);
  const int skipped = pass * shape.pass_bytes, bytes = min(shape.pass_bytes, shape.row_bytes - skipped);
  const uint8_t* first = data + int64_t(first_row) * shape.row_bytes + skipped;
  for (int r = threadIdx.x / warp_size; r < rows; r += blockDim.x / warp_size) {
    const uint8_t* row = first + r * shape.row_bytes;
    const int before = reinterpret_cast<uint64_t>(row) & 15;
#pragma unroll 3
    for (int i = threadIdx.x % warp_size * 16; i < bytes + before; i += warp_size * 16)
      copy_async_16(memory + r * shape.stage_stride + i, row - before + i);
  }
}

__device__ __forceinline__ void start_tile_copies(const Work& work, Cursor at, uint8_t* memory) {
  if (at.unit < work.num_units) stage_tile(memory, work.shape, work.data, at.unit, at.pass);
  commit_copies();
}

__device__ __forceinline__ Cursor fill_tile_ring(const Work& work, const Ring& ring) {
  Cursor ahead = {work.first_unit, 0};
  for (int i = 0; i < ring.stages; i++) {
    start_tile_copies(work, ahead, ring.stage_at(i));
    ahead.advance(work);
  }
  return ahead;
}

// The thread's accumulators of a slice in [slices, warps, lanes].
__device__ __forceinline__ float4& partial_of(float* partial, int slice) {
  return reinterpret_cast<float4*>(partial)[slice * tile_threads + threadIdx.x % tile_threads];
}

// The sums of a unit from the accumulators of its warps, [slices, warps, lanes, 4]: finish(row of the matrix,
// t, sum).
template <int slices, typename Finish>
__device__ __forceinline__ void finish_tile(const float* partial, const MatrixShape& shape, int first_row,
                                            Finish&& finish) {
  const int width = 8 >> shape.spread, slice_sums = slice_rows * shape.unit_rows;
  for (int at = threadIdx.x; at < slices * slice_sums; at += blockDim.x) {
    const int slice = at / slice_sums, i = at % slice_sums, part = i / 128, lane = i % 128 / 4,
              element = i % 4;
    const float* from = partial + (slice * tile_warps + part * width) * 128 + i % 128;
    float p[8];
#pragma unroll
    for (int j = 0; j < 8; j++) p[j] = j < width ? from[j * 128] : 0.0f;
    finish(first_row + part * 16 + lane / 4 + element / 2 * 8,
           slice * slice_rows + lane % 4 * 2 + element % 2, sum_of_eight(p));
  }
}

// All units of the block, whose warps have `slices` each.
template <Types types, int slices, int sets, typename Finish>
__device__ __forceinline__ void multiply_tiles_skinny(const Work& work, const Ring& ring, Cursor ahead,
                                                      TileRows x, float* partial, Finish&& finish) {
  x.first = tile_set() * slices * slice_rows;
  const MatrixShape& shape = work.shape;
  float p[slices][4] = {};
  int index = 0;
  for (Cursor now = {work.first_unit, 0}; now.unit < work.num_units; now.advance(work)) {
    const int first_row = now.unit * shape.unit_rows;
    const uint64_t from = reinterpret_cast<uint64_t>(work.data) + int64_t(first_row) * shape.row_bytes;
    const uint32_t address = uint32_t(from) + now.pass * shape.pass_bytes;
    ring.wait();
    __syncthreads();
    add_tile<types>({ring.stage_at(index), address, shape.stage_stride, shape.row_bytes}, shape, now.pass, x,
                    p);
    const bool is_last = now.pass + 1 == shape.num_passes;
    if (is_last) {
#pragma unroll
      for (int n = 0; n < slices; n++) {
        partial_of(partial, tile_set() * slices + n) = {p[n][0], p[n][1], p[n][2], p[n][3]};
        p[n][0] = p[n][1] = p[n][2] = p[n][3] = 0;
      }
    }
    __syncthreads();
    start_tile_copies(work, ahead, ring.stage_at(index));
    ahead.advance(work);
    index = ring.after(index);
    if (is_last) finish_tile<slices * sets>(partial, shape, first_row, finish);
  }
}

}  // namespace coldstream
