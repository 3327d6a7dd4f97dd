// Transposes and sums across lanes, shared by the NEON kernels of all folders.
#pragma once

#include <arm_neon.h>

namespace coldstream {

// 4 rows of 4 32-bit values, in place.
static inline void transpose_4x4(int32x4_t (&v)[4]) {
  const int64x2_t a = vreinterpretq_s64_s32(vtrn1q_s32(v[0], v[1]));
  const int64x2_t b = vreinterpretq_s64_s32(vtrn2q_s32(v[0], v[1]));
  const int64x2_t c = vreinterpretq_s64_s32(vtrn1q_s32(v[2], v[3]));
  const int64x2_t d = vreinterpretq_s64_s32(vtrn2q_s32(v[2], v[3]));
  v[0] = vreinterpretq_s32_s64(vtrn1q_s64(a, c));
  v[1] = vreinterpretq_s32_s64(vtrn1q_s64(b, d));
  v[2] = vreinterpretq_s32_s64(vtrn2q_s64(a, c));
  v[3] = vreinterpretq_s32_s64(vtrn2q_s64(b, d));
}

// Lane i: the sum of all lanes of v[i].
static inline int32x4_t sum_each(const int32x4_t* v) {
  return vpaddq_s32(vpaddq_s32(v[0], v[1]), vpaddq_s32(v[2], v[3]));
}

}  // namespace coldstream
