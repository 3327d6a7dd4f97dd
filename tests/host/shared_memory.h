// The shared memory of blocks that alternate: what the kernels' library has of memory for each thread of the
// host.
#pragma once

#include <link.h>
#include <string.h>

#include <stdexcept>
#include <utility>
#include <vector>

void touch_shared_memory();  // of the library

namespace {

constexpr unsigned char poison = 0xa5;

// Full of poison at first. A launch is given a part of what is dynamic; the bytes behind that stay poison, or
// the block that wrote there has failed, and so they are the same for all blocks.
class SharedMemory {
 public:
  using OfBlock = std::vector<unsigned char>;

  SharedMemory(const unsigned char* dynamic, size_t given, size_t available) {
    static const PlaceOfMemory found(dynamic);
    data_ = const_cast<unsigned char*>(dynamic) - found.before_dynamic;
    size_ = found.size;
    begin_ = dynamic + given - data_;
    end_ = dynamic + available - data_;
    memset(data_, poison, size_);
  }

  OfBlock of_new_block() const { return OfBlock(size_ - (end_ - begin_), poison); }

  // The library's memory becomes that of a block, and the last block keeps what it wrote.
  void bring_in(OfBlock& block) {
    if (loaded_ == &block) return;
    if (loaded_) {
      memcpy(loaded_->data(), data_, begin_);
      memcpy(loaded_->data() + begin_, data_ + end_, size_ - end_);
    }
    memcpy(data_, block.data(), begin_);
    memcpy(data_ + end_, block.data() + begin_, size_ - end_);
    loaded_ = &block;
  }

  // The block that was brought in has ended.
  void leave() { loaded_ = nullptr; }

  // Whether nothing was written behind what the launch was given, where each byte has to be the next, and
  // poison.
  bool is_whole() const {
    return begin_ == end_ ||
           (data_[begin_] == poison && memcmp(data_ + begin_, data_ + begin_ + 1, end_ - begin_ - 1) == 0);
  }

 private:
  // The same for all threads of the host but for where it begins.
  struct PlaceOfMemory {
    size_t before_dynamic = 0, size = 0;

    explicit PlaceOfMemory(const unsigned char* dynamic) {
      touch_shared_memory();
      const unsigned char* data = nullptr;
      std::pair<const unsigned char**, size_t*> to = {&data, &size};
      dl_iterate_phdr(find, &to);
      if (!data) throw std::runtime_error("the library has no shared memory");
      before_dynamic = dynamic - data;
    }

    static int find(dl_phdr_info* library, size_t, void* to) {
      bool is_ours = false;
      size_t size = 0;
      for (int i = 0; i < library->dlpi_phnum; i++) {
        const auto& part = library->dlpi_phdr[i];
        const auto begin = library->dlpi_addr + part.p_vaddr, own = reinterpret_cast<ElfW(Addr)>(&find);
        if (part.p_type == PT_LOAD) is_ours |= begin <= own && own < begin + part.p_memsz;
        if (part.p_type == PT_TLS) size = part.p_memsz;
      }
      if (is_ours) {
        const auto& [data, bytes] = *static_cast<std::pair<const unsigned char**, size_t*>*>(to);
        *data = static_cast<unsigned char*>(library->dlpi_tls_data);
        *bytes = size;
      }
      return int(is_ours);
    }
  };

  unsigned char* data_ = nullptr;
  size_t size_ = 0, begin_, end_;
  OfBlock* loaded_ = nullptr;
};

}  // namespace
