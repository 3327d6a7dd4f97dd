// Where rows of a sequence lie in caches by position, and what is wrong with rows that lie nowhere.
#pragma once

#include <cstdint>

#include "ops/float_ops.h"

namespace coldstream {

// Caches [num_pieces, num_positions, …]: a piece is a sequence's, for a batch a block of attention_chunk
// positions.
struct CachePlaces {
  RowLayout layout;
  int64_t num_pieces, num_positions;

  // Of a sequence, at most.
  int64_t max_positions() const {
    return layout.in_batch() ? layout.batch.num_blocks * attention_chunk : num_positions;
  }
  int64_t size() const { return num_pieces * num_positions; }
  int32_t position(int64_t row) const { return layout.positions[row]; }
  // Index in its sequence of what the row appends.
  int64_t index(int64_t row) const {
    return layout.in_batch() ? layout.batch.indices[row] : layout.positions[row];
  }
  // Index in its sequence of what `row` sees at a position up to its own.
  int64_t index_at(int64_t row, int64_t at) const {
    if (!layout.in_tree(row)) return at;
    for (int64_t ancestor = row; ancestor >= 0; ancestor = layout.batch.parents[ancestor]) {
      if (layout.positions[ancestor] == at) return index(ancestor);
    }
    return at;
  }
  // Of an index in the sequence of `row`, counted from the first position of the first piece.
  int64_t place(int64_t row, int64_t index) const {
    int64_t piece = layout.state_ids[row];
    if (layout.in_batch()) {
      const BatchLayout& batch = layout.batch;
      piece = batch.tables[batch.segments[row] * batch.num_blocks + index / attention_chunk];
      index %= attention_chunk;
    }
    return piece * num_positions + index;
  }

  bool is_valid(int64_t row) const;
  // Null, or what is wrong with the rows of one segment. Nothing is read or written through a table before.
  const char* segment_fault(int32_t first, int32_t end) const;
};

}  // namespace coldstream
