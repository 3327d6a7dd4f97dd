// tq3_0, the type whose keys and values stay turned: turn.py and levels.py on the GPU.
#pragma once

#include "attention/cache.cuh"
#include "attention/rotation.cuh"

namespace coldstream {

static_assert(turn_length == scale_values);

// Four neighbouring lanes hold a block: values i … i + 7, with i the same modulo 32 as 8 times the lane.
__device__ __forceinline__ uint32_t lanes_of_block() { return 0xfu << (threadIdx.x % warp_size & ~3); }

__device__ __forceinline__ void turn_eight(float (&x)[8], int i) {
#pragma unroll
  for (int j = 0; j < 8; j++) x[j] = changed_sign(x[j], i % scale_values + j);
#pragma unroll
  for (int stride = 1; stride < 8; stride *= 2) {
#pragma unroll
    for (int j = 0; j < 8; j++) {
      if (j & stride) continue;
      const float a = x[j], b = x[j + stride];
      x[j] = a + b, x[j + stride] = a - b;
    }
  }
#pragma unroll
  for (int distance = 1; distance < 4; distance *= 2) {
#pragma unroll
    for (int j = 0; j < 8; j++) {
      x[j] = butterfly(x[j], __shfl_xor_sync(lanes_of_block(), x[j], distance), i & 8 * distance);
    }
  }
}

struct cache_tq3_0 {
  static constexpr bool is_turned = true;
  static constexpr int chunk_values = 32;
  // Low bits, high bits and scales of a row share its pieces of 16 bytes.
  static constexpr int code_chunks(int head_dim) { return chunks_of(head_dim / scale_values * 14); }
  static constexpr int scale_chunks(int) { return 0; }
  static constexpr int high_begin(int head_dim) { return head_dim / 4; }
  static constexpr int scales_begin(int head_dim) { return head_dim / 8 * 3; }

  // Levels of the codes 0 … 7, with an offset of 128, as the bytes of two words.
  static constexpr uint32_t level_byte(int level, int place) { return uint32_t(level + 128) << 8 * place; }
  static constexpr uint32_t levels_of(int sign) {
    return level_byte(sign * 13, 0) | level_byte(sign * 40, 1) | level_byte(sign * 71, 2) |
           level_byte(sign * 114, 3);
  }
  static __device__ __forceinline__ uint32_t levels_at(uint32_t codes) {
    return __byte_perm(levels_of(1), levels_of(-1), codes);
  }

  // The scale of a block, of whose turned values this thread holds eight.
  static __device__ __forceinline__ uint16_t scale_of(const float (&y)[8], int i) {
    const bool is_upper = i & 16;
    float p[8];
#pragma unroll
    for (int j = 0; j < 8; j++) {
      const float other = __shfl_xor_sync(lanes_of_block(), y[j], 2);
      const float first = is_upper ? other : y[j], second = is_upper ? y[j] : other;
      p[j] = __fmaf_rn(second, second, first * first);
    }
#pragma unroll
    for (int j = 0; j < 8; j++) p[j] += __shfl_xor_sync(lanes_of_block(), p[j], 1);
    const uint16_t bits = float_to_half(sqrtf(sum_of_eight(p) / float(scale_values)) / 53.0f);
    return bits < half_infinity ? bits : half_nan;
  }

  static __device__ __forceinline__ uint32_t code_of(float y, float scale) {
    const float magnitude = fabsf(y);
    if (!(scale > 0.0f)) return 0;
    return (magnitude >= 26.5f * scale) + (magnitude >= 55.5f * scale) + (magnitude >= 92.5f * scale) +
           4 * (y < 0.0f);
  }

  static __device__ __forceinline__ void store_eight(uint8_t* row, int head_dim, int i, const float (&x)[8]) {
    float y[8];
#pragma unroll
    for (int j = 0; j < 8; j++) y[j] = x[j];
    turn_eight(y, i);
    const uint16_t bits = scale_of(y, i);
    const float scale = half_to_float(bits);
    const int block = i / scale_values, part = i / 8 % 4;
    uint32_t low = 0, high = 0;
#pragma unroll
    for (int j = 0; j < 8; j++) {
      const uint32_t code = code_of(y[j], scale);
      low |= (code & 3) << 4 * j;
      high |= code >> 2 << 4 * j;
    }
    low <<= part % 2 * 2, high <<= part;
    low |= __shfl_xor_sync(lanes_of_block(), low, 1);
    high |= __shfl_xor_sync(lanes_of_block(), high, 1);
    high |= __shfl_xor_sync(lanes_of_block(), high, 2);
    if (part % 2 == 0) reinterpret_cast<uint32_t*>(row)[2 * block + part / 2] = low;
    if (part > 0) return;
    reinterpret_cast<uint32_t*>(row + high_begin(head_dim))[block] = high;
    reinterpret_cast<uint16_t*>(row + scales_begin(head_dim))[block] = bits;
  }

  // The codes of block `block` of a row, whose byte b is at the address `at(b)`.
  template <class addresses>
  static __device__ __forceinline__ uint4 piece_of(const addresses& at, int head_dim, int block) {
    const uint2 low = *reinterpret_cast<const uint2*>(at(8 * block));
    const uint32_t high = *reinterpret_cast<const uint32_t*>(at(high_begin(head_dim) + 4 * block));
    return make_uint4(low.x, low.y, high, 0);
  }
  template <class addresses>
  static __device__ __forceinline__ uint16_t scale_bits_of(const addresses& at, int head_dim, int block) {
    return *reinterpret_cast<const uint16_t*>(at(scales_begin(head_dim) + 2 * block));
  }

  static __device__ __forceinline__ float4 four_of(const uint4& piece, int quad, float scale) {
    const int part = quad / 2;
    const uint32_t low = (quad < 4 ? piece.x : piece.y) >> part % 2 * 2;
    const uint32_t high = part < 2 ? piece.z << (2 - part) : piece.z >> (part - 2);
    const uint32_t codes = (low & 0x33333333u) | (high & 0x44444444u);
    const uint32_t levels = levels_at(quad % 2 ? codes >> 16 : codes);
    return make_float4(byte_to_float(levels, 0) * scale, byte_to_float(levels, 1) * scale,
                       byte_to_float(levels, 2) * scale, byte_to_float(levels, 3) * scale);
  }
  static __device__ __forceinline__ float2 load_two(const uint8_t* row, int head_dim, int i, float scale) {
    const int block = i / scale_values, part = i / 8 % 4, byte = i % 8 / 2;
    const uint32_t low = row[8 * block + part / 2 * 4 + byte] >> part % 2 * 2;
    const uint32_t high = row[high_begin(head_dim) + 4 * block + byte] >> part;
    const uint32_t levels = levels_at((low & 0x33u) | (high & 0x11u) << 2);
    return make_float2(byte_to_float(levels, 0) * scale, byte_to_float(levels, 1) * scale);
  }
};

}  // namespace coldstream
