#include "quant/rows_avx2.h"

#if defined(__AVX2__)

#include "quant/blocks_avx2.h"
#include "quant/row_lanes.h"
#include "shuffles_avx2.h"

namespace coldstream {

namespace {

struct LanesAvx2 {
  using Floats = __m256;
  using Words = __m256i;
  static constexpr int width = 8;
  static constexpr bool interleaves_blocks = true;

  static Floats load(const float* from) { return _mm256_loadu_ps(from); }
  static void store(float* to, Floats v) { _mm256_storeu_ps(to, v); }
  static Words load_words(const void* from) { return load_256(from); }
  static void store_words(void* to, Words v) { _mm256_store_si256(static_cast<__m256i*>(to), v); }
  static Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }

  static Words greater_magnitude(Words bits, Floats v) {
    return _mm256_max_epu32(bits, _mm256_and_si256(_mm256_castps_si256(v), _mm256_set1_epi32(0x7fffffff)));
  }
  static uint32_t greatest(Words bits) {
    alignas(32) uint32_t lanes[8];
    store_words(lanes, bits);
    uint32_t max = 0;
    for (uint32_t lane : lanes) max = lane > max ? lane : max;
    return max;
  }
  static int16_t round_16(const float* x, float r, int8_t* q) {
    const __m256i low = _mm256_cvtps_epi32(_mm256_mul_ps(load(x), _mm256_set1_ps(r)));
    const __m256i high = _mm256_cvtps_epi32(_mm256_mul_ps(load(x + 8), _mm256_set1_ps(r)));
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xd8);
    const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(q), bytes);
    // Sums of unsigned bytes in two halves, after moving the values up by 128.
    const __m128i halves = _mm_sad_epu8(_mm_xor_si128(bytes, _mm_set1_epi8(-128)), _mm_setzero_si128());
    return static_cast<int16_t>(_mm_extract_epi16(halves, 0) + _mm_extract_epi16(halves, 4) - 16 * 128);
  }
  static void transpose(Words (&v)[8]) { transpose_8x8(v); }
  static Words add_pairs(Words even, Words odd) {
    const __m256i ones = _mm256_set1_epi16(1);
    const __m256i high = _mm256_slli_epi32(_mm256_madd_epi16(odd, ones), 16);
    return _mm256_blend_epi16(_mm256_madd_epi16(even, ones), high, 0xaa);
  }
};

}  // namespace

void quantize_row_avx2(const float* x, int64_t cols, ActivationRow out) {
  quantize_row<LanesAvx2>(x, cols, out);
}

void pack_avx2(const ActivationRow* x, int num_rows, int64_t cols, ActivationTile* out) {
  pack<LanesAvx2>(x, num_rows, cols, out);
}

void float_product_avx2(const float* w, int64_t stride, int64_t count, int64_t cols, const float* const* x,
                        int num_rows, float* const* out) {
  float_product<LanesAvx2>(w, stride, count, cols, x, num_rows, out);
}

void glu_avx2(const Glu& unit, const float* gate, const float* up, int64_t count, float* out) {
  glu(unit, gate, up, count, out);
}

}  // namespace coldstream

#endif
