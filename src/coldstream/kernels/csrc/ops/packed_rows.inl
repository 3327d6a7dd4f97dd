// Rows of the packed integer types, i4 and i3: codes of four and of three bits, written one by one, and read
// 32 at a time as rows of i8 for the products.

// What nibbles stand for: code + 8, and the levels of kernels/attention/levels.py.
constexpr int8_t nibble_values[16] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
constexpr int8_t level_values[16] = {13, 40, 71, 114, -13, -40, -71, -114};
constexpr float level_thresholds[3] = {26.5f, 55.5f, 92.5f};
constexpr float nibble_limit = 7.0f, level_limit = 140.0f;

// head [n], n a multiple of 32, is rotated in place and rounded.
template <int bits>
static void store_packed(float* head, void* to, int64_t n) {
  rotate_head(head, n);
  auto* row = static_cast<uint8_t*>(to);
  const PlaneScale scale = scale_planes(head, n, bits == 4 ? nibble_limit : level_limit, 1.0f);
  memset(row, 0, n * bits / 8);
  for (int64_t i = 0; i < n; i += 16) {
    if constexpr (bits == 4) {
      int8_t codes[16];
      store_bytes(codes, codes_of(head + i, scale.factor));
      for (int64_t j = 0; j < 8; j++) row[i / 2 + j] = (codes[2 * j] + 8) | (codes[2 * j + 1] + 8) << 4;
    } else {
      float scaled[16];
      store16(scaled, scale.factor == 0.0f ? zero16() : mul16(load16(head + i), splat16(scale.factor)));
      for (int64_t j = 0; j < 16; j++) {
        const float magnitude = __builtin_fabsf(scaled[j]);
        int low = 0;
        for (const float threshold : level_thresholds) low += magnitude >= threshold;
        // Value 8 · part + place of a block: cache_layout.py says which bits are its own.
        const int64_t block = i / 32, part = i % 32 / 8 + j / 8, place = j % 8;
        row[8 * block + part / 2 * 4 + place / 2] |= low << (place % 2 * 4 + part % 2 * 2);
        row[n / 4 + 4 * block + place / 2] |= (scaled[j] < 0.0f) << (place % 2 * 4 + part);
      }
    }
  }
  const int64_t code_bytes = n * bits / 8;
  memset(row + code_bytes, 0, (code_bytes + sizeof(float) + 15) / 16 * 16 - code_bytes);
  memcpy(row + code_bytes, &scale.scale, sizeof(float));
}

// A packed row → a row of i8.
template <int bits>
static inline void unpack_row(const int8_t* row, int64_t n, int8_t* out) {
  for (int64_t i = 0; i < n; i += 32) {
    uint32_t nibbles[4];
    if constexpr (bits == 4) {
      memcpy(nibbles, row + i / 2, sizeof(nibbles));
    } else {
      uint32_t low[2], high;
      memcpy(low, row + i / 4, sizeof(low));
      memcpy(&high, row + n / 4 + i / 8, sizeof(high));
      for (int part = 0; part < 4; part++) {
        const uint32_t signs = (high >> part & 0x11111111) << 2;
        nibbles[part] = (low[part / 2] >> (part % 2 * 2) & 0x33333333) | signs;
      }
    }
    look_up_nibbles(nibbles, bits == 4 ? nibble_values : level_values, out + i);
  }
  memcpy(out + n, row + n * bits / 8, sizeof(float));
}

struct RowView {
  const int8_t* first;
  int64_t stride;
};

// n rows of keys or values of a chunk from `offset` on, as rows of planes; of a packed type in `memory`.
template <int bits>
static inline RowView plane_rows(const AttentionChunk& chunk, const void* cache, int64_t offset, int64_t n,
                                 int8_t* memory) {
  const int8_t* rows = static_cast<const int8_t*>(cache) + offset;
  if constexpr (bits >= 8) return {rows, chunk.position_stride};
  const int64_t size = chunk.head_size, stride = cache_row_elements(CacheType::i8, size);
  for (int64_t p = 0; p < n; p++) {
    unpack_row<bits>(rows + p * chunk.position_stride, size, memory + p * stride);
  }
  return {memory, stride};
}
