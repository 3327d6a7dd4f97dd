/* Preloaded by test_disk_faults.py: pread as a failing disk or a busy system has it, by what FAULT says. Reads of
   the main thread, which are those of the file's header, are left alone. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

typedef ssize_t read_function(int, void*, size_t, off_t);

static atomic_int calls;

// A read that brings no more than `most`. It is cut afterwards, as direct ones of odd lengths are refused.
static ssize_t cut(ssize_t count, void* to, ssize_t most) {
  if (count <= most) return count;
  memset((char*)to + most, 0xff, count - most);
  return most;
}

static ssize_t faulty(read_function* real, int fd, void* to, size_t count, off_t offset) {
  const char* fault = getenv("FAULT");
  int first = 0, number = 0;
  char kind[16] = "";
  if (gettid() == getpid()) return real(fd, to, count, offset);
  const int call = atomic_fetch_add(&calls, 1);
  if (fault != NULL && sscanf(fault, "%15[a-z] %d %d", kind, &first, &number) == 3 && call >= first &&
      call < first + number) {
    if (strcmp(kind, "eio") == 0) return errno = EIO, -1;
    if (strcmp(kind, "eintr") == 0) return errno = EINTR, -1;
    if (strcmp(kind, "direct") == 0 && fcntl(fd, F_GETFL) & O_DIRECT) return errno = EINVAL, -1;
    if (strcmp(kind, "short") == 0) return cut(real(fd, to, count, offset), to, 1000);
    if (strcmp(kind, "stall") == 0) nanosleep(&(struct timespec){0, 200000000}, NULL);
    // Direct reads bring a page at a time, and others nothing.
    if (strcmp(kind, "page") == 0 && !(fcntl(fd, F_GETFL) & O_DIRECT)) return errno = EIO, -1;
    if (strcmp(kind, "page") == 0) return cut(real(fd, to, count, offset), to, 4096);
    // The first read takes its time while the others fail.
    if (strcmp(kind, "late") == 0 && call > first) return errno = EIO, -1;
    if (strcmp(kind, "late") == 0) nanosleep(&(struct timespec){0, 200000000}, NULL);
  }
  return real(fd, to, count, offset);
}

ssize_t pread(int fd, void* to, size_t count, off_t offset) {
  return faulty((read_function*)dlsym(RTLD_NEXT, "pread"), fd, to, count, offset);
}

ssize_t pread64(int fd, void* to, size_t count, off_t offset) {
  return faulty((read_function*)dlsym(RTLD_NEXT, "pread64"), fd, to, count, offset);
}
