// From the bytes of a file at any even address to int8 codes and scales in shared memory, for the types that
// the tensor cores cannot read in place.
#pragma once

#include "cuda/gemm_weights.cuh"

namespace coldstream::gemm {

// The 32-bit word at an even byte offset of word-aligned shared memory; reads up to the end of the next word.
__device__ __forceinline__ uint32_t load_word(const uint8_t* base, int offset) {
  const uint32_t* words = reinterpret_cast<const uint32_t*>(base) + offset / 4;
  return __funnelshift_r(words[0], words[1], offset % 4 * 8);
}

__device__ __forceinline__ float load_half(const uint8_t* base, int offset) {
  return half_to_float(*reinterpret_cast<const uint16_t*>(base + offset));
}

// Bytes minus `offset`, a power of two that every byte is below twice of.
template <int offset>
__device__ __forceinline__ uint32_t subtract(uint32_t bytes) {
  return (bytes + 0x01010101u * (0x80 - offset)) ^ 0x80808080u;
}

// Four bits, one to a byte each, as 16 or 0.
__device__ __forceinline__ uint32_t spread_bits(uint32_t bits) {
  return ((bits & 15) * 0x00204081u & 0x01010101u) << 4;
}

__device__ __forceinline__ void unpack_q6_k(const uint8_t* raw, int offset, int half, int word,
                                            uint32_t* codes, uint8_t* table) {
  const uint32_t first = load_word(raw, offset + 64 * half + 4 * word);
  const uint32_t second = load_word(raw, offset + 64 * half + 32 + 4 * word);
  const uint32_t high = load_word(raw, offset + 128 + 32 * half + 4 * word);
  codes += 32 * half + word;
  codes[0] = subtract<32>((first & 0x0f0f0f0fu) | ((high << 4) & 0x30303030u));
  codes[8] = subtract<32>((second & 0x0f0f0f0fu) | ((high << 2) & 0x30303030u));
  codes[16] = subtract<32>(((first >> 4) & 0x0f0f0f0fu) | (high & 0x30303030u));
  codes[24] = subtract<32>(((second >> 4) & 0x0f0f0f0fu) | ((high >> 2) & 0x30303030u));
  if (half == 0 && word < 4)
    reinterpret_cast<uint32_t*>(table)[word] = load_word(raw, offset + 192 + 4 * word);
  if (half == 0 && word == 4) reinterpret_cast<float*>(table)[4] = load_half(raw, offset + 208);
}

template <class Weights>
__device__ __forceinline__ void unpack_block(const uint8_t* raw, int offset, uint32_t* codes, float* d) {
  *d = load_half(raw, offset);
  if constexpr (is_same<Weights, Q8_0>) {
#pragma unroll
    for (int w = 0; w < 8; w++) codes[w] = load_word(raw, offset + 2 + 4 * w);
  } else {
    constexpr bool has_high_bits = is_same<Weights, Q5_0>;
    const uint32_t bits = has_high_bits ? load_word(raw, offset + 2) : 0;
#pragma unroll
    for (int w = 0; w < 4; w++) {
      const uint32_t word = load_word(raw, offset + (has_high_bits ? 6 : 2) + 4 * w);
      const uint32_t low = word & 0x0f0f0f0fu, high = (word >> 4) & 0x0f0f0f0fu;
      if constexpr (has_high_bits) {
        codes[w] = subtract<16>(low | spread_bits(bits >> 4 * w));
        codes[4 + w] = subtract<16>(high | spread_bits(bits >> (16 + 4 * w)));
      } else {
        codes[w] = subtract<8>(low);
        codes[4 + w] = subtract<8>(high);
      }
    }
  }
}

// All rows of a stage, by all threads of the block. Blocks that the row does not have become what lies there.
template <class T>
__device__ void unpack_stage(const uint8_t* stage, uint8_t* unpacked) {
  using Weights = typename T::Weights;
  constexpr int items = Weights::super ? 16 : 8;  // a row's
  const int* offsets = reinterpret_cast<const int*>(stage + T::offsets_at);
#pragma unroll 2
  for (int first = 0; first < T::rows * items; first += T::multiplying_threads) {
    const int item = first + threadIdx.x, row = item / items, part = item % items;
    if (item >= T::rows * items) break;
    const uint8_t* raw = stage + T::weights_at + row * Weights::pitch;
    uint32_t* codes = reinterpret_cast<uint32_t*>(unpacked + row * code_pitch);
    uint8_t* table = unpacked + T::rows * code_pitch + row * table_pitch;
    if constexpr (Weights::super)
      unpack_q6_k(raw, offsets[row], part / 8, part % 8, codes, table);
    else
      unpack_block<Weights>(raw, offsets[row] + part * (Weights::group_bytes / 8), codes + 8 * part,
                            reinterpret_cast<float*>(table) + part);
  }
}

}  // namespace coldstream::gemm
