/* Preloaded by test_host_out_of_memory.py: one large allocation of the process fails, which one says
   `fail_allocation`. Those of the tokenizers library are left alone: Rust's answer to a failed one is abort. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#define LARGE 4096

extern void* __libc_malloc(size_t);
extern void* __libc_calloc(size_t, size_t);
extern void* __libc_realloc(void*, size_t);
extern void* __libc_memalign(size_t, size_t);

static atomic_long left; /* large allocations up to the one that fails, itself included; none does at 0 */
static atomic_long seen;
static atomic_int is_counting;

/* The number-th large allocation from now on fails; 0: none. Returns how many there were since the last call. */
long fail_allocation(long number) {
  atomic_store(&is_counting, 1);
  atomic_store(&left, number);
  return atomic_exchange(&seen, 0);
}

static int fails(size_t bytes, const void* caller) {
  Dl_info from;
  if (bytes < LARGE || !atomic_load(&is_counting)) return 0;
  if (dladdr(caller, &from) != 0 && strstr(from.dli_fname, "/tokenizers/") != NULL) return 0;
  atomic_fetch_add(&seen, 1);
  return atomic_load(&left) > 0 && atomic_fetch_sub(&left, 1) == 1;
}

void* malloc(size_t bytes) {
  if (!fails(bytes, __builtin_return_address(0))) return __libc_malloc(bytes);
  errno = ENOMEM;
  return NULL;
}

void* calloc(size_t count, size_t bytes) {
  size_t all;
  if (__builtin_mul_overflow(count, bytes, &all) || !fails(all, __builtin_return_address(0))) return __libc_calloc(count, bytes);
  errno = ENOMEM;
  return NULL;
}

void* realloc(void* old, size_t bytes) {
  if (!fails(bytes, __builtin_return_address(0))) return __libc_realloc(old, bytes);
  errno = ENOMEM;
  return NULL;
}

void* aligned_alloc(size_t alignment, size_t bytes) {
  if (!fails(bytes, __builtin_return_address(0))) return __libc_memalign(alignment, bytes);
  errno = ENOMEM;
  return NULL;
}

int posix_memalign(void** to, size_t alignment, size_t bytes) {
  void* memory = fails(bytes, __builtin_return_address(0)) ? NULL : __libc_memalign(alignment, bytes);
  if (memory == NULL) return ENOMEM;
  *to = memory;
  return 0;
}

void* mmap(void* at, size_t bytes, int protection, int flags, int fd, off_t offset) {
  if (fails(bytes, __builtin_return_address(0))) {
    errno = ENOMEM;
    return MAP_FAILED;
  }
  return (void*)syscall(SYS_mmap, at, bytes, protection, flags, fd, offset);
}

void* mmap64(void* at, size_t bytes, int protection, int flags, int fd, off_t offset)
    __attribute__((alias("mmap")));
