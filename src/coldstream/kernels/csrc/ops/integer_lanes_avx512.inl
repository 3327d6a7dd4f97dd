// Sixteen int32 lanes as one 512-bit register. Meaning: integer_lanes_generic.inl.

struct Ints16 {
  __m512i all;
};

static inline Ints16 load_ints(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
static inline void store_ints(int32_t* p, Ints16 v) { _mm512_storeu_si512(p, v.all); }

static inline Ints16 splat_ints(int32_t x) { return {_mm512_set1_epi32(x)}; }
static inline Ints16 add_ints(Ints16 a, Ints16 b) { return {_mm512_add_epi32(a.all, b.all)}; }
static inline Ints16 sub_ints(Ints16 a, Ints16 b) { return {_mm512_sub_epi32(a.all, b.all)}; }
static inline Ints16 times_256(Ints16 a) { return {_mm512_slli_epi32(a.all, 8)}; }
static inline Ints16 over_256(Ints16 a) { return {_mm512_srai_epi32(a.all, 8)}; }

static inline Ints16 widen_bytes(const int8_t* p) {
  return {_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}

static inline Ints16 widen_byte_pairs(const int8_t* p) {
  return {_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}

static inline Ints16 join_ints(Ints16 low, Ints16 high) {
  return {_mm512_mask_blend_epi16(0xaaaaaaaa, low.all, _mm512_slli_epi32(high.all, 16))};
}

static inline Ints16 join_planes(const int8_t* high, const int8_t* low) {
  const Ints16 wide = widen_bytes(high);
  return join_ints(add_ints(times_256(wide), widen_bytes(low)), wide);
}

static inline Ints16 join_neighbours(const int8_t* first, const int8_t* second) {
  return join_ints(widen_bytes(first), widen_bytes(second));
}

// As an instruction: of the intrinsic GCC 12 keeps sums of a loop in copies, which it spills.
static inline Ints16 add_products(Ints16 a, Ints16 b, Ints16 sum) {
  asm("vpdpwssd %2, %1, %0" : "+v"(sum.all) : "v"(a.all), "v"(b.all));
  return sum;
}

static inline Ints16 bits_of_floats(Vec16 v) { return {_mm512_castps_si512(v.all)}; }
static inline Vec16 floats_of_bits(Ints16 v) { return {_mm512_castsi512_ps(v.all)}; }
static inline Vec16 ints_to_floats(Ints16 v) { return {_mm512_cvtepi32_ps(v.all)}; }

static inline void store_bytes(int8_t* p, Ints16 v) {
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
