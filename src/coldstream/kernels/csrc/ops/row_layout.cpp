#include "ops/float_ops.h"

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

}  // namespace coldstream
