// Every quantised type once: the geometry of its blocks, their codes as int8, and their scales. All product
// kernels and the values of embeddings are made from these structs. A type is a struct here, and a line of
// `AllWeights`.
//
// A super-block has 256 codes in eight sub-blocks, whose scales are scale(block, j), or in sixteen, whose
// scales 4 q … 4 q + 3 are the signed bytes of scale_word(block, q). Smaller blocks have 32 or 64 codes, and
// a product takes 32 of them at a time. Layouts: ggml's public headers.
#pragma once

#include <grids.cuh>        // of Python's tables; see grid_tables.py
#include <quant_types.cuh>  // of Python's QuantType; see type_numbers.py

#include "cuda/weight_block.cuh"

namespace coldstream {

// Word w of the nibbles of a block of 32, whose 16 bytes begin at `at`: the low nibbles are the first codes.
template <class B, class At, class W>
__device__ __forceinline__ uint32_t nibbles_of_32(const B& block, At at, W w) {
  return (block.word(at + (w & 3) * 4) >> ((w >> 2) * 4)) & 0x0f0f0f0fu;
}

// Σ c q_x of a block of 32 whose 16 bytes of nibbles begin at `at`.
template <class B>
__device__ __forceinline__ int dot_nibbles(const B& block, int at, const uint32_t (&x)[8]) {
  int low = 0, high = 0;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const uint32_t bytes = block.word(at + 4 * i);
    low = dot_unsigned(bytes & 0x0f0f0f0fu, x[i], low);
    high = dot_unsigned(bytes & 0xf0f0f0f0u, x[4 + i], high);
  }
  return low + (high >> 4);
}
// The same of codes whose fifth bits are in the word at `at`, with 16 bytes of nibbles behind. Words have the
// factor 8.
template <class B>
__device__ __forceinline__ int dot_five_bits(const B& block, int at, const uint32_t (&x)[8]) {
  const uint32_t bits = block.word(at);
  int sum = 0;
#pragma unroll
  for (int i = 0; i < 8; i += 2) {
    const EightBits top = to_top_bits(bits >> (4 * i));
    const uint32_t a = block.word(at + 4 + i % 4 * 4), b = block.word(at + 8 + i % 4 * 4);
    sum = dot_unsigned(((i < 4 ? a << 3 : a >> 1) & 0x78787878u) | (top.first & 0x80808080u), x[i], sum);
    sum = dot_unsigned(((i < 4 ? b << 3 : b >> 1) & 0x78787878u) | (top.second & 0x80808080u), x[i + 1], sum);
  }
  return sum >> 3;
}
// Σ q_x where a bit of `bits` is set. The bits k of its four bytes are those of column k.
__device__ __forceinline__ int dot_bits(uint32_t bits, const uint32_t (&columns)[8]) {
  int sum = 0;
#pragma unroll
  for (int k = 0; k < 8; k++) sum = dot_signed(bits >> k & four_ones, columns[k], sum);
  return sum;
}

struct Q4_0 : SmallBlock<Q4_0, q4_0, 18> {
  static constexpr int shift = 4;

  template <class B, class W>
  __device__ static __forceinline__ uint32_t word(const B& block, W w) {
    return subtract<8>(nibbles_of_32(block, 2, w));
  }
  template <class B, class W>
  __device__ static __forceinline__ uint32_t shifted_word(const B& block, W w) {
    const uint32_t bytes = block.word(2 + (w & 3) * 4);
    return ((w < 4 ? bytes << 4 : bytes) & 0xf0f0f0f0u) ^ 0x80808080u;
  }
  template <class B>
  __device__ static __forceinline__ int product(const B& block, const BlockCodes& x, const Tables&) {
    return dot_nibbles(block, 2, x.natural) - 8 * x.sum;
  }
};

struct Q4_1 : SmallBlock<Q4_1, q4_1, 20> {
  static constexpr bool has_mins = true;

  template <class B, class W>
  __device__ static __forceinline__ uint32_t word(const B& block, W w) {
    return nibbles_of_32(block, 4, w);
  }
  template <class B>
  __device__ static __forceinline__ float minimum(const B& block) {
    return half_at(block, 2);
  }
  template <class B>
  __device__ static __forceinline__ int product(const B& block, const BlockCodes& x, const Tables&) {
    return dot_nibbles(block, 4, x.natural);
  }
};

struct Q5_0 : SmallBlock<Q5_0, q5_0, 22> {
  static constexpr int shift = 3;

  template <class B, class W>
  __device__ static __forceinline__ uint32_t word(const B& block, W w) {
    return spread_bits(~block.word(2) >> 4 * w) * 0xf0 + nibbles_of_32(block, 6, w);
  }
  // The fifth bits become the top bits of the bytes, inverted: 128 is taken away.
  template <class B, class W>
  __device__ static __forceinline__ uint32_t shifted_word(const B& block, W w) {
    const uint32_t bytes = block.word(6 + (w & 3) * 4), bits = block.word(2) >> 4 * w;
    const uint32_t low = (w < 4 ? bytes << 3 : bytes >> 1) & 0x78787878u;
    return low | (~((bits & 15) * 0x10204080u) & 0x80808080u);
  }
  template <class B>
  __device__ static __forceinline__ int product(const B& block, const BlockCodes& x, const Tables&) {
    return dot_five_bits(block, 2, x.natural) - 16 * x.sum;
  }
};

struct Q5_1 : SmallBlock<Q5_1, q5_1, 24> {
  static constexpr bool has_mins = true, takes_columns = true;

  template <class B, class W>
  __device__ static __forceinline__ uint32_t word(const B& block, W w) {
    return spread_bits(block.word(4) >> 4 * w) * 16 + nibbles_of_32(block, 8, w);
  }
  template <class B>
  __device__ static __forceinline__ float minimum(const B& block) {
    return half_at(block, 2);
  }
  template <class B>
  __device__ static __forceinline__ int product(const B& block, const BlockCodes& x, const Tables&) {
    return dot_nibbles(block, 8, x.natural) + 16 * dot_bits(block.word(4), x.columns);
  }
};

struct Q8_0 : SmallBlock<Q8_0, q8_0, 34> {
  template <class B, class W>
  __device__ static __forceinline__ uint32_t word(const B& block, W w) {
    return block.word(2 + w * 4);
  }
};

// The values −127 −104 −83 −65, −49 −35 −22 −10, 1 13 25 38, 53 69 89 113.
constexpr SixteenValues iq4_values = {{0xbfad9881u, 0xf6eaddcfu, 0x26190d01u, 0x71594535u}};
// Twice the values of E2M1: 0 1 2 3, 4 6 8 12, and the same with a minus.
constexpr SixteenValues e2m1_doubled = {{0x03020100u, 0x0c080604u, 0xfdfeff00u, 0xf4f8fafcu}};
// The same without signs: eight are negative, and eight are not.
constexpr SplitValues iq4_split = {{0x4153687fu, 0x0a162331u}, {0x26190d01u, 0x71594535u}};
constexpr SplitValues e2m1_split = {{0x03020100u, 0x0c080604u}, {0x03020100u, 0x0c080604u}};

// I of a block of 32 whose 16 bytes of nibbles begin at `at`.
template <class B>
__device__ __forceinline__ SplitSum split_product(const SplitValues& values, const B& block, int at,
                                                  const uint32_t (&x)[8]) {
  SplitSum sum;
#pragma unroll
  for (int i = 0; i < 4; i++) sum.add(values, block.word(at + 4 * i), x + 2 * i);
  return sum;
}

struct IQ4_NL : SmallBlock<IQ4_NL, iq4_nl, 18> {
  static constexpr bool interleaves_x = true;
  using Tables = SplitValues;
  __device__ static __forceinline__ Tables tables() { return iq4_split.in_registers(); }

  template <class B, class W>
  __device__ static __forceinline__ uint32_t word(const B& block, W w) {
    return look_up(iq4_values, nibbles_of_32(block, 2, w));
  }
  template <class B>
  __device__ static __forceinline__ void two_words(const B& block, SplitIndex w, uint32_t& first,
                                                   uint32_t& second) {
    look_up_nibbles(iq4_values, block.word(2 + w * 4), first, second);
  }
  template <class B>
  __device__ static __forceinline__ int product(const B& block, const BlockCodes& x, const Tables& tables) {
    const SplitSum sum = split_product(tables, block, 2, x.natural);
    return sum.high - sum.low;
  }
};

struct MXFP4 : SmallBlock<MXFP4, mxfp4, 17> {
  static constexpr bool interleaves_x = true;
  using Tables = SplitValues;
  __device__ static __forceinline__ Tables tables() { return e2m1_split.in_registers(); }

  template <class B, class W>
  __device__ static __forceinline__ uint32_t word(const B& block, W w) {
    return look_up(e2m1_doubled, nibbles_of_32(block, 1, w));
  }
  template <class B>
  __device__ static __forceinline__ void two_words(const B& block, SplitIndex w, uint32_t& first,
                                                   uint32_t& second) {
    look_up_nibbles(e2m1_doubled, block.word(1 + w * 4), first, second);
  }
  template <class B>
  __device__ static __forceinline__ int product(const B& block, const BlockCodes& x, const Tables& tables) {
    const SplitSum sum = split_product(tables, block, 1, x.natural);
    return sum.low - sum.high;
  }
  // 2^(e − 128): the float32 exponent is e − 1, and the two smallest powers are denormal.
  template <class B>
  __device__ static __forceinline__ float d(const B& block) {
    const uint32_t e = block.byte(0);
    return __uint_as_float(e < 2 ? 1u << (21 + e) : (e - 1) << 23);
  }
};

struct Q2_0 : SmallBlock<Q2_0, q2_0, 18, 64> {
  template <class B, class W>
  __device__ static __forceinline__ uint32_t word(const B& block, W w) {
    return subtract<1>(spread_crumbs(block.word(2 + (w >> 2) * 4) >> ((w & 3) * 8) & 255));
  }
};

struct Q2_K : SuperBlock<Q2_K, q2_k, 84, 16> {
  static constexpr bool has_mins = true, is_interleaved = true, folds_scales = true;
  static constexpr int d_at = 80;

  template <class B, class W>
  __device__ static __forceinline__ uint32_t word(const B& block, W w) {
    return (block.word(16 + (w >> 5) * 32 + (w & 7) * 4) >> ((w >> 3 & 3) * 2)) & 0x03030303u;
  }
  template <class B, class W>
  __device__ static __forceinline__ uint32_t folded_word(const B& block, W w) {
    return word(block, w) * uint32_t(Q2_K::scale(block, w >> 2));
  }
  template <class B>
  __device__ static __forceinline__ uint32_t scale_word(const B& block, int q) {
    return block.word(4 * q) & 0x0f0f0f0fu;
  }
  template <class B>
  __device__ static __forceinline__ uint32_t min_word(const B& block, int q) {
    return (block.word(4 * q) >> 4) & 0x0f0f0f0fu;
  }
  template <class B>
  __device__ static __forceinline__ float dmin(const B& block) {
    return half_at(block, 82);
  }
};

struct Q3_K : SuperBlock<Q3_K, q3_k, 110, 16> {
  static constexpr bool is_interleaved = true;
  static constexpr int d_at = 108;
  // −4 … 3 times −32 … 31 reaches 128, but not −128.
  static constexpr bool folds_scales = true, folds_negated = true;

  // Codes plus 4.
  template <class B, class W>
  __device__ static __forceinline__ uint32_t unsigned_word(const B& block, W w) {
    const uint32_t low = (block.word(32 + (w >> 5) * 32 + (w & 7) * 4) >> ((w >> 3 & 3) * 2)) & 0x03030303u;
    const uint32_t high = (block.word((w & 7) * 4) >> (w >> 3)) & 0x01010101u;
    return low | high << 2;
  }
  template <class B, class W>
  __device__ static __forceinline__ uint32_t word(const B& block, W w) {
    return subtract<4>(unsigned_word(block, w));
  }
  // As the general ones, with half the operations.
  __device__ static __forceinline__ uint32_t scales(const uint8_t* block, int s) {
    uint32_t words[3];
    load_words(block + 96, words);
    const uint32_t low = of_interleaved(words[0], words[1], s) >> (4 * (s >> 1)),
                   high = words[2] >> (4 * (s >> 1));
    return subtract<32>((low & 0x0f0f0f0fu) | (of_interleaved(high, high >> 2, s) << 4 & 0x30303030u));
  }
  // Bits stay where they are in their bytes, and runs of products with them are shifted back.
  template <class Grid>
  __device__ static __forceinline__ int product(const uint8_t* block, int s, const uint32_t (&x)[16],
                                                uint32_t scales, const Grid&) {
    const int half = s >> 1, part = 16 * (s & 1);
    uint32_t low[4], high[4];
    load_words(block + 32 + 32 * half + part, low);
    load_words(block + part, high, 4 * half);  // masks leave the bits of other bytes out
    int sum = 0;
#pragma unroll
    for (int c = 0; c < 4; c++) {
      int lows = 0, highs = 0;
#pragma unroll
      for (int i = 0; i < 4; i++) {
        lows = dot_unsigned(low[i] & 0x03030303u << (2 * c), x[4 * c + i], lows);
        highs = dot_unsigned(high[i] & 0x01010101u << c, x[4 * c + i], highs);
      }
      sum += signed_byte(scales, c) * ((lows + (highs << (c + 2))) >> (2 * c));
    }
    return sum - 4 * RunSums(x).dot(scales);
  }
  // While bytes are together, products have 128 added.
  template <class B, class W>
  __device__ static __forceinline__ uint32_t folded_word(const B& block, W w) {
    const uint32_t factor = -Q3_K::scale(block, w >> 2);
    return (unsigned_word(block, w) * factor + (0x80808080u - 0x04040404u * factor)) ^ 0x80808080u;
  }
  template <class B>
  __device__ static __forceinline__ uint32_t scale_word(const B& block, int q) {
    const uint32_t low = (block.word(96 + (q & 1) * 4) >> ((q >> 1) * 4)) & 0x0f0f0f0fu;
    return subtract<32>(low | ((block.word(104) >> (2 * q)) & 0x03030303u) << 4);
  }
};

// The header of Q4_K and Q5_K: float16 d and dmin, then eight 6-bit scales and minima in 12 bytes.
struct HeaderK {
  float d, dmin;
  uint32_t scales[2];  // a byte each
  uint32_t mins[2];
};

__device__ __forceinline__ HeaderK unpack_header_k(uint4 raw) {
  HeaderK header;
  header.d = half_to_float(uint16_t(raw.x));
  header.dmin = half_to_float(uint16_t(raw.x >> 16));
  header.scales[0] = raw.y & 0x3f3f3f3f;
  header.scales[1] = (raw.w & 0x0f0f0f0f) | ((raw.y >> 2) & 0x30303030);
  header.mins[0] = raw.z & 0x3f3f3f3f;
  header.mins[1] = ((raw.w >> 4) & 0x0f0f0f0f) | ((raw.z >> 2) & 0x30303030);
  return header;
}

template <class Own, int type, int bytes>
struct HeaderBlock : SuperBlock<Own, type, bytes, 8> {
  static constexpr bool has_mins = true, has_header = true, overlaps_rows = true;

  __device__ static __forceinline__ HeaderK header(const uint8_t* block) {
    return unpack_header_k(load_16(block));
  }
};

struct Q4_K : HeaderBlock<Q4_K, q4_k, 144> {
  template <class B, class W>
  __device__ static __forceinline__ uint32_t word(const B& block, W w) {
    return (block.word(16 + (w >> 4) * 32 + (w & 7) * 4) >> ((w >> 3 & 1) * 4)) & 0x0f0f0f0fu;
  }
  // The second half of a quarter has the factor 16.
  __device__ static __forceinline__ void unpack(const uint8_t* block, int s, uint32_t (&codes)[16]) {
    const uint4 a = load_16(block + 16 + 32 * s), b = load_16(block + 32 + 32 * s);
    const uint32_t words[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
    for (int i = 0; i < 8; i++) {
      codes[i] = words[i] & 0x0f0f0f0f;
      codes[8 + i] = words[i] & 0xf0f0f0f0;
    }
  }
  __device__ static __forceinline__ int dot(const uint32_t (&codes)[16], const uint32_t (&x)[16],
                                            uint32_t scales) {
    int first = 0, second = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) {
      first = dot_unsigned(codes[i], x[i], first);
      second = dot_unsigned(codes[8 + i], x[8 + i], second);
    }
    return int(scales & 0xff) * first + int((scales >> 8) & 0xff) * (second >> 4);
  }
};

struct Q5_K : HeaderBlock<Q5_K, q5_k, 176> {
  template <class B, class W>
  __device__ static __forceinline__ uint32_t word(const B& block, W w) {
    const uint32_t low = (block.word(48 + (w >> 4) * 32 + (w & 7) * 4) >> ((w >> 3 & 1) * 4)) & 0x0f0f0f0fu;
    return low | ((block.word(16 + (w & 7) * 4) >> (w >> 3)) & 0x01010101u) << 4;
  }
  __device__ static __forceinline__ void unpack(const uint8_t* block, int s, uint32_t (&codes)[16]) {
    const uint4 a = load_16(block + 48 + 32 * s), b = load_16(block + 64 + 32 * s);
    const uint4 high_a = load_16(block + 16), high_b = load_16(block + 32);
    const uint32_t words[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
    const uint32_t high[8] = {high_a.x, high_a.y, high_a.z, high_a.w, high_b.x, high_b.y, high_b.z, high_b.w};
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const uint32_t bits = high[i] >> (2 * s);
      codes[i] = (words[i] & 0x0f0f0f0f) | ((bits << 4) & 0x10101010);
      codes[8 + i] = ((words[i] >> 4) & 0x0f0f0f0f) | ((bits << 3) & 0x10101010);
    }
  }
  __device__ static __forceinline__ int dot(const uint32_t (&codes)[16], const uint32_t (&x)[16],
                                            uint32_t scales) {
    int first = 0, second = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) {
      first = dot_unsigned(codes[i], x[i], first);
      second = dot_unsigned(codes[8 + i], x[8 + i], second);
    }
    return int(scales & 0xff) * first + int((scales >> 8) & 0xff) * second;
  }
};

struct Q6_K : SuperBlock<Q6_K, q6_k, 210, 16> {
  static constexpr bool is_interleaved = true, overlaps_rows = true;
  static constexpr int shift = 2, d_at = 208;

  // The bytes with the low four bits of word w, and those with its high two.
  template <class B, class W>
  __device__ static __forceinline__ uint32_t low_bits(const B& block, W w) {
    return block.word((w >> 5) * 64 + (w >> 3 & 1) * 32 + (w & 7) * 4);
  }
  template <class B, class W>
  __device__ static __forceinline__ uint32_t high_bits(const B& block, W w) {
    return block.word(128 + (w >> 5) * 32 + (w & 7) * 4);
  }
  template <class B, class W>
  __device__ static __forceinline__ uint32_t word(const B& block, W w) {
    const uint32_t low = (low_bits(block, w) >> ((w >> 4 & 1) * 4)) & 0x0f0f0f0fu;
    return subtract<32>(low | ((high_bits(block, w) >> ((w >> 3 & 3) * 2)) & 0x03030303u) << 4);
  }
  template <class B, class W>
  __device__ static __forceinline__ uint32_t shifted_word(const B& block, W w) {
    const uint32_t low = low_bits(block, w);
    return join((w >> 4 & 1) ? low >> 2 : low << 2, high_bits(block, w) << (6 - (w >> 3 & 3) * 2));
  }
  // The four bits of `low` and two of `high` as signed bytes, with 128 taken away.
  __device__ static __forceinline__ uint32_t join(uint32_t low, uint32_t high) {
    return (low & 0x3c3c3c3cu) | ((high & 0xc0c0c0c0u) ^ 0x80808080u);
  }
  // As the general ones, with fewer addresses.
  __device__ static __forceinline__ void unpack(const uint8_t* block, int s, uint32_t (&codes)[16]) {
    const int half = s >> 1, part = 16 * (s & 1);
    uint32_t a[4], b[4], high[4];
    load_words(block + 64 * half + part, a);
    load_words(block + 64 * half + 32 + part, b);
    load_words(block + 128 + 32 * half + part, high);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      codes[i] = join(a[i] << 2, high[i] << 6);
      codes[4 + i] = join(b[i] << 2, high[i] << 4);
      codes[8 + i] = join(a[i] >> 2, high[i] << 2);
      codes[12 + i] = join(b[i] >> 2, high[i]);
    }
  }
  __device__ static __forceinline__ uint32_t scales(const uint8_t* block, int s) {
    uint32_t words[2];
    load_words(block + 192 + 8 * (s >> 1), words);
    return of_interleaved(words[0], words[1], s);
  }
  template <class B>
  __device__ static __forceinline__ uint32_t scale_word(const B& block, int q) {
    return block.word(192 + 4 * q);
  }
};

struct IQ4_XS : SuperBlock<IQ4_XS, iq4_xs, 136, 8> {
  template <class B, class W>
  __device__ static __forceinline__ uint32_t word(const B& block, W w) {
    return look_up(iq4_values, nibbles_of_32(block, 8 + (w >> 3) * 16, w & 7));
  }
  template <class B>
  __device__ static __forceinline__ int scale(const B& block, int j) {
    const uint32_t low = block.byte(4 + (j >> 1)) >> ((j & 1) * 4) & 15, high = block.two(2) >> (2 * j) & 3;
    return int(low | high << 4) - 32;
  }
  __device__ static __forceinline__ void arrange(uint32_t (&x)[16]) {
    interleave(x);
    interleave(x + 8);
  }
  template <class Grid>
  __device__ static __forceinline__ int product(const uint8_t* block, int s, const uint32_t (&x)[16],
                                                uint32_t, const Grid&) {
    const uint2 header = load_8(block);
    const uint32_t low = header.y >> (8 * s), high = header.x >> (16 + 4 * s);
    const int scales[2] = {int((low & 15) | (high << 4 & 0x30)) - 32,
                           int((low >> 4 & 15) | (high << 2 & 0x30)) - 32};
    int total = 0;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      SplitSum sum;
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const uint2 nibbles = load_8(block + 8 + 32 * s + 16 * half + 8 * i);
        sum.add(iq4_split, nibbles.x, x + 8 * half + 4 * i);
        sum.add(iq4_split, nibbles.y, x + 8 * half + 4 * i + 2);
      }
      total += scales[half] * (sum.high - sum.low);
    }
    return total;
  }
};

// Grids: an entry has four values, in two-byte words of grids.cuh.
constexpr uint32_t iq2_levels = 0x002b1908u;  // 8 25 43
constexpr uint32_t iq2_negated = 0x00d5e7f8u;
constexpr uint32_t iq3_xxs_levels[2] = {0x1c140c04u, 0x3e342c24u};  // 4 12 … 44 52 62
constexpr uint32_t iq3_s_levels[2] = {0x07050301u, 0x0f0d0b09u};    // 1 3 … 15
constexpr uint32_t iq1_levels_above = 0x000901f9u,
                   iq1_levels_below = 0x0007fff7u;  // −8 0 8, and 1 more or less

// Entries 2 i and 2 i + 1 of a grid of eight values.
__device__ __forceinline__ uint32_t two_entries(const uint16_t* grid, int i) {
  return reinterpret_cast<const uint32_t*>(grid)[i];
}

struct AsItIs {
  __device__ __forceinline__ int operator()(int, int sum) const { return sum; }
};

// The part of I of a quarter, which has eight entries of eight values or pairs of four. add(k, sum): adds the
// products of entry or pair k; scale(run): what a run of them is multiplied by, which is finish(run, sum).
template <int runs, class Sum, class Add, class Scale, class Finish = AsItIs>
__device__ __forceinline__ int sum_of_runs(const Add& add, const Scale& scale, const Finish& finish = {}) {
  int total = 0;
#pragma unroll
  for (int run = 0; run < runs; run++) {
    Sum sum = {};
#pragma unroll
    for (int k = 8 / runs * run; k < 8 / runs * (run + 1); k++) add(k, sum);
    total += scale(run) * finish(run, int(sum));
  }
  return total;
}

struct IQ2_XXS : SuperBlock<IQ2_XXS, iq2_xxs, 66, 8> {
  static constexpr int grid_entries = 256;
  static constexpr float d_factor = 0.125f;

  template <class B, class W>
  __device__ static __forceinline__ uint32_t word(const B& block, W w) {
    const uint32_t index = block.word(2 + (w >> 3) * 8) >> ((w >> 1 & 3) * 8) & 255;
    const uint32_t signs = even_signs(block.word(6 + (w >> 3) * 8) >> ((w >> 1 & 3) * 7) & 127);
    return with_signs(levels_of(iq2_xxs_grid[2 * index + int(w & 1)], iq2_levels, 0), signs >> ((w & 1) * 4));
  }
  template <class B>
  __device__ static __forceinline__ int scale(const B& block, int j) {
    return 1 + 2 * (block.word(6 + 8 * j) >> 28);
  }
  __device__ static __forceinline__ uint32_t grid_entry(int i) { return two_entries(iq2_xxs_grid, i); }
  template <class Grid>
  __device__ static __forceinline__ int product(const uint8_t* block, int s, const uint32_t (&x)[16],
                                                uint32_t, const Grid& grid) {
    uint32_t words[4];
    load_words(block + 2 + 16 * s, words);
    const auto add = [&](int k, int& sum) {
      const uint32_t indices = words[k / 4 * 2], signs = words[k / 4 * 2 + 1] >> (7 * (k % 4)) & 127;
      sum = dot_selected(with_even_sign_bits(grid.at_byte(indices, k % 4), signs), iq2_levels, iq2_negated,
                         x + 2 * k, sum);
    };
    return sum_of_runs<2, int>(add, [&](int half) { return int(words[2 * half + 1] >> 27 | 1); });
  }
};

struct IQ2_XS : SuperBlock<IQ2_XS, iq2_xs, 74, 16> {
  static constexpr int grid_entries = 512;
  static constexpr float d_factor = 0.125f;

  template <class B, class W>
  __device__ static __forceinline__ uint32_t word(const B& block, W w) {
    const uint32_t bits = block.word(2 + (w >> 2) * 4) >> ((w >> 1 & 1) * 16) & 0xffff;
    const uint32_t signs = even_signs(bits >> 9);
    return with_signs(levels_of(iq2_xs_grid[2 * (bits & 511) + int(w & 1)], iq2_levels, 0),
                      signs >> ((w & 1) * 4));
  }
  template <class B>
  __device__ static __forceinline__ uint32_t scale_word(const B& block, int q) {
    return odd_nibbles(block.two(66 + 2 * q));
  }
  __device__ static __forceinline__ uint32_t grid_entry(int i) { return two_entries(iq2_xs_grid, i); }
  template <class Grid>
  __device__ static __forceinline__ int product(const uint8_t* block, int s, const uint32_t (&x)[16],
                                                uint32_t scales, const Grid& grid) {
    uint32_t words[4];
    load_words(block + 2 + 16 * s, words);
    const auto add = [&](int k, int& sum) {
      const uint32_t bits = words[k / 2] >> (16 * (k % 2));
      sum = dot_selected(with_even_sign_bits(grid[bits & 511], bits >> 9 & 127), iq2_levels, iq2_negated,
                         x + 2 * k, sum);
    };
    return sum_of_runs<4, int>(add, [&](int c) { return signed_byte(scales, c); });
  }
};

struct IQ2_S : SuperBlock<IQ2_S, iq2_s, 82, 16> {
  static constexpr int grid_entries = 1024;
  static constexpr float d_factor = 0.125f;

  template <class B, class W>
  __device__ static __forceinline__ uint32_t word(const B& block, W w) {
    const uint32_t low = block.word(2 + (w >> 3) * 4) >> ((w >> 1 & 3) * 8) & 255;
    const uint32_t index = low | (block.byte(66 + (w >> 3)) >> ((w >> 1 & 3) * 2) & 3) << 8;
    const uint32_t signs = block.word(34 + (w >> 3) * 4) >> ((w & 7) * 4);
    return with_signs(levels_of(iq2_s_grid[2 * index + int(w & 1)], iq2_levels, 0), signs);
  }
  template <class B>
  __device__ static __forceinline__ uint32_t scale_word(const B& block, int q) {
    return odd_nibbles(block.two(74 + 2 * q));
  }
  __device__ static __forceinline__ uint32_t grid_entry(int i) { return two_entries(iq2_s_grid, i); }
  template <class Grid>
  __device__ static __forceinline__ int product(const uint8_t* block, int s, const uint32_t (&x)[16],
                                                uint32_t scales, const Grid& grid) {
    uint32_t low[2], signs[2];
    load_words(block + 2 + 8 * s, low);
    load_words(block + 34 + 8 * s, signs);
    const uint32_t fields = Near{block}.two(66 + 2 * s);
    const uint32_t high[2] = {spread_crumbs(fields & 255), spread_crumbs(fields >> 8)};
    const auto add = [&](int k, int& sum) {
      const uint32_t index = bytes_together(low[k / 4], high[k / 4], k % 4);
      sum = dot_selected(with_sign_bits(grid[index], signs[k / 4], signs[k / 4] >> 4, k % 4), iq2_levels,
                         iq2_negated, x + 2 * k, sum);
    };
    return sum_of_runs<4, int>(add, [&](int c) { return signed_byte(scales, c); });
  }
};

struct IQ3_XXS : SuperBlock<IQ3_XXS, iq3_xxs, 98, 8> {
  static constexpr int grid_entries = 256;
  static constexpr float d_factor = 0.25f;
  static constexpr bool repeats_grid = true;

  template <class B, class W>
  __device__ static __forceinline__ uint32_t word(const B& block, W w) {
    const uint32_t index = block.word(2 + (w >> 2) * 4) >> ((w & 3) * 8) & 255;
    const uint32_t signs = even_signs(block.word(66 + (w >> 3) * 4) >> ((w >> 1 & 3) * 7) & 127);
    return with_signs(levels_of(iq3_xxs_grid[index], iq3_xxs_levels[0], iq3_xxs_levels[1]),
                      signs >> ((w & 1) * 4));
  }
  template <class B>
  __device__ static __forceinline__ int scale(const B& block, int j) {
    return 1 + 2 * (block.word(66 + 4 * j) >> 28);
  }
  __device__ static __forceinline__ uint32_t grid_entry(int i) {
    return levels_of(iq3_xxs_grid[i], iq3_xxs_levels[0], iq3_xxs_levels[1]);
  }
  template <class Grid>
  __device__ static __forceinline__ int product(const uint8_t* block, int s, const uint32_t (&x)[16],
                                                uint32_t, const Grid& grid) {
    uint32_t indices[4], signs[2];
    load_words(block + 2 + 16 * s, indices);
    load_words(block + 66 + 8 * s, signs);
    const auto add = [&](int k, SignedSum& sum) {
      const SignMasks masks = even_sign_masks(signs[k / 4] >> (7 * (k % 4)) & 127);
      const int first = 2 * (k % 2);
      sum.add(grid.at_byte(indices[k / 2], first), masks.first, x[2 * k]);
      sum.add(grid.at_byte(indices[k / 2], first + 1), masks.second, x[2 * k + 1]);
    };
    return sum_of_runs<2, SignedSum>(add, [&](int half) { return int(signs[half] >> 27 | 1); });
  }
};

struct IQ3_S : SuperBlock<IQ3_S, iq3_s, 110, 8> {
  static constexpr int grid_entries = 512;
  static constexpr bool repeats_grid = true;

  template <class B, class W>
  __device__ static __forceinline__ uint32_t word(const B& block, W w) {
    const uint32_t low = block.word(2 + (w >> 2) * 4) >> ((w & 3) * 8) & 255;
    const uint32_t index = low | (block.byte(66 + (w >> 3)) >> (w & 7) & 1) << 8;
    return with_signs(levels_of(iq3_s_grid[index], iq3_s_levels[0], iq3_s_levels[1]),
                      block.word(74 + (w >> 3) * 4) >> ((w & 7) * 4));
  }
  template <class B>
  __device__ static __forceinline__ int scale(const B& block, int j) {
    return 1 + 2 * (block.byte(106 + (j >> 1)) >> ((j & 1) * 4) & 15);
  }
  // Halves of the odd values, rounded down: a code is twice its half and one more, and inverting the half
  // gives that of the negative code.
  __device__ static __forceinline__ uint32_t grid_entry(int i) {
    return levels_of(iq3_s_grid[i], 0x03020100u, 0x07060504u);
  }
  template <class Grid>
  __device__ static __forceinline__ int product(const uint8_t* block, int s, const uint32_t (&x)[16],
                                                uint32_t, const Grid& grid) {
    uint32_t low[4], signs[2];
    load_words(block + 2 + 16 * s, low);
    load_words(block + 74 + 8 * s, signs);
    const uint32_t sevens[2] = {signs[0] & 0x7f7f7f7fu, signs[1] & 0x7f7f7f7fu};
    const uint32_t high = Near{block}.two(66 + 2 * s), scales = Near{block}.byte(106 + s);
    const auto add = [&](int k, int& sum) {
      const SignMasks masks = sign_masks(signs[k / 4], sevens[k / 4], k % 4);
      const uint32_t four = low[k / 2], bits = spread_bits(high >> (k / 2 * 4));
      const int first = 2 * (k % 2);
      sum = dot_signed(grid[bytes_together(four, bits, first)] ^ masks.first, x[2 * k], sum);
      sum = dot_signed(grid[bytes_together(four, bits, first + 1)] ^ masks.second, x[2 * k + 1], sum);
    };
    const auto finish = [&](int half, int sum) { return 2 * sum + sum_of_words<8>(x + 8 * half); };
    return sum_of_runs<2, int>(
        add, [&](int half) { return int(2 * (scales >> (4 * half) & 15) + 1); }, finish);
  }
};

// Codes are eight times the grid's values, and one more or one less.
struct IQ1_S : SuperBlock<IQ1_S, iq1_s, 50, 8> {
  static constexpr int grid_entries = 2048;
  static constexpr float d_factor = 0.125f;

  template <class B, class W>
  __device__ static __forceinline__ uint32_t word(const B& block, W w) {
    const uint32_t bits = block.two(34 + (w >> 3) * 2),
                   low = block.word(2 + (w >> 3) * 4) >> ((w >> 1 & 3) * 8) & 255;
    const uint32_t index = low | (bits >> ((w >> 1 & 3) * 3) & 7) << 8;
    return levels_of(iq1_grid[2 * index + int(w & 1)], bits >> 15 ? iq1_levels_below : iq1_levels_above, 0);
  }
  template <class B>
  __device__ static __forceinline__ int scale(const B& block, int j) {
    return 1 + 2 * (block.two(34 + 2 * j) >> 12 & 7);
  }
  __device__ static __forceinline__ uint32_t grid_entry(int i) { return two_entries(iq1_grid, i); }
  template <class Grid>
  __device__ static __forceinline__ int product(const uint8_t* block, int s, const uint32_t (&x)[16],
                                                uint32_t, const Grid& grid) {
    uint32_t low[2], bits[1];
    load_words(block + 2 + 8 * s, low);
    load_words(block + 34 + 4 * s, bits);
    const uint32_t fields[2] = {bits[0], bits[0] >> 16};
    const uint32_t high[2] = {spread_thirds(fields[0]), spread_thirds(fields[1])};
    const auto add = [&](int k, int& sum) {
      const uint32_t levels = fields[k / 4] & 0x8000 ? iq1_levels_below : iq1_levels_above;
      sum = dot_selected(grid[bytes_together(low[k / 4], high[k / 4], k % 4)], levels, 0, x + 2 * k, sum);
    };
    return sum_of_runs<2, int>(add, [&](int half) { return int((fields[half] >> 11 & 14) + 1); });
  }
};

struct IQ1_M : SuperBlock<IQ1_M, iq1_m, 56, 16> {
  static constexpr int grid_entries = 2048;

  template <class B, class W>
  __device__ static __forceinline__ uint32_t word(const B& block, W w) {
    const uint32_t bits = block.word(32 + (w >> 4) * 4) >> ((w >> 1 & 7) * 4);
    const uint32_t index = (block.word((w >> 3) * 4) >> ((w >> 1 & 3) * 8) & 255) | (bits & 7) << 8;
    return levels_of(iq1_grid[2 * index + int(w & 1)], bits & 8 ? iq1_levels_below : iq1_levels_above, 0);
  }
  template <class B>
  __device__ static __forceinline__ uint32_t scale_word(const B& block, int q) {
    const uint32_t bits = block.two(48 + 2 * q);
    const uint32_t fields =
        (bits & 7) | (bits & 0x38) << 5 | (bits & 0x1c0) << 10 | (bits & 0xe00) << 15;  // a byte each
    return 2 * fields + 0x01010101u;
  }
  // The top nibbles of the four words of scales.
  template <class B>
  __device__ static __forceinline__ float d(const B& block) {
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) bits |= block.two(48 + 2 * i) >> 12 << (4 * i);
    return half_to_float(uint16_t(bits)) * 0.125f;
  }
  __device__ static __forceinline__ uint32_t grid_entry(int i) { return two_entries(iq1_grid, i); }
  template <class Grid>
  __device__ static __forceinline__ int product(const uint8_t* block, int s, const uint32_t (&x)[16],
                                                uint32_t scales, const Grid& grid) {
    const uint2 low = load_8(block + 8 * s);
    // Of each index the nibble with its three high bits and the sign of its values, in a byte of its own.
    const uint32_t bits = Near{block}.word(32 + 4 * s), nibbles[2] = {bits << 4, bits};
    const uint32_t high[2] = {bits & 0x07070707u, bits >> 4 & 0x07070707u};
    const auto add = [&](int k, int& sum) {
      const uint32_t index = bytes_together(k < 4 ? low.x : low.y, high[k % 2], k % 4, k / 2);
      const uint32_t below = permute(nibbles[k % 2], 0, 0x8888 + 0x1111 * (k / 2)) & 0x44444444u;
      sum = dot_selected(grid[index] | below, iq1_levels_above, iq1_levels_below, x + 2 * k, sum);
    };
    return sum_of_runs<4, int>(add, [&](int c) { return signed_byte(scales, c); });
  }
};

// Without scales of sub-blocks.
struct TQ2_0 : SuperBlock<TQ2_0, tq2_0, 66, 8> {
  static constexpr bool is_interleaved = true, folds_scales = true;
  static constexpr int d_at = 64;

  template <class B, class W>
  __device__ static __forceinline__ uint32_t word(const B& block, W w) {
    return subtract<1>((block.word((w >> 5) * 32 + (w & 7) * 4) >> ((w >> 3 & 3) * 2)) & 0x03030303u);
  }
  template <class B, class W>
  __device__ static __forceinline__ uint32_t folded_word(const B& block, W w) {
    return word(block, w);
  }
  template <class B>
  __device__ static __forceinline__ int scale(const B&, int) {
    return 1;
  }
};

// Of all quantised types.
template <class... Weights>
struct WeightList {};
using AllWeights = WeightList<Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ2_XXS, IQ2_XS,
                              IQ3_XXS, IQ1_S, IQ4_NL, IQ3_S, IQ2_S, IQ4_XS, IQ1_M, TQ2_0, MXFP4, Q2_0>;

}  // namespace coldstream
