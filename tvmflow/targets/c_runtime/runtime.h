/* Declarations for generated code and the runtime. Each library compiles them with names of its own: TF(name). */
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#ifdef TF_DEVICE
#include <stdarg.h>
#endif

#if defined(__ANDROID__)
#include "android.h"
#elif defined(TF_FREESTANDING)
/* Compilers emit calls of these functions, and there is no header for them. */
void *memcpy(void *target, const void *source, size_t bytes);
void *memset(void *target, int value, size_t bytes);
int strcmp(const char *left, const char *right);
#define _Thread_local
#else
#include <stdlib.h>
#include <string.h>
#include <time.h>
#endif

#ifdef __ANDROID__
#define TF_CAN_FORK
#elif defined(_WIN32)
#include "threads_windows.h"
#elif defined(TF_THREADS)
#include <pthread.h>
#include <signal.h>
#include <unistd.h>
#define TF_CAN_FORK
#endif
#if defined(TF_MAPS_FILES) && !defined(_WIN32) && !defined(__ANDROID__)
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#endif
#if defined(__linux__) && !defined(__ANDROID__)
#include <sched.h>
#endif

#define TF_ALIGNMENT 64
#ifdef TF_THREADS
#define TF_CACHE_LINE 128
#else
#define TF_CACHE_LINE TF_ALIGNMENT
#endif

/* The types of the public header, whose names differ between libraries. */
typedef TF(context) tf_context;
typedef TF(buffer) tf_buffer;
typedef TF(tensor) tf_tensor;
typedef TF(options) tf_options;

#ifdef TF_DEVICE
#include "device.h"
#endif

/* How TVM's code calls a function for each task of a parallel loop (tvm/runtime/c_backend_api.h). */
typedef struct {
  void *sync_handle;
  int32_t num_task;
} tf_group;
typedef int (*tf_lambda)(int task, tf_group *group, void *data);

/* The axis of an output that a count bounds, or -1, and the index of the count. */
typedef struct {
  int axis;
  size_t count;
} tf_output_count;

#ifdef TF_DIMENSIONS
typedef TF(dimension) tf_dimension;

/* The memory for the present sizes, in bytes; scratch memory is for one task. */
typedef struct {
  uint64_t arena;
  uint64_t staging;
  uint64_t scratch;
  size_t inputs[TF_STATUS(INPUTS) + 1];
  size_t outputs[TF_STATUS(OUTPUTS) + 1];
} tf_memory;

#define TF_SCRATCH_OF(context) ((context)->plan.scratch)
#define TF_ARENA_OF(context) ((context)->plan.arena)
#else
#define TF_SCRATCH_OF(context) TF_SCRATCH
#define TF_ARENA_OF(context) TF_ARENA
#endif

typedef void (*tf_hook)(void *user, size_t kernel, uint64_t nanoseconds);

/* The state of a thread that runs kernels. */
typedef struct {
  tf_context *context;
  unsigned char *scratch;
  size_t used;
  bool is_serial;
} tf_thread;

typedef struct {
  _Alignas(TF_CACHE_LINE) atomic_uint claimed; /* the last job whose task a thread has claimed */
} tf_task;

#ifdef TF_THREADS
typedef struct {
  tf_context *context;
  uint32_t number;
  pthread_t handle;
} tf_worker;
#endif

#ifdef TF_DIMENSIONS
/* A state to which a step appends in place: its input and output, its blocks, and the bytes of a row of a block. */
typedef struct {
  size_t input;
  size_t output;
  size_t outer;
  size_t row;
} tf_appended;
#endif

#ifdef TF_STATES
/* One of a state's two buffers. */
typedef struct {
  unsigned char *data;
  size_t capacity;
} tf_held;
#endif

struct TF(context) {
  uint32_t threads;
  tf_options options;
  unsigned char *arena;
  unsigned char *scratch; /* for the caller's code outside of parallel loops, then for each task */
  const unsigned char *weights;
#ifdef TF_MAPS_FILES
  tf_buffer mapped; /* the file of the weights, if this context has mapped it */
#endif
#ifdef TF_DEVICE
  struct tf_shared *shared; /* the device, with the weights */
  tf_stream *stream;
  tf_handle device_arena;
  tf_handle *handles; /* of the tensors on the device, by their number */
  tf_handle *views;   /* those in the library's own memory */
  tf_handle bound[TF_STATUS(INPUTS) + TF_STATUS(OUTPUTS) + 1]; /* the program's memory for inputs and outputs, or 0 */
  bool is_lost;
  bool returns_early; /* the present call does not wait for its end */
#endif
  tf_hook hook;
  void *hook_user;
  atomic_flag is_busy;
#ifdef TF_DIMENSIONS
  unsigned char *memory; /* scratch memory, arena and staging; NULL before the first call */
  size_t capacity;
  int64_t *values;  /* the dimensions, then sizes and offsets that follow from them */
  uint32_t *useful; /* for each call of a kernel, the number of tasks that pays off */
  unsigned char *counts;
  tf_memory plan;
  bool is_planned; /* all of these belong to the present dimensions */
#endif
#ifdef TF_STATES
  tf_held held[TF_STATES][2];
  unsigned held_now; /* which of the two holds the states that steps replace; a step writes the other one */
  bool is_step;
  int64_t length;
  int64_t dropped;
  uint64_t random;
#endif
  uint32_t useful_tasks; /* the number of tasks that pays off for the present kernel */
  /* A job is a parallel loop of at most `threads` tasks. Each thread begins with the task of its number, then claims
   * others, so that no task waits for a thread that is not running. */
  tf_lambda lambda;
  void *data;
  uint32_t job_tasks;
  tf_task *tasks;
  _Alignas(TF_CACHE_LINE) atomic_uint job;
  _Alignas(TF_CACHE_LINE) atomic_uint pending;
  atomic_int failure;
  atomic_uint calls;
#ifdef TF_THREADS
  _Alignas(TF_CACHE_LINE) atomic_uint sleeping;
  atomic_int caller_cpu;
  atomic_bool is_stopping;
  atomic_bool is_joining;
  pthread_mutex_t mutex;
  pthread_cond_t work;
  pthread_cond_t done;
  tf_worker *workers;
  uint32_t started;
#endif
#ifdef TF_CAN_FORK
  pid_t process;
#endif
};

#ifndef _WIN32
static inline uint64_t tf_nanoseconds(void);
#endif
static int tf_allocate(const tf_options *options, size_t bytes, size_t alignment, void **memory);
#ifdef TF_STATES
static int tf_reset(tf_context *context);
static void tf_release_states(tf_context *context);
#endif

#define TF_BEGIN(tf, arena, weights, in, out)                               \
  const bool tf_hooked = (tf)->hook != NULL;                                \
  uint64_t tf_start = 0;                                                    \
  (void)(arena), (void)(weights), (void)(in), (void)(out), (void)tf_hooked, (void)tf_start

/* Call a kernel, and divide its parallel loops into at most so many tasks. */
#define TF_CALL(number, tasks, call)                                               \
  do {                                                                             \
    if (tf_hooked) tf_start = tf_nanoseconds();                                    \
    tf->useful_tasks = (tasks);                                                    \
    if ((call) != 0) return TF_STATUS(KERNEL_FAILED);                              \
    if (tf_hooked) tf->hook(tf->hook_user, (number), tf_nanoseconds() - tf_start); \
  } while (0)

/* Return the status of a failure if a kernel has found a wrong value. */
#define TF_CHECK(failure, failed)                                                                 \
  do {                                                                                            \
    if (*(const int32_t *)(const void *)(failed) != 0) return TF_STATUS(WRONG_VALUE) + (failure); \
  } while (0)

#ifdef TF_DEVICE
TF_MAYBE_UNUSED static int tf_launch_kernel(tf_context *context, size_t kernel, const tf_device_launch *launches, size_t count,
                            const uint32_t *places, size_t tensors);

/* Return the status of a call that has failed. */
#define TF_TRY(call)                                    \
  do {                                                  \
    const int tf_status = (call);                       \
    if (tf_status != TF_STATUS(OK)) return tf_status;   \
  } while (0)
/* Launch a kernel on the tensors at these places. */
#define TF_LAUNCH(number, launches, ...)                                                         \
  TF_TRY(tf_launch_kernel(tf, (number), launches, sizeof launches / sizeof *launches,            \
                          (const uint32_t[]){__VA_ARGS__}, sizeof((uint32_t[]){__VA_ARGS__}) / 4))
#endif

#ifdef TF_DIMENSIONS
/* Arithmetic of dimensions: with the largest ones, every value fits 62 bits. */
static inline int64_t tf_least(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t tf_largest(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t tf_divide(int64_t a, int64_t b) { return a / b - (a % b != 0 && (a < 0) != (b < 0)); }
static inline int64_t tf_remainder(int64_t a, int64_t b) { return a - tf_divide(a, b) * b; }
static inline int64_t tf_pad(int64_t bytes) { return (bytes + TF_ALIGNMENT - 1) / TF_ALIGNMENT * TF_ALIGNMENT; }

/* Return the number of tasks that pays off for a call; `work` adds up the operations of calls with several. */
static inline uint32_t tf_count_tasks_of(int64_t operations, int64_t loops, int64_t limit, int64_t most, int64_t *work) {
  const int64_t tasks = operations / tf_largest(loops, 1) / limit;
  if (tasks <= 1) return 1;
  *work += operations;
  return (uint32_t)tf_least(tasks, most);
}
#define tf_count_tasks(operations, loops, work) \
  tf_count_tasks_of(operations, loops, TF_TASK_OPERATIONS, TF_MAX_TASKS, work)

/* Give each call one task if all calls together have too few operations. */
static inline void tf_choose_tasks_of(uint32_t *tasks, size_t calls, int64_t work, int64_t least) {
  for (size_t i = 0; i < calls && work < least; ++i) tasks[i] = 1;
}
#define tf_choose_tasks(tasks, calls, work) tf_choose_tasks_of(tasks, calls, work, TF_PROGRAM_OPERATIONS)
#endif
