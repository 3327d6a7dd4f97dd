// Products of one row of activations with many weight rows, shared by the linear and the expert kernels; with
// a matrix of floats, of up to eight rows.
//
// A warp takes units of four weight rows times `1 << spread` (of one row for float types), and of each row a
// pass of columns at a time. The bytes of a pass go through a ring of shared memory that is the warp's own,
// so that loads of later passes are under way while it computes, without a barrier.
//
// In the product of an integer type the group lane / 4 of a lane says which accumulator p of
// docs/arithmetic.md it has, of one of the quads of weight rows, and s = lane % 4 which row of the quad. Of a
// super-block the four lanes of a group compute a quarter of each of the four rows, and exchange sums.
#pragma once

#include "cuda/row_codes.cuh"
#include "cuda/weight_ring.cuh"

namespace coldstream {

// Inputs of a product: one quantised row for integer types, up to T rows of floats for float types.
struct Inputs {
  SharedRow quantized;  // its codes are those of a `LoneRow` for weights in blocks of 32
  const float* values;
  int stride;             // of a row of values
  int num_rows;           // up to T; rows after the last repeat it
  const uint32_t* grids;  // of the launch's types, in shared memory
};

// Sub-block scales of the quarters that a lane computes, from those of the row that it keeps: result i
// belongs to row s ^ i of the quad. A transposition between the four lanes, two scales wide.
__device__ __forceinline__ void exchange_scales(const uint32_t (&own)[2], int s, uint32_t (&scales)[4]) {
  const uint32_t near = s & 2 ? own[1] : own[0], far = s & 2 ? own[0] : own[1];
  const uint32_t across = __shfl_xor_sync(all_lanes, far, 2);
  const uint32_t low = __byte_perm(near, across, 0x5410), high = __byte_perm(near, across, 0x7632);
  const uint32_t kept = s & 1 ? high : low;
  const uint32_t received = __shfl_xor_sync(all_lanes, s & 1 ? low : high, 1);
  scales[0] = kept;
  scales[1] = received;
  scales[2] = kept >> 16;
  scales[3] = received >> 16;
}

// The sum over the four lanes of the row that the lane keeps; part i is the lane's share of row s ^ i.
__device__ __forceinline__ int exchange_sums(const int (&part)[4]) {
  const int a = part[0] + __shfl_xor_sync(all_lanes, part[1], 1);
  return a + __shfl_xor_sync(all_lanes, part[2], 2) + __shfl_xor_sync(all_lanes, part[3], 3);
}

// Σ minimum · sum over the eight sub-blocks of a super-block.
__device__ __forceinline__ int dot_mins(const uint32_t (&mins)[2], uint4 sums) {
  int total = __dp2a_lo(int(sums.x), int(mins[0]), 0);
  total = __dp2a_hi(int(sums.y), int(mins[0]), total);
  total = __dp2a_lo(int(sums.z), int(mins[1]), total);
  return __dp2a_hi(int(sums.w), int(mins[1]), total);
}

// A lane's super-block of a pass, and the quad of weight rows that it works on.
struct LanePlace {
  int s, quad, g;
  int at;       // the super-block in the row of x, the first one if the lane has none
  bool exists;  // whether the lane has one

  __device__ __forceinline__ LanePlace(const MatrixShape& shape, int pass, int groups) {
    const int lane = threadIdx.x % warp_size, group = lane / 4,
              super_block = pass * 8 + (group & ((8 >> shape.spread) - 1));
    s = lane % 4;
    quad = group >> (3 - shape.spread);
    exists = super_block < groups;
    g = exists ? group & ((8 >> shape.spread) - 1) : 0;
    at = exists ? super_block : 0;
  }
};

// The codes of x under the lane's quarter of its super-block.
template <class Weights>
__device__ __forceinline__ void load_quarter(const SharedRow& x, const LanePlace& place,
                                             uint32_t (&codes)[16]) {
#pragma unroll
  for (int c = 0; c < 4; c++) {
    const uint4 chunk = load_chunk(x, place.at * 16 + Weights::chunk(place.s, c));
    codes[4 * c] = chunk.x, codes[4 * c + 1] = chunk.y;
    codes[4 * c + 2] = chunk.z, codes[4 * c + 3] = chunk.w;
  }
}

// The floats of a super-block, and its scales and minima if it has a header.
template <class Weights>
__device__ __forceinline__ HeaderK header_of(const uint8_t* block) {
  if constexpr (Weights::has_header) {
    return Weights::header(block);
  } else {
    const typename Weights::Near bytes = {block};
    HeaderK header;
    header.d = Weights::d(bytes);
    if constexpr (Weights::has_mins) header.dmin = Weights::dmin(bytes);
    return header;
  }
}

// What a lane has of the four rows of a quad: its shares of their products and, without a header, of the sums
// of minima.
struct Shares {
  int products[4], mins[4];
};

// What a super-block of the row that the lane keeps adds to its accumulator.
struct SuperBlockTerms {
  float by, product, by_minimum, minimums;

  template <class Weights>
  __device__ __forceinline__ float added_to(float p) const {
    const float sum = __fmaf_rn(by, product, p);
    if constexpr (Weights::has_mins) return __fmaf_rn(by_minimum, minimums, sum);
    return sum;
  }
};

template <class Weights>
__device__ __forceinline__ SuperBlockTerms terms_of(const HeaderK& header, const Shares& shares,
                                                    const SharedRow& x, const LanePlace& place) {
  const float product = float(exchange_sums(shares.products)), a = x.scales[place.at];
  SuperBlockTerms terms = {header.d * a, product, 0.0f, 0.0f};
  if constexpr (Weights::has_mins) {
    const int mins = Weights::has_header ? dot_mins(header.mins, load_16(x.sums + place.at * 16))
                                         : exchange_sums(shares.mins);
    terms.by_minimum = -(header.dmin * a), terms.minimums = float(mins);
  }
  return terms;
}

// p with the super-block of the row that the lane keeps.
template <class Weights>
__device__ __forceinline__ float add_super_block(const HeaderK& header, const Shares& shares,
                                                 const SharedRow& x, const LanePlace& place, float p) {
  const float sum = terms_of<Weights>(header, shares, x, place).template added_to<Weights>(p);
  return place.exists ? sum : p;
}

template <class Weights, class Grid>
__device__ __forceinline__ SuperBlockTerms terms_of_pass(const Staged& staged, const LanePlace& place,
                                                         const SharedRow& x, const Grid& grid) {
  constexpr bool is_aligned = Weights::alignment == 16,
                 has_run_mins = Weights::has_mins && !Weights::has_header;
  const int offset = place.g * Weights::bytes;
  uint32_t codes_x[16], scales[4];
  load_quarter<Weights>(x, place, codes_x);
  Weights::arrange(codes_x);
  const HeaderK header = header_of<Weights>(staged.row<is_aligned>(place.quad * 4 + place.s) + offset);
  if constexpr (Weights::has_header) exchange_scales(header.scales, place.s, scales);
  Shares shares;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const uint8_t* block = staged.row<is_aligned>(place.quad * 4 + (place.s ^ i)) + offset;
    if constexpr (!Weights::has_header) scales[i] = Weights::scales(block, place.s);
    shares.products[i] = Weights::product(block, place.s, codes_x, scales[i], grid);
    if constexpr (has_run_mins) shares.mins[i] = RunSums(codes_x).dot(Weights::mins(block, place.s));
    if constexpr (!Weights::overlaps_rows) __syncwarp();
  }
  return terms_of<Weights>(header, shares, x, place);
}

template <class Weights, class Grid>
__device__ __forceinline__ void add_super_blocks(const Staged& staged, const MatrixShape& shape, int pass,
                                                 const SharedRow& x, const Grid& grid, float& p) {
  const LanePlace place(shape, pass, x.groups);
  const float sum = terms_of_pass<Weights>(staged, place, x, grid).template added_to<Weights>(p);
  p = place.exists ? sum : p;
}

// The 32 codes of block `index` of a row: eight words of a block in memory from `first` on.
template <class Weights>
struct SmallPlace {
  NearBytes<Weights::alignment> block;
  int first;

  __device__ __forceinline__ SmallPlace(const uint8_t* row, int index)
      : block{row + index / parts * Weights::bytes}, first((index & (parts - 1)) * 8) {}

  __device__ __forceinline__ void unpack(uint32_t (&codes)[8]) const {
#pragma unroll
    for (int i = 0; i < 8; i++) codes[i] = Weights::shifted_word(block, first + i);
  }

 private:
  static constexpr int parts = Weights::elements / 32;
};

// p with a block of 32, whose minimum is `m` and whose product of integers `product`. `sum`: of the codes of
// x.
template <class Weights>
__device__ __forceinline__ float add_block(int product, float d, float m, int sum, float scale, float p) {
  p = __fmaf_rn(d * scale, float(product), p);
  if constexpr (Weights::has_mins) p = __fmaf_rn(m * scale, float(sum), p);
  return p;
}

template <class Weights, class B>
__device__ __forceinline__ float minimum_of(const B& block) {
  if constexpr (Weights::has_mins)
    return Weights::minimum(block);
  else
    return 0.0f;
}

// The codes of block j of group `group`.
__device__ __forceinline__ void load_block(const SharedRow& x, int group, int j, uint32_t (&codes)[8]) {
  const uint4 first = load_chunk(x, group * 16 + 2 * j), second = load_chunk(x, group * 16 + 2 * j + 1);
  codes[0] = first.x, codes[1] = first.y, codes[2] = first.z, codes[3] = first.w;
  codes[4] = second.x, codes[5] = second.y, codes[6] = second.z, codes[7] = second.w;
}

// A block of 32 in memory, `offset` bytes behind another, so that loads of several share addresses. `codes`
// is where the first block of its bytes would begin; it differs in the second half of a block of 64.
template <int alignment, int offset>
struct BytesBehind {
  NearBytes<alignment> block, codes;

  __device__ __forceinline__ uint32_t word(int at) const { return codes.word(SplitIndex{0, offset + at}); }
  __device__ __forceinline__ uint32_t two(int at) const { return block.two(offset + at); }
  __device__ __forceinline__ uint32_t byte(int at) const { return block.byte(offset + at); }
};

// A lane's blocks of a pass: block lane / 4 of one group after the other, of row lane % 4.
template <class Weights, Types types>
class LaneBlocks {
 public:
  using Row = LoneRowOf<types>;

  // `group`: of the first one in x.
  __device__ __forceinline__ LaneBlocks(const uint8_t* row, const Row& x, int group)
      : tables(Weights::tables()) {
    const int j = threadIdx.x % warp_size / 4, first = swizzled(2 * j);
    block.memory = row + j / parts * Weights::bytes;
    codes.memory = block.memory + j % parts * part_bytes;
#pragma unroll
    for (int i = 0; i < 2; i++) chunks[i] = x.codes + group * Row::code_bytes + (first ^ i) * 16;
    scales = x.scales() + group * scales_in_group + j;
  }

  // p with the block of group g from here.
  template <int g>
  __device__ __forceinline__ float add(float p) const {
    const BytesBehind<Weights::alignment, g * step> own = {block, codes};
    const typename Row::Scale of_x = scales[g * scales_in_group];
    BlockCodes x;
    load<g * Row::code_bytes>(x.natural);
    if constexpr (keeps_columns<types>)
      x.sum = of_x.sum;
    else
      x.sum = sum_of_words<8>(x.natural);
    if constexpr (Weights::interleaves_x && !interleaves_x<types>) interleave(x.natural);
    if constexpr (Weights::takes_columns) load<g * Row::code_bytes + group_elements>(x.columns);
    return add_block<Weights>(Weights::product(own, x, tables), Weights::d(own), minimum_of<Weights>(own),
                              x.sum, of_x.scale, p);
  }

  __device__ __forceinline__ void advance(int groups) {
    block.memory += groups * step, codes.memory += groups * step;
#pragma unroll
    for (int i = 0; i < 2; i++) chunks[i] += groups * Row::code_bytes;
    scales += groups * scales_in_group;
  }

 private:
  static constexpr int parts = Weights::elements / 32, part_bytes = parts == 1 ? 0 : 8;
  static constexpr int step = scales_in_group / parts * Weights::bytes;

  // Two chunks, `behind` bytes behind those of the first block.
  template <int behind>
  __device__ __forceinline__ void load(uint32_t (&words)[8]) const {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const uint4 chunk = load_16(chunks[i] + behind);
      words[4 * i] = chunk.x, words[4 * i + 1] = chunk.y;
      words[4 * i + 2] = chunk.z, words[4 * i + 3] = chunk.w;
    }
  }

  const typename Weights::Tables tables;
  NearBytes<Weights::alignment> block, codes;
  const uint8_t* chunks[2];
  const typename Row::Scale* scales;
};

template <class Weights, Types types>
__device__ __forceinline__ void add_blocks(const Staged& staged, const MatrixShape& shape, int pass,
                                           const LoneRowOf<types>& x, float& p) {
  const int lane = threadIdx.x % warp_size, j = lane / 4;
  const int pass_blocks = shape.pass_bytes / Weights::bytes * (Weights::elements / 32),
            first_block = pass * pass_blocks;
  const int num_blocks = min(pass_blocks, shape.num_cols / 32 - first_block);
  LaneBlocks<Weights, types> blocks(staged.row<false>(lane % 4), x, first_block / scales_in_group);
  int block = 0;
#pragma unroll 1
  for (; block + 32 <= num_blocks; block += 32) {
    p = blocks.template add<0>(p);
    p = blocks.template add<1>(p);
    p = blocks.template add<2>(p);
    p = blocks.template add<3>(p);
    blocks.advance(4);
  }
#pragma unroll 1
  for (block += j; block < num_blocks; block += 16) {
    p = blocks.template add<0>(p);
    if (block + 8 < num_blocks) p = blocks.template add<1>(p);
    blocks.advance(2);
  }
  __syncwarp();
}

__device__ __forceinline__ float to_float(float value) { return value; }

struct Half {
  uint16_t bits;
};
struct Bfloat16 {
  uint16_t bits;
};
__device__ __forceinline__ float to_float(Half value) { return half_to_float(value.bits); }
__device__ __forceinline__ float to_float(Bfloat16 value) { return bfloat16_to_float(value.bits); }

// A lane has accumulator lane % 16, and of the rows of x those with its half of the warp: t = 2 i + lane / 16
// in p[i].
template <typename Value, int T>
__device__ __forceinline__ void add_values(const Staged& staged, const MatrixShape& shape, int pass,
                                           const Inputs& x, float (&p)[T]) {
  constexpr int count = T == 1 ? 1 : T / 2;
  const int lane = threadIdx.x % warp_size, j = lane % 16, half = lane / 16;
  const int pass_cols = shape.pass_bytes / int(sizeof(Value)), begin = pass * pass_cols;
  const int cols = min(pass_cols, shape.num_cols - begin);
  const Value* w = reinterpret_cast<const Value*>(staged.row<false>(0)) + j;
  const float* values[count];
#pragma unroll
  for (int i = 0; i < count; i++)
    values[i] = x.values + int64_t(min(2 * i + half, x.num_rows - 1)) * x.stride + begin + j;
  constexpr int batch = T == 1 ? 16 : 8;
  const int steps = cols / 16, whole = steps / batch * batch;
  for (int first = 0; first < whole; first += batch) {
    float weights[batch], inputs[count][batch];
#pragma unroll
    for (int k = 0; k < batch; k++) {
      weights[k] = to_float(w[16 * (first + k)]);
#pragma unroll
      for (int i = 0; i < count; i++) inputs[i][k] = values[i][16 * (first + k)];
    }
#pragma unroll
    for (int k = 0; k < batch; k++) {
#pragma unroll
      for (int i = 0; i < count; i++) p[i] = __fmaf_rn(inputs[i][k], weights[k], p[i]);
    }
  }
  for (int at = 16 * whole; at + j < cols; at += 16) {
    const float weight = to_float(w[at]);
#pragma unroll
    for (int i = 0; i < count; i++) p[i] = __fmaf_rn(values[i][at], weight, p[i]);
  }
  __syncwarp();
}

// The sums of a unit of a float type: all T in every lane.
template <int T>
__device__ __forceinline__ void sum_up_values(float (&p)[T]) {
  if constexpr (T == 1) {
    p[0] = sum_of_sixteen_lanes(p[0], 1);
  } else {
    const bool is_second = threadIdx.x % warp_size >= 16;
    float sums[T];
#pragma unroll
    for (int i = 0; i < T / 2; i++) {
      const float own = sum_of_sixteen_lanes(p[i], 1), other = __shfl_xor_sync(all_lanes, own, 16);
      sums[2 * i] = is_second ? other : own;
      sums[2 * i + 1] = is_second ? own : other;
    }
#pragma unroll
    for (int t = 0; t < T; t++) p[t] = sums[t];
  }
}

// Prefetches rows of floats into the first-level cache by the whole block, a sector a thread.
__device__ __forceinline__ void warm_values(const float* values, int stride, int num_rows, int cols) {
  for (int t = 0; t < num_rows; t++)
    for (int i = threadIdx.x * 8; i < cols; i += blockDim.x * 8)
      bring_close(values + int64_t(t) * stride + i);
}

// One pass of one unit. Integer types take one row of x; products_tiles.cuh is for several.
template <Types types, int T, int grid_room>
__device__ __forceinline__ void add_pass(const Staged& staged, const MatrixShape& shape, int pass,
                                         const Inputs& x, float (&p)[T]) {
  const int type = shape.type;
  if constexpr (T == 1) {
    const auto add = [&](auto weights) {
      using Weights = decltype(weights);
      if constexpr (Weights::is_super)
        add_super_blocks<Weights>(staged, shape, pass, x.quantized,
                                  grid_of<types, Weights, grid_room>(x.grids), p[0]);
      else
        add_blocks<Weights, types>(staged, shape, pass, {x.quantized.codes, x.quantized.groups}, p[0]);
    };
    with_weights<types>(type, add);
  }
  if (is_type<types, f32>(type)) return add_values<float>(staged, shape, pass, x, p);
  if (is_type<types, f16>(type)) return add_values<Half>(staged, shape, pass, x, p);
  if (is_type<types, bf16>(type)) return add_values<Bfloat16>(staged, shape, pass, x, p);
}

// The tree of docs/arithmetic.md over the accumulators; all lanes of a weight row get the sum. If a quad has
// fewer than eight accumulators the others are 0, and adding 0 turns −0 to 0.
__device__ __forceinline__ float sum_up_groups(float sum, int spread) {
#pragma unroll
  for (int step = 0; step < 3; step++) {
    const float other = __shfl_xor_sync(all_lanes, sum, 16 >> step);
    sum += step < spread ? 0.0f : other;
  }
  return sum;
}

// The weight row of a unit whose sum a lane has after `sum_up_groups`, and whether it is the lane that writes
// it.
struct LaneRow {
  int row;
  bool writes;

  __device__ __forceinline__ explicit LaneRow(const MatrixShape& shape) {
    const int lane = threadIdx.x % warp_size, group = lane / 4;
    row = (group >> (3 - shape.spread)) * 4 + lane % 4;
    writes = (group & ((8 >> shape.spread) - 1)) == 0;
  }
};

// Walks the warp's units: add(staged, pass) for every pass of a unit, then end_unit(first row).
template <typename Add, typename EndUnit>
__device__ __forceinline__ void walk_units(const Work& work, const Ring& ring, Cursor ahead, Add&& add,
                                           EndUnit&& end_unit) {
  const MatrixShape& shape = work.shape;
  const int row_step = shape.is_copied_at_once() ? 0 : shape.row_bytes;
  int index = 0;
  for (Cursor now = {work.first_unit, 0}; now.unit < work.num_units; now.advance(work)) {
    const int first_row = now.unit * shape.unit_rows;
    const uint64_t from = reinterpret_cast<uint64_t>(work.data) + int64_t(first_row) * shape.row_bytes;
    const uint32_t address = uint32_t(from) + now.pass * shape.pass_bytes;
    ring.wait();
    add({ring.stage_at(index), address, shape.stage_stride, row_step}, now.pass);
    __syncwarp();
    ahead.start_copies(work, ring.stage_at(index));
    ahead.advance(work);
    index = ring.after(index);
    if (now.pass + 1 == shape.num_passes) end_unit(first_row);
  }
}

// All units of the warp. Calls finish(row, sums) with the sums of weight row `row` in the lanes that write
// them, and with a row out of range in the others.
template <Types types, int T, int grid_room, typename Finish>
__device__ __forceinline__ void multiply(const Work& work, const Ring& ring, Cursor ahead, const Inputs& x,
                                         Finish&& finish) {
  const MatrixShape& shape = work.shape;
  float p[T] = {};
  const auto add = [&](const Staged& staged, int pass) {
    add_pass<types, T, grid_room>(staged, shape, pass, x, p);
  };
  walk_units(work, ring, ahead, add, [&](int first_row) {
    const LaneRow lane(shape);
    if (is_float<types>(shape.type)) {
      sum_up_values(p);
    } else {
#pragma unroll
      for (int t = 0; t < T; t++) p[t] = sum_up_groups(p[t], shape.spread);
    }
    const bool is_first = threadIdx.x % warp_size == 0;
    const bool writes = is_float<types>(shape.type) ? is_first : lane.writes;
    finish(writes ? first_row + (is_float<types>(shape.type) ? 0 : lane.row) : shape.num_rows, p);
#pragma unroll
    for (int t = 0; t < T; t++) p[t] = 0;
  });
}

}  // namespace coldstream
