// Sixteen int32 lanes as two 256-bit registers. Meaning: integer_lanes_generic.inl.

struct Ints16 {
  __m256i lo, hi;
};

static inline Ints16 load_ints(const int32_t* p) {
  const auto* halves = reinterpret_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(halves), _mm256_loadu_si256(halves + 1)};
}

static inline void store_ints(int32_t* p, Ints16 v) {
  auto* halves = reinterpret_cast<__m256i*>(p);
  _mm256_storeu_si256(halves, v.lo);
  _mm256_storeu_si256(halves + 1, v.hi);
}

static inline Ints16 splat_ints(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }

static inline Ints16 add_ints(Ints16 a, Ints16 b) {
  return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)};
}

static inline Ints16 sub_ints(Ints16 a, Ints16 b) {
  return {_mm256_sub_epi32(a.lo, b.lo), _mm256_sub_epi32(a.hi, b.hi)};
}

static inline Ints16 times_256(Ints16 a) { return {_mm256_slli_epi32(a.lo, 8), _mm256_slli_epi32(a.hi, 8)}; }
static inline Ints16 over_256(Ints16 a) { return {_mm256_srai_epi32(a.lo, 8), _mm256_srai_epi32(a.hi, 8)}; }

static inline Ints16 widen_byte_pairs(const int8_t* p) {
  const auto* halves = reinterpret_cast<const __m128i*>(p);
  return {_mm256_cvtepi8_epi16(_mm_loadu_si128(halves)), _mm256_cvtepi8_epi16(_mm_loadu_si128(halves + 1))};
}

static inline Ints16 join_ints(Ints16 low, Ints16 high) {
  return {_mm256_blend_epi16(low.lo, _mm256_slli_epi32(high.lo, 16), 0xaa),
          _mm256_blend_epi16(low.hi, _mm256_slli_epi32(high.hi, 16), 0xaa)};
}

// Lanes of two int16: of a and b, each in its order.
static inline Ints16 join_words(__m256i a, __m256i b) {
  // Unpacking takes lanes of 128 bits each on their own: 0–3 and 8–11, 4–7 and 12–15.
  const __m256i low = _mm256_unpacklo_epi16(a, b), high = _mm256_unpackhi_epi16(a, b);
  return {_mm256_permute2x128_si256(low, high, 0x20), _mm256_permute2x128_si256(low, high, 0x31)};
}

static inline __m256i widen_to_words(const int8_t* p) {
  return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

static inline Ints16 join_planes(const int8_t* high, const int8_t* low) {
  const __m256i words = widen_to_words(high);
  return join_words(_mm256_add_epi16(_mm256_slli_epi16(words, 8), widen_to_words(low)), words);
}

static inline Ints16 join_neighbours(const int8_t* first, const int8_t* second) {
  return join_words(widen_to_words(first), widen_to_words(second));
}

static inline Ints16 add_products(Ints16 a, Ints16 b, Ints16 sum) {
  return {_mm256_add_epi32(sum.lo, _mm256_madd_epi16(a.lo, b.lo)),
          _mm256_add_epi32(sum.hi, _mm256_madd_epi16(a.hi, b.hi))};
}

static inline Ints16 bits_of_floats(Vec16 v) {
  return {_mm256_castps_si256(v.lo), _mm256_castps_si256(v.hi)};
}

static inline Vec16 floats_of_bits(Ints16 v) {
  return {_mm256_castsi256_ps(v.lo), _mm256_castsi256_ps(v.hi)};
}

static inline Vec16 ints_to_floats(Ints16 v) { return {_mm256_cvtepi32_ps(v.lo), _mm256_cvtepi32_ps(v.hi)}; }

static inline void store_bytes(int8_t* p, Ints16 v) {
  // The packs take lanes of 128 bits each on their own: words 0–3, 8–11, 4–7, 12–15.
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(v.lo, v.hi), 0xd8);
  const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
}

static inline void look_up_nibbles(const uint32_t* nibbles, const int8_t* table, int8_t* out) {
  const __m128i packed = _mm_loadu_si128(reinterpret_cast<const __m128i*>(nibbles));
  const __m128i levels = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  const __m128i mask = _mm_set1_epi8(15);
  const __m128i even = _mm_shuffle_epi8(levels, _mm_and_si128(packed, mask));
  const __m128i odd = _mm_shuffle_epi8(levels, _mm_and_si128(_mm_srli_epi16(packed, 4), mask));
  auto* halves = reinterpret_cast<__m128i*>(out);
  _mm_storeu_si128(halves, _mm_unpacklo_epi8(even, odd));
  _mm_storeu_si128(halves + 1, _mm_unpackhi_epi8(even, odd));
}
