// From the bytes of a file to int8 codes and scales in shared memory, for the types with super-blocks that
// the tensor cores cannot read in place.
#pragma once

#include "cuda/gemm_copies.cuh"

namespace coldstream::gemm {

// A sixteenth of a super-block: codes and, of the table, one entry of each kind that there is.
template <class Weights>
__device__ __forceinline__ void unpack_super(const typename Weights::Near& block, int part, uint32_t* codes,
                                             uint8_t* table) {
  const int first = part / 8 * 32 + part % 8;
#pragma unroll
  for (int k = 0; k < 4; k++) {
    const SplitIndex word = {first, 8 * k};
    if constexpr (Weights::folds_scales)
      codes[word] = Weights::folded_word(block, word);
    else
      codes[word] = Weights::word(block, word);
  }
  uint32_t* words = reinterpret_cast<uint32_t*>(table);
  float* floats = reinterpret_cast<float*>(table);
  if constexpr (!Weights::folds_scales && Weights::sub_blocks == 16) {
    if (part < 4) words[part] = Weights::scale_word(block, part);
  } else if constexpr (!Weights::folds_scales) {
    if (part < 8) table[part] = uint8_t(Weights::scale(block, part));
  }
  if (part == 8) floats[d_at / 4] = Weights::d(block);
  if constexpr (Weights::has_mins) {
    if (part == 9) floats[dmin_at / 4] = Weights::dmin(block);
    if (part >= 12) words[mins_at / 4 + part - 12] = Weights::min_word(block, part - 12);
  }
}

// All rows of a stage, by all threads of the block.
template <class T>
__device__ void unpack_stage(const uint8_t* stage, uint8_t* unpacked) {
  using Weights = typename T::Weights;
  constexpr int items = 16;  // a row's
  const int* offsets = reinterpret_cast<const int*>(stage + T::offsets_at);
#pragma unroll 2
  for (int first = 0; first < T::rows * items; first += T::multiplying_threads) {
    const int item = first + threadIdx.x, row = item / items, part = item % items;
    if (item >= T::rows * items) break;
    const uint8_t* group = stage + T::weights_at + row * T::Group::pitch + offsets[row];
    uint32_t* codes = reinterpret_cast<uint32_t*>(unpacked + row * code_pitch);
    uint8_t* table = unpacked + T::rows * code_pitch + row * T::Group::table_pitch;
    unpack_super<Weights>({group}, part, codes, table);
  }
}

}  // namespace coldstream::gemm
