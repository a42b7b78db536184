/* Shifts the wall clock of the program that it is preloaded into, and of all its children, by as many microseconds as a
 * file says at this moment. Clocks that nobody can set (CLOCK_MONOTONIC and its like) are left alone.
 *
 * Time comes by the raw system call: Redis asks for it while its allocator starts, when nothing else may be called yet. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t *offset;

__attribute__((constructor)) static void open_offset(void) {
  const char *path = getenv("IDEMPOTENCY_TEST_CLOCK");
  int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
  if (file < 0) return;
  void *page = mmap(NULL, sizeof *offset, PROT_READ, MAP_SHARED, file, 0);
  if (page != MAP_FAILED) offset = page;
  close(file);
}

int clock_gettime(clockid_t clock, struct timespec *told) {
  int failed = syscall(SYS_clock_gettime, clock, told);
  if (!failed && offset && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
    int64_t micros = told->tv_sec * INT64_C(1000000) + told->tv_nsec / 1000 + *offset;
    told->tv_sec = micros / 1000000;
    told->tv_nsec = micros % 1000000 * 1000;
  }
  return failed;
}

int gettimeofday(struct timeval *told, void *zone) {
  struct timespec now;
  (void)zone;
  int failed = clock_gettime(CLOCK_REALTIME, &now);
  if (!failed) {
    told->tv_sec = now.tv_sec;
    told->tv_usec = now.tv_nsec / 1000;
  }
  return failed;
}

time_t time(time_t *told) {
  struct timespec now;
  time_t seconds = clock_gettime(CLOCK_REALTIME_COARSE, &now) ? (time_t)-1 : now.tv_sec;
  if (told) *told = seconds;
  return seconds;
}
