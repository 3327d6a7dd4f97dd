#include "ops/cache_places.h"

namespace coldstream {

int32_t group_end(const RowLayout& layout, int32_t first, int32_t rows) {
  int32_t end = first + 1;
  while (end < rows && layout.same_group(end, first)) end++;
  return end;
}

int32_t state_end(const RowLayout& layout, int32_t first, int32_t end) {
  int32_t next = first + 1;
  while (next < end && layout.state_ids[next] == layout.state_ids[first]) next++;
  return next;
}

const char* parents_fault(const RowLayout& layout, int32_t first, int32_t end) {
  const bool is_tree = layout.in_tree(first);
  if (is_tree && end - first > max_tree_rows) return "a draft tree has more rows than one may have";
  for (int32_t row = first; row < end; row++) {
    const int32_t parent = layout.batch.parents[row];
    if (layout.in_tree(row) != is_tree) return "rows of a chain and of a draft tree are in one segment";
    const bool is_earlier = parent == -1 || (parent >= first && parent < row);
    if (is_tree ? !is_earlier : parent != (row == first ? -1 : row - 1)) {
      return "a row's parent is neither what is committed nor an earlier row that it may follow";
    }
  }
  return nullptr;
}

bool CachePlaces::is_valid(int64_t row) const {
  const int32_t at = layout.positions[row];
  if (at < 0 || at >= max_positions()) return false;
  if (!layout.in_batch()) return layout.state_ids[row] >= 0 && layout.state_ids[row] < num_pieces;
  const int32_t segment = layout.batch.segments[row];
  return segment >= 0 && segment < layout.batch.num_segments && index(row) >= 0 &&
         index(row) < max_positions();
}

const char* CachePlaces::segment_fault(int32_t first, int32_t end) const {
  if (const char* fault = parents_fault(layout, first, end)) return fault;
  const BatchLayout& batch = layout.batch;
  const int64_t committed = index(first);
  for (int32_t row = first; row < end; row++) {
    const int32_t parent = batch.parents[row];
    const int64_t expected = parent < 0 ? committed : int64_t{layout.positions[parent]} + 1;
    if (index(row) != committed + row - first || layout.positions[row] != expected) {
      return "attention: a row of a batch is not at the position after its parent";
    }
  }
  if (!is_valid(first) || !is_valid(end - 1)) {
    return "attention: a row's segment or position lies outside its table";
  }
  const int32_t* table = batch.tables + batch.segments[first] * batch.num_blocks;
  for (int64_t block = 0; block <= index(end - 1) / attention_chunk; block++) {
    if (table[block] < 0 || table[block] >= num_pieces) {
      return "attention: a table names a block that there is not";
    }
  }
  return nullptr;
}

}  // namespace coldstream
