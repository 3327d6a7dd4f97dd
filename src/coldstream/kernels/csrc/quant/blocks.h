// GGUF block layouts as byte structs (so they may lie at any address), and their geometry.
// Source: the GGUF specification and the block layouts in ggml's public headers.
#pragma once

#include <cstdint>
#include <cstring>

#include "arithmetic.h"
#include "quant/weight.h"

namespace coldstream {

// clang-format off
struct block_q4_0 { uint8_t d[2], qs[16]; };
struct block_q4_1 { uint8_t d[2], m[2], qs[16]; };
struct block_q5_0 { uint8_t d[2], qh[4], qs[16]; };
struct block_q5_1 { uint8_t d[2], m[2], qh[4], qs[16]; };
struct block_q8_0 { uint8_t d[2], qs[32]; };
struct block_q2_k { uint8_t scales[16], qs[64], d[2], dmin[2]; };
struct block_q3_k { uint8_t hmask[32], qs[64], scales[12], d[2]; };
struct block_q4_k { uint8_t d[2], dmin[2], scales[12], qs[128]; };
struct block_q5_k { uint8_t d[2], dmin[2], scales[12], qh[32], qs[128]; };
struct block_q6_k { uint8_t ql[128], qh[64], scales[16], d[2]; };
struct block_iq2_xxs { uint8_t d[2], qs[64]; };
struct block_iq2_xs { uint8_t d[2], qs[64], scales[8]; };
struct block_iq2_s { uint8_t d[2], qs[32], signs[32], qh[8], scales[8]; };
struct block_iq3_xxs { uint8_t d[2], qs[64], scales_signs[32]; };
struct block_iq3_s { uint8_t d[2], qs[64], qh[8], signs[32], scales[4]; };
struct block_iq1_s { uint8_t d[2], qs[32], qh[16]; };
struct block_iq1_m { uint8_t qs[32], qh[16], scales[8]; };
struct block_iq4_nl { uint8_t d[2], qs[16]; };
struct block_iq4_xs { uint8_t d[2], scales_h[2], scales_l[4], qs[128]; };
struct block_mxfp4 { uint8_t e, qs[16]; };
// clang-format on

struct quant_geometry {
  quant_type type;
  const char* name;
  int block_elements;
  int block_bytes;
};

inline constexpr quant_geometry quant_geometries[] = {
    {quant_type::f32, "F32", 1, 4},
    {quant_type::f16, "F16", 1, 2},
    {quant_type::bf16, "BF16", 1, 2},
    {quant_type::q4_0, "Q4_0", 32, sizeof(block_q4_0)},
    {quant_type::q4_1, "Q4_1", 32, sizeof(block_q4_1)},
    {quant_type::q5_0, "Q5_0", 32, sizeof(block_q5_0)},
    {quant_type::q5_1, "Q5_1", 32, sizeof(block_q5_1)},
    {quant_type::q8_0, "Q8_0", 32, sizeof(block_q8_0)},
    {quant_type::iq4_nl, "IQ4_NL", 32, sizeof(block_iq4_nl)},
    {quant_type::mxfp4, "MXFP4", 32, sizeof(block_mxfp4)},
    {quant_type::q2_k, "Q2_K", 256, sizeof(block_q2_k)},
    {quant_type::q3_k, "Q3_K", 256, sizeof(block_q3_k)},
    {quant_type::q4_k, "Q4_K", 256, sizeof(block_q4_k)},
    {quant_type::q5_k, "Q5_K", 256, sizeof(block_q5_k)},
    {quant_type::q6_k, "Q6_K", 256, sizeof(block_q6_k)},
    {quant_type::iq2_xxs, "IQ2_XXS", 256, sizeof(block_iq2_xxs)},
    {quant_type::iq2_xs, "IQ2_XS", 256, sizeof(block_iq2_xs)},
    {quant_type::iq2_s, "IQ2_S", 256, sizeof(block_iq2_s)},
    {quant_type::iq3_xxs, "IQ3_XXS", 256, sizeof(block_iq3_xxs)},
    {quant_type::iq3_s, "IQ3_S", 256, sizeof(block_iq3_s)},
    {quant_type::iq1_s, "IQ1_S", 256, sizeof(block_iq1_s)},
    {quant_type::iq1_m, "IQ1_M", 256, sizeof(block_iq1_m)},
    {quant_type::iq4_xs, "IQ4_XS", 256, sizeof(block_iq4_xs)},
};

// The vector kernels address fields by offset within these.
static_assert(sizeof(block_q4_0) == 18 && sizeof(block_q5_0) == 22 && sizeof(block_q8_0) == 34);
static_assert(sizeof(block_q4_k) == 144 && sizeof(block_q5_k) == 176 && sizeof(block_q6_k) == 210);

// nullptr for an unknown id.
constexpr const quant_geometry* quant_geometry_find(int type_id) {
  for (const auto& geometry : quant_geometries)
    if (static_cast<int>(geometry.type) == type_id) return &geometry;
  return nullptr;
}

// Types whose products are taken over integers; all others are dequantised first (docs/arithmetic.md).
constexpr bool quant_is_integer(quant_type type) {
  switch (type) {
    case quant_type::q4_0:
    case quant_type::q5_0:
    case quant_type::q8_0:
    case quant_type::q4_k:
    case quant_type::q5_k:
    case quant_type::q6_k:
      return true;
    default:
      return false;
  }
}

static inline uint16_t load_u16(const uint8_t* p) {
  uint16_t v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

static inline uint32_t load_u32(const uint8_t* p) {
  uint32_t v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

static inline float load_half(const uint8_t* p) { return half_to_float(load_u16(p)); }

// Sub-block scales (6 bits) and minimums (6 bits) of Q4_K and Q5_K, eight of each, one per byte.
struct scales_k4 {
  uint64_t scales;
  uint64_t mins;
};

static inline scales_k4 unpack_scales_k4(const uint8_t* packed) {
  const uint32_t a = load_u32(packed), b = load_u32(packed + 4), c = load_u32(packed + 8);
  const uint32_t scales_high = (c & 0x0f0f0f0f) | ((a >> 6) & 0x03030303) << 4;
  const uint32_t mins_high = ((c >> 4) & 0x0f0f0f0f) | ((b >> 6) & 0x03030303) << 4;
  return {(a & 0x3f3f3f3f) | uint64_t(scales_high) << 32, (b & 0x3f3f3f3f) | uint64_t(mins_high) << 32};
}

}  // namespace coldstream
