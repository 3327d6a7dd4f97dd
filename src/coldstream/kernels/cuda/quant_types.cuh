// The numbers of GGUF's tensor types; their geometry comes from Python's table.
#pragma once

namespace coldstream {

enum QuantType {
  // clang-format off
  f32 = 0, f16 = 1, q4_0 = 2, q4_1 = 3, q5_0 = 6, q5_1 = 7, q8_0 = 8, q2_k = 10, q3_k = 11, q4_k = 12, q5_k = 13,
  q6_k = 14, iq2_xxs = 16, iq2_xs = 17, iq3_xxs = 18, iq1_s = 19, iq4_nl = 20, iq3_s = 21, iq2_s = 22,
  iq4_xs = 23, iq1_m = 29, bf16 = 30, tq2_0 = 35, mxfp4 = 39, q2_0 = 42
  // clang-format on
};

}  // namespace coldstream
