// What the traits of all quantised types have in common; weight_traits.cuh has the types.
//
// `B` is a block's bytes, NearBytes or ExactBytes. Word w of a block has the codes 4 w … 4 w + 3, a byte
// each. `shifted_word` has codes times 2^shift, which takes fewer instructions; sums of products with them
// are shifted back, exactly.
#pragma once

#include "cuda/weight_bytes.cuh"

namespace coldstream {

template <class B>
__device__ __forceinline__ float half_at(const B& block, int at) {
  return half_to_float(uint16_t(block.two(at)));
}

// What a type says if it has nothing else to say.
template <class Own, int type_, int bytes_, int elements_, int sub_blocks_>
struct WeightBlock {
  static constexpr int type = type_, bytes = bytes_, elements = elements_;
  static constexpr int sub_blocks = sub_blocks_;  // with a scale each
  static constexpr int alignment = (bytes & -bytes) < 16 ? bytes & -bytes : 16;
  static constexpr bool is_super = elements == 256;
  // Minima, in super-blocks for each sub-block, are subtracted (a small block's are added).
  static constexpr bool has_mins = false;
  // A header of d, dmin, and eight 6-bit scales and minima.
  static constexpr bool has_header = false;
  // The bytes of 128 codes are shared by sub-blocks: each has one field of every byte.
  static constexpr bool is_interleaved = false;
  // Scales times codes fit int8, so that a super-block is one sum of products: those of folded_word(block,
  // w).
  static constexpr bool folds_scales = false;
  // Folded words have the other sign.
  static constexpr bool folds_negated = false;
  // Whether loads for several weight rows may be under way in a thread; other types need the registers.
  static constexpr bool overlaps_rows = false;
  static constexpr int shift = 0;
  // The float16 that scales a block, and what it is multiplied with.
  static constexpr int d_at = 0;
  static constexpr float d_factor = 1.0f;
  // Words of a grid that GEMV keeps in shared memory: grid_entry(i). With a look-up for every word of codes a
  // grid is kept sixteen times or eight, as it fits, so that no more than two or four lanes meet in a bank.
  static constexpr int grid_entries = 0;
  static constexpr bool repeats_grid = false;
  // Whether the product of a block of 32 takes codes of x by columns too.
  static constexpr bool takes_columns = false;

  template <class B, class W>
  __device__ static __forceinline__ uint32_t shifted_word(const B& block, W w) {
    return Own::word(block, w);
  }
  template <class B>
  __device__ static __forceinline__ float d(const B& block) {
    return half_at(block, Own::d_at) * Own::d_factor;
  }
};

// Σ q_x of so many words of codes.
template <int count>
__device__ __forceinline__ int sum_of_words(const uint32_t* x) {
  int sum = 0;
#pragma unroll
  for (int i = 0; i < count; i++) sum = dot_signed(four_ones, x[i], sum);
  return sum;
}

// What a block of 32 is multiplied with: codes of x, their sum, and, for types that take them, the codes by
// columns. Word k of those has the codes k, 8 + k, 16 + k and 24 + k.
struct BlockCodes {
  uint32_t natural[8], columns[8];
  int sum;
};

// Blocks of 32 or 64.

template <class Own, int type, int bytes, int elements = 32>
struct SmallBlock : WeightBlock<Own, type, bytes, elements, 1> {
  // Whether `product` takes the codes of x in the order of `interleave`.
  static constexpr bool interleaves_x = false;
  // What `product` takes from registers.
  struct Tables {};
  __device__ static __forceinline__ Tables tables() { return {}; }

  // Words w and w + 4; w is one of the first four of 32 codes.
  template <class B>
  __device__ static __forceinline__ void two_words(const B& block, SplitIndex w, uint32_t& first,
                                                   uint32_t& second) {
    first = Own::word(block, w);
    second = Own::word(block, w + SplitIndex{0, 4});
  }

  // I of a block of 32.
  template <class B, class T>
  __device__ static __forceinline__ int product(const B& block, const BlockCodes& x, const T&) {
    uint32_t codes[8];
#pragma unroll
    for (int i = 0; i < 8; i++) codes[i] = Own::shifted_word(block, i);
    return dot(codes, x.natural);
  }
  __device__ static __forceinline__ int dot(const uint32_t (&codes)[8], const uint32_t (&x)[8]) {
    int sum = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) sum = dot_signed(codes[i], x[i], sum);
    return sum >> Own::shift;
  }
};

// Sums of the codes of x in a quarter's runs of 16, two to a word.
struct RunSums {
  uint32_t pairs[2];

  __device__ __forceinline__ explicit RunSums(const uint32_t (&x)[16]) {
#pragma unroll
    for (int pair = 0; pair < 2; pair++) {
      int sums[2] = {};
#pragma unroll
      for (int i = 0; i < 8; i++) sums[i / 4] = dot_signed(four_ones, x[8 * pair + i], sums[i / 4]);
      pairs[pair] = __byte_perm(uint32_t(sums[0]), uint32_t(sums[1]), 0x5410);
    }
  }
  // With the minima or scales of the runs, a signed byte each.
  __device__ __forceinline__ int dot(uint32_t factors) const {
    return __dp2a_hi(int(pairs[1]), int(factors), __dp2a_lo(int(pairs[0]), int(factors), 0));
  }
};

// Super-blocks. GEMV takes them in quarters of 64 codes. Quarter s has four runs of 16, run c being chunk
// `chunk(s, c)` of the sixteen chunks of a super-block. Its codes are shifted words.

template <class Own, int type, int bytes, int sub_blocks>
struct SuperBlock : WeightBlock<Own, type, bytes, 256, sub_blocks> {
  using Near = NearBytes<WeightBlock<Own, type, bytes, 256, sub_blocks>::alignment>;

  template <class B>
  __device__ static __forceinline__ int scale(const B& block, int j) {
    return int8_t(Own::scale_word(block, j >> 2) >> ((j & 3) * 8));
  }
  __device__ static __forceinline__ int chunk(int s, int c) {
    return Own::is_interleaved ? (s & 2) << 2 | (s & 1) | c << 1 : 4 * s + c;
  }
  __device__ static __forceinline__ SplitIndex word_of_quarter(int s, int k) {
    if constexpr (Own::is_interleaved) return {(s & 2) << 4 | (s & 1) << 2, k / 4 * 8 + k % 4};
    return {16 * s, k};
  }
  __device__ static __forceinline__ void unpack(const uint8_t* block, int s, uint32_t (&codes)[16]) {
#pragma unroll
    for (int k = 0; k < 16; k++) codes[k] = Own::shifted_word(Near{block}, word_of_quarter(s, k));
  }
  // Of a quarter's runs, a signed byte each; with eight sub-blocks, of its halves.
  __device__ static __forceinline__ uint32_t scales(const uint8_t* block, int s) {
    if constexpr (sub_blocks == 8) {
      const uint32_t first = Own::scale(Near{block}, 2 * s), second = Own::scale(Near{block}, 2 * s + 1);
      return (first & 0xff) | second << 8;
    } else if constexpr (Own::is_interleaved) {
      const int q = s & 2;
      return of_interleaved(Own::scale_word(Near{block}, q), Own::scale_word(Near{block}, q + 1), s);
    } else {
      return Own::scale_word(Near{block}, s);
    }
  }
  // Of a quarter's runs, a byte each.
  __device__ static __forceinline__ uint32_t mins(const uint8_t* block, int s) {
    static_assert(Own::is_interleaved);
    const int q = s & 2;
    return of_interleaved(Own::min_word(Near{block}, q), Own::min_word(Near{block}, q + 1), s);
  }
  __device__ static __forceinline__ uint32_t of_interleaved(uint32_t first, uint32_t second, int s) {
    return __byte_perm(first, second, s & 1 ? 0x7531 : 0x6420);
  }
  __device__ static __forceinline__ int dot(const uint32_t (&codes)[16], const uint32_t (&x)[16],
                                            uint32_t scales) {
    constexpr int run_words = 64 / sub_blocks;  // of a sub-block
    int sum = 0;
#pragma unroll
    for (int c = 0; c < 16 / run_words; c++) {
      int run = 0;
#pragma unroll
      for (int i = 0; i < run_words; i++)
        run = dot_signed(codes[run_words * c + i], x[run_words * c + i], run);
      sum += int(int8_t(scales >> (8 * c))) * run;
    }
    return sum >> Own::shift;
  }
  // Puts the codes of x under a quarter into the order that `product` takes.
  __device__ static __forceinline__ void arrange(uint32_t (&)[16]) {}
  // A quarter's part of I. `scales`: of types with a header; `grid`: the type's, in shared memory.
  template <class Grid>
  __device__ static __forceinline__ int product(const uint8_t* block, int s, const uint32_t (&x)[16],
                                                uint32_t scales, const Grid&) {
    uint32_t codes[16];
    Own::unpack(block, s, codes);
    return Own::dot(codes, x, scales);
  }
};

// I of a super-block from the sum of products with folded words.
template <class Weights>
__device__ __forceinline__ int of_folded(int sum) {
  return Weights::folds_negated ? -sum : sum;
}

}  // namespace coldstream
