// Sixteen float32 lanes as two 256-bit registers. Meaning: vec16_generic.inl.

struct Vec16 {
  __m256 lo, hi;
};

static inline Vec16 splat16(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
static inline Vec16 zero16() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }

static const int32_t lane_masks[48] = {-1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1};

struct Mask16 {
  __m256i lo, hi;
};

static inline int lanes_of(int64_t left) { return left <= 0 ? 0 : left < 16 ? static_cast<int>(left) : 16; }

static inline Mask16 first_lanes(int64_t n) {
  const int32_t* p = lane_masks + 16 - lanes_of(n);
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 8))};
}

static inline Vec16 load16(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }

static inline Vec16 load16(const Float16* p) {
  const auto* words = reinterpret_cast<const __m128i*>(p);
  return {_mm256_cvtph_ps(_mm_loadu_si128(words)), _mm256_cvtph_ps(_mm_loadu_si128(words + 1))};
}

static inline __m256 bf16_to_float(__m128i words) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(words), 16));
}

static inline Vec16 load16(const Bfloat16* p) {
  const auto* words = reinterpret_cast<const __m128i*>(p);
  return {bf16_to_float(_mm_loadu_si128(words)), bf16_to_float(_mm_loadu_si128(words + 1))};
}

// Masked moves take many times as long as others on some processors, and most vectors are whole.
static inline Vec16 load16(const float* p, int64_t left) {
  if (left >= 16) return load16(p);
  const Mask16 m = first_lanes(left);
  return {_mm256_maskload_ps(p, m.lo), _mm256_maskload_ps(p + 8, m.hi)};
}

// There is no masked load of 16-bit lanes at this tier.
template <typename T>
static inline Vec16 load16(const T* p, int64_t left) {
  if (left >= 16) return load16(p);
  T padded[16] = {};
  memcpy(padded, p, lanes_of(left) * sizeof(T));
  return load16(padded);
}

static inline void store16(float* p, Vec16 v) {
  _mm256_storeu_ps(p, v.lo);
  _mm256_storeu_ps(p + 8, v.hi);
}

static inline void store16(float* p, Vec16 v, int64_t left) {
  if (left >= 16) return store16(p, v);
  const Mask16 m = first_lanes(left);
  _mm256_maskstore_ps(p, m.lo, v.lo);
  _mm256_maskstore_ps(p + 8, m.hi, v.hi);
}

static inline void store16(Float16* p, Vec16 v, int64_t left) {
  __m128i words[2] = {_mm256_cvtps_ph(v.lo, _MM_FROUND_TO_NEAREST_INT),
                      _mm256_cvtps_ph(v.hi, _MM_FROUND_TO_NEAREST_INT)};
  memcpy(p, words, lanes_of(left) * sizeof(Float16));
}

static inline Vec16 add16(Vec16 a, Vec16 b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
static inline Vec16 sub16(Vec16 a, Vec16 b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
static inline Vec16 mul16(Vec16 a, Vec16 b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
static inline Vec16 div16(Vec16 a, Vec16 b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
static inline Vec16 max16(Vec16 a, Vec16 b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
static inline Vec16 min16(Vec16 a, Vec16 b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }

static inline Vec16 fma16(Vec16 a, Vec16 b, Vec16 c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}

static inline __m256 pow2_8(__m256 shifted) {
  const __m256i exponent = _mm256_slli_epi32(_mm256_castps_si256(shifted), 23);
  return _mm256_castsi256_ps(_mm256_add_epi32(exponent, _mm256_set1_epi32(127 << 23)));
}

static inline Vec16 pow2_16(Vec16 shifted) { return {pow2_8(shifted.lo), pow2_8(shifted.hi)}; }

static inline Vec16 keep16(Vec16 v, int64_t n, float fill) {
  const Mask16 m = first_lanes(n);
  const __m256 other = _mm256_set1_ps(fill);
  return {_mm256_blendv_ps(other, v.lo, _mm256_castsi256_ps(m.lo)),
          _mm256_blendv_ps(other, v.hi, _mm256_castsi256_ps(m.hi))};
}

static inline float sum16(Vec16 v) {
  const __m256 p = _mm256_add_ps(v.lo, v.hi);
  const __m128 q = _mm_add_ps(_mm256_castps256_ps128(p), _mm256_extractf128_ps(p, 1));
  const __m128 r = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(r, _mm_shuffle_ps(r, r, 1)));
}

static inline float greatest16(Vec16 v) {
  const __m256 p = _mm256_max_ps(v.lo, v.hi);
  const __m128 q = _mm_max_ps(_mm256_castps256_ps128(p), _mm256_extractf128_ps(p, 1));
  const __m128 r = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(r, _mm_shuffle_ps(r, r, 1)));
}

static inline void transpose16(Vec16* rows) {
  __m256i quadrants[2][2][8];  // by half of the rows, half of the columns
  for (int i = 0; i < 16; i++) {
    quadrants[i / 8][0][i % 8] = _mm256_castps_si256(rows[i].lo);
    quadrants[i / 8][1][i % 8] = _mm256_castps_si256(rows[i].hi);
  }
  for (auto& half : quadrants) {
    for (auto& quadrant : half) transpose_8x8(quadrant);
  }
  for (int i = 0; i < 16; i++) {
    rows[i] = {_mm256_castsi256_ps(quadrants[0][i / 8][i % 8]),
               _mm256_castsi256_ps(quadrants[1][i / 8][i % 8])};
  }
}
