// The tasks of a stage over consecutive weight rows. The first ones, one for each worker, have three quarters
// of the rows, because the first kilobytes of every new place are read at a third of the speed. The other
// tasks share the rest, ever smaller, so that workers of unequal speed end together.
#pragma once

#include <algorithm>
#include <cstdint>

namespace coldstream {

class ShrinkingSlices {
 public:
  struct Slice {
    int64_t begin, end;
    bool is_empty() const { return begin == end; }
  };

  // Of `total` rows, for `count` workers; multiples of `step` rows but for the last one, and at most `most`.
  ShrinkingSlices(int64_t total, int count, int64_t step, int64_t most)
      : total_(total), count_(count), step_(step), most_(most) {}

  // The slice of a task, empty behind the last one. Tasks are asked for in ascending order.
  Slice of(int64_t task) {
    for (; num_tasks_ <= task && last_.end < total_; num_tasks_++) {
      const int64_t shared = num_tasks_ < count_ ? total_ * 3 / 4 : total_ - last_.end;
      const int64_t share = shared / count_ / step_ * step_;
      const int64_t size = std::max(std::min(share, most_), step_);
      last_ = {last_.end, std::min(last_.end + size, total_)};
    }
    return task < num_tasks_ ? last_ : Slice{total_, total_};
  }

 private:
  const int64_t total_, count_, step_, most_;
  int64_t num_tasks_ = 0;
  Slice last_ = {0, 0};
};

}  // namespace coldstream
