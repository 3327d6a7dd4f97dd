// Sixteen int32 lanes as one 512-bit register. Meaning: integer_lanes_generic.inl.

struct ints16 {
  __m512i all;
};

static inline ints16 load_ints(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
static inline void store_ints(int32_t* p, ints16 v) { _mm512_storeu_si512(p, v.all); }

static inline ints16 splat_ints(int32_t x) { return {_mm512_set1_epi32(x)}; }
static inline ints16 add_ints(ints16 a, ints16 b) { return {_mm512_add_epi32(a.all, b.all)}; }
static inline ints16 sub_ints(ints16 a, ints16 b) { return {_mm512_sub_epi32(a.all, b.all)}; }
static inline ints16 times_256(ints16 a) { return {_mm512_slli_epi32(a.all, 8)}; }
static inline ints16 over_256(ints16 a) { return {_mm512_srai_epi32(a.all, 8)}; }

static inline ints16 widen_bytes(const int8_t* p) {
  return {_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}

static inline ints16 widen_byte_pairs(const int8_t* p) {
  return {_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}

static inline ints16 join_ints(ints16 low, ints16 high) {
  return {_mm512_mask_blend_epi16(0xaaaaaaaa, low.all, _mm512_slli_epi32(high.all, 16))};
}

static inline ints16 join_planes(const int8_t* high, const int8_t* low) {
  const ints16 wide = widen_bytes(high);
  return join_ints(add_ints(times_256(wide), widen_bytes(low)), wide);
}

static inline ints16 join_neighbours(const int8_t* first, const int8_t* second) {
  return join_ints(widen_bytes(first), widen_bytes(second));
}

// As an instruction: of the intrinsic GCC 12 keeps sums of a loop in copies, which it spills.
static inline ints16 add_products(ints16 a, ints16 b, ints16 sum) {
  asm("vpdpwssd %2, %1, %0" : "+v"(sum.all) : "v"(a.all), "v"(b.all));
  return sum;
}

static inline ints16 bits_of_floats(vec16 v) { return {_mm512_castps_si512(v.all)}; }
static inline vec16 floats_of_bits(ints16 v) { return {_mm512_castsi512_ps(v.all)}; }
static inline vec16 ints_to_floats(ints16 v) { return {_mm512_cvtepi32_ps(v.all)}; }

static inline void store_bytes(int8_t* p, ints16 v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(v.all));
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
