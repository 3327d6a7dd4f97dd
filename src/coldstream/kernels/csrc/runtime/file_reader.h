// Reads ranges of files into memory on its own threads, beside computation. Bypasses the page cache where the
// file system can (O_DIRECT), so that the file is not in memory twice; otherwise drops the pages after
// reading.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace coldstream {

// Alignment of offsets, sizes and memory of direct reads, sufficient for all disks.
inline constexpr uint64_t io_alignment = 4096;

constexpr uint64_t io_floor(uint64_t offset) { return offset / io_alignment * io_alignment; }
constexpr uint64_t io_ceil(uint64_t offset) { return io_floor(offset + io_alignment - 1); }

class FileReader {
 public:
  // The bytes from begin to end of a file. `to` is the memory of byte io_floor(begin), aligned and large
  // enough for whole units of io_alignment. `pending` is decremented when they are in memory, and never if
  // they cannot be read.
  struct Request {
    int file;
    uint64_t begin, end;
    std::byte* to;
    std::atomic<int>* pending;
  };
  struct Counters {
    uint64_t bytes, retries;
  };

  // Opens the files of the descriptors again, so that they can be read even after they were unlinked.
  // Throws std::system_error, std::invalid_argument for no thread.
  FileReader(const std::vector<int>& descriptors, std::vector<std::string> names, int num_threads);
  FileReader(const FileReader&) = delete;
  FileReader& operator=(const FileReader&) = delete;
  ~FileReader();

  void submit(const Request& next);
  // Waits until `is_done()` is true or a read has failed; returns whether it is true. Calls `is_done`
  // whenever a `pending` has become 0.
  template <typename F>
  bool wait(F is_done) {
    std::unique_lock lock(mutex_);
    progress_.wait(lock, [&] { return is_done() || failed_; });
    return is_done();
  }
  bool failed() const { return failed_; }
  // The description of a failure; empty without one.
  std::string failure();
  // Drops requests that have not begun, waits for the others, and clears a failure. Throws forked_error.
  void settle();

  // Whether all files are read past the page cache.
  bool is_direct() const;
  Counters count() const { return {bytes_, retries_}; }

 private:
  struct Source {
    std::string name;
    int plain = -1;                // descriptor through the page cache
    std::atomic<int> direct = -1;  // bypassing it, or -1 if that is not possible
  };

  void serve();
  std::string read(const Request& next);
  std::string read_plain(Source& from, const Request& next, uint64_t at, int failures);
  void stop();

  const pid_t owner_;
  std::vector<std::unique_ptr<Source>> sources_;
  std::unique_ptr<std::vector<std::thread>> threads_;
  std::mutex mutex_;
  std::condition_variable work_, progress_;  // for the threads; for waiting callers
  std::deque<Request> queue_;
  int num_active_ = 0;
  bool stopping_ = false;
  std::atomic<bool> failed_{false};
  std::string failure_;
  std::atomic<uint64_t> bytes_{0}, retries_{0};
};

}  // namespace coldstream
