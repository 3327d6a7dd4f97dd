// GGUF blocks of the integer types as operands of dp4a: geometry and unpacking.
//
// Blocks are read from memory whose bytes around a block may be read too: up to the next multiple of 4 and 4
// more (shared memory with some room after the last block). Blocks of Q4_K and Q5_K are aligned to 16 bytes,
// all others to 2. Codes are bytes equal to `factor` times the value, so that one exact shift of the product
// replaces shifts of the codes.
#pragma once

#include "cuda/common.cuh"
#include "cuda/quant_types.cuh"

namespace coldstream {

__device__ __forceinline__ int dot_signed(uint32_t weights, uint32_t x, int sum) {
  return __dp4a(int(weights), int(x), sum);
}

__device__ __forceinline__ uint4 load_16(const uint8_t* p) { return *reinterpret_cast<const uint4*>(p); }

// Words that start at p, a multiple of 2.
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

__device__ __forceinline__ float load_half(const uint8_t* p) {
  return half_to_float(*reinterpret_cast<const uint16_t*>(p));
}

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

// Super-blocks of 256 are taken in quarters of 64 codes. Quarter s has four runs of 16 consecutive inputs,
// run c being chunk `chunk(s, c)` of the 16 chunks of 16 inputs under the super-block, in codes[4 c …].

struct FormatQ4K {
  static constexpr int bytes = 144;
  static constexpr bool has_mins = true;
  static constexpr bool is_aligned = true;

  static __device__ __forceinline__ int chunk(int s, int c) { return 4 * s + c; }

  static __device__ __forceinline__ void unpack(const uint8_t* block, int s, uint32_t (&codes)[16]) {
    const uint4 a = load_16(block + 16 + 32 * s), b = load_16(block + 32 + 32 * s);
    const uint32_t words[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
    for (int i = 0; i < 8; i++) {
      codes[i] = words[i] & 0x0f0f0f0f;
      codes[8 + i] = words[i] & 0xf0f0f0f0;  // factor 16
    }
  }

  // Scales of sub-blocks 2 s and 2 s + 1 are the low bytes of `scales`.
  static __device__ __forceinline__ int dot(const uint32_t (&codes)[16], const uint32_t (&x)[16],
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

struct FormatQ5K {
  static constexpr int bytes = 176;
  static constexpr bool has_mins = true;
  static constexpr bool is_aligned = true;

  static __device__ __forceinline__ int chunk(int s, int c) { return 4 * s + c; }

  static __device__ __forceinline__ void unpack(const uint8_t* block, int s, uint32_t (&codes)[16]) {
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

  static __device__ __forceinline__ int dot(const uint32_t (&codes)[16], const uint32_t (&x)[16],
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

struct FormatQ6K {
  static constexpr int bytes = 210;
  static constexpr bool has_mins = false;
  static constexpr bool is_aligned = false;

  static __device__ __forceinline__ int chunk(int s, int c) { return 8 * (s >> 1) + (s & 1) + 2 * c; }

  // Codes minus 32, factor 4.
  static __device__ __forceinline__ void unpack(const uint8_t* block, int s, uint32_t (&codes)[16]) {
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

  // The four bits of `low` and two of `high` as signed bytes, with 128 taken away.
  static __device__ __forceinline__ uint32_t join(uint32_t low, uint32_t high) {
    return (low & 0x3c3c3c3c) | ((high & 0xc0c0c0c0) ^ 0x80808080);
  }

  // The int8 scales of the quarter's four runs.
  static __device__ __forceinline__ uint32_t scales(const uint8_t* block, int s) {
    uint32_t words[2];
    load_words(block + 192 + 8 * (s >> 1), words);
    return __byte_perm(words[0], words[1], s & 1 ? 0x7531 : 0x6420);
  }

  static __device__ __forceinline__ int dot(const uint32_t (&codes)[16], const uint32_t (&x)[16],
                                            uint32_t scales) {
    int sum = 0;
#pragma unroll
    for (int c = 0; c < 4; c++) {
      int run = 0;
#pragma unroll
      for (int i = 4 * c; i < 4 * c + 4; i++) run = dot_signed(codes[i], x[i], run);
      sum += int(int8_t(scales >> (8 * c))) * run;
    }
    return sum >> 2;
  }

  static __device__ __forceinline__ float d(const uint8_t* block) { return load_half(block + 208); }
};

// Blocks of 32: eight words of codes, minus the type's offset, whose product is shifted right by `shift`.

struct FormatQ8_0 {
  static constexpr int bytes = 34;
  static constexpr int shift = 0;

  static __device__ __forceinline__ void unpack(const uint8_t* block, uint32_t (&codes)[8]) {
    load_words(block + 2, codes);
  }
};

struct FormatQ4_0 {
  static constexpr int bytes = 18;
  static constexpr int shift = 4;

  static __device__ __forceinline__ void unpack(const uint8_t* block, uint32_t (&codes)[8]) {
    uint32_t words[4];
    load_words(block + 2, words);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      codes[i] = ((words[i] << 4) & 0xf0f0f0f0) ^ 0x80808080;
      codes[4 + i] = (words[i] & 0xf0f0f0f0) ^ 0x80808080;
    }
  }
};

struct FormatQ5_0 {
  static constexpr int bytes = 22;
  static constexpr int shift = 3;

  static __device__ __forceinline__ void unpack(const uint8_t* block, uint32_t (&codes)[8]) {
    uint32_t words[5];  // the fifth bits of all 32 codes, then four bits of each
    load_words(block + 2, words);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      codes[i] = join((words[1 + i] << 3) & 0x78787878, words[0] >> (4 * i));
      codes[4 + i] = join((words[1 + i] >> 1) & 0x78787878, words[0] >> (16 + 4 * i));
    }
  }

  // The low four of `bits` become the top bits of the bytes, inverted: 128 is taken away.
  static __device__ __forceinline__ uint32_t join(uint32_t low, uint32_t bits) {
    return low | (~((bits & 15) * 0x10204080u) & 0x80808080);
  }
};

template <typename Format>
__device__ __forceinline__ int dot_block(const uint32_t (&codes)[8], const uint32_t (&x)[8]) {
  int sum = 0;
#pragma unroll
  for (int i = 0; i < 8; i++) sum = dot_signed(codes[i], x[i], sum);
  return sum >> Format::shift;
}

}  // namespace coldstream
