#include "ops/ngram_table.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>

namespace coldstream {

namespace {

int duplicate(int fd) {
  const int copy = fcntl(fd, F_DUPFD_CLOEXEC, 0);
  if (copy < 0) throw std::system_error(errno, std::generic_category(), "cannot read the model file");
  return copy;
}

// 0, an error of the system, or −1 if the file ends within the range.
int read_at(int fd, uint8_t* out, int64_t num_bytes, uint64_t offset) {
  while (num_bytes > 0) {
    const ssize_t count = pread(fd, out, static_cast<size_t>(num_bytes), static_cast<off_t>(offset));
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return count < 0 ? errno : -1;
    out += count, num_bytes -= count, offset += static_cast<uint64_t>(count);
  }
  return 0;
}

}  // namespace

NgramTable::NgramTable(int fd, uint64_t offset, QuantType type, int64_t num_rows, int64_t num_cols,
                       int64_t row_bytes, uint64_t cache_bytes)
    : type(type),
      num_rows(num_rows),
      num_cols(num_cols),
      row_bytes(row_bytes),
      fd_(duplicate(fd)),
      offset_(offset) {
  const int64_t set_bytes =
      ways * (row_bytes + static_cast<int64_t>(sizeof(Slot))) + static_cast<int64_t>(sizeof(uint32_t));
  num_sets_ = std::min((num_rows + ways - 1) / ways, static_cast<int64_t>(cache_bytes) / set_bytes);
  slots_.resize(num_sets_ * ways);
  counts_.resize(num_sets_);
  rows_.resize(num_sets_ * ways * row_bytes);
}

NgramTable::~NgramTable() { close(fd_); }

uint64_t NgramTable::cache_bytes() const {
  return slots_.size() * sizeof(Slot) + counts_.size() * sizeof(uint32_t) + rows_.size();
}

void NgramTable::will_need(int64_t row) const {
  if (row < 0 || row >= num_rows) return;
  if (num_sets_ > 0) {
    const int64_t set = set_of(row);
    bool is_there = false;
    const std::lock_guard<std::mutex> lock(locks_[set % num_locks]);
    find(set, row, is_there);
    if (is_there) return;
  }
  const auto place = static_cast<off_t>(offset_ + static_cast<uint64_t>(row * row_bytes));
  posix_fadvise(fd_, place, row_bytes, POSIX_FADV_WILLNEED);
}

// Neighbouring rows are of unlike n-grams, and so are rows that lie a power of two apart.
int64_t NgramTable::set_of(int64_t row) const {
  const uint64_t mixed = static_cast<uint64_t>(row) * 0x9e3779b97f4a7c15u;
  return static_cast<int64_t>((mixed >> 32) % static_cast<uint64_t>(num_sets_));
}

int64_t NgramTable::find(int64_t set, int64_t row, bool& is_there) const {
  int64_t oldest = set * ways;
  for (int64_t slot = set * ways; slot < (set + 1) * ways; slot++) {
    is_there = slots_[slot].row == row;
    if (is_there) return slot;
    if (counts_[set] - slots_[slot].used > counts_[set] - slots_[oldest].used) oldest = slot;
  }
  return oldest;
}

void NgramTable::read(int64_t row, uint8_t* out) {
  const int64_t set = num_sets_ > 0 ? set_of(row) : -1;
  bool is_there = false;
  if (set >= 0) {
    const std::lock_guard<std::mutex> lock(locks_[set % num_locks]);
    const int64_t slot = find(set, row, is_there);
    if (is_there) {
      use(set, slot);
      std::copy_n(rows_.data() + slot * row_bytes, row_bytes, out);
    }
  }
  (is_there ? hits_ : misses_).fetch_add(1, std::memory_order_relaxed);
  if (is_there) return;
  const int found = read_at(fd_, out, row_bytes, offset_ + static_cast<uint64_t>(row * row_bytes));
  if (found != 0) {
    std::fill_n(out, row_bytes, uint8_t{0});
    problem_.store(found, std::memory_order_relaxed);
    return;
  }
  if (set < 0) return;
  const std::lock_guard<std::mutex> lock(locks_[set % num_locks]);
  const int64_t slot = find(set, row, is_there);
  slots_[slot].row = row;
  use(set, slot);
  std::copy_n(out, row_bytes, rows_.data() + slot * row_bytes);
}

}  // namespace coldstream
