// How a gate and a value become one number: docs/arithmetic.md, the gated units.
#pragma once

#include <cstdint>

namespace coldstream {

// Numbered as `GATED_UNITS` of kernels/ops.py.
enum class GluKind : int { swiglu, clamped_swiglu, geglu };
constexpr int num_glu_kinds = 3;

struct Glu {
  GluKind kind = GluKind::swiglu;
  float limit = 0.0f;  // of clamped_swiglu
};

constexpr float clamped_alpha = 1.702f;
// gelu(x) = x · sigmoid(x · (gelu_linear + gelu_cubic · x²)), from tanh(z / 2) = 2 · sigmoid(z) − 1.
constexpr float gelu_linear = 1.5957691216057308f;  // 2 · sqrt(2 / π)
constexpr float gelu_cubic = 0.07135481282553224f;  // 0.044715 times that

}  // namespace coldstream
