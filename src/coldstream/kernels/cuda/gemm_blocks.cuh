// Products with blocks of 32 or 64 by single warps, straight from the bytes that were copied. Each block of
// 32 has a product of its own, whose sums become floats and are scaled before the next ones are added.
#pragma once

#include "cuda/gemm_gather.cuh"
#include "cuda/gemm_sums.cuh"

namespace coldstream::gemm {

// A block whose first byte is `before` that of an aligned word: of many blocks with the same `before`, only
// addresses of words differ.
template <int alignment>
struct ShiftedBytes {
  const uint8_t* words;
  uint32_t before;

  __device__ __forceinline__ uint32_t word(int at) const { return word(SplitIndex{0, at}); }

  // `own` is a multiple of 4.
  __device__ __forceinline__ uint32_t word(SplitIndex at) const {
    const uint32_t place = before + at.constant % 4;
    const uint8_t* from = words + at.own + (place & 4) + at.constant / 4 * 4;
    const uint32_t* two = reinterpret_cast<const uint32_t*>(from);
    if constexpr (alignment >= 4)
      return two[0];
    else
      return __funnelshift_r(two[0], two[1], place * 8);
  }
  __device__ __forceinline__ uint32_t two(int at) const {
    return *reinterpret_cast<const uint16_t*>(words + before + at);
  }
  __device__ __forceinline__ uint32_t byte(int at) const { return words[before + at]; }
};

// One block of 32 of a lane's rows g and g + 8: registers of A, and floats. Shifted codes are times 2^shift.
template <class Weights, bool shifted>
struct BlockRows {
  uint32_t a[4];
  float d[2], minima[2];

  // `first_word` is the lane's first word of the block's codes.
  __device__ __forceinline__ BlockRows(const ShiftedBytes<Weights::alignment> (&blocks)[2], int first_word) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const auto& block = blocks[h];
      if constexpr (shifted) {
        a[h] = Weights::shifted_word(block, SplitIndex{first_word, 0});
        a[2 + h] = Weights::shifted_word(block, SplitIndex{first_word, 4});
      } else {
        Weights::two_words(block, SplitIndex{first_word, 0}, a[h], a[2 + h]);
      }
      d[h] = Weights::d(block);
      if constexpr (Weights::has_mins) minima[h] = Weights::minimum(block);
    }
  }

  // Adds `sums` of products with the activation rows 2t and 2t + 1 of eight, whose scales and sums of codes
  // are these.
  __device__ __forceinline__ void add(const float (&sums)[4], float2 scales, float2 code_sums,
                                      float (&p)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float scale = i % 2 ? scales.y : scales.x;
      p[i] = __fmaf_rn(d[i / 2] * scale, sums[i], p[i]);
      if constexpr (Weights::has_mins)
        p[i] = __fmaf_rn(minima[i / 2] * scale, i % 2 ? code_sums.y : code_sums.x, p[i]);
    }
  }
};

// A stage as a lane sees it.
template <class T>
struct BlockStage {
  using Weights = typename T::Weights;
  using Bytes = ShiftedBytes<Weights::alignment>;
  // From one block of a leaf to the next, begins of blocks in their windows move by so much.
  static constexpr int block_step = block_begin<Weights>(4) % copy_bytes;
  static_assert(block_step % 4 == 0);

  const uint8_t* rows[2];
  int offsets[2];        // of the rows in their windows
  const uint8_t* words;  // the lane's of the first block
  int t;

  __device__ __forceinline__ BlockStage(const Fragment& at, const uint8_t* stage)
      : words(stage + 4 * word_place<T>(at.column * 8 + 2 * at.t)), t(at.t) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int row = at.row + 8 * h + at.g;
      rows[h] = stage + T::weights_at + row * T::weight_pitch;
      offsets[h] = reinterpret_cast<const int*>(stage + T::offsets_at)[row];
    }
  }

  __device__ __forceinline__ int first_word(int block) const {
    return t + block % (Weights::elements / small_block) * 8;
  }
  __device__ __forceinline__ uint32_t begin(int h, int block) const {
    return uint32_t(offsets[h] + block_begin<Weights>(block)) % copy_bytes;
  }
  // Blocks of entry `entry`, `number` after one that begins there in its windows, even or odd as `odd` says.
  template <bool shifted, int odd>
  __device__ __forceinline__ BlockRows<Weights, shifted> load(int entry, const uint32_t (&begins)[2],
                                                              int number, int first_word) const {
    Bytes blocks[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const uint32_t before = begins[h] % 4;
      uint32_t aligned = begins[h] - before;
      if constexpr (block_step == 8)
        aligned ^= 8 * odd;
      else if constexpr (block_step > 0)
        aligned = (aligned + number * block_step) % copy_bytes;
      blocks[h] = {rows[h] + aligned + entry * block_room<Weights>, before};
    }
    return {blocks, first_word};
  }
  __device__ __forceinline__ const uint8_t* words_of(int entry) const {
    return words + entry * T::tokens * 4;
  }
};

// Adds entry `entry` of a stage, whose blocks are `rows`, by products of single warps.
template <class T, int nt, class Rows>
__device__ __forceinline__ void add_entry(const BlockStage<T>& stage, uint32_t codes, int entry,
                                          const Rows& rows, float (&p)[T::nt][4]) {
  using Weights = typename T::Weights;
  // The sums begin at 1.5 * 2^(23 - shift) as a float, and become floats by one subtraction.
  constexpr int first_bits = magic_bits - (Weights::shift << 23);
  constexpr float first_float = magic / (1 << Weights::shift);
  const uint8_t* words = stage.words_of(entry);
#pragma unroll
  for (int n = 0; n < nt; n++) {
    uint32_t b[2];
    load_two_matrices(b, codes + n * T::columns * 8 * code_pitch + small_block * entry);
    int bits[4];
    multiply_bytes(bits, rows.a, b[0], b[1], first_bits);
    float sums[4];
#pragma unroll
    for (int i = 0; i < 4; i++) sums[i] = __int_as_float(bits[i]) - first_float;
    const uint8_t* found = words + 8 * n * T::columns;
    float2 code_sums;
    if constexpr (Weights::has_mins) code_sums = *reinterpret_cast<const float2*>(found + T::sums_at);
    rows.add(sums, *reinterpret_cast<const float2*>(found + T::scales_at), code_sums, p[n]);
  }
}

// Adds entries `entry` to end - 1 of a stage, which are of one leaf and the first of which is `block`.
template <class T, int nt>
__device__ __forceinline__ void add_run(const BlockStage<T>& stage, uint32_t codes, int entry, int end,
                                        int block, float (&p)[T::num_sums][T::mt][T::nt][4]) {
  const int first = entry, first_word = stage.first_word(block);
  const uint32_t begins[2] = {stage.begin(0, block), stage.begin(1, block)};
#pragma unroll 1
  for (; entry < end; entry += 2) {
    const int number = entry - first;
    add_entry<T, nt>(stage, codes, entry, stage.template load<true, 0>(entry, begins, number, first_word),
                     p[0][0]);
    if (entry + 1 < end)
      add_entry<T, nt>(stage, codes, entry + 1,
                       stage.template load<true, 1>(entry + 1, begins, number + 1, first_word), p[1][0]);
  }
}

// Where the lane's products find the activations' codes of a stage.
template <class T>
__device__ __forceinline__ uint32_t codes_of(const Fragment& at, const uint8_t* stage) {
  return shared_address(stage + T::codes_at) + (at.column * 8 + at.lane % 8) * code_pitch +
         at.lane / 8 % 2 * 16;
}

// Adds the blocks of a stage from `position` on, which are in the order of memory.
template <class T, int nt>
__device__ __forceinline__ void add_eight(int num_blocks, const Fragment& at, const uint8_t* stage,
                                          BlockWalk& position, Accumulators<T>& sums) {
  const BlockStage<T> blocks(at, stage);
  const uint32_t codes = codes_of<T>(at, stage);
#pragma unroll
  for (int entry = 0; entry < stage_blocks; entry++) {
    const int block = position.group + entry;
    if (block >= num_blocks) break;
    const uint32_t begins[2] = {blocks.begin(0, block), blocks.begin(1, block)};
    add_entry<T, nt>(blocks, codes, entry,
                     blocks.template load<true, 0>(entry, begins, 0, blocks.first_word(block)),
                     sums.p[entry][0]);
  }
  position = position.next_eight(num_blocks);
  if (position.leaf == 8) sums.close_eight();
}

// The same in the order of the tree: also closes the leaves that end in the stage.
template <class T, int nt>
__device__ __forceinline__ void add_leaves(int num_blocks, const Fragment& at, const uint8_t* stage,
                                           BlockWalk& position, Accumulators<T>& sums) {
  const BlockStage<T> blocks(at, stage);
  const uint32_t codes = codes_of<T>(at, stage);
  for (int entry = 0; entry < stage_blocks && position.leaf < 8;) {
    const int count = min(position.rest_of_leaf(num_blocks), stage_blocks - entry);
    add_run<T, nt>(blocks, codes, entry, entry + count, position.group, sums.p);
    entry += round_up(count, 2);
    const BlockWalk following = position.after(count, num_blocks);
    if (following.leaf != position.leaf) sums.template close<nt>(position.leaf, following.leaf);
    position = following;
  }
}

template <class T, int nt>
__device__ __forceinline__ void add_blocks(int num_blocks, const Fragment& at, const uint8_t* stage,
                                           BlockWalk& position, Accumulators<T>& sums) {
  if constexpr (T::num_sums == 8)
    add_eight<T, nt>(num_blocks, at, stage, position, sums);
  else
    add_leaves<T, nt>(num_blocks, at, stage, position, sums);
}

// The narrowest set of products that covers `count` activation rows.
template <class T>
__device__ __forceinline__ void add_blocks_of(int count, int num_blocks, const Fragment& at,
                                              const uint8_t* stage, BlockWalk& position,
                                              Accumulators<T>& sums) {
  if (count <= 8 * T::columns)
    add_blocks<T, 1>(num_blocks, at, stage, position, sums);
  else if (T::nt == 2 || count <= 16 * T::columns)
    add_blocks<T, 2>(num_blocks, at, stage, position, sums);
  else if (T::nt == 4 || count <= 32 * T::columns)
    add_blocks<T, (T::nt < 4 ? T::nt : 4)>(num_blocks, at, stage, position, sums);
  else
    add_blocks<T, T::nt>(num_blocks, at, stage, position, sums);
}

}  // namespace coldstream::gemm
