// Bytes of blocks, and operations on four codes in the bytes of a word.
//
// Blocks begin on a multiple of their alignment, the greatest power of two that divides their size.
#pragma once

#include "cuda/common.cuh"

namespace coldstream {

// A sum of a number of the running thread and a constant, of which no bit is set in both: loads at constant
// distances then share an address.
struct SplitIndex {
  int own, constant;

  __device__ __forceinline__ operator int() const { return own + constant; }
};

__device__ __forceinline__ SplitIndex operator>>(SplitIndex a, int by) {
  return {a.own >> by, a.constant >> by};
}
__device__ __forceinline__ SplitIndex operator&(SplitIndex a, int mask) {
  return {a.own & mask, a.constant & mask};
}
__device__ __forceinline__ SplitIndex operator*(SplitIndex a, int by) {
  return {a.own * by, a.constant * by};
}
__device__ __forceinline__ SplitIndex operator+(int a, SplitIndex b) { return {b.own, a + b.constant}; }
__device__ __forceinline__ SplitIndex operator+(SplitIndex a, SplitIndex b) {
  return {a.own + b.own, a.constant + b.constant};
}

// A block in memory whose bytes around it may be read too: down to a multiple of 4, and from there up to 4
// bytes behind the next one (shared memory with some room after the last block).
template <int alignment>
struct NearBytes {
  const uint8_t* memory;

  __device__ __forceinline__ uint32_t word(int at) const { return word(SplitIndex{0, at}); }

  // `own` is a multiple of 4.
  __device__ __forceinline__ uint32_t word(SplitIndex at) const {
    const uint8_t* from = memory + at.own;
    if constexpr (alignment >= 4) {
      return *reinterpret_cast<const uint32_t*>(from + at.constant);
    } else {
      const uint32_t address = uint32_t(reinterpret_cast<uint64_t>(memory + at.constant % 4));
      const uint32_t before = address & (4 - alignment);
      const uint32_t* words = reinterpret_cast<const uint32_t*>(from - before + at.constant);
      return __funnelshift_r(words[0], words[1], before * 8);
    }
  }
  __device__ __forceinline__ uint32_t two(int at) const {
    return *reinterpret_cast<const uint16_t*>(memory + at);
  }
  __device__ __forceinline__ uint32_t byte(int at) const { return memory[at]; }
};

// A block of which no other byte may be read.
template <int alignment>
struct ExactBytes {
  const uint8_t* memory;

  __device__ __forceinline__ uint32_t word(int at) const {
    if constexpr (alignment >= 4)
      return *reinterpret_cast<const uint32_t*>(memory + at);
    else if constexpr (alignment == 2)
      return two(at) | two(at + 2) << 16;
    else
      return byte(at) | byte(at + 1) << 8 | byte(at + 2) << 16 | byte(at + 3) << 24;
  }
  __device__ __forceinline__ uint32_t two(int at) const {
    return *reinterpret_cast<const uint16_t*>(memory + at);
  }
  __device__ __forceinline__ uint32_t byte(int at) const { return memory[at]; }
};

// Words that start at p, a multiple of 2, near which more may be read.
template <int count>
__device__ __forceinline__ void load_words(const uint8_t* p, uint32_t (&words)[count]) {
  const uint64_t address = reinterpret_cast<uint64_t>(p);
  const uint32_t* aligned = reinterpret_cast<const uint32_t*>(p - (address & 2));
  const uint32_t shift = (address & 2) * 8;
  uint32_t low = aligned[0];
#pragma unroll
  for (int i = 0; i < count; i++) {
    const uint32_t high = aligned[i + 1];
    words[i] = __funnelshift_r(low, high, shift);
    low = high;
  }
}

constexpr uint32_t four_ones = 0x01010101u;  // a byte each

__device__ __forceinline__ int dot_signed(uint32_t weights, uint32_t x, int sum) {
  return __dp4a(int(weights), int(x), sum);
}

__device__ __forceinline__ uint4 load_16(const uint8_t* p) { return *reinterpret_cast<const uint4*>(p); }

// Bytes minus `offset`; each byte is below 128 + offset.
template <int offset>
__device__ __forceinline__ uint32_t subtract(uint32_t bytes) {
  return (bytes + four_ones * (0x80 - offset)) ^ 0x80808080u;
}

// The low four bits, one to a byte each, as 1 or 0.
__device__ __forceinline__ uint32_t spread_bits(uint32_t bits) {
  return (bits & 15) * 0x00204081u & four_ones;
}

// The four fields of two bits in a byte, one to a byte each.
__device__ __forceinline__ uint32_t spread_crumbs(uint32_t byte) {
  const uint32_t nibbles = (byte | byte << 12) & 0x000f000fu;
  return (nibbles | nibbles << 6) & 0x03030303u;
}

// The four nibbles of two bytes, one to a byte each.
__device__ __forceinline__ uint32_t spread_nibbles(uint32_t two) {
  const uint32_t bytes = (two & 0xff) | (two & 0xff00) << 8;
  return (bytes | bytes << 4) & 0x0f0f0f0fu;
}

// Sixteen signed bytes, four to a word.
struct SixteenValues {
  uint32_t words[4];
};

// The values of four indices below 16, a byte each.
__device__ __forceinline__ uint32_t look_up(const SixteenValues& values, uint32_t indices) {
  const uint32_t nibbles = __byte_perm(indices | indices >> 4, 0, 0x4420);
  const uint32_t low = nibbles & 0x7777u;
  const uint32_t first = __byte_perm(values.words[0], values.words[1], low);
  const uint32_t second = __byte_perm(values.words[2], values.words[3], low);
  return __byte_perm(first, second, 0x3210u | (nibbles & 0x8888u) >> 1);
}

// The values of an entry of a grid, whose four nibbles are numbers of bytes among eight.
__device__ __forceinline__ uint32_t levels_of(uint32_t entry, uint32_t low, uint32_t high) {
  return __byte_perm(low, high, entry);
}

// Positive bytes with signs: a set bit of the low four of `signs` makes its byte negative.
__device__ __forceinline__ uint32_t with_signs(uint32_t bytes, uint32_t signs) {
  const uint32_t negative = spread_bits(signs);
  return (bytes ^ negative * 255) + negative;
}

// Signs of eight values of which seven are given: an even number of them is negative.
__device__ __forceinline__ uint32_t even_signs(uint32_t bits) { return bits | (__popc(bits) & 1) << 7; }

}  // namespace coldstream
