// Sixteen int32 lanes as a plain array: the meaning of the operations in the other integer_lanes_*.inl. A
// lane may also hold two int16, the first in its low half.

struct Ints16 {
  int32_t lane[16];
};

static inline Ints16 load_ints(const int32_t* p) {
  Ints16 r;
  memcpy(r.lane, p, sizeof(r.lane));
  return r;
}

static inline void store_ints(int32_t* p, const Ints16& v) { memcpy(p, v.lane, sizeof(v.lane)); }

#define LANEWISE_INTS(NAME, PARAMETERS, EXPRESSION)        \
  static inline Ints16 NAME PARAMETERS {                   \
    Ints16 r;                                              \
    for (int i = 0; i < 16; i++) r.lane[i] = (EXPRESSION); \
    return r;                                              \
  }
LANEWISE_INTS(splat_ints, (int32_t x), x)
LANEWISE_INTS(add_ints, (const Ints16& a, const Ints16& b), a.lane[i] + b.lane[i])
LANEWISE_INTS(sub_ints, (const Ints16& a, const Ints16& b), a.lane[i] - b.lane[i])
LANEWISE_INTS(times_256, (const Ints16& a), a.lane[i] * 256)
LANEWISE_INTS(over_256, (const Ints16& a), a.lane[i] >> 8)  // rounded down
// Thirty-two bytes, two int16 a lane.
LANEWISE_INTS(widen_byte_pairs, (const int8_t* p), (p[2 * i] & 0xffff) | p[2 * i + 1] * 65536)
// Two int16 a lane, from lanes in their range.
LANEWISE_INTS(join_ints, (const Ints16& low, const Ints16& high),
              (low.lane[i] & 0xffff) | high.lane[i] * 65536)
// Numbers in two planes, as 256 · high + low and high.
LANEWISE_INTS(join_planes, (const int8_t* high, const int8_t* low),
              ((256 * high[i] + low[i]) & 0xffff) | high[i] * 65536)
// Numbers of two rows.
LANEWISE_INTS(join_neighbours, (const int8_t* first, const int8_t* second),
              (first[i] & 0xffff) | second[i] * 65536)
// sum + the products of the low halves and of the high halves.
LANEWISE_INTS(add_products, (const Ints16& a, const Ints16& b, const Ints16& sum),
              sum.lane[i] + static_cast<int16_t>(a.lane[i]) * static_cast<int16_t>(b.lane[i]) +
                  (a.lane[i] >> 16) * (b.lane[i] >> 16))
LANEWISE_INTS(bits_of_floats, (const Vec16& v), static_cast<int32_t>(float_to_bits(v.lane[i])))
#undef LANEWISE_INTS

static inline Vec16 floats_of_bits(const Ints16& v) {
  Vec16 r;
  for (int i = 0; i < 16; i++) r.lane[i] = bits_to_float(static_cast<uint32_t>(v.lane[i]));
  return r;
}

static inline Vec16 ints_to_floats(const Ints16& v) {
  Vec16 r;
  for (int i = 0; i < 16; i++) r.lane[i] = static_cast<float>(v.lane[i]);
  return r;
}

// For lanes in the range of a byte.
static inline void store_bytes(int8_t* p, const Ints16& v) {
  for (int i = 0; i < 16; i++) p[i] = static_cast<int8_t>(v.lane[i]);
}

// Thirty-two nibbles, the low half of a byte first → the bytes that a table has for them.
static inline void look_up_nibbles(const uint32_t* nibbles, const int8_t* table, int8_t* out) {
  const auto* bytes = reinterpret_cast<const uint8_t*>(nibbles);
  for (int i = 0; i < 16; i++) {
    out[2 * i] = table[bytes[i] & 15];
    out[2 * i + 1] = table[bytes[i] >> 4];
  }
}
