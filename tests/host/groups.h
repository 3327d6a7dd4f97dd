// What a thread gives in groups and takes in the order of giving: copies, and products of a warpgroup.
#pragma once

#include <stddef.h>

#include <vector>

namespace {

// Its memory stays for what comes next, since kernels end a group every few instructions.
template <class T>
class InGroups {
 public:
  void give(const T& next) { items_.push_back(next); }

  void end_group() {
    if (taken_ >= most_taken) {
      items_.erase(items_.begin(), items_.begin() + taken_);
      ends_.erase(ends_.begin(), ends_.begin() + taken_groups_);
      for (size_t& end : ends_) end -= taken_;
      taken_ = taken_groups_ = 0;
    }
    ends_.push_back(items_.size());
  }

  // The oldest that is of an ended group, but not of the last `pending`; null if there is none left.
  const T* take(int pending) {
    for (; taken_groups_ + pending < ends_.size(); taken_groups_++) {
      if (taken_ < ends_[taken_groups_]) return &items_[taken_++];
    }
    return nullptr;
  }

  void clear() {
    items_.clear();
    ends_.clear();
    taken_ = taken_groups_ = 0;
  }

 private:
  static constexpr size_t most_taken = 64;  // that are kept in front of the others

  std::vector<T> items_;
  std::vector<size_t> ends_;  // of groups, among the items
  size_t taken_ = 0, taken_groups_ = 0;
};

}  // namespace
