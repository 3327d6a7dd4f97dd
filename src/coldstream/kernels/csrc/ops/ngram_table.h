// Rows of a table in a file, of which a token needs a few: read by their place, and kept by use in bounded
// memory. Any thread may read; the file is never mapped.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "quant/blocks.h"

namespace coldstream {

class NgramTable {
 public:
  // Keeps a duplicate of the descriptor. cache_bytes: of rows in memory, at most. Throws std::system_error,
  // std::bad_alloc.
  NgramTable(int fd, uint64_t offset, QuantType type, int64_t num_rows, int64_t num_cols, int64_t row_bytes,
             uint64_t cache_bytes);
  ~NgramTable();
  NgramTable(const NgramTable&) = delete;
  NgramTable& operator=(const NgramTable&) = delete;

  const QuantType type;
  const int64_t num_rows, num_cols, row_bytes;

  // Asks the system to read the row soon, unless it is kept; nothing for one that does not exist. Only
  // advice.
  void will_need(int64_t row) const;
  // Copies the row into `out`. Zeros where that fails; `problem` then says why.
  void read(int64_t row, uint8_t* out);
  // 0, an error of the system, or −1 if the file ends before a row that was asked for.
  int problem() const { return problem_.load(std::memory_order_relaxed); }
  int64_t hits() const { return hits_.load(std::memory_order_relaxed); }
  int64_t misses() const { return misses_.load(std::memory_order_relaxed); }
  uint64_t cache_bytes() const;

 private:
  struct Slot {
    int64_t row = -1;
    uint32_t used = 0;  // the set's count when it was used last
  };
  static constexpr int64_t ways = 8, num_locks = 64;

  int64_t set_of(int64_t row) const;
  // The row's slot in its set, or the one that was used longest ago.
  int64_t find(int64_t set, int64_t row, bool& is_there) const;
  void use(int64_t set, int64_t slot) { slots_[slot].used = ++counts_[set]; }

  const int fd_;
  const uint64_t offset_;
  int64_t num_sets_ = 0;
  std::vector<Slot> slots_;       // [sets, ways]
  std::vector<uint32_t> counts_;  // [sets]: uses so far
  std::vector<uint8_t> rows_;     // [sets, ways, row_bytes]
  mutable std::mutex locks_[num_locks];
  std::atomic<int> problem_{0};
  std::atomic<int64_t> hits_{0}, misses_{0};
};

}  // namespace coldstream
