// The operands of a block of threads in attention over integers: adjacent rows of a batch, grouped by
// sequence, and a tile of 64 keys or values of one sequence in shared memory.
#pragma once

#include "attention/grid.cuh"
#include "attention/integers.cuh"

namespace coldstream {

constexpr int max_tree_rows = 64;
constexpr int scale_bytes_of_row = 16;  // of a tile, after the planes: the scale, and zeros

// `BatchRows` of kernels/ops.py.
struct BatchRows {
  const int32_t *positions, *segments, *tables, *indices, *parents, *kept;
  int32_t num_rows, table_stride;
};

// Rows begin … end − 1 of a batch, of one sequence; a draft tree's first row is `start`.
struct RowRun {
  int begin, end, segment, start, committed, num_kept;
  bool is_tree;

  __device__ RowRun(const BatchRows& rows, int first, int limit) : begin(first), end(first + 1) {
    segment = rows.segments[first];
    while (end < limit && rows.segments[end] == segment) end++;
    is_tree = rows.kept[first] >= 0;
    start = first;
    int after = end;
    if (is_tree) {
      while (start > 0 && rows.segments[start - 1] == segment) start--;
      while (after < rows.num_rows && rows.segments[after] == segment) after++;
    }
    committed = is_tree ? rows.indices[start] : rows.positions[end - 1] + 1;
    num_kept = committed + (is_tree ? after - start : 0);
  }

  // Whether all keys of a tile's positions are in order.
  __device__ bool is_committed(int tile) const {
    return !is_tree || (tile + 1) * block_positions <= committed;
  }

  // The last tile of indices that holds keys of positions in the tile number `tile`.
  __device__ int last_tile(int tile) const {
    return is_committed(tile) ? tile : (num_kept - 1) / block_positions;
  }
};

// The positions that one row sees.
struct RowView {
  int first = 0, position = -1;  // positions of its window; none
  uint64_t ancestors = 0;        // the rows of its tree that it follows, and itself

  __device__ RowView() {}
  __device__ RowView(const BatchRows& rows, const RowRun& run, int row, int window)
      : first(first_position(rows.positions[row], window)), position(rows.positions[row]) {
    if (!run.is_tree) return;
    for (int at = row; at >= 0; at = rows.parents[at]) ancestors |= uint64_t{1} << (at - run.start);
  }

  // Whether it has a position in tile `tile`.
  __device__ bool meets(int tile) const {
    return position >= first && tile >= first / block_positions && tile <= position / block_positions;
  }

  // Whether it sees all positions of tile `tile`.
  __device__ bool covers(int tile) const {
    return first <= tile * block_positions && position >= tile * block_positions + block_positions - 1;
  }

  // The position whose key is kept at `index`, if the row sees it in tile `tile`; −1 otherwise. `drafts` has
  // the positions of the tree's rows.
  __device__ int position_in(int tile, int index, const RowRun& run, const int32_t* drafts) const {
    int found = index;
    if (run.is_tree && index >= run.committed) {
      const int number = index - run.committed;
      if (index >= run.num_kept || !(ancestors >> number & 1)) return -1;
      found = drafts[number];
    }
    return found >= first && found <= position && found / block_positions == tile ? found : -1;
  }
};

// A tile in shared memory: [64, row_bytes], planes one behind the other, the scale, and zeros. What is packed
// in the cache is copied to the end of it, and unpacked from there; see integers_unpack.cuh.
template <class Row, int head_dim>
struct TileLayout {
  static constexpr int row_bytes = Row::planes * head_dim + scale_bytes_of_row;
  static constexpr int bytes = block_positions * row_bytes;
  static constexpr int packed_at = bytes - block_positions * Row::bytes;
  static_assert(Row::is_packed ? packed_at > 0 : packed_at == 0);
};

// Queues the copies of the rows of `tile` that are kept into shared memory, by `threads` threads of which
// this one has number `thread`. row_bytes: in the cache.
template <int row_bytes, int threads>
__device__ __forceinline__ void load_tile(uint8_t* to, const uint8_t* cache, const CacheStrides& strides,
                                          const BatchRows& rows, const RowRun& run, int kv_head, int tile) {
  constexpr int pieces = row_bytes / 16;
  const int first = tile * block_positions, count = min(block_positions, run.num_kept - first);
  const int block = rows.tables[int64_t{run.segment} * rows.table_stride + first / chunk_positions];
  const uint8_t* from = cache + block * strides.block_bytes +
                        first % chunk_positions * strides.position_bytes + int64_t{kv_head} * row_bytes;
  for (int i = threadIdx.x; i < count * pieces; i += threads)
    copy_async_16(to + i * 16, from + i / pieces * strides.position_bytes + i % pieces * 16);
}

// The same for one part of `parts` of the channels, of rows with both planes: each plane's share of them, and
// the scale.
template <class Row, int head_dim, int parts, int threads>
__device__ __forceinline__ void load_part(uint8_t* to, const uint8_t* cache, const CacheStrides& strides,
                                          const BatchRows& rows, const RowRun& run, int kv_head, int tile,
                                          int part) {
  constexpr int channels = head_dim / parts, share = channels / 16, pieces = 2 * share + 1;
  static_assert(Row::planes == 2 && channels % 16 == 0);
  const int first = tile * block_positions, count = min(block_positions, run.num_kept - first);
  const int block = rows.tables[int64_t{run.segment} * rows.table_stride + first / chunk_positions];
  const uint8_t* const from = cache + block * strides.block_bytes +
                              first % chunk_positions * strides.position_bytes +
                              int64_t{kv_head} * Row::bytes;
  for (int i = threadIdx.x; i < count * pieces; i += threads) {
    const int piece = i % pieces, plane = piece / share;
    const int at = plane < 2 ? plane * head_dim + part * channels + piece % share * 16 : Row::code_bytes;
    copy_async_16(to + i * 16, from + i / pieces * strides.position_bytes + at);
  }
}

template <int row_bytes>
__device__ __forceinline__ float scale_of_row(const uint8_t* row) {
  return *reinterpret_cast<const float*>(row + row_bytes - scale_bytes_of_row);
}

}  // namespace coldstream
