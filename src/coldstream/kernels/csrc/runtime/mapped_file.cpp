#include "runtime/mapped_file.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>

#include "runtime/fault_guard.h"

namespace coldstream {

namespace {

// Size of one request: the system reads at most its read-ahead window of it, which is at least this.
constexpr uint64_t read_ahead_bytes = 128 << 10;

}  // namespace

uint64_t page_bytes() {
  static const uint64_t bytes = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

MappedFile::MappedFile(int fd, uint64_t size, std::string name) : size_(size) {
  struct stat status;
  if (fstat(fd, &status) != 0) throw std::system_error(errno, std::generic_category(), "cannot read " + name);
  if (size == 0) throw std::invalid_argument(name + " has no bytes to map");
  if (static_cast<uint64_t>(status.st_size) < size) {
    throw ModelChangedError(name + " has " + std::to_string(status.st_size) + " bytes and had " +
                            std::to_string(size) +
                            " when it was opened: restore the file and load the model again");
  }
  void* mapping = mmap(nullptr, size, PROT_READ, MAP_SHARED, fd, 0);
  if (mapping == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "cannot map " + name);
  data_ = static_cast<const uint8_t*>(mapping);
  try {
    guard_ = std::make_unique<GuardedRegion>(data_, size, std::move(name));
  } catch (...) {
    munmap(mapping, size);
    throw;
  }
}

MappedFile::~MappedFile() {
  guard_.reset();
  munmap(const_cast<uint8_t*>(data_), size_);
}

void MappedFile::check_range(uint64_t offset, uint64_t num_bytes) const {
  if (offset <= size_ && num_bytes <= size_ - offset) return;
  throw std::invalid_argument("bytes " + std::to_string(offset) + " + " + std::to_string(num_bytes) +
                              " lie outside a mapping of " + std::to_string(size_) + " bytes");
}

void MappedFile::read_ahead(uint64_t offset, uint64_t num_bytes) const {
  check_range(offset, num_bytes);
  const uint64_t step = std::max(read_ahead_bytes, page_bytes());
  for (uint64_t first = offset / page_bytes() * page_bytes(); first < offset + num_bytes; first += step) {
    const uint64_t count = std::min(step, offset + num_bytes - first);
    madvise(const_cast<uint8_t*>(data_) + first, count, MADV_WILLNEED);
  }
}

}  // namespace coldstream
