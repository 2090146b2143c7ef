/* What generated code and the runtime share. Each library compiles this with names of its own: TF(name). */
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef TF_FREESTANDING
/* Every compiler expects these functions, without a header. */
void *memcpy(void *target, const void *source, size_t bytes);
void *memset(void *target, int value, size_t bytes);
int strcmp(const char *left, const char *right);
#define _Thread_local
#else
#include <stdlib.h>
#include <string.h>
#include <time.h>
#endif

#ifdef _WIN32
#include "threads_windows.h"
#elif defined(TF_THREADS)
#include <pthread.h>
#include <signal.h>
#include <unistd.h>
#define TF_CAN_FORK
#endif
#if defined(TF_MAPS_FILES) && !defined(_WIN32)
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#endif
#ifdef __linux__
#include <sched.h>
#endif

#define TF_ALIGNMENT 64
#ifdef TF_THREADS
#define TF_CACHE_LINE 128
#else
#define TF_CACHE_LINE TF_ALIGNMENT
#endif

/* The types of the public header, whose names differ from library to library. */
typedef TF(context) tf_context;
typedef TF(buffer) tf_buffer;
typedef TF(tensor) tf_tensor;
typedef TF(options) tf_options;

/* How TVM's code calls a function for each task of a parallel loop (tvm/runtime/c_backend_api.h). */
typedef struct {
  void *sync_handle;
  int32_t num_task;
} tf_group;
typedef int (*tf_lambda)(int task, tf_group *group, void *data);

/* The axis of an output that has a count, or -1, and the place of the count among all. */
typedef struct {
  int axis;
  size_t count;
} tf_output_count;

typedef void (*tf_hook)(void *user, size_t kernel, uint64_t nanoseconds);

/* What a thread needs of its context while it runs kernels. */
typedef struct {
  tf_context *context;
  unsigned char *scratch;
  size_t used;
  bool is_serial;
} tf_thread;

typedef struct {
  _Alignas(TF_CACHE_LINE) atomic_uint claimed; /* the last job whose task somebody took */
} tf_task;

#ifdef TF_THREADS
typedef struct {
  tf_context *context;
  uint32_t number;
  pthread_t handle;
} tf_worker;
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
  tf_hook hook;
  void *hook_user;
  atomic_flag is_busy;
  uint32_t useful_tasks; /* into how many tasks the kernel that runs is worth dividing */
  /* A job is a parallel loop: at most `threads` tasks. Whoever comes first takes a task, the thread of its number at
   * best. So nobody waits for a thread that is not running: the caller does what is left. */
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

#define TF_BEGIN(tf, arena, weights, in, out)                               \
  const bool tf_hooked = (tf)->hook != NULL;                                \
  uint64_t tf_start = 0;                                                    \
  (void)(arena), (void)(weights), (void)(in), (void)(out), (void)tf_hooked, (void)tf_start

/* Call a kernel whose parallel loops are worth dividing into so many tasks. */
#define TF_CALL(number, tasks, call)                                               \
  do {                                                                             \
    if (tf_hooked) tf_start = tf_nanoseconds();                                    \
    tf->useful_tasks = (tasks);                                                    \
    if ((call) != 0) return TF_STATUS(KERNEL_FAILED);                              \
    if (tf_hooked) tf->hook(tf->hook_user, (number), tf_nanoseconds() - tf_start); \
  } while (0)
