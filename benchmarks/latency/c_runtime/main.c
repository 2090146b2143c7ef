/* main THREADS [LIBRARY]: time the runtime of C libraries, or the thread pool of TVM's runtime, and print JSON. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "library.h"

enum { EMPTY, EMPTY_LOOP, LOOP };
enum { LOOPS = 10, CALLS = 2000 };
/* Ten loops of 40 µs. */
static const uint32_t WORK = 20000;

typedef struct {
  void *sync_handle;
  int32_t num_task;
} group;
typedef int (*lambda)(int, group *, void *);
int bench_work_task(int, group *, void *);

static bench_context *context;
static int (*launch)(lambda, void *, int); /* of TVM's runtime */

static double now_ns(clockid_t clock) {
  struct timespec time;
  clock_gettime(clock, &time);
  return time.tv_sec * 1e9 + time.tv_nsec;
}

static void rest(long microseconds) {
  const struct timespec time = {0, microseconds * 1000};
  nanosleep(&time, NULL);
}

static int do_nothing(int task, group *group, void *data) {
  (void)task, (void)group, (void)data;
  return 0;
}

static void call(uint32_t kernel, uint32_t times, uint32_t amount) {
  if (launch) {
    for (uint32_t i = 0; i < times; ++i)
      if (launch(kernel == LOOP ? bench_work_task : do_nothing, &amount, 0) != 0) abort();
    return;
  }
  _Alignas(64) uint32_t input[16] = {kernel, times, amount};
  const bench_buffer buffer = {input, sizeof input};
  if (bench_run(context, &buffer, 1, NULL, 0) != BENCH_OK) abort();
}

static int compare(const void *left, const void *right) {
  const double difference = *(const double *)left - *(const double *)right;
  return (difference > 0) - (difference < 0);
}

static double quantile(const double *sorted, int count, double share) { return sorted[(int)(share * (count - 1))]; }

/* The nanoseconds of a kernel: the median of 101 calls of so many. */
static double time_kernel(uint32_t kernel, uint32_t times) {
  double samples[101];
  for (int i = 0; i < 101; ++i) {
    const double start = now_ns(CLOCK_MONOTONIC);
    call(kernel, times, 0);
    samples[i] = (now_ns(CLOCK_MONOTONIC) - start) / times;
  }
  qsort(samples, 101, sizeof *samples, compare);
  return samples[50];
}

/* Calls after rests, in nanoseconds: wall time, and processor time between the end of a call and that of the rest. */
static void time_after_rests(uint32_t kernel, double *call_ns, double *idle_ns) {
  double calls[100], idle = 0;
  for (int i = 0; i < 100; ++i) {
    const double start = now_ns(CLOCK_MONOTONIC);
    call(kernel, 1, 0);
    calls[i] = now_ns(CLOCK_MONOTONIC) - start;
    const double used = now_ns(CLOCK_PROCESS_CPUTIME_ID);
    rest(5000);
    idle += now_ns(CLOCK_PROCESS_CPUTIME_ID) - used;
  }
  qsort(calls, 100, sizeof *calls, compare);
  *call_ns = calls[50];
  *idle_ns = idle / 100;
}

int main(int count, char **arguments) {
  const uint32_t threads = (uint32_t)atoi(arguments[1]);
  if (count > 2) {
    void *library = dlopen(arguments[2], RTLD_NOW | RTLD_GLOBAL);
    launch = library ? (int (*)(lambda, void *, int))dlsym(library, "TVMBackendParallelLaunch") : NULL;
    if (!launch) return fprintf(stderr, "%s\n", dlerror()), 1;
  } else {
    const bench_options options = {.abi = BENCH_ABI, .threads = threads};
    if (bench_create(&options, &context) != BENCH_OK) return 1;
  }
  static double calls[CALLS];
  double after_rest, idle;
  group alone = {NULL, 1};
  uint32_t work = WORK;
  for (int i = 0; i < 101; ++i) {
    const double start = now_ns(CLOCK_MONOTONIC);
    for (int loop = 0; loop < LOOPS; ++loop) bench_work_task(0, &alone, &work);
    calls[i] = now_ns(CLOCK_MONOTONIC) - start;
  }
  qsort(calls, 101, sizeof *calls, compare);
  const double one_thread = calls[0];
  printf("{\"empty\": %.1f, \"loop\": %.1f", launch ? 0.0 : time_kernel(EMPTY, 10000), time_kernel(EMPTY_LOOP, 1000));
  time_after_rests(EMPTY_LOOP, &after_rest, &idle);
  printf(", \"loop_after_rest\": %.0f, \"idle_us\": %.1f", after_rest, idle / 1e3);
  for (int i = 0; i < CALLS; ++i) {
    const double start = now_ns(CLOCK_MONOTONIC);
    call(LOOP, LOOPS, WORK);
    calls[i] = (now_ns(CLOCK_MONOTONIC) - start) / one_thread;
    if (i % 4 == 0) rest(500);
  }
  qsort(calls, CALLS, sizeof *calls, compare);
  printf(", \"one_thread_us\": %.1f, \"median\": %.2f, \"p99\": %.2f, \"p999\": %.2f, \"max\": %.2f}\n", one_thread / 1e3,
         quantile(calls, CALLS, 0.5), quantile(calls, CALLS, 0.99), quantile(calls, CALLS, 0.999), calls[CALLS - 1]);
  return context ? bench_destroy(context) : 0;
}
