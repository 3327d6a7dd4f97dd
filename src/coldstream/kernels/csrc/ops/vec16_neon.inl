// Sixteen float32 lanes as four 128-bit registers. Meaning: vec16_generic.inl.

struct Vec16 {
  float32x4_t part[4];
};

// The vector whose registers are value(0) … value(3).
template <typename F>
static inline __attribute__((always_inline)) Vec16 each_part(F&& value) {
  return {{value(0), value(1), value(2), value(3)}};
}

static inline Vec16 splat16(float x) {
  return each_part([&](int) { return vdupq_n_f32(x); });
}

static inline Vec16 zero16() { return splat16(0.0f); }

static inline int lanes_of(int64_t left) { return left <= 0 ? 0 : left < 16 ? static_cast<int>(left) : 16; }

static inline Vec16 load16(const float* p) {
  return each_part([&](int i) { return vld1q_f32(p + 4 * i); });
}

static inline Vec16 load16(const Float16* p) {
  const auto* words = reinterpret_cast<const uint16_t*>(p);
  return each_part([&](int i) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(words + 4 * i))); });
}

static inline Vec16 load16(const Bfloat16* p) {
  const auto* words = reinterpret_cast<const uint16_t*>(p);
  return each_part([&](int i) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(words + 4 * i), 16)); });
}

// There are no masked loads and stores at this tier.
template <typename T>
static inline Vec16 load16(const T* p, int64_t left) {
  if (left >= 16) return load16(p);
  T padded[16] = {};
  memcpy(padded, p, lanes_of(left) * sizeof(T));
  return load16(padded);
}

static inline void store16(float* p, Vec16 v) {
  for (int i = 0; i < 4; i++) vst1q_f32(p + 4 * i, v.part[i]);
}

static inline void store16(float* p, Vec16 v, int64_t left) {
  if (left >= 16) return store16(p, v);
  float lanes[16];
  store16(lanes, v);
  memcpy(p, lanes, lanes_of(left) * sizeof(float));
}

static inline void store16(Float16* p, Vec16 v, int64_t left) {
  uint16_t words[16];
  for (int i = 0; i < 4; i++) vst1_u16(words + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(v.part[i])));
  memcpy(p, words, lanes_of(left) * sizeof(Float16));
}

static inline Vec16 add16(Vec16 a, Vec16 b) {
  return each_part([&](int i) { return vaddq_f32(a.part[i], b.part[i]); });
}

static inline Vec16 sub16(Vec16 a, Vec16 b) {
  return each_part([&](int i) { return vsubq_f32(a.part[i], b.part[i]); });
}

static inline Vec16 mul16(Vec16 a, Vec16 b) {
  return each_part([&](int i) { return vmulq_f32(a.part[i], b.part[i]); });
}

static inline Vec16 div16(Vec16 a, Vec16 b) {
  return each_part([&](int i) { return vdivq_f32(a.part[i], b.part[i]); });
}

static inline Vec16 fma16(Vec16 a, Vec16 b, Vec16 c) {
  return each_part([&](int i) { return vfmaq_f32(c.part[i], a.part[i], b.part[i]); });
}

// The instructions for the greater and the smaller number give a NaN where one of both is; these give b.
static inline float32x4_t greater_4(float32x4_t a, float32x4_t b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }

static inline Vec16 max16(Vec16 a, Vec16 b) {
  return each_part([&](int i) { return greater_4(a.part[i], b.part[i]); });
}

static inline Vec16 min16(Vec16 a, Vec16 b) {
  return each_part([&](int i) { return vbslq_f32(vcltq_f32(a.part[i], b.part[i]), a.part[i], b.part[i]); });
}

static inline Vec16 pow2_16(Vec16 shifted) {
  return each_part([&](int i) {
    const uint32x4_t exponent = vshlq_n_u32(vreinterpretq_u32_f32(shifted.part[i]), 23);
    return vreinterpretq_f32_u32(vaddq_u32(exponent, vdupq_n_u32(127u << 23)));
  });
}

static inline Vec16 keep16(Vec16 v, int64_t n, float fill) {
  static const int32_t lanes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const int32x4_t count = vdupq_n_s32(lanes_of(n));
  return each_part([&](int i) {
    return vbslq_f32(vcltq_s32(vld1q_s32(lanes + 4 * i), count), v.part[i], vdupq_n_f32(fill));
  });
}

static inline float sum16(Vec16 v) {
  const float32x4_t p = vaddq_f32(vaddq_f32(v.part[0], v.part[2]), vaddq_f32(v.part[1], v.part[3]));
  const float32x2_t q = vadd_f32(vget_low_f32(p), vget_high_f32(p));
  return vget_lane_f32(q, 0) + vget_lane_f32(q, 1);
}

static inline float greatest16(Vec16 v) {
  const float32x4_t p = greater_4(greater_4(v.part[0], v.part[2]), greater_4(v.part[1], v.part[3]));
  const float32x2_t low = vget_low_f32(p), high = vget_high_f32(p);
  const float32x2_t q = vbsl_f32(vcgt_f32(low, high), low, high);
  const float x = vget_lane_f32(q, 0), y = vget_lane_f32(q, 1);
  return x > y ? x : y;
}

static inline void transpose16(Vec16* rows) {
  Vec16 from[16];
  for (int i = 0; i < 16; i++) from[i] = rows[i];
  for (int i = 0; i < 4; i++) {
    for (int j = 0; j < 4; j++) {
      int32x4_t square[4];
      for (int k = 0; k < 4; k++) square[k] = vreinterpretq_s32_f32(from[4 * i + k].part[j]);
      transpose_4x4(square);
      for (int k = 0; k < 4; k++) rows[4 * j + k].part[i] = vreinterpretq_f32_s32(square[k]);
    }
  }
}
