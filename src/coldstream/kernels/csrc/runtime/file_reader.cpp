#include "runtime/file_reader.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <system_error>

#include "runtime/signals_blocked.h"
#include "runtime/spin.h"
#include "runtime/thread_pool.h"

namespace coldstream {

namespace {

constexpr int max_retries = 1;  // of a failed read

std::string describe_loss(const std::string& name, uint64_t offset) {
  return name + " changed while in use: byte " + std::to_string(offset) +
         " is no longer there (the file shrank); restore the file and load the model again";
}

std::string describe_error(const std::string& name, uint64_t offset, int error) {
  return name + " can no longer be read at byte " + std::to_string(offset) +
         ", twice: " + std::strerror(error) + "; check the disk, then load the model again";
}

}  // namespace

FileReader::FileReader(const std::vector<int>& descriptors, std::vector<std::string> names, int num_threads)
    : owner_(getpid()), threads_(std::make_unique<std::vector<std::thread>>()) {
  if (num_threads < 1 || names.size() != descriptors.size()) {
    throw std::invalid_argument("reading files needs a name for each and at least one thread");
  }
  try {
    for (size_t i = 0; i < descriptors.size(); i++) {
      sources_.push_back(std::make_unique<Source>());
      Source& next = *sources_.back();
      next.name = std::move(names[i]);
      next.plain = fcntl(descriptors[i], F_DUPFD_CLOEXEC, 0);
      if (next.plain < 0) {
        throw std::system_error(errno, std::generic_category(), "cannot read " + next.name);
      }
      // Opened by descriptor, because the path may name another file now.
      const std::string link = "/proc/self/fd/" + std::to_string(next.plain);
      next.direct = open(link.c_str(), O_RDONLY | O_DIRECT | O_CLOEXEC);
    }
    SignalsBlocked blocked;
    for (int i = 0; i < num_threads; i++) threads_->emplace_back(&FileReader::serve, this);
  } catch (...) {
    stop();
    throw;
  }
}

FileReader::~FileReader() { stop(); }

void FileReader::stop() {
  if (getpid() == owner_) {
    {
      std::lock_guard lock(mutex_);
      queue_.clear();
      stopping_ = true;
    }
    work_.notify_all();
    for (std::thread& t : *threads_) t.join();
  } else {
    static_cast<void>(threads_.release());  // a forked child has none of them
  }
  for (const auto& s : sources_) {
    if (s->direct >= 0) close(s->direct);
    if (s->plain >= 0) close(s->plain);
  }
}

void FileReader::submit(const Request& next) {
  {
    std::lock_guard lock(mutex_);
    queue_.push_back(next);
  }
  work_.notify_one();
}

std::string FileReader::failure() {
  std::lock_guard lock(mutex_);
  return failure_;
}

void FileReader::settle() {
  if (getpid() != owner_) {
    throw ForkedError(
        "this model was opened before fork() and the threads that read it do not exist here: open it again in "
        "the child process, or start it with the 'spawn' method");
  }
  std::unique_lock lock(mutex_);
  queue_.clear();
  progress_.wait(lock, [&] { return num_active_ == 0; });
  failed_ = false;
  failure_.clear();
}

bool FileReader::is_direct() const {
  for (const auto& s : sources_) {
    if (s->direct < 0) return false;
  }
  return true;
}

void FileReader::serve() {
  std::unique_lock lock(mutex_);
  for (;;) {
    work_.wait(lock, [&] { return stopping_ || !queue_.empty(); });
    if (stopping_) return;
    const Request next = queue_.front();
    queue_.pop_front();
    num_active_++;
    lock.unlock();
    std::string failure = read(next);
    lock.lock();
    num_active_--;
    bool is_reported = num_active_ == 0;  // for `settle`
    if (!failure.empty()) {
      if (!failed_) failure_ = std::move(failure);
      failed_ = true;
      queue_.clear();
      is_reported = true;
    } else if (next.pending->fetch_sub(1, std::memory_order_release) == 1) {
      is_reported = true;
    }
    if (is_reported) progress_.notify_all();
  }
}

// Returns what went wrong, or nothing.
std::string FileReader::read(const Request& next) {
  Source& from = *sources_[next.file];
  const uint64_t first = io_floor(next.begin), last = io_ceil(next.end);
  const int direct = from.direct;
  uint64_t at = first;
  int failures = 0;
  while (direct >= 0 && at < next.end) {
    const ssize_t count = pread(direct, next.to + (at - first), last - at, static_cast<off_t>(at));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0 && errno == EINVAL) from.direct = -1;
    if (count < 0 && errno != EINVAL) failures++;
    // After an error or an early end of a direct read, the plain read decides.
    if (count <= 0) break;
    at += static_cast<uint64_t>(count);
    bytes_ += static_cast<uint64_t>(count);
    if (at < next.end && at % io_alignment != 0) break;
  }
  retries_ += failures;
  return at < next.end ? read_plain(from, next, at, failures) : std::string();
}

std::string FileReader::read_plain(Source& from, const Request& next, uint64_t at, int failures) {
  const uint64_t first = io_floor(next.begin);
  while (at < next.end) {
    const ssize_t count = pread(from.plain, next.to + (at - first), next.end - at, static_cast<off_t>(at));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) {
      if (++failures > max_retries) return describe_error(from.name, at, errno);
      retries_++;
      continue;
    }
    if (count == 0) return describe_loss(from.name, at);
    at += static_cast<uint64_t>(count);
    bytes_ += static_cast<uint64_t>(count);
  }
  const auto length = static_cast<off_t>(next.end - first);
  posix_fadvise(from.plain, static_cast<off_t>(first), length, POSIX_FADV_DONTNEED);
  return {};
}

}  // namespace coldstream
