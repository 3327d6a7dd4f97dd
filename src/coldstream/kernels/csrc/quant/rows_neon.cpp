#include "quant/rows_neon.h"

#if defined(__aarch64__)

#include <arm_neon.h>

#include "quant/row_lanes.h"
#include "shuffles_neon.h"

namespace coldstream {

namespace {

struct LanesNeon {
  using Floats = float32x4_t;
  using Words = int32x4_t;
  static constexpr int width = 4;
  static constexpr bool interleaves_blocks = false;

  static Floats load(const float* from) { return vld1q_f32(from); }
  static void store(float* to, Floats v) { vst1q_f32(to, v); }
  static Words load_words(const void* from) { return vld1q_s32(static_cast<const int32_t*>(from)); }
  static void store_words(void* to, Words v) { vst1q_s32(static_cast<int32_t*>(to), v); }
  static Floats fma(Floats a, Floats b, Floats c) { return vfmaq_f32(c, a, b); }

  static Words greater_magnitude(Words bits, Floats v) {
    const uint32x4_t magnitude = vreinterpretq_u32_f32(vabsq_f32(v));
    return vreinterpretq_s32_u32(vmaxq_u32(vreinterpretq_u32_s32(bits), magnitude));
  }
  static uint32_t greatest(Words bits) { return vmaxvq_u32(vreinterpretq_u32_s32(bits)); }
  static int16_t round_16(const float* x, float r, int8_t* q) {
    int16x4_t words[4];
    for (int j = 0; j < 4; j++)
      words[j] = vmovn_s32(vcvtnq_s32_f32(vmulq_f32(load(x + 4 * j), vdupq_n_f32(r))));
    const int16x8_t low = vcombine_s16(words[0], words[1]), high = vcombine_s16(words[2], words[3]);
    vst1q_s8(q, vcombine_s8(vmovn_s16(low), vmovn_s16(high)));
    return vaddvq_s16(vaddq_s16(low, high));
  }
  static void transpose(Words (&v)[4]) { transpose_4x4(v); }
  static Words add_pairs(Words even, Words odd) {
    const int16x8_t a = vreinterpretq_s16_s32(even), b = vreinterpretq_s16_s32(odd);
    return vreinterpretq_s32_s16(vaddq_s16(vtrn1q_s16(a, b), vtrn2q_s16(a, b)));
  }
};

}  // namespace

void quantize_row_neon(const float* x, int64_t cols, ActivationRow out) {
  quantize_row<LanesNeon>(x, cols, out);
}

void pack_neon(const ActivationRow* x, int num_rows, int64_t cols, ActivationTile* out) {
  pack<LanesNeon>(x, num_rows, cols, out);
}

void float_product_neon(const float* w, int64_t stride, int64_t count, int64_t cols, const float* const* x,
                        int num_rows, float* const* out) {
  float_product<LanesNeon>(w, stride, count, cols, x, num_rows, out);
}

void glu_neon(const Glu& unit, const float* gate, const float* up, int64_t count, float* out) {
  glu(unit, gate, up, count, out);
}

}  // namespace coldstream

#endif
