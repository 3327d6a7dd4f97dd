// The types of cache_types.py: how a head's row of one position is laid out, written and read.
//
// A row is `code_chunks` pieces of 16 bytes with the values' codes, then `scale_chunks` with a float16 scale
// per 32 values (float types have none); the row of a turned type is of another kind, see turned.cuh.
#pragma once

#include "cuda/common.cuh"

namespace coldstream {

constexpr int scale_values = 32;
constexpr float smallest_maximum = 7.888609052210118e-31f;  // 2^-100
constexpr float largest_float = 3.402823466e38f;
constexpr uint16_t half_infinity = 0x7c00, half_nan = 0x7e00;

__host__ __device__ constexpr int chunks_of(int num_bytes) { return (num_bytes + 15) / 16; }

// uint8 codes in the lowest bits of `word` as floats: 2^23 + code has the code in its last bits.
__device__ __forceinline__ float code_to_float(uint32_t code, float offset) {
  return __uint_as_float(code | 0x4b000000u) - (8388608.0f + offset);
}

// Byte `byte` of `word` less 128, exactly.
__device__ __forceinline__ float byte_to_float(uint32_t word, int byte) {
  return __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7440 | byte)) - 8388736.0f;
}

// Four neighbouring lanes hold the 32 values of a block, eight each.
__device__ __forceinline__ float greatest_of_block(float x) {
  const uint32_t lanes = 0xfu << (threadIdx.x % warp_size & ~3);
  x = fmaxf(x, __shfl_xor_sync(lanes, x, 1));
  return fmaxf(x, __shfl_xor_sync(lanes, x, 2));
}

struct block_scale {
  float factor;  // of the values
  uint16_t bits;
};

// For `extreme`, the value that gets the code `largest`; `finite` unless the block holds NaN or infinity.
__device__ __forceinline__ block_scale scale_of_block(float extreme, float largest, bool finite) {
  if (!finite) return {0.0f, half_nan};
  if (fabsf(extreme) < smallest_maximum) return {0.0f, 0};
  return {largest / extreme, float_to_half(extreme / largest)};
}

__device__ __forceinline__ bool block_is_finite(const float (&x)[8]) {
  float is_not = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; i++) is_not = fabsf(x[i]) <= largest_float ? is_not : 1.0f;
  return greatest_of_block(is_not) == 0.0f;
}

struct cache_f32 {
  static constexpr bool is_turned = false;
  static constexpr int chunk_values = 4;
  static constexpr int code_chunks(int head_dim) { return head_dim / 4; }
  static constexpr int scale_chunks(int) { return 0; }

  static __device__ __forceinline__ void store_eight(uint8_t* row, int, int i, const float (&x)[8]) {
    float4* out = reinterpret_cast<float4*>(row + 4 * i);
    out[0] = make_float4(x[0], x[1], x[2], x[3]);
    out[1] = make_float4(x[4], x[5], x[6], x[7]);
  }
  static __device__ __forceinline__ float4 four_of(const uint4& chunk, int, float) {
    return make_float4(__uint_as_float(chunk.x), __uint_as_float(chunk.y), __uint_as_float(chunk.z),
                       __uint_as_float(chunk.w));
  }
  static __device__ __forceinline__ float2 load_two(const uint8_t* row, int, int i, float) {
    return *reinterpret_cast<const float2*>(row + 4 * i);
  }
};

struct cache_f16 {
  static constexpr bool is_turned = false;
  static constexpr int chunk_values = 8;
  static constexpr int code_chunks(int head_dim) { return head_dim / 8; }
  static constexpr int scale_chunks(int) { return 0; }

  static __device__ __forceinline__ uint32_t pack(float low, float high) {
    return float_to_half(low) | uint32_t(float_to_half(high)) << 16;
  }
  static __device__ __forceinline__ float low(uint32_t word) { return half_to_float(uint16_t(word)); }
  static __device__ __forceinline__ float high(uint32_t word) { return half_to_float(uint16_t(word >> 16)); }

  static __device__ __forceinline__ void store_eight(uint8_t* row, int, int i, const float (&x)[8]) {
    *reinterpret_cast<uint4*>(row + 2 * i) =
        make_uint4(pack(x[0], x[1]), pack(x[2], x[3]), pack(x[4], x[5]), pack(x[6], x[7]));
  }
  static __device__ __forceinline__ float4 four_of(const uint4& chunk, int quad, float) {
    const uint32_t a = quad ? chunk.z : chunk.x, b = quad ? chunk.w : chunk.y;
    return make_float4(low(a), high(a), low(b), high(b));
  }
  static __device__ __forceinline__ float2 load_two(const uint8_t* row, int, int i, float) {
    const uint32_t word = *reinterpret_cast<const uint32_t*>(row + 2 * i);
    return make_float2(low(word), high(word));
  }
};

struct cache_q8_0 {
  static constexpr bool is_turned = false;
  static constexpr int chunk_values = 16;
  static constexpr int code_chunks(int head_dim) { return head_dim / 16; }
  static constexpr int scale_chunks(int head_dim) { return chunks_of(head_dim / scale_values * 2); }

  static __device__ __forceinline__ void store_eight(uint8_t* row, int head_dim, int i, const float (&x)[8]) {
    float maximum = 0.0f;
#pragma unroll
    for (int j = 0; j < 8; j++) maximum = fmaxf(maximum, fabsf(x[j]));
    const bool finite = block_is_finite(x);
    const block_scale scale = scale_of_block(greatest_of_block(maximum), 127.0f, finite);
    uint32_t words[2] = {0, 0};
#pragma unroll
    for (int j = 0; j < 8; j++) {
      const int code = finite ? __float2int_rn(x[j] * scale.factor) : 0;
      words[j / 4] |= uint32_t(code & 0xff) << 8 * (j % 4);
    }
    *reinterpret_cast<uint2*>(row + i) = make_uint2(words[0], words[1]);
    if (i % scale_values == 0) reinterpret_cast<uint16_t*>(row + head_dim)[i / scale_values] = scale.bits;
  }
  static __device__ __forceinline__ float value(uint32_t word, int byte, float scale) {
    return byte_to_float(word ^ 0x80808080u, byte) * scale;
  }
  static __device__ __forceinline__ float4 four_of_word(uint32_t word, float scale) {
    return make_float4(value(word, 0, scale), value(word, 1, scale), value(word, 2, scale),
                       value(word, 3, scale));
  }
  static __device__ __forceinline__ float4 four_of(const uint4& chunk, int quad, float scale) {
    return four_of_word(quad == 0 ? chunk.x : quad == 1 ? chunk.y : quad == 2 ? chunk.z : chunk.w, scale);
  }
  static __device__ __forceinline__ float2 load_two(const uint8_t* row, int, int i, float scale) {
    const uint32_t word = *reinterpret_cast<const uint16_t*>(row + i);
    return make_float2(value(word, 0, scale), value(word, 1, scale));
  }
};

struct cache_q4_0 {
  static constexpr bool is_turned = false;
  static constexpr int chunk_values = 32;
  static constexpr int code_chunks(int head_dim) { return head_dim / 32; }
  static constexpr int scale_chunks(int head_dim) { return chunks_of(head_dim / scale_values * 2); }

  static __device__ __forceinline__ void store_eight(uint8_t* row, int head_dim, int i, const float (&x)[8]) {
    float greatest = x[0], least = x[0];
#pragma unroll
    for (int j = 1; j < 8; j++) greatest = fmaxf(greatest, x[j]), least = fminf(least, x[j]);
    greatest = greatest_of_block(greatest);
    least = -greatest_of_block(-least);
    const bool finite = block_is_finite(x);
    const block_scale scale = scale_of_block(greatest >= -least ? greatest : least, -8.0f, finite);
    uint32_t word = 0;
#pragma unroll
    for (int j = 0; j < 8; j++) {
      const int code = finite ? min(__float2int_rn(x[j] * scale.factor), 7) : 0;
      word |= uint32_t(code + 8) << 4 * j;
    }
    *reinterpret_cast<uint32_t*>(row + i / 2) = word;
    if (i % scale_values == 0) reinterpret_cast<uint16_t*>(row + head_dim / 2)[i / scale_values] = scale.bits;
  }
  static __device__ __forceinline__ float value(uint32_t word, int place, float scale) {
    return code_to_float(word >> 4 * place & 15u, 8.0f) * scale;
  }
  static __device__ __forceinline__ float4 four_of(const uint4& chunk, int quad, float scale) {
    const int pair = quad / 2, first = quad % 2 * 4;
    const uint32_t word = pair == 0 ? chunk.x : pair == 1 ? chunk.y : pair == 2 ? chunk.z : chunk.w;
    return make_float4(value(word, first, scale), value(word, first + 1, scale),
                       value(word, first + 2, scale), value(word, first + 3, scale));
  }
  static __device__ __forceinline__ float2 load_two(const uint8_t* row, int, int i, float scale) {
    const uint32_t byte = row[i / 2];
    return make_float2(value(byte, 0, scale), value(byte, 1, scale));
  }
};

}  // namespace coldstream
