// Sixteen float32 lanes as a plain array: the meaning of the operations in the other vec16_*.inl.

struct Vec16 {
  float lane[16];
};

static inline int lanes_of(int64_t left) { return left < 16 ? static_cast<int>(left) : 16; }

static inline float bits_to_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

static inline uint32_t float_to_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

static inline float to_float(float x) { return x; }

static inline float to_float(Bfloat16 x) { return bits_to_float(static_cast<uint32_t>(x.bits) << 16); }

static inline float to_float(Float16 x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000) << 16;
  const uint32_t rest = x.bits & 0x7fff;
  const uint32_t quiet = rest > 0x7c00 ? 0x400000 : 0;
  if (rest >= 0x7c00) return bits_to_float(sign | 0x7f800000 | quiet | (rest & 0x3ff) << 13);
  if (rest >= 0x0400) return bits_to_float(sign | ((rest << 13) + (112u << 23)));
  return bits_to_float(sign | float_to_bits(static_cast<float>(rest) * 0x1p-24f));
}

// To nearest, ties to even, as the F16C instruction does it.
static inline Float16 to_float16(float x) {
  const uint32_t bits = float_to_bits(x);
  const auto sign = static_cast<uint16_t>(bits >> 16 & 0x8000);
  const uint32_t rest = bits & 0x7fffffff;
  if (rest > 0x7f800000) return {static_cast<uint16_t>(sign | 0x7e00 | (rest >> 13 & 0x3ff))};
  if (rest >= 0x477ff000) return {static_cast<uint16_t>(sign | 0x7c00)};
  if (rest < 0x38800000) {  // subnormal: adding 0.5 aligns the unit of the sum with that of the result
    const uint32_t sum = float_to_bits(bits_to_float(rest) + 0.5f);
    return {static_cast<uint16_t>(sign | (sum - 0x3f000000))};
  }
  const uint32_t rounded = rest + 0xfff + (rest >> 13 & 1);
  return {static_cast<uint16_t>(sign | ((rounded - (112u << 23)) >> 13))};
}

static inline Vec16 splat16(float x) {
  Vec16 r;
  for (int i = 0; i < 16; i++) r.lane[i] = x;
  return r;
}

static inline Vec16 zero16() { return splat16(0.0f); }

template <typename T>
static inline Vec16 load16(const T* p) {
  Vec16 r;
  for (int i = 0; i < 16; i++) r.lane[i] = to_float(p[i]);
  return r;
}

// The first min(left, 16) values, then zeros.
template <typename T>
static inline Vec16 load16(const T* p, int64_t left) {
  Vec16 r = zero16();
  for (int i = 0; i < lanes_of(left); i++) r.lane[i] = to_float(p[i]);
  return r;
}

static inline void store16(float* p, const Vec16& v) { memcpy(p, v.lane, sizeof(v.lane)); }

static inline void store16(float* p, const Vec16& v, int64_t left) {
  for (int i = 0; i < lanes_of(left); i++) p[i] = v.lane[i];
}

static inline void store16(Float16* p, const Vec16& v, int64_t left) {
  for (int i = 0; i < lanes_of(left); i++) p[i] = to_float16(v.lane[i]);
}

#define LANEWISE(NAME, EXPRESSION)                           \
  static inline Vec16 NAME(const Vec16& a, const Vec16& b) { \
    Vec16 r;                                                 \
    for (int i = 0; i < 16; i++) {                           \
      const float x = a.lane[i], y = b.lane[i];              \
      r.lane[i] = EXPRESSION;                                \
    }                                                        \
    return r;                                                \
  }
LANEWISE(add16, x + y)
LANEWISE(sub16, x - y)
LANEWISE(mul16, (x * y))
LANEWISE(div16, x / y)
LANEWISE(max16, x > y ? x : y)  // a NaN in either: y
LANEWISE(min16, x < y ? x : y)
#undef LANEWISE

static inline Vec16 fma16(const Vec16& a, const Vec16& b, const Vec16& c) {
  Vec16 r;
  for (int i = 0; i < 16; i++) r.lane[i] = __builtin_fmaf(a.lane[i], b.lane[i], c.lane[i]);
  return r;
}

// 2^n for lanes that hold 1.5·2^23 + n, n in −126 … 127.
static inline Vec16 pow2_16(const Vec16& shifted) {
  Vec16 r;
  for (int i = 0; i < 16; i++) {
    r.lane[i] = bits_to_float((float_to_bits(shifted.lane[i]) << 23) + (127u << 23));
  }
  return r;
}

// The first min(n, 16) lanes of v, then `fill`.
static inline Vec16 keep16(const Vec16& v, int64_t n, float fill) {
  Vec16 r = splat16(fill);
  for (int i = 0; i < lanes_of(n); i++) r.lane[i] = v.lane[i];
  return r;
}

static inline float sum16(const Vec16& v) {
  float p[8];
  for (int i = 0; i < 8; i++) p[i] = v.lane[i] + v.lane[i + 8];
  return ((p[0] + p[4]) + (p[2] + p[6])) + ((p[1] + p[5]) + (p[3] + p[7]));
}

static inline float greatest16(const Vec16& v) {
  float p[8];
  for (int width = 8, i = 0; i < width; i++) p[i] = v.lane[i] > v.lane[i + 8] ? v.lane[i] : v.lane[i + 8];
  for (int width = 4; width > 0; width /= 2) {
    for (int i = 0; i < width; i++) p[i] = p[i] > p[i + width] ? p[i] : p[i + width];
  }
  return p[0];
}

static inline void transpose16(Vec16* rows) {
  for (int i = 0; i < 16; i++) {
    for (int j = 0; j < i; j++) {
      const float x = rows[i].lane[j];
      rows[i].lane[j] = rows[j].lane[i];
      rows[j].lane[i] = x;
    }
  }
}
