// A thread that samples which thread holds Python's interpreter lock (GIL). See gil_holds.py.
//
// It never takes the lock itself. A hold lasts from the first to the last sample that found the same
// thread state, in wall time and in CPU time of the holder.

#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <time.h>

extern void *_PyThreadState_UncheckedGet(void);

struct hold {
  int64_t thread_id;
  int64_t wall_ns;
  int64_t cpu_ns;
};

static struct hold *holds;
static long num_holds, capacity, thread_id_offset;
static struct timespec pause_between;
static volatile int stopping;
static pthread_t sampler;

static int64_t nanoseconds(clockid_t clock) {
  struct timespec t;
  return clock_gettime(clock, &t) ? 0 : t.tv_sec * 1000000000LL + t.tv_nsec;
}

// The kernel's identifier of the CPU clock of a thread.
static clockid_t cpu_clock(int64_t thread_id) { return (~(clockid_t)thread_id << 3) | 6; }

static void *sample(void *unused) {
  char *held = 0;
  struct hold first = {0, 0, 0}, last = {0, 0, 0};
  prctl(PR_SET_TIMERSLACK, 1);
  while (!stopping) {
    char *state = _PyThreadState_UncheckedGet();
    if (held && state != held && num_holds < capacity)
      holds[num_holds++] = (struct hold){
          first.thread_id, last.wall_ns - first.wall_ns, last.cpu_ns - first.cpu_ns};
    if (state) {
      int64_t id = (int64_t) * (unsigned long *)(state + thread_id_offset);
      last = (struct hold){id, nanoseconds(CLOCK_MONOTONIC), nanoseconds(cpu_clock(id))};
      if (state != held) first = last;
    }
    held = state;
    nanosleep(&pause_between, 0);
  }
  return unused;
}

int begin(long offset, long most_holds, long pause_ns) {
  thread_id_offset = offset, capacity = most_holds, num_holds = 0, stopping = 0;
  pause_between = (struct timespec){0, pause_ns};
  holds = calloc(capacity, sizeof(struct hold));
  return holds ? pthread_create(&sampler, 0, sample, 0) : 1;
}

struct hold *end(long *found) {
  stopping = 1;
  pthread_join(sampler, 0);
  *found = num_holds;
  return holds;
}
