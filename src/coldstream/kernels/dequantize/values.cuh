// Decodes blocks of every type to float32, a run of eight adjacent values at a time.
//
// Value i of a block, which lies in sub-block j, is (d · scale(j)) · code(i) − dmin · min(j), as in
// integer_blocks.py; every multiplication rounds on its own. Run r holds values 8 r … 8 r + 7, which share a
// sub-block, an entry of a grid (or two) and a byte of signs. Blocks are aligned to 2 bytes, those of Q4_K
// and Q5_K to 16, those of MXFP4 to 1. `table`, aligned to 8 bytes, holds the int8 values that the codes of a
// type stand for.
#pragma once

#include "cuda/blocks.cuh"

namespace coldstream {

constexpr int run_values = 8;

constexpr bool is_iq1(int type) { return type == iq1_s || type == iq1_m; }
constexpr bool has_grid(int type) {
  return type == iq2_xxs || type == iq2_xs || type == iq2_s || type == iq3_xxs || type == iq3_s ||
         is_iq1(type);
}
constexpr bool has_six_bit_scales(int type) { return type == q4_k || type == q5_k; }

// Runs of a sub-block of a type with blocks of 256; smaller blocks are one sub-block.
constexpr int sub_block_runs(int type) {
  const bool is_short = type == q2_k || type == q3_k || type == q6_k;
  return is_short || type == iq2_xs || type == iq2_s || type == iq1_m ? 2 : 4;
}

__device__ __forceinline__ int word16(const uint8_t* p) { return *reinterpret_cast<const uint16_t*>(p); }

__device__ __forceinline__ uint32_t word32(const uint8_t* p) {
  return uint32_t(word16(p)) | uint32_t(word16(p + 2)) << 16;
}

// Bits shift … shift + bits − 1 of the eight bytes at p, an even address.
template <int bits>
__device__ __forceinline__ void load_fields(const uint8_t* p, int shift, int (&fields)[8]) {
#pragma unroll
  for (int k = 0; k < 8; k += 2) {
    const int word = word16(p + k) >> shift;
    fields[k] = word & ((1 << bits) - 1);
    fields[k + 1] = (word >> 8) & ((1 << bits) - 1);
  }
}

// Nibbles of a run of a block of 32, whose 16 bytes begin at p: the low nibbles are values 0 to 15, the high
// ones 16 to 31.
__device__ __forceinline__ void load_nibbles(const uint8_t* p, int r, int (&codes)[8]) {
  load_fields<4>(p + r % 2 * 8, r / 2 * 4, codes);
}

__device__ __forceinline__ void add_fifth_bits(int bits, int offset, int (&codes)[8]) {
#pragma unroll
  for (int k = 0; k < 8; k++) codes[k] += ((bits >> k & 1) << 4) - offset;
}

__device__ __forceinline__ void look_up(const int8_t* table, int (&codes)[8]) {
#pragma unroll
  for (int k = 0; k < 8; k++) codes[k] = table[codes[k]];
}

// Codes of a run of a block of 32.
template <int type>
__device__ __forceinline__ void small_block_codes(const uint8_t* block, int r, const int8_t* table,
                                                  int (&codes)[8]) {
  if constexpr (type == q8_0) {
    load_fields<8>(block + 2 + 8 * r, 0, codes);
#pragma unroll
    for (int k = 0; k < 8; k++) codes[k] = int8_t(codes[k]);
  } else if constexpr (type == q4_0) {
    load_nibbles(block + 2, r, codes);
#pragma unroll
    for (int k = 0; k < 8; k++) codes[k] -= 8;
  } else if constexpr (type == q4_1) {
    load_nibbles(block + 4, r, codes);
  } else if constexpr (type == q5_0) {
    load_nibbles(block + 6, r, codes);
    add_fifth_bits(block[2 + r], 16, codes);
  } else if constexpr (type == q5_1) {
    load_nibbles(block + 8, r, codes);
    add_fifth_bits(block[4 + r], 0, codes);
  } else if constexpr (type == iq4_nl) {
    load_nibbles(block + 2, r, codes);
    look_up(table, codes);
  } else {
    static_assert(type == mxfp4);
#pragma unroll
    for (int k = 0; k < 8; k++) codes[k] = block[1 + r % 2 * 8 + k] >> (r / 2 * 4) & 15;
    look_up(table, codes);
  }
}

// Codes of a run of a block of 256 that has no grid.
template <int type>
__device__ __forceinline__ void linear_codes(const uint8_t* block, int r, const int8_t* table,
                                             int (&codes)[8]) {
  const int word = r / 4, in_word = r % 4 * 8, half = r / 16;  // of 32 values, of 128
  int high[8];
  if constexpr (type == q4_k) {
    load_fields<4>(block + 16 + r / 8 * 32 + in_word, word % 2 * 4, codes);
  } else if constexpr (type == q5_k) {
    load_fields<4>(block + 48 + r / 8 * 32 + in_word, word % 2 * 4, codes);
    load_fields<1>(block + 16 + in_word, word, high);
#pragma unroll
    for (int k = 0; k < 8; k++) codes[k] += 16 * high[k];
  } else if constexpr (type == q6_k) {
    load_fields<4>(block + half * 64 + r % 8 * 8, r / 8 % 2 * 4, codes);
    load_fields<2>(block + 128 + half * 32 + in_word, word % 4 * 2, high);
#pragma unroll
    for (int k = 0; k < 8; k++) codes[k] += 16 * high[k] - 32;
  } else if constexpr (type == q2_k) {
    load_fields<2>(block + 16 + half * 32 + in_word, word % 4 * 2, codes);
  } else if constexpr (type == q3_k) {
    load_fields<2>(block + 32 + half * 32 + in_word, word % 4 * 2, codes);
    load_fields<1>(block + in_word, word, high);
#pragma unroll
    for (int k = 0; k < 8; k++) codes[k] += 4 * high[k] - 4;
  } else {
    static_assert(type == iq4_xs);
    load_fields<4>(block + 8 + word * 16 + r % 2 * 8, r / 2 % 2 * 4, codes);
    look_up(table, codes);
  }
}

// The signs of eight values of which seven are given: an even number is negative.
__device__ __forceinline__ int even_signs(int bits) {
  int parity = bits ^ bits >> 4;
  parity ^= parity >> 2;
  parity ^= parity >> 1;
  return bits | (parity & 1) << 7;
}

// The entries of its grid that a run takes (one entry of eight values or two of four), and its signs, a bit
// for each value, set for minus.
struct GridRun {
  int entries[2];
  int signs;
};

template <int type>
__device__ __forceinline__ GridRun load_grid_run(const uint8_t* block, int r) {
  const int word = r / 4, in_word = r % 4;
  if constexpr (type == iq2_xxs) {
    const uint8_t* group = block + 2 + 8 * word;
    const int entry = group[in_word];
    return {{2 * entry, 2 * entry + 1}, even_signs(word32(group + 4) >> (7 * in_word) & 127)};
  } else if constexpr (type == iq2_xs) {
    const int bits = word16(block + 2 + 2 * r), entry = bits & 511;
    return {{2 * entry, 2 * entry + 1}, even_signs(bits >> 9)};
  } else if constexpr (type == iq2_s) {
    const int entry = block[2 + r] + 256 * (block[66 + word] >> (2 * in_word) & 3);
    return {{2 * entry, 2 * entry + 1}, block[34 + r]};
  } else if constexpr (type == iq3_xxs) {
    return {{block[2 + 2 * r], block[3 + 2 * r]},
            even_signs(word32(block + 66 + 4 * word) >> (7 * in_word) & 127)};
  } else if constexpr (type == iq3_s) {
    const int high = block[66 + word] >> (2 * in_word);
    return {{block[2 + 2 * r] + 256 * (high & 1), block[3 + 2 * r] + 256 * (high >> 1 & 1)}, block[74 + r]};
  } else if constexpr (type == iq1_s) {
    const int bits = word16(block + 34 + 2 * word), entry = block[2 + r] + 256 * (bits >> (3 * in_word) & 7);
    return {{2 * entry, 2 * entry + 1}, bits >> 15 ? 255 : 0};
  } else {
    static_assert(type == iq1_m);
    const int bits = block[32 + r / 2] >> (r % 2 * 4), entry = block[r] + 256 * (bits & 7);
    return {{2 * entry, 2 * entry + 1}, bits >> 3 & 1 ? 255 : 0};
  }
}

// Codes of a run of a block with a grid. The sign negates a value, except for IQ1: there the codes are eight
// times the value, and the sign adds or subtracts an eighth.
template <int type>
__device__ __forceinline__ void grid_codes(const uint8_t* block, int r, const int8_t* table,
                                           int (&codes)[8]) {
  const GridRun run = load_grid_run<type>(block, r);
#pragma unroll
  for (int k = 0; k < 8; k++) {
    const uint32_t four = reinterpret_cast<const uint32_t*>(table)[run.entries[k / 4]];
    const int value = int8_t(four >> (k % 4 * 8)), sign = 1 - 2 * (run.signs >> k & 1);
    codes[k] = is_iq1(type) ? 8 * value + sign : value * sign;
  }
}

// Scale of sub-block j; a block of 32 is its only sub-block.
template <int type>
__device__ __forceinline__ int scale_of(const uint8_t* block, int j) {
  const int nibble_shift = j % 2 * 4;
  if constexpr (type == q6_k) return int8_t(block[192 + j]);
  if constexpr (type == q2_k) return block[j] & 15;
  if constexpr (type == q3_k) {
    return (block[96 + j % 8] >> (j / 8 * 4) & 15) + 16 * (block[104 + j % 4] >> (j / 4 * 2) & 3) - 32;
  }
  if constexpr (type == iq4_xs) {
    return (block[4 + j / 2] >> nibble_shift & 15) + 16 * (block[2 + j / 4] >> (j % 4 * 2) & 3) - 32;
  }
  if constexpr (type == iq2_xxs) return 1 + 2 * (word16(block + 8 + 8 * j) >> 12);
  if constexpr (type == iq3_xxs) return 1 + 2 * (word16(block + 68 + 4 * j) >> 12);
  if constexpr (type == iq2_xs) return 1 + 2 * (block[66 + j / 2] >> nibble_shift & 15);
  if constexpr (type == iq2_s) return 1 + 2 * (block[74 + j / 2] >> nibble_shift & 15);
  if constexpr (type == iq3_s) return 1 + 2 * (block[106 + j / 2] >> nibble_shift & 15);
  if constexpr (type == iq1_s) return 1 + 2 * (word16(block + 34 + 2 * j) >> 12 & 7);
  if constexpr (type == iq1_m) return 1 + 2 * (word16(block + 48 + j / 4 * 2) >> (j % 4 * 3) & 7);
  return 1;
}

// d of a block; types with a minimum read d and dmin together.
template <int type>
__device__ __forceinline__ float factor_of(const uint8_t* block) {
  if constexpr (type == q3_k) {
    return load_half(block + 108);
  } else if constexpr (type == q6_k) {
    return FormatQ6K::d(block);
  } else if constexpr (type == iq3_xxs) {
    return load_half(block) * 0.25f;
  } else if constexpr (type == iq1_m) {
    // The top nibbles of the four words of scales.
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) bits |= uint32_t(word16(block + 48 + 2 * i) >> 12) << (4 * i);
    return half_to_float(uint16_t(bits)) * 0.125f;
  } else if constexpr (type == mxfp4) {
    // 2^(e − 128): the float32 exponent is e − 1, and the two smallest powers are denormal.
    const uint32_t e = block[0];
    return __uint_as_float(e < 2 ? 1u << (21 + e) : (e - 1) << 23);
  } else {
    return load_half(block) * (has_grid(type) && type != iq3_s ? 0.125f : 1.0f);
  }
}

// The factor of a run's codes, and what is subtracted from the products.
struct RunScale {
  float scale, minimum;
};

template <int type>
__device__ __forceinline__ RunScale load_run_scale(const uint8_t* block, int r) {
  const int j = r / sub_block_runs(type);
  if constexpr (has_six_bit_scales(type)) {
    const HeaderK header = unpack_header_k(load_16(block));
    const uint32_t scales = j < 4 ? header.scales[0] : header.scales[1];
    const uint32_t mins = j < 4 ? header.mins[0] : header.mins[1];
    const int shift = j % 4 * 8;
    return {header.d * float(scales >> shift & 255), header.dmin * float(mins >> shift & 255)};
  } else if constexpr (type == q2_k) {
    return {load_half(block + 80) * float(scale_of<type>(block, j)),
            load_half(block + 82) * float(block[j] >> 4)};
  } else if constexpr (type == q4_1 || type == q5_1) {
    return {load_half(block), -load_half(block + 2)};
  } else {
    return {factor_of<type>(block) * float(scale_of<type>(block, j)), 0.0f};
  }
}

// Values of run r of a block.
template <int type, int block_elements>
__device__ __forceinline__ void load_run(const uint8_t* block, int r, const int8_t* table,
                                         float (&values)[8]) {
  int codes[8];
  if constexpr (block_elements == 32) {
    small_block_codes<type>(block, r, table, codes);
  } else if constexpr (has_grid(type)) {
    grid_codes<type>(block, r, table, codes);
  } else {
    linear_codes<type>(block, r, table, codes);
  }
  constexpr bool has_minimum = has_six_bit_scales(type) || type == q2_k || type == q4_1 || type == q5_1;
  const RunScale by = load_run_scale<type>(block, r);
#pragma unroll
  for (int k = 0; k < 8; k++) {
    values[k] = by.scale * float(codes[k]);
    if constexpr (has_minimum) values[k] -= by.minimum;
  }
}

// Value i of a row of floats.
template <int type>
__device__ __forceinline__ float load_float(const uint8_t* row, int i) {
  if constexpr (type == f32) return reinterpret_cast<const float*>(row)[i];
  const uint16_t bits = reinterpret_cast<const uint16_t*>(row)[i];
  return type == f16 ? half_to_float(bits) : bfloat16_to_float(bits);
}

}  // namespace coldstream
