#include "runtime/touch_pages.h"

#include <algorithm>

namespace coldstream {

namespace {

constexpr uint64_t task_bytes = 1 << 20;

}  // namespace

TouchPages::TouchPages(std::shared_ptr<MappedFile> file, uint64_t offset, uint64_t num_bytes)
    : file_(std::move(file)), begin_(offset), end_(offset + num_bytes) {
  file_->check_range(offset, num_bytes);
}

void TouchPages::run(int, int, Worker& w) {
  const volatile uint8_t* bytes = file_->data();
  const uint64_t page = page_bytes();
  for (;;) {
    const uint64_t first = begin_ + w.take() * task_bytes;
    if (first >= end_) return;
    const uint64_t last = std::min(first + task_bytes, end_);
    for (uint64_t i = first; i < last; i += page) static_cast<void>(bytes[i]);
    static_cast<void>(bytes[last - 1]);
  }
}

}  // namespace coldstream
