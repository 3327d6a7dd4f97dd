#include "runtime/touch_pages.h"

#include <algorithm>

namespace coldstream {

namespace {

constexpr uint64_t PAGE_BYTES = 4096;
constexpr uint64_t TASK_BYTES = 1 << 20;

}  // namespace

touch_pages::touch_pages(std::shared_ptr<mapped_file> file, uint64_t offset, uint64_t num_bytes)
    : file_(std::move(file)), begin_(offset), end_(offset + num_bytes) {
  if (offset > file_->size() || num_bytes > file_->size() - offset) {
    throw std::invalid_argument("bytes " + std::to_string(offset) + " + " + std::to_string(num_bytes) +
                                " lie outside a mapping of " + std::to_string(file_->size()) + " bytes");
  }
}

void touch_pages::run(int, int, worker& w) {
  const volatile uint8_t* bytes = file_->data();
  for (;;) {
    const uint64_t first = begin_ + w.take() * TASK_BYTES;
    if (first >= end_) return;
    const uint64_t last = std::min(first + TASK_BYTES, end_);
    for (uint64_t i = first; i < last; i += PAGE_BYTES) static_cast<void>(bytes[i]);
    static_cast<void>(bytes[last - 1]);
  }
}

}  // namespace coldstream
