// docs/arithmetic.md in C++: the scalar pieces that every kernel shares.
//
// Everything here has internal linkage: a file compiled for a tier gets its own copy in that tier's
// instructions, and the linker can never hand one tier's code to another. The functions are branch-free, so
// that loops over them vectorise.
#pragma once

#include <bit>
#include <cstdint>

#include "glu.h"

namespace coldstream {

static inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

// NaN stays NaN; the result of a finite x is never subnormal, zero or infinite.
static inline float exp(float x) {
  constexpr float low = -87.33654f, high = 88.37626f, log2e = 1.44269504088896341f;
  constexpr float round_to_integer =
      12582912.0f;  // 1.5 * 2^23: adding it leaves no fraction bits, ties to even
  x = x < low ? low : x;
  x = x > high ? high : x;
  const float shifted = x * log2e + round_to_integer;
  const float n = shifted - round_to_integer;
  const float t = fma(n, 2.12194440e-4f, fma(n, -0.693359375f, x));
  float r = 1.0f / 5040.0f;
  r = fma(r, t, 1.0f / 720.0f);
  r = fma(r, t, 1.0f / 120.0f);
  r = fma(r, t, 1.0f / 24.0f);
  r = fma(r, t, 1.0f / 6.0f);
  r = fma(r, t, 0.5f);
  r = fma(r, t, 1.0f);
  r = fma(r, t, 1.0f);
  const uint32_t exponent =
      std::bit_cast<uint32_t>(shifted) - std::bit_cast<uint32_t>(round_to_integer) + 127u;
  return r * std::bit_cast<float>(exponent << 23);
}

static inline float sigmoid(float x) { return 1.0f / (1.0f + exp(-x)); }

static inline float silu(float x) { return x * sigmoid(x); }

// NaN stays NaN, as above.
static inline float clamped_swiglu(float gate, float up, float limit) {
  gate = gate > limit ? limit : gate;
  up = up > limit ? limit : up;
  up = up < -limit ? -limit : up;
  return gate * sigmoid(gate * clamped_alpha) * (up + 1.0f);
}

static inline float gelu(float x) { return x * sigmoid(x * fma(x * x, gelu_cubic, gelu_linear)); }

static inline void glu(const Glu& unit, const float* gate, const float* up, int64_t count, float* out) {
  switch (unit.kind) {
    case GluKind::swiglu:
      for (int64_t i = 0; i < count; i++) out[i] = silu(gate[i]) * up[i];
      break;
    case GluKind::clamped_swiglu:
      for (int64_t i = 0; i < count; i++) out[i] = clamped_swiglu(gate[i], up[i], unit.limit);
      break;
    case GluKind::geglu:
      for (int64_t i = 0; i < count; i++) out[i] = gelu(gate[i]) * up[i];
      break;
  }
}

// The final order of every sum: eight accumulators to one.
static inline float sum_lanes_8(const float* p) {
  return ((p[0] + p[4]) + (p[2] + p[6])) + ((p[1] + p[5]) + (p[3] + p[7]));
}

static inline float sum_lanes_16(const float* p) {
  float q[8];
  for (int j = 0; j < 8; j++) q[j] = p[j] + p[j + 8];
  return sum_lanes_8(q);
}

static inline float half_to_float(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000) << 16;
  const uint32_t magnitude = h & 0x7fff;
  if (magnitude >= 0x7c00) return std::bit_cast<float>(sign | 0x7f800000u | (magnitude & 0x3ff) << 13);
  // The exponent bias differs by 112; scaling by 2^112 also turns subnormal halves into normal floats,
  // exactly.
  const float scaled = std::bit_cast<float>(magnitude << 13) * 0x1p112f;
  return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(scaled));
}

static inline float bfloat_to_float(uint16_t h) { return std::bit_cast<float>(uint32_t(h) << 16); }

}  // namespace coldstream
