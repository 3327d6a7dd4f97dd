// The indexer of attention: which blocks of positions each row sees.
#pragma once

#include "ops/cache_places.h"

namespace coldstream {

struct IndexerArguments {
  int64_t capacity;  // rows
  int64_t num_heads, head_size, num_rope_pairs;
  InputRows query;               // [T, heads · head_size]
  InputRows key;                 // [T, head_size]
  InputRows angles;              // [T, pairs · 2], of rows
  InputRows block_angles;        // the same of the first positions of their blocks
  const float *q_norm, *k_norm;  // [head_size]
  float eps;
  int64_t num_blocks, block_size;  // num_blocks: complete ones that a row sees at most
  void* cache;                     // [pieces, positions, head_size], contiguous; see `AttentionArguments`
  CacheType type;                  // f16 or f32
  CachePlaces places;
  int32_t* words;  // [T, num_words], contiguous; see `ChosenBlocks`
  int64_t num_words;
};
std::unique_ptr<Op> make_choose_blocks(const FloatKernels& kernels, const IndexerArguments& arguments);

}  // namespace coldstream
