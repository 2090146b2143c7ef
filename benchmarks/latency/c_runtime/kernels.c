/* Kernels as TVM compiles them: one does nothing, one has an empty parallel loop, one a loop of some work. */
#include <stdint.h>

typedef struct {
  void *sync_handle;
  int32_t num_task;
} group;

/* The runtime's pointer for TVM's __TVMBackendParallelLaunch. */
extern int (*bench_launch)(int (*)(int, group *, void *), void *, int);

static int do_nothing(int task, group *group, void *data) {
  (void)task, (void)group, (void)data;
  return 0;
}

/* Work that grows with the number: 100 takes about 0.1 µs. The result keeps it from being left out. */
float bench_work(uint32_t amount) {
  float sums[16] = {0};
  for (uint32_t i = 0; i < amount; ++i)
    for (int lane = 0; lane < 16; ++lane) sums[lane] = sums[lane] * 0.999f + 1.0f;
  float sum = 0;
  for (int lane = 0; lane < 16; ++lane) sum += sums[lane];
  return sum;
}

int bench_work_task(int task, group *group, void *data) {
  const uint32_t amount = *(const uint32_t *)data;
  const uint32_t tasks = (uint32_t)group->num_task, number = (uint32_t)task;
  volatile float result = bench_work(amount * (number + 1) / tasks - amount * number / tasks);
  (void)result;
  return 0;
}

int32_t bench_empty(void *amount) { return amount == 0; }

int32_t bench_empty_loop(void *amount) { return bench_launch(do_nothing, amount, 0); }

int32_t bench_loop(void *amount) { return bench_launch(bench_work_task, amount, 0); }
