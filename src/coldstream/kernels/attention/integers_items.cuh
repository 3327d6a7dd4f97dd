// The items of a block of threads, computed one after the other: some adjacent rows and a key/value head,
// with all their chunks or an even share of them.
#pragma once

#include "attention/integers_arguments.cuh"
#include "attention/integers_pairs.cuh"

namespace coldstream {

// Adjacent rows before last_row and a key/value head: pairs of a row and a query head.
struct ItemPairs {
  int first_row, last_row, kv_head;

  __device__ int num_pairs(const IntegersArguments& a) const {
    return (last_row - first_row) * (a.num_heads / a.num_kv_heads);
  }

  // Pairs beyond the last repeat it, and are not written.
  __device__ int64_t pair_at(const IntegersArguments& a, int pair) const {
    const int group = a.num_heads / a.num_kv_heads, found = min(pair, num_pairs(a) - 1);
    return int64_t{first_row + found / group} * a.num_heads + kv_head * group + found % group;
  }
};

// The first chunk that a row sees.
__device__ __forceinline__ int first_chunk_of(const IntegersArguments& a, int row) {
  return first_position(a.rows.positions[row], a.window) / chunk_positions;
}

// Index in the workspace of a pair's chunk number `chunk`, or of the merged one. first: the row's first
// chunk.
__device__ __forceinline__ int64_t place_of_chunk(const IntegersArguments& a, int64_t pair, int chunk,
                                                  int first) {
  return pair * a.max_chunks + (a.max_chunks == 1 ? 0 : chunk - first);
}

// The cells of `size` positions, first … last, in which rows begin … end − 1 have positions; first > last
// without any.
__device__ __forceinline__ void find_cells(const IntegersArguments& a, int begin, int end, int size,
                                           int& first, int& last) {
  first = 0x7fffffff;
  last = -1;
#pragma unroll 1
  for (int i = begin; i < end; i++) {
    const int position = a.rows.positions[i];
    if (position < 0) continue;
    first = min(first, first_position(position, a.window) / size);
    last = max(last, position / size);
  }
}

// The first and the last tile of chunks first_chunk … last_chunk in which rows begin … end − 1 have
// positions; false without any.
__device__ __forceinline__ bool find_tiles_of(const IntegersArguments& a, int begin, int end, int first_chunk,
                                              int last_chunk, int& first, int& last) {
  find_cells(a, begin, end, block_positions, first, last);
  first = max(first, first_chunk * chunk_blocks);
  last = min(last, last_chunk * chunk_blocks + chunk_blocks - 1);
  return first <= last;
}

// block_pairs: pairs that a block takes at once.
template <int block_pairs>
struct BlockItems : ItemPairs {
  const IntegersArguments& a;
  const int tile_rows = block_pairs / (a.num_heads / a.num_kv_heads);
  int first_chunk, last_chunk;  // of the item
  int item = -1, chunks_before = 0, share_begin = 0, share_end = 0;

  __device__ explicit BlockItems(const IntegersArguments& arguments) : a(arguments) {}

  // The first and the last tile of the item's chunks in which rows of a run have positions; false without
  // any.
  __device__ bool find_tiles(const RowRun& run, int& first, int& last) const {
    return find_tiles_of(a, run.begin, run.end, first_chunk, last_chunk, first, last);
  }

  // The range of the item's chunks in which its rows have positions; the end is exclusive.
  __device__ void find_chunks(int& begin, int& end) const {
    int last;
    find_cells(a, first_row, last_row, chunk_positions, begin, last);
    end = last + 1;
    begin = min(begin, end);
  }

  __device__ void take_rows(int tile) {
    first_row = tile * tile_rows;
    last_row = min(first_row + tile_rows, a.rows.num_rows);
  }

  // The next of the block's items; `item` is −1 before the first.
  __device__ bool next() {
    const int num_tiles = (a.rows.num_rows + tile_rows - 1) / tile_rows,
              num_items = num_tiles * a.num_kv_heads;
    if (a.max_chunks == 1) {
      // All chunks of some rows; the last rows come first, as they have most positions.
      item = item < 0 ? blockIdx.x : item + gridDim.x;
      if (item >= num_items) return false;
      kv_head = item % a.num_kv_heads;
      take_rows(num_tiles - 1 - item / a.num_kv_heads);
      first_chunk = 0;
      last_chunk = 0x7fffffff / chunk_positions;
      return true;
    }
    int begin, end;
    if (item < 0) {
      // An even share of the chunks of all rows.
      int64_t total = 0;
      for (int tile = 0; tile < num_tiles; tile++) {
        take_rows(tile);
        find_chunks(begin, end);
        total += (end - begin) * a.num_kv_heads;
      }
      share_begin = int(total * blockIdx.x / gridDim.x);
      share_end = int(total * (blockIdx.x + 1) / gridDim.x);
    }
    for (item++; item < num_items && chunks_before < share_end; item++) {
      kv_head = item % a.num_kv_heads;
      take_rows(item / a.num_kv_heads);
      find_chunks(begin, end);
      first_chunk = begin + max(share_begin - chunks_before, 0);
      last_chunk = begin + min(share_end - chunks_before, end - begin) - 1;
      chunks_before += end - begin;
      if (first_chunk <= last_chunk) return true;
    }
    return false;
  }
};

// The maxima and denominators of a chunk, of a lane's pairs.
struct PairChunk {
  ForBoth<float> maximum, denominator;
  ForBoth<bool> has_begun;

  __device__ void begin() { has_begun[0] = has_begun[1] = false; }

  // after: the maxima including a block's best scores; correction: the factors of earlier results.
  __device__ void raise(const ForBoth<float>& best, ForBoth<float>& after, ForBoth<float>& correction) const {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      after[i] = has_begun[i] ? fmaxf(maximum[i], best[i]) : best[i];
      correction[i] = has_begun[i] ? exact_exp(maximum[i] - after[i]) : 1.0f;
    }
  }

  // Takes in a block of pair i, with its weights' sum.
  __device__ void add(int i, float total, float after, float correction) {
    denominator[i] = has_begun[i] ? __fmaf_rn(denominator[i], correction, total) : total;
    maximum[i] = after;
    has_begun[i] = true;
  }
};

// The maximum and the denominator of merged chunks, of which `adds` is the last and `sum` those before it;
// the factors of both.
__device__ __forceinline__ float2 merge_chunk(float2 sum, float2 adds, float& ours, float& theirs) {
  const float after = fmaxf(sum.x, adds.x);
  ours = exact_exp(sum.x - after);
  theirs = exact_exp(adds.x - after);
  return make_float2(after, __fmaf_rn(adds.y, theirs, sum.y * ours));
}

}  // namespace coldstream
