// 256 codes of any type in sixteen registers, and the scales of a super-block beside them; the products of
// codes and inputs, by the instructions that the including file is compiled for.
#pragma once

#include <arm_neon.h>

#include "quant/traits.h"
#include "quant/unpack_neon.h"

namespace coldstream {

namespace {

struct Codes256 {
  int8x16_t part[16];
};

// The signed codes of a super-block, or of the small blocks of 256 inputs. They are all int8, so that no
// product needs an offset.
template <QuantType Q>
inline __attribute__((always_inline)) Codes256 load_codes(const typename Traits<Q>::Block* b) {
  Codes256 c;
  for (int k = 0; k < 4; k++) {
    const UnpackNeon::Bytes bytes = Traits<Q>::template codes<UnpackNeon>(b, k);
    for (int i = 0; i < 4; i++) {
      const int8x16_t codes = vreinterpretq_s8_u8(bytes.part[i]);
      c.part[4 * k + i] = Traits<Q>::offset == 0 ? codes : vsubq_s8(codes, vdupq_n_s8(Traits<Q>::offset));
    }
  }
  return c;
}

// sum + the products of sixteen codes and inputs, added up in any lanes. Two products of at most 128 · 127
// fit an int16.
inline __attribute__((always_inline)) int32x4_t add_dots(int32x4_t sum, int8x16_t codes, int8x16_t inputs) {
#if defined(__ARM_FEATURE_DOTPROD)
  return vdotq_s32(sum, codes, inputs);
#else
  const int16x8_t low = vmull_s8(vget_low_s8(codes), vget_low_s8(inputs));
  return vpadalq_s16(sum, vmlal_high_s8(low, codes, inputs));
#endif
}

// Lane i: sum + the products of four codes, number `four` of sixteen, with inputs 4 i … 4 i + 3.
template <int four>
inline __attribute__((always_inline)) int32x4_t add_rows(int32x4_t sum, int8x16_t inputs, int8x16_t codes) {
#if defined(__ARM_FEATURE_DOTPROD)
  return vdotq_laneq_s32(sum, inputs, codes, four);
#else
  const int8x16_t same = vreinterpretq_s8_s32(vdupq_laneq_s32(vreinterpretq_s32_s8(codes), four));
  const int16x8_t low = vmull_s8(vget_low_s8(inputs), vget_low_s8(same)), high = vmull_high_s8(inputs, same);
  return vpadalq_s16(sum, vpaddq_s16(low, high));
#endif
}

// Scales of sub-blocks as int16: sixteen, or eight and nothing.
struct WideBytes {
  int16x8_t low, high;

  inline __attribute__((always_inline)) explicit WideBytes(const ScaleBytes& bytes)
      : low(vmovl_s8(vcreate_s8(bytes.low))), high(vmovl_s8(vcreate_s8(bytes.high))) {}
};

}  // namespace

}  // namespace coldstream
