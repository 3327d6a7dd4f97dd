#include "runtime/mapped_file.h"

#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <system_error>

#include "runtime/fault_guard.h"

namespace coldstream {

mapped_file::mapped_file(int fd, uint64_t size, std::string name) : size_(size) {
  struct stat status;
  if (fstat(fd, &status) != 0) throw std::system_error(errno, std::generic_category(), "cannot read " + name);
  if (size == 0) throw std::invalid_argument(name + " has no bytes to map");
  if (static_cast<uint64_t>(status.st_size) < size) {
    throw model_changed_error(name + " has " + std::to_string(status.st_size) + " bytes and had " +
                              std::to_string(size) +
                              " when it was opened: restore the file and load the model again");
  }
  void* mapping = mmap(nullptr, size, PROT_READ, MAP_SHARED, fd, 0);
  if (mapping == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "cannot map " + name);
  data_ = static_cast<const uint8_t*>(mapping);
  try {
    guard_ = std::make_unique<guarded_region>(data_, size, std::move(name));
  } catch (...) {
    munmap(mapping, size);
    throw;
  }
}

mapped_file::~mapped_file() {
  guard_.reset();
  munmap(const_cast<uint8_t*>(data_), size_);
}

}  // namespace coldstream
