// Operations on sixteen lanes: those of a tier, whose file is TIER, and their meaning in plain C++.
#if defined(__x86_64__)
#include <immintrin.h>
#else
#include <arm_neon.h>
#endif
#include <stdint.h>
#include <string.h>

#include "ops/float_kernels.h"
#if defined(__x86_64__)
#include "shuffles_avx2.h"
#else
#include "shuffles_neon.h"
#endif

namespace coldstream {

// What a namespace with a Vec16 has of each operation: eleven vectors.
#define OPERATE                                                                          \
  static inline void operate(const float* a, const float* b, int64_t left, float* out) { \
    const Vec16 x = load16(a), y = load16(b);                                            \
    const Vec16 vectors[9] = {add16(x, y),                                               \
                              sub16(x, y),                                               \
                              mul16(x, y),                                               \
                              div16(x, y),                                               \
                              max16(x, y),                                               \
                              min16(x, y),                                               \
                              fma16(x, y, splat16(0.75f)),                               \
                              load16(a, left),                                           \
                              keep16(x, left, 3.0f)};                                    \
    for (int i = 0; i < 9; i++) store16(out + 16 * i, vectors[i]);                       \
    store16(out + 16 * 9, x, left);                                                      \
    out[16 * 10] = sum16(x);                                                             \
    out[16 * 10 + 1] = greatest16(x);                                                    \
  }

namespace definition {
#include "ops/vec16_generic.inl"
OPERATE
}  // namespace definition

namespace tier {
#include TIER
OPERATE
}  // namespace tier

}  // namespace coldstream

extern "C" void operate(bool by_tier, const float* a, const float* b, int64_t left, float* out) {
  (by_tier ? coldstream::tier::operate : coldstream::definition::operate)(a, b, left, out);
}
