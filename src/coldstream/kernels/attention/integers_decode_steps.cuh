// The steps of a block of threads of integers_decode.cu, and its layout of shared memory.
#pragma once

#include "attention/integers_arguments.cuh"
#include "attention/integers_items.cuh"
#include "attention/integers_unpack.cuh"

namespace coldstream {

constexpr int decode_warps = 4;  // that share a block of positions

// Rows begin … end − 1 of a batch, of a chain of one sequence that has keys of num_kept positions.
struct ChainRun {
  int begin, end, segment, num_kept;

  __device__ ChainRun() {}
  __device__ ChainRun(const BatchRows& rows, int first, int limit)
      : begin(first), end(first + 1), segment(rows.segments[first]) {
#pragma unroll 1
    while (end < limit && rows.segments[end] == segment) end++;
    num_kept = rows.positions[end - 1] + 1;
  }
};

// Some blocks of positions of a chunk, for rows of one sequence.
struct DecodeStep : ItemPairs {
  ChainRun run;
  int chunk, begin, end, tile;  // tiles begin … end of the run; the step's first
  int block;                    // of the cache, that has the chunk; read a step ahead of the copies from it
  bool begins_item, begins_run, ends_run;
  int seen;  // with a choice: a bit for each tile of the chunk that a row of the run sees

  // Whether the run has positions in block b of the step.
  __device__ bool has(int b) const { return tile + b >= begin && tile + b <= end; }

  __device__ bool is_pair(const IntegersArguments& a, int pair) const { return pair < num_pairs(a); }

  // The chunk's, in the workspace.
  __device__ int64_t place_of(const IntegersArguments& a, int64_t pair) const {
    return place_of_chunk(a, pair, chunk, first_chunk_of(a, int(pair / a.num_heads)));
  }
};

// The steps of a block of threads. An item is a tile of rows, a key/value head and a chunk; items are
// numbered by tiles of rows, then chunks, then heads, and block b takes items b, b + gridDim.x, …
template <int blocks, bool is_chosen>
struct DecodeSteps : DecodeStep {
  const IntegersArguments& a;
  const int tile_rows = pairs / (a.num_heads / a.num_kv_heads);
  int index = blockIdx.x,
      items_before = 0;  // the next item's number; items of the tiles of rows before first_row
  int next_row = 0;      // the item's first row behind the run

  __device__ explicit DecodeSteps(const IntegersArguments& arguments) : a(arguments) {
    first_row = last_row = 0;
    tile = end = -1;
  }

  // Goes on to the next step; false behind the last.
  __device__ bool next() {
    begins_item = begins_run = false;
    if (tile >= 0 && !ends_run) {
      tile += blocks;
      if constexpr (is_chosen) skip_unseen();
      ends_run = is_last();
      return true;
    }
    while (true) {
      while (next_row < last_row) {
        run = ChainRun(a.rows, next_row, last_row);
        next_row = run.end;
        if (!find_tiles_of(a, run.begin, run.end, chunk, chunk, begin, end)) continue;
        if constexpr (is_chosen) {
          find_seen();
          if (!seen) continue;
        }
        begins_run = true;
        block = a.rows.tables[int64_t{run.segment} * a.rows.table_stride + chunk];
        tile = begin / blocks * blocks;
        if constexpr (is_chosen) skip_unseen();
        ends_run = is_last();
        return true;
      }
      if (!find_item()) return false;
      begins_item = true;
    }
  }

 private:
  __device__ bool is_last() const {
    if constexpr (is_chosen)
      return seen >> (tile % chunk_blocks + blocks) == 0;
    else
      return tile + blocks > end;
  }

  __device__ void find_seen() {
    seen = 0;
#pragma unroll 1
    for (int row = run.begin; row < run.end; row++) {
#pragma unroll
      for (int i = 0; i < chunk_blocks; i++)
        seen |= (chosen_in(a.chosen, row, chunk * chunk_blocks + i) != 0) << i;
    }
  }

  // Goes on to a step with a tile that is seen; there is one.
  __device__ void skip_unseen() {
    while (!(seen >> tile % chunk_blocks & ((1 << blocks) - 1))) tile += blocks;
  }

  __device__ bool find_item() {
    for (; first_row < a.rows.num_rows; first_row += tile_rows) {
      last_row = min(first_row + tile_rows, a.rows.num_rows);
      int first_chunk, last_chunk;
      find_cells(a, first_row, last_row, chunk_positions, first_chunk, last_chunk);
      const int count = first_chunk > last_chunk ? 0 : (last_chunk - first_chunk + 1) * a.num_kv_heads;
      if (index - items_before < count) {
        kv_head = (index - items_before) % a.num_kv_heads;
        chunk = first_chunk + (index - items_before) / a.num_kv_heads;
        next_row = first_row;
        index += gridDim.x;
        return true;
      }
      items_before += count;
    }
    return false;
  }
};

// blocks: of 64 positions, in a step. places: see PLACES in cuda.py.
template <int bits, int head_dim, int blocks, int places>
struct DecodeMemory {
  using KeptRow = CacheRow<bits, head_dim>;
  using Layout = TileLayout<KeptRow, head_dim>;
  static constexpr int warps = decode_warps * blocks, threads = warps * warp_size;
  static constexpr int rows = blocks * block_positions, query_bytes = 2 * head_dim + 16;
  static constexpr int queries_at = places * blocks * Layout::bytes,
                       weights_at = queries_at + pairs * query_bytes;
  static constexpr int codes_at = weights_at + rows / 8 * warp_size * 16;
  static constexpr int numbers_at = codes_at + blocks * 4 * warp_size * 16;
  static constexpr int bytes = numbers_at + 2 * (warps + blocks) * pairs * 4;

  uint8_t* const shared;

  __device__ uint8_t* keys() const { return shared; }
  __device__ uint8_t* values() const { return shared + (places - 1) * blocks * Layout::bytes; }
  __device__ const uint8_t* key(int b, int position) const {
    return keys() + b * Layout::bytes + position * Layout::row_bytes;
  }
  __device__ const uint8_t* value(int b, int position) const {
    return values() + b * Layout::bytes + position * Layout::row_bytes;
  }
  __device__ uint8_t* queries() const { return shared + queries_at; }

  // Weights of eight positions of a block, by lanes.
  __device__ float4* weights(int b, int eight) const {
    return reinterpret_cast<float4*>(shared + weights_at) + (b * (block_positions / 8) + eight) * warp_size;
  }
  // Codes of a half of a block, by lanes; plane 0 is the high one.
  __device__ uint4* codes(int b, int half, int plane) const {
    return reinterpret_cast<uint4*>(shared + codes_at) + ((b * 2 + half) * 2 + plane) * warp_size;
  }
  __device__ float* numbers() const { return reinterpret_cast<float*>(shared + numbers_at); }
  // The greatest of a warp's scores of a pair, of its scaled weights, the sum of a block's weights, and their
  // scale.
  __device__ float& best(int warp, int pair) const { return numbers()[warp * pairs + pair]; }
  __device__ uint32_t& greatest(int warp, int pair) const {
    return reinterpret_cast<uint32_t*>(numbers())[(warps + warp) * pairs + pair];
  }
  __device__ float& total(int b, int pair) const { return numbers()[(2 * warps + b) * pairs + pair]; }
  __device__ float& scale(int b, int pair) const {
    return numbers()[(2 * warps + blocks + b) * pairs + pair];
  }

  // Copies that the next group has.
  __device__ void load_queries(const IntegersArguments& a, const DecodeStep& step) const {
    constexpr int pieces = 2 * head_dim / 16;
#pragma unroll 1
    for (int i = threadIdx.x; i < pairs * pieces; i += threads) {
      const int pair = i / pieces, piece = i % pieces;
      copy_async_16(queries() + pair * query_bytes + piece * 16,
                    a.query + step.pair_at(a, pair) * 2 * head_dim + piece * 16);
    }
  }

  // A group of copies each.
  __device__ void load_keys(const IntegersArguments& a, const DecodeStep& step) const {
    load(keys(), a.k_cache, a, step);
  }
  __device__ void load_values(const IntegersArguments& a, const DecodeStep& step) const {
    load(values(), a.v_cache, a, step);
  }

  // All threads meet inside if rows are packed.
  __device__ void unpack(uint8_t* tiles) const {
    if constexpr (KeptRow::is_packed) {
      for (int b = 0; b < blocks; b++)
        unpack_tile<bits, head_dim, threads>(tiles + b * Layout::bytes, threadIdx.x);
    }
  }

 private:
  static constexpr int stride =
      KeptRow::is_packed ? KeptRow::bytes : Layout::row_bytes;  // of rows that arrive

  // Where position `position` of the step arrives.
  static __device__ uint32_t place_of(uint32_t tiles, int position) {
    return tiles + position / block_positions * Layout::bytes + Layout::packed_at +
           position % block_positions * stride;
  }

  // The rows of the step's positions that are kept, some at a time, each by as many threads as it has pieces
  // of 16 bytes.
  __device__ void load(uint8_t* tiles, const uint8_t* cache, const IntegersArguments& a,
                       const DecodeStep& step) const {
    constexpr int pieces = (KeptRow::is_packed ? KeptRow::bytes : KeptRow::code_bytes) / 16;
    constexpr int rows_at_once = threads / pieces;
    const int first = step.tile * block_positions, count = step.run.num_kept - first;
    const uint8_t* const from = cache + step.block * a.strides.block_bytes +
                                first % chunk_positions * a.strides.position_bytes +
                                int64_t{step.kv_head} * KeptRow::bytes;
    const uint32_t to = shared_address(tiles);
    const int piece = threadIdx.x % pieces, row = threadIdx.x / pieces;
    const int64_t bytes_at_once = rows_at_once * a.strides.position_bytes;
    const int limit = row < rows_at_once ? min(count, rows) : 0;
    const uint8_t* codes = from + row * a.strides.position_bytes + piece * 16;
    // Where rows that are copied together lie in one block, their distances are known to the compiler.
    constexpr bool is_even = block_positions % rows_at_once == 0;
    const uint32_t first_place = place_of(to, is_even ? 0 : row) + (is_even ? row * stride : 0) + piece * 16;
#pragma unroll
    for (int i = 0; i < rows; i += rows_at_once) {
      const uint32_t place =
          is_even ? first_place + place_of(0, i) - place_of(0, 0) : place_of(to, i + row) + piece * 16;
      copy_if_below(limit, i + row, place, codes);
      codes += bytes_at_once;
    }
    if constexpr (!KeptRow::is_packed) {
#pragma unroll
      for (int i = 0; i < rows; i += threads) {
        const int position = i + threadIdx.x;
        copy_word_if_below(min(count, rows), position, place_of(to, position) + KeptRow::code_bytes,
                           from + position * a.strides.position_bytes + KeptRow::code_bytes);
      }
    }
    commit_copies();
  }

  static_assert(KeptRow::is_packed || Layout::row_bytes == KeptRow::bytes);
};

}  // namespace coldstream
