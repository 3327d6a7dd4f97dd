// Products of up to 64 rows of activations as in products_tiles.cuh, for any number of columns: a stage of
// the ring has a part of the columns of a unit and of all rows of activations, so that a block need not hold
// whole rows.
//
// A unit has 32 weight rows, and four warps for each sixteen of them. A warp has two p of docs/arithmetic.md,
// four apart. Super-blocks of one p are taken before those of the other, blocks of 32 side by side; both
// ascend.
#pragma once

#include "cuda/products_tiles.cuh"

namespace coldstream {

constexpr int part_groups = 4;  // of 256 columns
constexpr int part_width = 4;   // warps of sixteen weight rows
constexpr int part_unit_rows = tile_warps / part_width * 16;
constexpr int part_code_bytes = part_groups * group_elements + 16;  // from row to row, as in TileRows
// Of a row and group: sums of 16 codes or scales of 32 inputs.
constexpr int part_head_bytes = 32;
constexpr int part_row_bytes = part_code_bytes + part_groups * (part_head_bytes + int(sizeof(float)));

// A part of quantised rows in shared memory, with sums of 16 codes.
struct PartRows : TileRows {
  __device__ __forceinline__ int add_mins(const uint32_t (&mins)[2], int at) const {
    const uint4 low = load_16(sums + at * part_head_bytes), high = load_16(sums + at * part_head_bytes + 16);
    const uint32_t words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    int total = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int twice = int(__byte_perm(mins[i / 2], 0, i % 2 ? 0x3322 : 0x1100));
      total = __dp2a_lo(int(words[2 * i]), twice, total);
      total = __dp2a_hi(int(words[2 * i + 1]), twice, total);
    }
    return total;
  }
};

// Quantised rows in global memory.
struct PartSource {
  const int8_t* codes;   // [rows, groups · 256]
  const uint8_t* heads;  // [rows, groups], part_head_bytes each
  const float* scales;   // [rows, groups]; null for blocks of 32, whose scales are the heads
  int groups;
  int num_rows;
};

__device__ __forceinline__ PartRows part_rows(uint8_t* memory, const PartSource& x) {
  uint8_t* heads = memory + x.num_rows * part_code_bytes;
  uint8_t* behind = heads + x.num_rows * part_groups * part_head_bytes;
  return {{memory, heads, reinterpret_cast<float*>(x.scales ? behind : heads), part_groups, x.num_rows}};
}

// Starts the copies of part `pass` of all rows by the whole block.
__device__ __forceinline__ void copy_part(uint8_t* memory, const PartSource& x, int pass) {
  const PartRows to = part_rows(memory, x);
  const int first = pass * part_groups, count = min(part_groups, x.groups - first);
#pragma unroll 4
  for (int i = threadIdx.x; i < x.num_rows * part_groups * 16; i += blockDim.x) {
    const int t = i / (part_groups * 16), k = i % (part_groups * 16);
    const int8_t* from = x.codes + (int64_t(t) * x.groups + first) * group_elements + k * 16;
    if (k < count * 16) copy_async_16(to.codes + t * part_code_bytes + k * 16, from);
  }
  for (int i = threadIdx.x; i < x.num_rows * part_groups * 2; i += blockDim.x) {
    const int t = i / (part_groups * 2), k = i % (part_groups * 2);
    const uint8_t* from = x.heads + (int64_t(t) * x.groups + first) * part_head_bytes + k * 16;
    if (k < count * 2) copy_async_16(to.sums + t * part_groups * part_head_bytes + k * 16, from);
  }
  if (x.scales == nullptr) return;
  for (int i = threadIdx.x; i < x.num_rows * part_groups; i += blockDim.x) {
    const int t = i / part_groups, k = i % part_groups;
    copy_word_if_below(count, k, shared_address(to.scales + i), x.scales + int64_t(t) * x.groups + first + k);
  }
}

// The order of passes: super-blocks of the first accumulators lie in the even ones.
struct PartOrder {
  int num_passes;
  bool is_block;

  __device__ __forceinline__ int num_even() const { return (num_passes + 1) / 2; }
  __device__ __forceinline__ int pass(int i) const {
    if (is_block) return i;
    return i < num_even() ? 2 * i : 2 * (i - num_even()) + 1;
  }
  // Whether the warps' first accumulators are complete behind pass i, and others follow.
  __device__ __forceinline__ bool is_middle(int i) const {
    return !is_block && i + 1 == num_even() && i + 1 < num_passes;
  }
};

// One pass of one unit: super-blocks into p, blocks of 32 into p and into q, the accumulators four further.
template <Types types, int slices>
__device__ __forceinline__ void add_part(const Staged& staged, const MatrixShape& shape, int pass,
                                         int num_groups, const PartRows& x, float (&p)[slices][4],
                                         float (&q)[slices][4]) {
  const int warp = warp_of_set(), g = warp % part_width;
  const int first_row = warp / part_width * 16 + threadIdx.x % warp_size / 4;
  const uint8_t *row = staged.row<false>(first_row), *row_8 = staged.row<false>(first_row + 8);
  with_weights<types>(shape.type, [&](auto weights) {
    using Weights = decltype(weights);
    if constexpr (Weights::is_super) {
      if (pass * part_groups + g < num_groups) add_super_block_of<Weights>(row, row_8, g, x, g, p);
    } else {
      for (int i = 0; i < part_groups; i++) {
        const int first = (pass * part_groups + i) * 8, num_blocks = shape.num_cols / 32, j = i * 8 + g;
        if (first + g < num_blocks) add_block_32<Weights>(row, row_8, j, x, i, g, p);
        if (first + g + 4 < num_blocks) add_block_32<Weights>(row, row_8, j + 4, x, i, g + 4, q);
      }
    }
  });
}

// As `finish_tile`, of sums over the pairs of accumulators four apart.
template <int slices, typename Finish>
__device__ __forceinline__ void finish_part(const float* partial, int first_row, Finish&& finish) {
  constexpr int slice_sums = slice_rows * part_unit_rows;
  for (int at = threadIdx.x; at < slices * slice_sums; at += blockDim.x) {
    const int slice = at / slice_sums, i = at % slice_sums, part = i / 128, lane = i % 128 / 4,
              element = i % 4;
    const float* from = partial + (slice * tile_warps + part * part_width) * 128 + i % 128;
    const float sum = (from[0] + from[2 * 128]) + (from[128] + from[3 * 128]);
    finish(first_row + part * 16 + lane / 4 + element / 2 * 8,
           slice * slice_rows + lane % 4 * 2 + element % 2, sum);
  }
}

// A stage has the weights of a pass and then, from `rows_at` on, the part of the rows. All sets of the block.
template <Types types, int slices, int sets, typename Source, typename Finish>
__device__ __forceinline__ void multiply_parts(const Work& work, const Ring& ring, int rows_at,
                                               float* partial, Source&& source, Finish&& finish) {
  const MatrixShape& shape = work.shape;
  const PartOrder order = {shape.num_passes, is_block_type<types>(shape.type)};
  Cursor ahead = {work.first_unit, 0};
  for (int i = 0; i < ring.stages; i++) {
    if (ahead.unit < work.num_units)
      stage_tile(ring.stage_at(i), shape, work.data, ahead.unit, order.pass(ahead.pass));
    ahead.advance(work);
  }
  wait_for_previous_grid();
  const PartSource x = source();
  ahead = {work.first_unit, 0};
  for (int i = 0; i < ring.stages; i++) {
    if (ahead.unit < work.num_units) copy_part(ring.stage_at(i) + rows_at, x, order.pass(ahead.pass));
    commit_copies();
    ahead.advance(work);
  }
  float p[slices][4] = {}, q[slices][4] = {};
  int index = 0;
  for (Cursor now = {work.first_unit, 0}; now.unit < work.num_units; now.advance(work)) {
    const int first_row = now.unit * shape.unit_rows, pass = order.pass(now.pass);
    const uint64_t from = reinterpret_cast<uint64_t>(work.data) + int64_t(first_row) * shape.row_bytes;
    const Staged staged = {ring.stage_at(index), uint32_t(from) + pass * shape.pass_bytes, shape.stage_stride,
                           shape.row_bytes};
    PartRows rows = part_rows(ring.stage_at(index) + rows_at, x);
    rows.first = tile_set() * slices * slice_rows;
    ring.wait();
    __syncthreads();
    add_part<types>(staged, shape, pass, x.groups, rows, p, q);
    const bool is_last = now.pass + 1 == shape.num_passes,
               has_middle = !order.is_block && shape.num_passes > 1;
    if (is_last || order.is_middle(now.pass)) {
#pragma unroll
      for (int n = 0; n < slices; n++) {
        float4& kept = partial_of(partial, tile_set() * slices + n);
        // The thread has kept its first accumulators there itself.
        if (is_last && has_middle) q[n][0] = kept.x, q[n][1] = kept.y, q[n][2] = kept.z, q[n][3] = kept.w;
        if (is_last) p[n][0] += q[n][0], p[n][1] += q[n][1], p[n][2] += q[n][2], p[n][3] += q[n][3];
        kept = {p[n][0], p[n][1], p[n][2], p[n][3]};
        p[n][0] = p[n][1] = p[n][2] = p[n][3] = 0;
        q[n][0] = q[n][1] = q[n][2] = q[n][3] = 0;
      }
    }
    __syncthreads();
    if (ahead.unit < work.num_units) {
      stage_tile(ring.stage_at(index), shape, work.data, ahead.unit, order.pass(ahead.pass));
      copy_part(ring.stage_at(index) + rows_at, x, order.pass(ahead.pass));
    }
    commit_copies();
    ahead.advance(work);
    index = ring.after(index);
    if (is_last) finish_part<slices * sets>(partial, first_row, finish);
  }
}

}  // namespace coldstream
