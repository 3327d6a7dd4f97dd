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

// Words that start `skipped` bits, up to 15, behind p, a multiple of 2, near which more may be read.
template <int count>
__device__ __forceinline__ void load_words(const uint8_t* p, uint32_t (&words)[count], int skipped = 0) {
  const uint32_t before = uint32_t(reinterpret_cast<uint64_t>(p)) & 2;
  const uint32_t* aligned = reinterpret_cast<const uint32_t*>(p - before);
  const uint32_t shift = before * 8 + skipped;
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

__device__ __forceinline__ uint2 load_8(const uint8_t* p) { return *reinterpret_cast<const uint2*>(p); }
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

// The four fields of three bits in twelve, one to a byte each.
__device__ __forceinline__ uint32_t spread_thirds(uint32_t fields) {
  const uint32_t pairs = (fields & 0x3f) | (fields << 10 & 0x003f0000u);
  return (pairs & 0x00070007u) | (pairs << 5 & 0x07000700u);
}

// The four nibbles of two bytes, one to a byte each.
__device__ __forceinline__ uint32_t spread_nibbles(uint32_t two) {
  const uint32_t bytes = (two & 0xff) | (two & 0xff00) << 8;
  return (bytes | bytes << 4) & 0x0f0f0f0fu;
}

// 1 + 2 x of the four nibbles x of two bytes.
__device__ __forceinline__ uint32_t odd_nibbles(uint32_t two) { return 2 * spread_nibbles(two) + four_ones; }

// Sixteen signed bytes, four to a word.
struct SixteenValues {
  uint32_t words[4];
};

// The values of four indices below 16, a byte each.
__device__ __forceinline__ uint32_t look_up(const SixteenValues& values, uint32_t indices) {
  const uint32_t nibbles = __byte_perm(indices | indices >> 4, 0, 0x4420);
  const uint32_t low = nibbles & 0x7777u;
  const uint32_t first = permute(values.words[0], values.words[1], low);
  const uint32_t second = permute(values.words[2], values.words[3], low);
  return permute(first, second, 0x3210u | (nibbles & 0x8888u) >> 1);
}

// The values of the low nibbles of a word, and of its high ones, a byte each.
__device__ __forceinline__ void look_up_nibbles(const SixteenValues& values, uint32_t nibbles, uint32_t& low,
                                                uint32_t& high) {
  const uint32_t numbers = nibbles & 0x77777777u, halves = (nibbles >> 1 & 0x44444444u) | 0x32103210u;
  uint32_t mixed[2];  // a low nibble's value, a high one's, alternately
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const uint32_t first = permute(values.words[0], values.words[1], numbers >> 16 * i);
    const uint32_t second = permute(values.words[2], values.words[3], numbers >> 16 * i);
    mixed[i] = permute(first, second, halves >> 16 * i);
  }
  low = __byte_perm(mixed[0], mixed[1], 0x6420);
  high = __byte_perm(mixed[0], mixed[1], 0x7531);
}

// The values of an entry of a grid, whose four nibbles are numbers of bytes among eight.
__device__ __forceinline__ uint32_t levels_of(uint32_t entry, uint32_t low, uint32_t high) {
  return permute(low, high, entry);
}

// Positive bytes with signs: a set bit of the low four of `signs` makes its byte negative.
__device__ __forceinline__ uint32_t with_signs(uint32_t bytes, uint32_t signs) {
  const uint32_t negative = spread_bits(signs);
  return (bytes ^ negative * 255) + negative;
}

// Signs of eight values of which seven are given: an even number of them is negative.
__device__ __forceinline__ uint32_t even_signs(uint32_t bits) { return bits | (__popc(bits) & 1) << 7; }

// Byte i of a word.
__device__ __forceinline__ uint32_t byte_of(uint32_t word, int i) { return permute(word, 0, 0x4440 | i); }

// A grid of words in shared memory, of which there are so many copies. A lane's own has words of its own
// banks.
template <int copies>
struct SharedGrid {
  const uint8_t* memory;
  uint32_t own;  // bytes of the other copies before the lane's word of an entry

  __device__ __forceinline__ explicit SharedGrid(const uint32_t* grid)
      : memory(reinterpret_cast<const uint8_t*>(grid)), own(threadIdx.x % copies * 4) {}
  __device__ __forceinline__ uint32_t operator[](uint32_t index) const { return at((index << shift) + own); }
  // The entry whose number is byte i of a word.
  __device__ __forceinline__ uint32_t at_byte(uint32_t word, int i) const {
    return (*this)[byte_of(word, i)];
  }

 private:
  static constexpr int shift = copies == 1 ? 2 : copies == 8 ? 5 : 6;  // from entries to bytes
  static_assert(copies * 4 == 1 << shift);

  __device__ __forceinline__ uint32_t at(uint32_t offset) const {
    return *reinterpret_cast<const uint32_t*>(memory + offset);
  }
};

// Byte i of `low`, and above it byte j of `high`, whose bytes are below 128.
__device__ __forceinline__ uint32_t bytes_together(uint32_t low, uint32_t high, int i, int j) {
  return permute(low, high, 0xcc40 + 0x1110 * j + i);
}
__device__ __forceinline__ uint32_t bytes_together(uint32_t low, uint32_t high, int i) {
  return bytes_together(low, high, i, i);
}

// The signs of eight values, a set bit for a negative one, added as bit 2 to the nibbles of `entry`. Of
// `quads` the first four bits of each half are taken. The multiplications put copies side by side, of which
// masks take pairs of bits and then single ones.
__device__ __forceinline__ uint32_t spread_signs(uint32_t quads, uint32_t entry) {
  const uint32_t pairs = (quads & 0x000f000fu) * 0x104 & 0x0c0c0c0cu;
  return (pairs * 9 & 0x44444444u) | entry;
}
// Those of byte i of `signs`; `high` is signs >> 4.
__device__ __forceinline__ uint32_t with_sign_bits(uint32_t entry, uint32_t signs, uint32_t high, int i) {
  return spread_signs(permute(signs, high, 0x4400 + 0x1111 * i), entry);
}
// Seven of them, when an even number of all eight is negative.
__device__ __forceinline__ uint32_t with_even_sign_bits(uint32_t entry, uint32_t signs) {
  return spread_signs(signs * 0x1001 + (uint32_t(__popc(signs)) << 19), entry);
}

// sum + products of eight values, whose selectors of bytes of `low` and `high` are the nibbles of
// `selectors`.
__device__ __forceinline__ int dot_selected(uint32_t selectors, uint32_t low, uint32_t high,
                                            const uint32_t* x, int sum) {
  sum = dot_signed(permute(low, high, selectors), x[0], sum);
  return dot_signed(permute(low, high, selectors >> 16), x[1], sum);
}

// The low eight bits of `bits`, each as the top bit of a byte, with others below. Without the last bit, the
// copies of a product do not meet.
struct EightBits {
  uint32_t first, second;
};
__device__ __forceinline__ EightBits to_top_bits(uint32_t bits) {
  const uint32_t seven = bits & 127;
  return {seven * 0x10204080u, seven * 0x00020408u + (bits << 24)};
}

// Bytes of ones where a value is negative, for eight values.
struct SignMasks {
  uint32_t first, second;
};
// Of the top bits of bytes.
__device__ __forceinline__ uint32_t signs_of_bytes(uint32_t bytes) { return permute(bytes, 0, 0xba98); }
// Of byte i of `signs`; `sevens` has them without the top bits of bytes. Those are taken as they are.
__device__ __forceinline__ SignMasks sign_masks(uint32_t signs, uint32_t sevens, int i) {
  const uint32_t seven = byte_of(sevens, i);
  return {signs_of_bytes(seven * 0x10204080u), permute(seven * 0x00020408u, signs, 0xca98 + 0x1000 * i)};
}
// Of seven signs, when an even number of all eight is negative.
__device__ __forceinline__ SignMasks even_sign_masks(uint32_t signs) {
  return {signs_of_bytes(signs * 0x10204080u),
          signs_of_bytes(signs * 0x00020408u + (uint32_t(__popc(signs)) << 31))};
}

// Sums of the products of values with the signs of x's, and of those that are negative.
struct SignedSum {
  int all = 0, negative = 0;

  __device__ __forceinline__ void add(uint32_t values, uint32_t mask, uint32_t x) {
    all = dot_signed(values, x, all);
    negative = dot_signed(values & mask, x, negative);
  }
  __device__ __forceinline__ operator int() const { return all - 2 * negative; }
};

// Sixteen values as two tables of bytes that are not negative: of the indices below 8, and of the others.
struct SplitValues {
  uint32_t low[2], high[2];

  // With the first half of each table in a register; the other halves are operands of a permutation.
  __device__ __forceinline__ SplitValues in_registers() const {
    return {{in_own_register(low[0]), low[1]}, {in_own_register(high[0]), high[1]}};
  }
};

// The order of the codes in words of nibbles: those of the low nibbles of a word, x[i], and of its high ones,
// x[i
// + 4], in turn.
__device__ __forceinline__ uint32_t interleave_low(uint32_t a, uint32_t b) {
  return __byte_perm(a, b, 0x5140);
}
__device__ __forceinline__ uint32_t interleave_high(uint32_t a, uint32_t b) {
  return __byte_perm(a, b, 0x7362);
}
__device__ __forceinline__ void interleave(uint32_t* x) {
  uint32_t natural[8];
#pragma unroll
  for (int i = 0; i < 8; i++) natural[i] = x[i];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    x[2 * i] = interleave_low(natural[i], natural[4 + i]);
    x[2 * i + 1] = interleave_high(natural[i], natural[4 + i]);
  }
}

// Sums of the products of interleaved x's with the low values of a word's nibbles, and with the high ones:
// each table gives 0 for the indices of the other, as the sign of a byte that is not negative.
struct SplitSum {
  int low = 0, high = 0;

  __device__ __forceinline__ void add(const SplitValues& values, uint32_t nibbles, const uint32_t* x) {
    const uint32_t others = nibbles ^ 0x88888888u;
    low = dot_signed(permute(values.low[0], values.low[1], nibbles), x[0], low);
    low = dot_signed(permute(values.low[0], values.low[1], nibbles >> 16), x[1], low);
    high = dot_signed(permute(values.high[0], values.high[1], others), x[0], high);
    high = dot_signed(permute(values.high[0], values.high[1], others >> 16), x[1], high);
  }
};

}  // namespace coldstream
