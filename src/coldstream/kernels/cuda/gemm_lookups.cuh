// Planes for products of warpgroups by look-ups in shared memory, for types whose codes are few levels. The
// products of all levels with a scale fit into a few registers, and a permutation chooses four bytes of them.
// So neither codes nor scales are unpacked.
//
// Lookup<Weights> has the type's tables, in parts of 16 bytes, and the planes of a row's words t and t + 4 of
// each 32 inputs. Loads of a warp from random places of a table would often meet in a bank. So tables of
// grids and of signs have a copy for every lane, or for two that read the same word, in a bank of its own. A
// table begins where its first byte's number has a bit in common with the numbers of bytes within it: that
// keeps the compiler from adding the two bit by bit, and loads add them for nothing.
//
// Where products are odd, planes have (product - 1) / 2, which takes a bit less: a sum of products is twice
// the sum with planes, plus the sum of the activations.
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

// `bits` from bit `from` on, shifted to bit `at`; other bits are there too.
__device__ __forceinline__ uint32_t shift(uint32_t bits, int from, int at) {
  return from > at ? bits >> (from - at) : bits << (at - from);
}

// What a type reads of a block once, for all of its steps.
struct NoHeader {
  template <class B>
  __device__ __forceinline__ explicit NoHeader(const B&) {}
};

__device__ __forceinline__ uint32_t two_bytes(const uint8_t* from) {
  return *reinterpret_cast<const uint16_t*>(from);
}

__device__ __forceinline__ uint32_t four_bytes(const uint8_t* from) {
  return *reinterpret_cast<const uint32_t*>(from);
}

__device__ __forceinline__ uint2 eight_bytes(const uint8_t* from) {
  return *reinterpret_cast<const uint2*>(from);
}

// Byte `i` of a word.
__device__ __forceinline__ uint32_t byte_of(uint32_t word, int i) { return permute(word, 0, 0x4440 | i); }

// Parts of tables: four words, number 4 * i and the following ones, or copies of one.

template <class Word>
__device__ __forceinline__ uint4 four_words(int i, Word word) {
  return make_uint4(word(4 * i), word(4 * i + 1), word(4 * i + 2), word(4 * i + 3));
}

__device__ __forceinline__ uint4 four_copies(uint32_t word) { return make_uint4(word, word, word, word); }

__device__ __forceinline__ uint32_t pair_of(uint32_t low, uint32_t high) { return low | high << 16; }

// Entry k of a grid with eight values.
__device__ __forceinline__ uint32_t entry_of_eight(const uint16_t* grid, int k) {
  return pair_of(grid[2 * k], grid[2 * k + 1]);
}

// Bits of `signs`, each as 4 in a nibble.
__device__ __forceinline__ uint32_t sign_nibbles(uint32_t signs, int count) {
  uint32_t nibbles = 0;
  for (int i = 0; i < count; i++) nibbles |= (signs >> i & 1) << (4 * i + 2);
  return nibbles;
}

template <class Weights>
struct Lookup {
  static constexpr int table_bytes = 0;
  static constexpr bool is_halved = false;
};

// Levels of both signs are numbers of bytes among eight: 4 more for the negative ones. Entries of both tables
// have sixteen copies.
struct IQ2Lookup {
  static constexpr bool has_high = true, is_halved = false;
  static constexpr int scaled_bytes = 16 * 8;

  // Of scales 2 i and 2 i + 1: the low bytes of the products with the levels, and the high bytes.
  __device__ static uint4 products(int i) {
    static_assert(iq2_levels == (8 | 25 << 8 | 43 << 16));
    const uint32_t scale = 1 + 4 * i, next = scale + 2;
    const uint32_t first = scale * (8 | 25 << 16), third = scale * 43;
    const uint32_t next_first = next * (8 | 25 << 16), next_third = next * 43;
    return make_uint4(permute(first, third, 0x0420), permute(first, third, 0x0531),
                      permute(next_first, next_third, 0x0420), permute(next_first, next_third, 0x0531));
  }

  // Chooses among the products of both signs. No low byte is 0, so that every byte becomes its negative
  // without a carry.
  __device__ static __forceinline__ void choose(uint2 scaled, uint32_t numbers, uint32_t& high,
                                                uint32_t& low) {
    low = permute(scaled.x, 0x01010100u - scaled.x, numbers);
    high = permute(scaled.y, ~scaled.y, numbers);
  }
};

// Signs of which seven are given.
struct EvenIQ2Lookup : IQ2Lookup {
  static constexpr int signs_at = scaled_bytes, grid_at = signs_at + 128 * 64;

  __device__ static uint4 part_of(const uint16_t* grid, int i) {
    if (16 * i < signs_at) return products(i);
    if (16 * i < grid_at) return four_copies(sign_nibbles(even_signs((i - signs_at / 16) / 4), 8));
    return four_copies(entry_of_eight(grid, (i - grid_at / 16) / 4));
  }
};

template <>
struct Lookup<IQ2_XXS> : EvenIQ2Lookup {
  static constexpr int table_bytes = grid_at + 256 * 64;

  __device__ static uint4 part(int i) { return part_of(iq2_xxs_grid, i); }

  using Header = NoHeader;

  template <class B>
  __device__ static __forceinline__ void make(const B& block, const Header&, int step, LaneWords lane,
                                              const uint8_t* tables, uint32_t (&high)[2],
                                              uint32_t (&low)[2]) {
    const uint32_t indices = block.word(2 + 8 * step), signs = block.word(6 + 8 * step);
    const uint32_t pair_signs = signs >> 7 * lane.pair(0);
    const uint2 scaled = eight_bytes(tables + (signs >> 25 & 0x78));
#pragma unroll
    for (int c = 0; c < 2; c++) {
      const uint32_t sign = (shift(pair_signs, 14 * c, 6) & 0x1fc0) | lane.own_half;
      const uint32_t entry = 64 * byte_of(indices, lane.pair(c)) + lane.own_half;
      choose(scaled, two_bytes(tables + grid_at + entry) | two_bytes(tables + signs_at + sign), high[c],
             low[c]);
    }
  }
};

template <>
struct Lookup<IQ2_XS> : EvenIQ2Lookup {
  static constexpr int table_bytes = grid_at + 512 * 64;

  __device__ static uint4 part(int i) { return part_of(iq2_xs_grid, i); }

  struct Header {
    uint32_t scales[2];

    template <class B>
    __device__ __forceinline__ explicit Header(const B& block) : scales{block.word(66), block.word(70)} {}
  };

  template <class B>
  __device__ static __forceinline__ void make(const B& block, const Header& header, int step, LaneWords lane,
                                              const uint8_t* tables, uint32_t (&high)[2],
                                              uint32_t (&low)[2]) {
#pragma unroll
    for (int c = 0; c < 2; c++) {
      const uint32_t bits = block.two(2 + 8 * step + 2 * lane.pair(c));
      const uint32_t entry = (bits << 6 & 0x7fc0) | lane.own_half;
      const uint32_t sign = (bits >> 3 & 0x1fc0) | lane.own_half;
      const uint32_t scale = shift(header.scales[step / 4], 8 * (step % 4) + 4 * c, 3) & 0x78;
      const uint2 scaled = eight_bytes(tables + scale);
      choose(scaled, two_bytes(tables + grid_at + entry) | two_bytes(tables + signs_at + sign), high[c],
             low[c]);
    }
  }
};

template <>
struct Lookup<IQ2_S> : IQ2Lookup {
  static constexpr int scaled_at = 32, grid_at = scaled_at + scaled_bytes, table_bytes = grid_at + 1024 * 64;

  // The signs are nibbles, and their table lies in as many banks as it has words.
  __device__ static uint4 part(int i) {
    if (16 * i >= grid_at) return four_copies(entry_of_eight(iq2_s_grid, (i - grid_at / 16) / 4));
    if (16 * i >= scaled_at) return products(i - scaled_at / 16);
    return four_words(i, [](int k) { return pair_of(sign_nibbles(2 * k, 4), sign_nibbles(2 * k + 1, 4)); });
  }

  struct Header {
    uint32_t high_bits[2], scales[2];

    template <class B>
    __device__ __forceinline__ explicit Header(const B& block)
        : high_bits{block.word(66), block.word(70)}, scales{block.word(74), block.word(78)} {}
  };

  template <class B>
  __device__ static __forceinline__ void make(const B& block, const Header& header, int step, LaneWords lane,
                                              const uint8_t* tables, uint32_t (&high)[2],
                                              uint32_t (&low)[2]) {
    const uint32_t signs = block.word(34 + 4 * step) >> 4 * lane.t;
    const uint32_t high_bits = shift(header.high_bits[step / 4], 8 * (step % 4), 14) >> 2 * lane.pair(0);
#pragma unroll
    for (int c = 0; c < 2; c++) {
      const uint32_t entry =
          64 * block.byte(2 + 4 * step + lane.pair(c)) + ((high_bits >> 4 * c & 0xc000) | lane.own_half);
      const uint32_t sign = shift(signs, 16 * c, 1) & 0x1e;
      const uint32_t scale = shift(header.scales[step / 4], 8 * (step % 4) + 4 * c, 3) & 0x78;
      const uint2 scaled = eight_bytes(tables + scaled_at + scale);
      choose(scaled, two_bytes(tables + grid_at + entry) | two_bytes(tables + sign), high[c], low[c]);
    }
  }
};

// Entries have 32 copies. Those of signs are ones in the bytes that are negative, of both halves.
template <>
struct Lookup<IQ3_XXS> {
  static constexpr bool has_high = true, is_halved = false;
  static constexpr int signs_at = 16 * 16, grid_at = signs_at + 128 * 128, table_bytes = grid_at + 256 * 128;

  __device__ static uint4 part(int i) {
    if (16 * i >= grid_at) return four_copies(iq3_xxs_grid[(i - grid_at / 16) / 8]);
    if (16 * i < signs_at) return products(1 + 2 * i);
    const uint32_t signs = even_signs((i - signs_at / 16) / 8);
    const uint32_t first = spread_bits(signs), second = spread_bits(signs >> 4);
    return make_uint4(first, second, first, second);
  }

  using Header = NoHeader;

  template <class B>
  __device__ static __forceinline__ void make(const B& block, const Header&, int step, LaneWords lane,
                                              const uint8_t* tables, uint32_t (&high)[2],
                                              uint32_t (&low)[2]) {
    const uint32_t signs = block.word(66 + 4 * step), pair_signs = signs >> 7 * lane.pair(0);
    const uint4 scaled = load_16(tables + (signs >> 24 & 0xf0));
#pragma unroll
    for (int c = 0; c < 2; c++) {
      const uint32_t index = block.byte(2 + 8 * step + 4 * c + lane.t);
      const uint32_t entry = two_bytes(tables + grid_at + (128 * index + lane.own));
      const uint32_t sign = (shift(pair_signs, 14 * c, 7) & 0x3f80) | lane.own;
      const uint32_t ones = four_bytes(tables + signs_at + sign), negative = ones * 255;
      // No product is a multiple of 256, so that adding 1 to the low byte never carries.
      low[c] = (permute(scaled.x, scaled.y, entry) ^ negative) + ones;
      high[c] = permute(scaled.z, scaled.w, entry) ^ negative;
    }
  }

 private:
  // Of a scale: the low bytes of the products with the levels, then the high bytes.
  __device__ static uint4 products(uint32_t scale) {
    uint32_t pairs[4];  // of products
    for (int i = 0; i < 4; i++) {
      const uint32_t levels = iq3_xxs_levels[i / 2] >> 16 * (i % 2);
      pairs[i] = scale * ((levels & 255) | (levels >> 8 & 255) << 16);
    }
    return make_uint4(permute(pairs[0], pairs[1], 0x6420), permute(pairs[2], pairs[3], 0x6420),
                      permute(pairs[0], pairs[1], 0x7531), permute(pairs[2], pairs[3], 0x7531));
  }
};

// Levels and scales are odd. Half a product less one half is below 256, and with a minus it has the inverted
// bits, so that the high plane is the sign alone.
template <>
struct Lookup<IQ3_S> {
  static constexpr bool has_high = true, is_halved = true;
  static constexpr int grid_at = 64, table_bytes = grid_at + 256 * 128;

  // Signs are nibbles; entries of the grid k and 256 + k are one word, of which there are 32 copies.
  __device__ static uint4 part(int i) {
    if (16 * i < grid_at) return four_words(i, [](int k) { return spread_bits(k) * 255; });
    const int entry = (i - grid_at / 16) / 8;
    return four_copies(pair_of(iq3_s_grid[entry], iq3_s_grid[256 + entry]));
  }

  struct Header {
    uint32_t high_bits[2], scales;

    template <class B>
    __device__ __forceinline__ explicit Header(const B& block)
        : high_bits{block.word(66), block.word(70)}, scales(block.word(106)) {}
  };

  template <class B>
  __device__ static __forceinline__ void make(const B& block, const Header& header, int step, LaneWords lane,
                                              const uint8_t* tables, uint32_t (&high)[2],
                                              uint32_t (&low)[2]) {
    static_assert(iq3_s_levels[0] == 0x07050301u && iq3_s_levels[1] == 0x0f0d0b09u);  // 2 i + 1
    const uint32_t signs = block.word(74 + 4 * step) >> 4 * lane.t;
    const uint32_t high_bits = shift(header.high_bits[step / 4], 8 * (step % 4), 1) >> lane.t;
    const uint32_t number = header.scales >> 4 * step & 15;
    // ((2 i + 1) (2 n + 1) - 1) / 2 = (2 i + 1) n + i, a byte each
    const uint32_t first = number * iq3_s_levels[0] + 0x03020100u;
    const uint32_t second = number * iq3_s_levels[1] + 0x07060504u;
#pragma unroll
    for (int c = 0; c < 2; c++) {
      const uint32_t index = block.byte(2 + 8 * step + 4 * c + lane.t);
      const uint32_t place = (high_bits >> 4 * c & 2) | lane.own;
      high[c] = four_bytes(tables + (shift(signs, 16 * c, 2) & 0x3c));
      low[c] = permute(first, second, two_bytes(tables + grid_at + (128 * index + place))) ^ high[c];
    }
  }
};

// Levels and scales are odd, and half a product fits a byte with its sign. The grid is too large for copies.
struct IQ1Lookup {
  static constexpr bool has_high = false, is_halved = true;
  static constexpr int grid_at = 64, table_bytes = grid_at + 2048 * 4;

  __device__ static uint4 part(int i) {
    if (16 * i < grid_at) return four_words(i, products);
    return four_words(i - grid_at / 16, [](int k) { return entry_of_eight(iq1_grid, k); });
  }
  // Of scale k % 8 with the levels above, the first eight, or below.
  __device__ static uint32_t products(int k) {
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
  using Header = NoHeader;

  template <class B>
  __device__ static __forceinline__ void make(const B& block, const Header&, int step, LaneWords lane,
                                              const uint8_t* tables, uint32_t (&)[2], uint32_t (&low)[2]) {
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
  struct Header {
    uint32_t scales[2];

    template <class B>
    __device__ __forceinline__ explicit Header(const B& block) : scales{block.word(48), block.word(52)} {}
  };

  template <class B>
  __device__ static __forceinline__ void make(const B& block, const Header& header, int step, LaneWords lane,
                                              const uint8_t* tables, uint32_t (&)[2], uint32_t (&low)[2]) {
    const uint32_t indices = block.word(4 * step), bits = block.two(32 + 2 * step) << 10;
    const uint32_t scales = shift(header.scales[step / 4], step / 2 % 2 * 16 + step % 2 * 6, 2);
#pragma unroll
    for (int c = 0; c < 2; c++) {
      const uint32_t nibble = bits >> 4 * lane.pair(c);  // bit 13: levels below
      const uint32_t scaled = four_bytes(tables + ((scales >> 3 * c & 0x1c) | (nibble >> 8 & 0x20)));
      low[c] = permute(scaled, 0, entry(tables, nibble, byte_of(indices, lane.pair(c)), lane));
    }
  }
};

// Constants, which the compiler would otherwise move into a register for each use: the levels plus 128, and
// the selector of four bytes in order, twice.
template <>
struct Lookup<IQ4_XS> {
  static constexpr bool is_halved = false;
  static constexpr int table_bytes = 32;

  __device__ static uint4 part(int i) {
    if (i > 0) return four_copies(0x32103210u);
    return four_words(0, [](int k) { return iq4_values.words[k] ^ 0x80808080u; });
  }
};

}  // namespace coldstream::gemm
