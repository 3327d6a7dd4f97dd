// Sixteen int32 lanes as four 128-bit registers. Meaning: integer_lanes_generic.inl.

struct Ints16 {
  int32x4_t part[4];
};

// The vector whose registers are value(0) … value(3).
template <typename F>
static inline __attribute__((always_inline)) Ints16 each_ints(F&& value) {
  return {{value(0), value(1), value(2), value(3)}};
}

static inline Ints16 load_ints(const int32_t* p) {
  return each_ints([&](int i) { return vld1q_s32(p + 4 * i); });
}

static inline void store_ints(int32_t* p, Ints16 v) {
  for (int i = 0; i < 4; i++) vst1q_s32(p + 4 * i, v.part[i]);
}

static inline Ints16 splat_ints(int32_t x) {
  return each_ints([&](int) { return vdupq_n_s32(x); });
}

static inline Ints16 add_ints(Ints16 a, Ints16 b) {
  return each_ints([&](int i) { return vaddq_s32(a.part[i], b.part[i]); });
}

static inline Ints16 sub_ints(Ints16 a, Ints16 b) {
  return each_ints([&](int i) { return vsubq_s32(a.part[i], b.part[i]); });
}

static inline Ints16 times_256(Ints16 a) {
  return each_ints([&](int i) { return vshlq_n_s32(a.part[i], 8); });
}

static inline Ints16 over_256(Ints16 a) {
  return each_ints([&](int i) { return vshrq_n_s32(a.part[i], 8); });
}

// Eight bytes as int16.
static inline int16x8_t widen_8(const int8_t* p) { return vmovl_s8(vld1_s8(p)); }

static inline Ints16 widen_byte_pairs(const int8_t* p) {
  return each_ints([&](int i) { return vreinterpretq_s32_s16(widen_8(p + 8 * i)); });
}

static inline Ints16 join_ints(Ints16 low, Ints16 high) {
  return each_ints([&](int i) { return vsliq_n_s32(low.part[i], high.part[i], 16); });
}

// Lanes of two int16: first(0) and second(0) have those of the first eight lanes, first(1) and second(1) the
// others.
template <typename F, typename G>
static inline __attribute__((always_inline)) Ints16 join_words(F&& first, G&& second) {
  return each_ints([&](int i) {
    const int16x8_t a = first(i / 2), b = second(i / 2);
    return vreinterpretq_s32_s16(i % 2 == 0 ? vzip1q_s16(a, b) : vzip2q_s16(a, b));
  });
}

static inline Ints16 join_planes(const int8_t* high, const int8_t* low) {
  return join_words(
      [&](int i) { return vaddq_s16(vshlq_n_s16(widen_8(high + 8 * i), 8), widen_8(low + 8 * i)); },
      [&](int i) { return widen_8(high + 8 * i); });
}

static inline Ints16 join_neighbours(const int8_t* first, const int8_t* second) {
  return join_words([&](int i) { return widen_8(first + 8 * i); },
                    [&](int i) { return widen_8(second + 8 * i); });
}

static inline Ints16 add_products(Ints16 a, Ints16 b, Ints16 sum) {
  return each_ints([&](int i) {
    const int16x8_t x = vreinterpretq_s16_s32(a.part[i]), y = vreinterpretq_s16_s32(b.part[i]);
    const int32x4_t low = vmull_s16(vget_low_s16(x), vget_low_s16(y)), high = vmull_high_s16(x, y);
    return vaddq_s32(sum.part[i], vpaddq_s32(low, high));
  });
}

static inline Ints16 bits_of_floats(Vec16 v) {
  return each_ints([&](int i) { return vreinterpretq_s32_f32(v.part[i]); });
}

static inline Vec16 floats_of_bits(Ints16 v) {
  return each_part([&](int i) { return vreinterpretq_f32_s32(v.part[i]); });
}

static inline Vec16 ints_to_floats(Ints16 v) {
  return each_part([&](int i) { return vcvtq_f32_s32(v.part[i]); });
}

static inline void store_bytes(int8_t* p, Ints16 v) {
  const int16x8_t low = vcombine_s16(vmovn_s32(v.part[0]), vmovn_s32(v.part[1]));
  const int16x8_t high = vcombine_s16(vmovn_s32(v.part[2]), vmovn_s32(v.part[3]));
  vst1q_s8(p, vcombine_s8(vmovn_s16(low), vmovn_s16(high)));
}

static inline void look_up_nibbles(const uint32_t* nibbles, const int8_t* table, int8_t* out) {
  const uint8x16_t packed = vld1q_u8(reinterpret_cast<const uint8_t*>(nibbles));
  const int8x16_t levels = vld1q_s8(table);
  const int8x16_t even = vqtbl1q_s8(levels, vandq_u8(packed, vdupq_n_u8(15)));
  const int8x16_t odd = vqtbl1q_s8(levels, vshrq_n_u8(packed, 4));
  vst1q_s8(out, vzip1q_s8(even, odd));
  vst1q_s8(out + 16, vzip2q_s8(even, odd));
}
