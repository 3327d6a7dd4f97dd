#include "hybrid/ngram_server.h"

#include <atomic>
#include <stdexcept>
#include <string>
#include <utility>

namespace coldstream {

namespace {

// Rows of the table that are read before threads which sleep have come.
constexpr int64_t most_alone = 256;

}  // namespace

NgramServer::NgramServer(std::shared_ptr<ThreadPool> threads, NgramMailbox box,
                         std::shared_ptr<NgramTable> table)
    : threads_(std::move(threads)), box_(box), table_(std::move(table)) {
  all_.push_back(make_ngram_bytes(table_, box_.ids, box_.num_heads, box_.out));
  std::atomic_ref(*box_.request).store(0, std::memory_order_relaxed);
  std::atomic_ref(*box_.done).store(1, std::memory_order_release);
  const auto is_asked = [request = box_.request] {
    return std::atomic_ref(*request).load(std::memory_order_acquire) != 0;
  };
  thread_ = std::make_unique<RequestThread>(is_asked, [this] { answer(); }, nullptr, false);
}

void NgramServer::check() {
  std::lock_guard lock(error_lock_);
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
}

void NgramServer::answer() {
  const uint32_t rows = std::atomic_ref(*box_.request).exchange(0, std::memory_order_acquire);
  try {
    if (rows > static_cast<uint32_t>(box_.capacity)) {
      throw std::invalid_argument("a request for n-grams of " + std::to_string(rows) +
                                  " rows, which the mailbox does not have");
    }
    read(static_cast<int>(rows));
  } catch (...) {
    std::lock_guard lock(error_lock_);
    if (!error_) error_ = std::current_exception();
  }
  std::atomic_ref(*box_.done).store(1, std::memory_order_release);
}

void NgramServer::read(int rows) {
  const int64_t count = int64_t{rows} * box_.num_heads;
  if (count > most_alone) return threads_->run(all_, rows);
  for (int64_t i = 0; i < count; i++) table_->will_need(box_.ids[i]);
  for (int64_t i = 0; i < count; i++) {
    if (!read_ngram_bytes(*table_, box_.ids[i], box_.out + i * table_->row_bytes))
      throw std::invalid_argument("ngram: a row lies outside the table");
  }
}

}  // namespace coldstream
