// The keys of an indexer's blocks, and their scores. Products are chains of fma, as those of attention over
// floats.

template <typename T>
static void average_rows(const void* const* rows, int64_t count, float* out, int64_t size) {
  const Vec16 share = splat16(1.0f / static_cast<float>(count));
  for (int64_t i = 0; i < size; i += 16) {
    Vec16 sum = load16(static_cast<const T*>(rows[0]) + i, size - i);
    for (int64_t r = 1; r < count; r++) {
      sum = add16(sum, load16(static_cast<const T*>(rows[r]) + i, size - i));
    }
    store16(out + i, mul16(sum, share), size - i);
  }
}

template <typename T>
static void score_blocks(const BlockScores& scores) {
  const int64_t size = scores.size, heads = scores.num_heads;
  float* keys = scores.memory;
  float* products = keys + attention_block * size;
  pack_keys(static_cast<const T*>(scores.keys), scores.stride, scores.count, size, keys);
  accumulate(scores.queries, size, keys, attention_block, products, attention_block, nullptr,
             scores.num_tokens * heads, head_floats(scores.count), size);
  for (int64_t token = 0; token < scores.num_tokens; token++) {
    const float* of_heads = products + token * heads * attention_block;
    for (int64_t i = 0; i < scores.count; i += 16) {
      Vec16 sum = zero16();
      for (int64_t h = 0; h < heads; h++) {
        // In this order a NaN becomes 0.
        sum = add16(sum, max16(load16(of_heads + h * attention_block + i), zero16()));
      }
      store16(scores.out + token * scores.out_stride + i, sum, scores.count - i);
    }
  }
}
