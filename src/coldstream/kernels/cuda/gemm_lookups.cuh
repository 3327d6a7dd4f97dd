// Planes for products of warpgroups by look-ups in shared memory, for types whose codes are few levels. The
// products of all levels with a scale fit into a few registers, and a permutation chooses four bytes of them.
// So neither codes nor scales are unpacked.
//
// Lookup<Weights> has the type's tables, word by word, and the planes of a row's words t and t + 4 of each 32
// inputs. Loads of a warp from random places of a table would often meet in a bank. So tables of grids and of
// signs have a copy for every lane, or for two that read the same word, in a bank of its own. A table begins
// where its first byte's number has a bit in common with the numbers of bytes within it: that keeps the
// compiler from adding the two bit by bit, and loads add them for nothing.
//
// Where products are odd, planes have (product - 1) / 2, which takes a bit less: a sum of products is
// twice the sum with planes, plus the sum of the activations.
#pragma once

#include "cuda/gemm_weights.cuh"

namespace coldstream::gemm {

// A lane's place in the eight words of 32 inputs: words t and t + 4, for c = 0 and 1. A pair of words has one
// entry of a grid with eight values, whose half is the lane's.
struct LaneWords {
  int t;
  // Places in bytes: of the lane's copy among 32, of its half of a copy among sixteen, of a half.
  uint32_t own, own_half, half;

  __device__ __forceinline__ explicit LaneWords(int lane)
      : t(lane % 4),
        own(in_register(lane * 4)),
        own_half(in_register(lane / 2 * 4 + lane % 2 * 2)),
        half(in_register(lane % 2 * 2)) {}

  __device__ __forceinline__ int pair(int c) const { return t / 2 + 2 * c; }
};

// `bits`, with those that begin at 0, or for c = 1 at `distance`, shifted to bit `at`.
__device__ __forceinline__ uint32_t shift_to(int at, uint32_t bits, int c, int distance) {
  const int left = at - c * distance;
  return left >= 0 ? bits << left : bits >> -left;
}

__device__ __forceinline__ uint32_t two_bytes(const uint8_t* from) {
  return *reinterpret_cast<const uint16_t*>(from);
}

__device__ __forceinline__ uint32_t four_bytes(const uint8_t* from) {
  return *reinterpret_cast<const uint32_t*>(from);
}

// Words of tables.

__device__ __forceinline__ uint32_t pair_of(uint32_t low, uint32_t high) { return low | high << 16; }

// Entry k of a grid with eight values.
__device__ __forceinline__ uint32_t entry_of_eight(const uint16_t* grid, int k) {
  return pair_of(grid[2 * k], grid[2 * k + 1]);
}

// Bits of `signs`, each as 4 in a nibble.
__device__ __forceinline__ uint32_t fours(uint32_t signs, int count) {
  uint32_t nibbles = 0;
  for (int i = 0; i < count; i++) nibbles |= (signs >> i & 1) << (4 * i + 2);
  return nibbles;
}

template <class Weights>
struct Lookup {
  static constexpr int words = 0;
  static constexpr bool is_halved = false;
};

// Levels of both signs are numbers of bytes among eight: 4 more for the negative ones. Entries of both tables
// have sixteen copies.
struct IQ2Lookup {
  static constexpr bool has_high = true, is_halved = false;

  // Chooses among the products of the levels with a scale.
  struct Products {
    uint32_t low, high, low_negative, high_negative;

    __device__ __forceinline__ explicit Products(uint32_t number) {
      static_assert(iq2_levels == (8 | 25 << 8 | 43 << 16));
      // Times 2 n + 1.
      const uint32_t first = number * (16 | 50 << 16) + (8 | 25 << 16), third = number * 86 + 43;
      low = permute(first, third, 0x0420);
      high = permute(first, third, 0x0531);
      // No low byte is 0, so that every byte becomes its negative without a carry.
      low_negative = 0x01010100u - low;
      high_negative = ~high;
    }
    __device__ __forceinline__ void choose(uint32_t numbers, uint32_t& of_high, uint32_t& of_low) const {
      of_low = permute(low, low_negative, numbers);
      of_high = permute(high, high_negative, numbers);
    }
  };
};

// Signs of which seven are given.
struct EvenIQ2Lookup : IQ2Lookup {
  static constexpr int grid_at = 128 * 64;

  __device__ static uint32_t word_of(const uint16_t* grid, int k) {
    if (4 * k < grid_at) return fours(even_signs(k / 16), 8);
    return entry_of_eight(grid, (k - grid_at / 4) / 16);
  }
};

template <>
struct Lookup<IQ2_XXS> : EvenIQ2Lookup {
  static constexpr int words = grid_at / 4 + 256 * 16;

  __device__ static uint32_t word(int k) { return word_of(iq2_xxs_grid, k); }

  template <class B>
  __device__ static __forceinline__ void make(const B& block, int step, LaneWords lane, const uint8_t* tables,
                                              uint32_t (&high)[2], uint32_t (&low)[2]) {
    const uint32_t indices = block.word(2 + 8 * step), signs = block.word(6 + 8 * step);
    const uint32_t pair_signs = signs >> 7 * lane.pair(0);
    const Products products(signs >> 28);
#pragma unroll
    for (int c = 0; c < 2; c++) {
      const uint32_t sign = (shift_to(6, pair_signs, c, 14) & 0x1fc0) | lane.own_half;
      const uint32_t entry = 64 * byte_of(indices, lane.pair(c)) + lane.own_half;
      products.choose(two_bytes(tables + grid_at + entry) | two_bytes(tables + sign), high[c], low[c]);
    }
  }
};

template <>
struct Lookup<IQ2_XS> : EvenIQ2Lookup {
  static constexpr int words = grid_at / 4 + 512 * 16;

  __device__ static uint32_t word(int k) { return word_of(iq2_xs_grid, k); }

  template <class B>
  __device__ static __forceinline__ void make(const B& block, int step, LaneWords lane, const uint8_t* tables,
                                              uint32_t (&high)[2], uint32_t (&low)[2]) {
    const uint32_t scales = block.byte(66 + step);
#pragma unroll
    for (int c = 0; c < 2; c++) {
      const uint32_t bits = block.two(2 + 8 * step + 2 * lane.pair(c));
      const uint32_t entry = (bits << 6 & 0x7fc0) | lane.own_half;
      const uint32_t sign = (bits >> 3 & 0x1fc0) | lane.own_half;
      const Products products(c ? scales >> 4 : scales & 15);
      products.choose(two_bytes(tables + grid_at + entry) | two_bytes(tables + sign), high[c], low[c]);
    }
  }
};

template <>
struct Lookup<IQ2_S> : IQ2Lookup {
  static constexpr int grid_at = 32, words = grid_at / 4 + 1024 * 16;

  // The signs are nibbles, and their table lies in as many banks as it has words.
  __device__ static uint32_t word(int k) {
    if (4 * k < grid_at) return pair_of(fours(2 * k, 4), fours(2 * k + 1, 4));
    return entry_of_eight(iq2_s_grid, (k - grid_at / 4) / 16);
  }

  template <class B>
  __device__ static __forceinline__ void make(const B& block, int step, LaneWords lane, const uint8_t* tables,
                                              uint32_t (&high)[2], uint32_t (&low)[2]) {
    const uint32_t signs = block.word(34 + 4 * step) >> 4 * lane.t;
    const uint32_t high_bits = block.byte(66 + step) << 14 >> 2 * lane.pair(0);
    const uint32_t scales = block.byte(74 + step);
#pragma unroll
    for (int c = 0; c < 2; c++) {
      const uint32_t entry =
          64 * block.byte(2 + 4 * step + lane.pair(c)) + ((high_bits >> 4 * c & 0xc000) | lane.own_half);
      const uint32_t sign = shift_to(1, signs, c, 16) & 0x1e;
      const Products products(c ? scales >> 4 : scales & 15);
      products.choose(two_bytes(tables + grid_at + entry) | two_bytes(tables + sign), high[c], low[c]);
    }
  }
};

// Entries have 32 copies. Those of signs are ones in the bytes that are negative, of both halves.
template <>
struct Lookup<IQ3_XXS> {
  static constexpr bool has_high = true, is_halved = false;
  static constexpr int grid_at = 128 * 128, words = grid_at / 4 + 256 * 32;

  __device__ static uint32_t word(int k) {
    if (4 * k < grid_at) return spread_bits(even_signs(k / 32) >> k % 2 * 4);
    return iq3_xxs_grid[(k - grid_at / 4) / 32];
  }

  template <class B>
  __device__ static __forceinline__ void make(const B& block, int step, LaneWords lane, const uint8_t* tables,
                                              uint32_t (&high)[2], uint32_t (&low)[2]) {
    const uint32_t signs = block.word(66 + 4 * step), pair_signs = signs >> 7 * lane.pair(0);
    uint32_t products[4];  // two each, times 2 n + 1
#pragma unroll
    for (int i = 0; i < 4; i++) products[i] = (signs >> 28) * (2 * level_pair(i)) + level_pair(i);
#pragma unroll
    for (int c = 0; c < 2; c++) {
      const uint32_t index = block.byte(2 + 8 * step + 4 * c + lane.t);
      const uint32_t entry = two_bytes(tables + grid_at + (128 * index + lane.own));
      const uint32_t ones = four_bytes(tables + ((shift_to(7, pair_signs, c, 14) & 0x3f80) | lane.own));
      const uint32_t negative = ones * 255;
      // No product is a multiple of 256, so that adding 1 to the low byte never carries.
      low[c] = (choose<0>(products, entry) ^ negative) + ones;
      high[c] = choose<1>(products, entry) ^ negative;
    }
  }

 private:
  __device__ static constexpr uint32_t level_pair(int i) {
    const uint32_t levels = iq3_xxs_levels[i / 2] >> 16 * (i % 2);
    return (levels & 255) | (levels >> 8 & 255) << 16;
  }
  template <int plane>
  __device__ static __forceinline__ uint32_t choose(const uint32_t (&products)[4], uint32_t numbers) {
    constexpr uint32_t bytes = plane ? 0x7531 : 0x6420;
    return permute(permute(products[0], products[1], bytes), permute(products[2], products[3], bytes),
                   numbers);
  }
};

// Levels and scales are odd. Half a product less one half is below 256, and with a minus it has the inverted
// bits, so that the high plane is the sign alone.
template <>
struct Lookup<IQ3_S> {
  static constexpr bool has_high = true, is_halved = true;
  static constexpr int grid_at = 64, words = grid_at / 4 + 256 * 32;

  // Signs are nibbles; entries of the grid k and 256 + k are one word, of which there are 32 copies.
  __device__ static uint32_t word(int k) {
    if (4 * k < grid_at) return spread_bits(k) * 255;
    const int entry = (k - grid_at / 4) / 32;
    return pair_of(iq3_s_grid[entry], iq3_s_grid[256 + entry]);
  }

  template <class B>
  __device__ static __forceinline__ void make(const B& block, int step, LaneWords lane, const uint8_t* tables,
                                              uint32_t (&high)[2], uint32_t (&low)[2]) {
    static_assert(iq3_s_levels[0] == 0x07050301u && iq3_s_levels[1] == 0x0f0d0b09u);  // 2 i + 1
    const uint32_t signs = block.word(74 + 4 * step) >> 4 * lane.t;
    const uint32_t high_bits = block.byte(66 + step) << 1 >> lane.t;
    const uint32_t scales = block.byte(106 + step / 2), number = step % 2 ? scales >> 4 : scales & 15;
    // ((2 i + 1) (2 n + 1) - 1) / 2 = (2 i + 1) n + i, a byte each
    const uint32_t first = number * iq3_s_levels[0] + 0x03020100u;
    const uint32_t second = number * iq3_s_levels[1] + 0x07060504u;
#pragma unroll
    for (int c = 0; c < 2; c++) {
      const uint32_t index = block.byte(2 + 8 * step + 4 * c + lane.t);
      const uint32_t place = (high_bits >> 4 * c & 2) | lane.own;
      high[c] = four_bytes(tables + (shift_to(2, signs, c, 16) & 0x3c));
      low[c] = permute(first, second, two_bytes(tables + grid_at + (128 * index + place))) ^ high[c];
    }
  }
};

// Levels and scales are odd, and half a product fits a byte with its sign. The grid is too large for copies.
struct IQ1Lookup {
  static constexpr bool has_high = false, is_halved = true;
  static constexpr int grid_at = 64, words = grid_at / 4 + 2048;

  // Of a scale with the levels above, the first eight, or below.
  __device__ static uint32_t word(int k) {
    if (4 * k >= grid_at) return entry_of_eight(iq1_grid, k - grid_at / 4);
    uint32_t bytes = 0;
    for (int i = 0; i < 4; i++) {
      const int level = int8_t((k < 8 ? iq1_levels_above : iq1_levels_below) >> 8 * i);
      bytes |= uint32_t((level * (1 + 2 * (k % 8)) - 1) >> 1 & 255) << 8 * i;
    }
    return bytes;
  }
  // Of bits 10 … 12 and the eight lower bits of an index.
  __device__ static __forceinline__ uint32_t entry(const uint8_t* tables, uint32_t high_bits, uint32_t low,
                                                   LaneWords lane) {
    return two_bytes(tables + grid_at + (4 * low + ((high_bits & 0x1c00) | lane.half)));
  }
};

template <>
struct Lookup<IQ1_S> : IQ1Lookup {
  template <class B>
  __device__ static __forceinline__ void make(const B& block, int step, LaneWords lane, const uint8_t* tables,
                                              uint32_t (&)[2], uint32_t (&low)[2]) {
    const uint32_t bits = block.two(34 + 2 * step), scaled = four_bytes(tables + (bits >> 10 & 0x3c));
#pragma unroll
    for (int c = 0; c < 2; c++) {
      const int pair = lane.pair(c);
      low[c] =
          permute(scaled, 0, entry(tables, bits << (10 - 3 * pair), block.byte(2 + 4 * step + pair), lane));
    }
  }
};

template <>
struct Lookup<IQ1_M> : IQ1Lookup {
  template <class B>
  __device__ static __forceinline__ void make(const B& block, int step, LaneWords lane, const uint8_t* tables,
                                              uint32_t (&)[2], uint32_t (&low)[2]) {
    const uint32_t indices = block.word(4 * step), bits = block.two(32 + 2 * step) << 10;
    const uint32_t scales = block.two(48 + step / 2 * 2) << 2 >> step % 2 * 6;
#pragma unroll
    for (int c = 0; c < 2; c++) {
      const uint32_t nibble = bits >> 4 * lane.pair(c);  // bit 13: levels below
      const uint32_t scaled = four_bytes(tables + ((scales >> 3 * c & 0x1c) | (nibble >> 8 & 0x20)));
      low[c] = permute(scaled, 0, entry(tables, nibble, byte_of(indices, lane.pair(c)), lane));
    }
  }
};

}  // namespace coldstream::gemm
