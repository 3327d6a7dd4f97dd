// Sixteen float32 lanes as one 512-bit register. Meaning: vec16_generic.inl.

struct Vec16 {
  __m512 all;
};

static inline Vec16 splat16(float x) { return {_mm512_set1_ps(x)}; }
static inline Vec16 zero16() { return {_mm512_setzero_ps()}; }

static inline __mmask16 first_lanes(int64_t n) {
  return n >= 16 ? 0xffff : n <= 0 ? 0 : static_cast<__mmask16>((1u << n) - 1);
}

static inline Vec16 load16(const float* p) { return {_mm512_loadu_ps(p)}; }

static inline Vec16 load16(const Float16* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}

static inline Vec16 bf16_to_float(__m256i words) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16))};
}

static inline Vec16 load16(const Bfloat16* p) {
  return bf16_to_float(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

static inline Vec16 load16(const float* p, int64_t left) {
  return {_mm512_maskz_loadu_ps(first_lanes(left), p)};
}

static inline Vec16 load16(const Float16* p, int64_t left) {
  return {_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first_lanes(left), p))};
}

static inline Vec16 load16(const Bfloat16* p, int64_t left) {
  return bf16_to_float(_mm256_maskz_loadu_epi16(first_lanes(left), p));
}

static inline void store16(float* p, Vec16 v) { _mm512_storeu_ps(p, v.all); }

// Most vectors are whole, and what a masked store wrote is not forwarded to loads.
static inline void store16(float* p, Vec16 v, int64_t left) {
  if (left >= 16) {
    _mm512_storeu_ps(p, v.all);
  } else {
    _mm512_mask_storeu_ps(p, first_lanes(left), v.all);
  }
}

static inline void store16(Float16* p, Vec16 v, int64_t left) {
  _mm256_mask_storeu_epi16(p, first_lanes(left), _mm512_cvtps_ph(v.all, _MM_FROUND_TO_NEAREST_INT));
}

static inline Vec16 add16(Vec16 a, Vec16 b) { return {_mm512_add_ps(a.all, b.all)}; }
static inline Vec16 sub16(Vec16 a, Vec16 b) { return {_mm512_sub_ps(a.all, b.all)}; }
static inline Vec16 mul16(Vec16 a, Vec16 b) { return {_mm512_mul_ps(a.all, b.all)}; }
static inline Vec16 div16(Vec16 a, Vec16 b) { return {_mm512_div_ps(a.all, b.all)}; }
static inline Vec16 max16(Vec16 a, Vec16 b) { return {_mm512_max_ps(a.all, b.all)}; }
static inline Vec16 min16(Vec16 a, Vec16 b) { return {_mm512_min_ps(a.all, b.all)}; }
static inline Vec16 fma16(Vec16 a, Vec16 b, Vec16 c) { return {_mm512_fmadd_ps(a.all, b.all, c.all)}; }

static inline Vec16 pow2_16(Vec16 shifted) {
  const __m512i exponent = _mm512_slli_epi32(_mm512_castps_si512(shifted.all), 23);
  return {_mm512_castsi512_ps(_mm512_add_epi32(exponent, _mm512_set1_epi32(127 << 23)))};
}

static inline Vec16 keep16(Vec16 v, int64_t n, float fill) {
  return {_mm512_mask_mov_ps(_mm512_set1_ps(fill), first_lanes(n), v.all)};
}

static inline float sum16(Vec16 v) {
  const __m256 p = _mm256_add_ps(_mm512_castps512_ps256(v.all), _mm512_extractf32x8_ps(v.all, 1));
  const __m128 q = _mm_add_ps(_mm256_castps256_ps128(p), _mm256_extractf128_ps(p, 1));
  const __m128 r = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(r, _mm_shuffle_ps(r, r, 1)));
}

static inline float greatest16(Vec16 v) {
  const __m256 p = _mm256_max_ps(_mm512_castps512_ps256(v.all), _mm512_extractf32x8_ps(v.all, 1));
  const __m128 q = _mm_max_ps(_mm256_castps256_ps128(p), _mm256_extractf128_ps(p, 1));
  const __m128 r = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(r, _mm_shuffle_ps(r, r, 1)));
}

static inline __m512 unpack_low_pairs(__m512 a, __m512 b) {
  return _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
}

static inline __m512 unpack_high_pairs(__m512 a, __m512 b) {
  return _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
}

static inline void transpose16(Vec16* rows) {
  __m512 t[16], u[16];  // u[4i + c]: column 4L + c of rows 4i … 4i + 3 in 128-bit lane L
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_ps(rows[i].all, rows[i + 1].all);
    t[i + 1] = _mm512_unpackhi_ps(rows[i].all, rows[i + 1].all);
  }
  for (int i = 0; i < 16; i += 4) {
    u[i] = unpack_low_pairs(t[i], t[i + 2]);
    u[i + 1] = unpack_high_pairs(t[i], t[i + 2]);
    u[i + 2] = unpack_low_pairs(t[i + 1], t[i + 3]);
    u[i + 3] = unpack_high_pairs(t[i + 1], t[i + 3]);
  }
  for (int c = 0; c < 4; c++) {
    const __m512 even_a = _mm512_shuffle_f32x4(u[c], u[4 + c], 0x88);
    const __m512 even_b = _mm512_shuffle_f32x4(u[8 + c], u[12 + c], 0x88);
    const __m512 odd_a = _mm512_shuffle_f32x4(u[c], u[4 + c], 0xdd);
    const __m512 odd_b = _mm512_shuffle_f32x4(u[8 + c], u[12 + c], 0xdd);
    rows[c].all = _mm512_shuffle_f32x4(even_a, even_b, 0x88);
    rows[4 + c].all = _mm512_shuffle_f32x4(odd_a, odd_b, 0x88);
    rows[8 + c].all = _mm512_shuffle_f32x4(even_a, even_b, 0xdd);
    rows[12 + c].all = _mm512_shuffle_f32x4(odd_a, odd_b, 0xdd);
  }
}
