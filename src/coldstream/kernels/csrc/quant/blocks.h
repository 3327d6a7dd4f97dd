// The numbers of GGUF's types, their blocks as byte structs (so they may lie at any address), and their
// geometry. Source: the GGUF specification and the block layouts in ggml's public headers.
#pragma once

#include <cstdint>
#include <cstring>
#include <iterator>

#include "arithmetic.h"

namespace coldstream {

enum class QuantType : int {
  // clang-format off
  f32 = 0, f16 = 1, q4_0 = 2, q4_1 = 3, q5_0 = 6, q5_1 = 7, q8_0 = 8, q2_k = 10, q3_k = 11, q4_k = 12,
  q5_k = 13, q6_k = 14, iq2_xxs = 16, iq2_xs = 17, iq3_xxs = 18, iq1_s = 19, iq4_nl = 20, iq3_s = 21,
  iq2_s = 22, iq4_xs = 23, iq1_m = 29, bf16 = 30, tq2_0 = 35, mxfp4 = 39, q2_0 = 42,
  // clang-format on
};

// clang-format off
struct BlockQ4_0 { uint8_t d[2], qs[16]; };
struct BlockQ4_1 { uint8_t d[2], m[2], qs[16]; };
struct BlockQ5_0 { uint8_t d[2], qh[4], qs[16]; };
struct BlockQ5_1 { uint8_t d[2], m[2], qh[4], qs[16]; };
struct BlockQ8_0 { uint8_t d[2], qs[32]; };
struct BlockQ2_K { uint8_t scales[16], qs[64], d[2], dmin[2]; };
struct BlockQ3_K { uint8_t hmask[32], qs[64], scales[12], d[2]; };
struct BlockQ4_K { uint8_t d[2], dmin[2], scales[12], qs[128]; };
struct BlockQ5_K { uint8_t d[2], dmin[2], scales[12], qh[32], qs[128]; };
struct BlockQ6_K { uint8_t ql[128], qh[64], scales[16], d[2]; };
struct BlockIQ2_XXS { uint8_t d[2], qs[64]; };
struct BlockIQ2_XS { uint8_t d[2], qs[64], scales[8]; };
struct BlockIQ2_S { uint8_t d[2], qs[32], signs[32], qh[8], scales[8]; };
struct BlockIQ3_XXS { uint8_t d[2], qs[64], scales_signs[32]; };
struct BlockIQ3_S { uint8_t d[2], qs[64], qh[8], signs[32], scales[4]; };
struct BlockIQ1_S { uint8_t d[2], qs[32], qh[16]; };
struct BlockIQ1_M { uint8_t qs[32], qh[16], scales[8]; };
struct BlockIQ4_NL { uint8_t d[2], qs[16]; };
struct BlockIQ4_XS { uint8_t d[2], scales_h[2], scales_l[4], qs[128]; };
struct BlockMXFP4 { uint8_t e, qs[16]; };
struct BlockQ2_0 { uint8_t d[2], qs[16]; };
struct BlockTQ2_0 { uint8_t qs[64], d[2]; };
// clang-format on

struct QuantGeometry {
  QuantType type;
  const char* name;
  int block_elements;
  int block_bytes;
};

inline constexpr QuantGeometry quant_geometries[] = {
    {QuantType::f32, "F32", 1, 4},
    {QuantType::f16, "F16", 1, 2},
    {QuantType::bf16, "BF16", 1, 2},
    {QuantType::q4_0, "Q4_0", 32, sizeof(BlockQ4_0)},
    {QuantType::q4_1, "Q4_1", 32, sizeof(BlockQ4_1)},
    {QuantType::q5_0, "Q5_0", 32, sizeof(BlockQ5_0)},
    {QuantType::q5_1, "Q5_1", 32, sizeof(BlockQ5_1)},
    {QuantType::q8_0, "Q8_0", 32, sizeof(BlockQ8_0)},
    {QuantType::iq4_nl, "IQ4_NL", 32, sizeof(BlockIQ4_NL)},
    {QuantType::mxfp4, "MXFP4", 32, sizeof(BlockMXFP4)},
    {QuantType::q2_0, "Q2_0", 64, sizeof(BlockQ2_0)},
    {QuantType::q2_k, "Q2_K", 256, sizeof(BlockQ2_K)},
    {QuantType::q3_k, "Q3_K", 256, sizeof(BlockQ3_K)},
    {QuantType::q4_k, "Q4_K", 256, sizeof(BlockQ4_K)},
    {QuantType::q5_k, "Q5_K", 256, sizeof(BlockQ5_K)},
    {QuantType::q6_k, "Q6_K", 256, sizeof(BlockQ6_K)},
    {QuantType::iq2_xxs, "IQ2_XXS", 256, sizeof(BlockIQ2_XXS)},
    {QuantType::iq2_xs, "IQ2_XS", 256, sizeof(BlockIQ2_XS)},
    {QuantType::iq2_s, "IQ2_S", 256, sizeof(BlockIQ2_S)},
    {QuantType::iq3_xxs, "IQ3_XXS", 256, sizeof(BlockIQ3_XXS)},
    {QuantType::iq3_s, "IQ3_S", 256, sizeof(BlockIQ3_S)},
    {QuantType::iq1_s, "IQ1_S", 256, sizeof(BlockIQ1_S)},
    {QuantType::iq1_m, "IQ1_M", 256, sizeof(BlockIQ1_M)},
    {QuantType::iq4_xs, "IQ4_XS", 256, sizeof(BlockIQ4_XS)},
    {QuantType::tq2_0, "TQ2_0", 256, sizeof(BlockTQ2_0)},
};

// nullptr for an unknown id.
constexpr const QuantGeometry* quant_geometry_find(int type_id) {
  for (const auto& geometry : quant_geometries)
    if (static_cast<int>(geometry.type) == type_id) return &geometry;
  return nullptr;
}

// Types whose products are taken over integers: all but floats (docs/arithmetic.md).
constexpr bool quant_is_integer(QuantType type) {
  return type != QuantType::f32 && type != QuantType::f16 && type != QuantType::bf16;
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

static inline uint64_t load_u64(const uint8_t* p) {
  uint64_t v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

static inline float load_half(const uint8_t* p) { return half_to_float(load_u16(p)); }

}  // namespace coldstream
