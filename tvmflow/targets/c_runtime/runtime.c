/* The runtime of a library: contexts, threads, and checks of the caller's arguments. */
/* How long an idle thread looks for work before it sleeps: a call of the next kernel comes within microseconds. */
#define TF_SPIN_NS 50000
/* How often the caller polls for the end of the other threads before it yields. */
#define TF_JOIN_SPINS 300
/* How often the caller yields before it sleeps: a thread that it waits for may need this CPU. */
#define TF_JOIN_YIELDS 500
#define TF_STACK (1 << 20)
#define TF_MAX_THREADS 1024

static _Thread_local tf_thread tf_here;
#ifdef TF_FREESTANDING
static atomic_flag tf_is_running = ATOMIC_FLAG_INIT;
#endif

#ifdef TF_FREESTANDING
/* There is no clock that all machines have. */
static inline uint64_t tf_nanoseconds(void) { return 0; }
#elif !defined(_WIN32)
static inline uint64_t tf_nanoseconds(void) {
  struct timespec now;
  timespec_get(&now, TIME_UTC);
#ifdef CLOCK_MONOTONIC
  clock_gettime(CLOCK_MONOTONIC, &now);
#endif
  return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}
#endif

static inline void tf_pause(void) {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__) || (defined(__arm__) && __ARM_ARCH >= 7)
  __asm__ volatile("yield");
#endif
}

static size_t tf_padded(size_t bytes) { return (bytes + TF_ALIGNMENT - 1) / TF_ALIGNMENT * TF_ALIGNMENT; }

/* ------------------------------------------------------------------ functions that TVM's code calls */

/* Allocate a kernel buffer that is too large for the stack. Scratch memory has room: all sizes are known at build time. */
static void *tf_allocate_workspace(int type, int device, uint64_t bytes, int code, int bits) {
  (void)type, (void)device, (void)code, (void)bits;
  unsigned char *memory = tf_here.scratch + tf_here.used;
  tf_here.used += tf_padded((size_t)bytes);
  return memory;
}

static int tf_free_workspace(int type, int device, void *memory) {
  (void)type, (void)device;
  tf_here.used = (size_t)((unsigned char *)memory - tf_here.scratch);
  return 0;
}

/* Do one task with scratch memory of its own. */
static void tf_do_task(tf_context *context, uint32_t task, uint32_t tasks, tf_lambda lambda, void *data) {
  const tf_thread before = tf_here;
  tf_group group = {NULL, (int32_t)tasks};
  tf_here = (tf_thread){context, context->scratch + (task + 1) * (size_t)TF_SCRATCH_OF(context), 0, true};
  if (lambda((int)task, &group, data) != 0) atomic_store_explicit(&context->failure, 1, memory_order_relaxed);
  tf_here = before;
}

/* Do the tasks of a job that no thread has claimed. */
static void tf_work(tf_context *context, unsigned job, uint32_t first) {
  for (uint32_t i = 0; i < context->threads; ++i) {
    const uint32_t task = (first + i) % context->threads;
    unsigned expected = job - 1;
    if (atomic_load_explicit(&context->tasks[task].claimed, memory_order_relaxed) != expected) continue;
    if (!atomic_compare_exchange_strong(&context->tasks[task].claimed, &expected, job)) continue;
    /* The job does not end before this task, so its data is valid. */
    tf_do_task(context, task, context->job_tasks, context->lambda, context->data);
    const unsigned left = atomic_fetch_sub(&context->pending, 1) - 1;
#ifdef TF_THREADS
    if (left == 0 && atomic_load(&context->is_joining)) {
      pthread_mutex_lock(&context->mutex);
      pthread_cond_signal(&context->done);
      pthread_mutex_unlock(&context->mutex);
    }
#else
    (void)left;
#endif
  }
}

/* A forked process has none of its parent's threads. */
static bool tf_is_forked(const tf_context *context) {
#ifdef TF_CAN_FORK
  return getpid() != context->process;
#else
  (void)context;
  return false;
#endif
}

static void tf_wake(tf_context *context) {
#ifdef TF_THREADS
  if (atomic_load(&context->sleeping) == 0) return;
  if (tf_is_forked(context)) {
    /* No thread is left to wake, and the mutex may stay locked forever: the caller does all tasks. */
    atomic_store(&context->sleeping, 0);
    return;
  }
#ifdef __linux__
  atomic_store_explicit(&context->caller_cpu, sched_getcpu(), memory_order_relaxed);
#endif
  pthread_mutex_lock(&context->mutex);
  pthread_cond_broadcast(&context->work);
  pthread_mutex_unlock(&context->mutex);
  /* A thread that woke on this CPU moves to another one now. */
  sched_yield();
#else
  (void)context;
#endif
}

static void tf_join(tf_context *context) {
  for (unsigned spins = 0; atomic_load_explicit(&context->pending, memory_order_acquire) != 0; ++spins) {
    tf_pause();
#ifdef TF_THREADS
    if (spins < TF_JOIN_SPINS) continue;
    if (spins < TF_JOIN_SPINS + TF_JOIN_YIELDS) {
      sched_yield();
      continue;
    }
    pthread_mutex_lock(&context->mutex);
    atomic_store(&context->is_joining, true);
    while (atomic_load(&context->pending) != 0) pthread_cond_wait(&context->done, &context->mutex);
    atomic_store(&context->is_joining, false);
    pthread_mutex_unlock(&context->mutex);
#else
    (void)spins;
#endif
  }
}

typedef struct {
  tf_context *context;
  uint32_t tasks;
  tf_lambda lambda;
  void *data;
  unsigned job;
} tf_body;

/* Do a task for the program's own loop. Tasks share no scratch memory, so an unknown or repeated task is an error. */
static void tf_do_body(void *argument, uint32_t task) {
  const tf_body *body = argument;
  tf_context *context = body->context;
  if (task >= body->tasks || atomic_exchange(&context->tasks[task].claimed, body->job) == body->job) {
    atomic_store_explicit(&context->failure, 1, memory_order_relaxed);
    return;
  }
  tf_do_task(context, task, body->tasks, body->lambda, body->data);
  atomic_fetch_sub(&context->pending, 1);
}

/* Run a parallel loop by the program's own loop. */
static void tf_delegate(tf_context *context, tf_lambda lambda, void *data, uint32_t tasks) {
  tf_body body = {context, tasks, lambda, data, atomic_fetch_add(&context->job, 1) + 1};
  atomic_store(&context->pending, tasks);
  context->options.parallel_for(context->options.user, tasks, tf_do_body, &body);
  if (atomic_load(&context->pending) != 0) atomic_store(&context->failure, 1);
}

/* Run a parallel loop on all threads, the caller's included. */
static void tf_share(tf_context *context, tf_lambda lambda, void *data, uint32_t tasks) {
  const unsigned job = atomic_load_explicit(&context->job, memory_order_relaxed) + 1;
  context->lambda = lambda;
  context->data = data;
  context->job_tasks = tasks;
  /* With fewer tasks than threads, no thread may claim the remaining ones. */
  for (uint32_t task = tasks; task < context->threads; ++task)
    atomic_store_explicit(&context->tasks[task].claimed, job, memory_order_relaxed);
  atomic_store_explicit(&context->pending, tasks, memory_order_relaxed);
  atomic_store(&context->job, job);
  tf_wake(context);
  tf_work(context, job, 0);
  tf_join(context);
}

/* Run a parallel loop. */
static int tf_launch(tf_lambda lambda, void *data, int wanted) {
  tf_context *context = tf_here.context;
  const uint32_t tasks = context->useful_tasks < context->threads ? context->useful_tasks : context->threads;
  (void)wanted;
  if (tf_here.is_serial || tasks == 1) {
    tf_group group = {NULL, 1};
    return lambda(0, &group, data);
  }
  (context->options.parallel_for ? tf_delegate : tf_share)(context, lambda, data, tasks);
  return atomic_exchange_explicit(&context->failure, 0, memory_order_relaxed) ? -1 : 0;
}

/* Kernels define these pointers too, weakly where the format of object files has that. In COFF all definitions are
 * equal, and the linker keeps one: it is set when a context is made. */
#ifdef _WIN32
#define TF_POINTER(type, value) __declspec(selectany) type
#else
#define TF_POINTER(type, value) __attribute__((visibility("hidden"))) type = value
#endif
TF_POINTER(int (*TF_PARALLEL_LAUNCH)(tf_lambda, void *, int), tf_launch);
TF_POINTER(void *(*TF_ALLOC_WORKSPACE)(int, int, uint64_t, int, int), tf_allocate_workspace);
TF_POINTER(int (*TF_FREE_WORKSPACE)(int, int, void *), tf_free_workspace);

static void tf_set_pointers(void) {
#ifdef _WIN32
  __atomic_store_n(&TF_PARALLEL_LAUNCH, tf_launch, __ATOMIC_RELAXED);
  __atomic_store_n(&TF_ALLOC_WORKSPACE, tf_allocate_workspace, __ATOMIC_RELAXED);
  __atomic_store_n(&TF_FREE_WORKSPACE, tf_free_workspace, __ATOMIC_RELAXED);
#endif
}

/* ------------------------------------------------------------------ threads */

#ifdef TF_THREADS

/* Poll for a job other than `seen` for TF_SPIN_NS; return whether there is one. */
static bool tf_spin(tf_context *context, unsigned seen) {
  const uint64_t limit = tf_nanoseconds() + TF_SPIN_NS;
  for (unsigned spins = 1;; ++spins) {
    if (atomic_load_explicit(&context->job, memory_order_acquire) != seen) return true;
    tf_pause();
    if (spins % 64 != 0) continue;
    if (tf_nanoseconds() > limit || atomic_load(&context->is_stopping)) return false;
    /* The caller may need this CPU. */
    sched_yield();
  }
}

/* Linux wakes a thread on the waker's CPU, even if others are idle. There it would interrupt the caller, or wait for it.
 * Once it runs on another CPU, it may run anywhere again. */
static void tf_leave_callers_cpu(tf_context *context) {
#ifdef __linux__
  const int cpu = sched_getcpu();
  cpu_set_t allowed, others;
  if (cpu < 0 || cpu != atomic_load_explicit(&context->caller_cpu, memory_order_relaxed)) return;
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
  others = allowed;
  CPU_CLR(cpu, &others);
  if (CPU_COUNT(&others) > 0 && sched_setaffinity(0, sizeof others, &others) == 0)
    sched_setaffinity(0, sizeof allowed, &allowed);
#else
  (void)context;
#endif
}

/* Wait for a job other than `seen`, and return it. A call wakes its threads before its first job. */
static unsigned tf_next_job(tf_context *context, unsigned seen) {
  while (!tf_spin(context, seen) && !atomic_load(&context->is_stopping)) {
    pthread_mutex_lock(&context->mutex);
    atomic_fetch_add(&context->sleeping, 1);
    const unsigned calls = atomic_load(&context->calls);
    while (atomic_load(&context->job) == seen && atomic_load(&context->calls) == calls &&
           !atomic_load(&context->is_stopping))
      pthread_cond_wait(&context->work, &context->mutex);
    atomic_fetch_sub(&context->sleeping, 1);
    pthread_mutex_unlock(&context->mutex);
    tf_leave_callers_cpu(context);
  }
  return atomic_load(&context->job);
}

static void *tf_serve(void *argument) {
  tf_worker *worker = argument;
  tf_context *context = worker->context;
#ifdef __linux__
  pthread_setname_np(pthread_self(), TF_THREAD_NAME);
#elif defined(__APPLE__)
  pthread_setname_np(TF_THREAD_NAME);
#endif
  for (unsigned job = 0;;) {
    job = tf_next_job(context, job);
    if (atomic_load(&context->is_stopping)) return NULL;
    tf_work(context, job, worker->number);
  }
}

static uint32_t tf_count_cpus(void) {
#ifdef _WIN32
  const long count = tf_count_windows_cpus();
#else
#if defined(__linux__) && defined(CPU_COUNT)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return (uint32_t)CPU_COUNT(&set);
#endif
  const long count = sysconf(_SC_NPROCESSORS_ONLN);
#endif
  return count > 0 ? (uint32_t)count : 1;
}

static bool tf_start_workers(tf_context *context) {
  pthread_mutex_init(&context->mutex, NULL);
  pthread_cond_init(&context->work, NULL);
  pthread_cond_init(&context->done, NULL);
#ifdef TF_CAN_FORK
  context->process = getpid();
#endif
  if (context->options.parallel_for) return true;
  /* Signals are for the program's own threads. Some C libraries give threads a stack of only 128 KiB. */
#ifndef _WIN32
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
#endif
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setstacksize(&attributes, TF_STACK);
  for (uint32_t number = 1; number < context->threads; ++number) {
    tf_worker *worker = &context->workers[number - 1];
    *worker = (tf_worker){context, number, worker->handle};
    if (pthread_create(&worker->handle, &attributes, tf_serve, worker) != 0) break;
    ++context->started;
  }
  pthread_attr_destroy(&attributes);
#ifndef _WIN32
  pthread_sigmask(SIG_SETMASK, &before, NULL);
#endif
  return context->started == context->threads - 1;
}

static void tf_stop_workers(tf_context *context) {
  pthread_mutex_lock(&context->mutex);
  atomic_store(&context->is_stopping, true);
  pthread_cond_broadcast(&context->work);
  pthread_mutex_unlock(&context->mutex);
  for (uint32_t i = 0; i < context->started; ++i) pthread_join(context->workers[i].handle, NULL);
  pthread_cond_destroy(&context->done);
  pthread_cond_destroy(&context->work);
  pthread_mutex_destroy(&context->mutex);
}

#endif

/* ------------------------------------------------------------------ contexts */

#ifdef TF_DEVICE
#include "device.c"
#endif

#ifndef TF_FREESTANDING
static void *tf_default_allocate(void *user, size_t bytes, size_t alignment) {
  (void)user;
#ifdef _WIN32
  return _aligned_malloc(bytes, alignment);
#else
  void *memory = NULL;
  return posix_memalign(&memory, alignment, bytes) == 0 ? memory : NULL;
#endif
}

static void tf_default_release(void *user, void *memory) {
  (void)user;
#ifdef _WIN32
  _aligned_free(memory);
#else
  free(memory);
#endif
}
#endif

/* Allocate memory by the options. A program's own function may return memory with a wrong alignment. */
static int tf_allocate(const tf_options *options, size_t bytes, size_t alignment, void **memory) {
  *memory = options->allocate(options->user, bytes, alignment);
  if (!*memory) return TF_STATUS(NO_MEMORY);
  if ((uintptr_t)*memory % alignment == 0) return TF_STATUS(OK);
  options->release(options->user, *memory);
  return TF_STATUS(MISALIGNED_MEMORY);
}

static int tf_choose_options(const tf_options *given, tf_options *options) {
  *options = (tf_options){.abi = TF_STATUS(ABI)};
  if (given) {
    /* The version comes first in the options of all versions. */
    if (given->abi != TF_STATUS(ABI)) return TF_STATUS(WRONG_VERSION);
    *options = *given;
  }
  if (!options->allocate != !options->release) return TF_STATUS(WRONG_OPTION);
  if (options->threads > TF_MAX_THREADS) return TF_STATUS(WRONG_OPTION);
#ifdef TF_FREESTANDING
  if (!options->allocate) return TF_STATUS(WRONG_OPTION);
#else
  if (!options->allocate) {
    options->allocate = tf_default_allocate;
    options->release = tf_default_release;
  }
#endif
#ifdef TF_THREADS
  if (options->threads == 0) {
    const uint32_t cpus = tf_count_cpus();
    options->threads = cpus < TF_DEFAULT_THREADS ? cpus : TF_DEFAULT_THREADS;
  }
#else
  if (options->threads == 0 || !options->parallel_for) options->threads = 1;
#endif
  if (options->threads > TF_MOST_TASKS) options->threads = TF_MOST_TASKS;
  return TF_STATUS(OK);
}

#ifdef TF_DIMENSIONS
static unsigned char *tf_find_counts(const tf_context *context) { return context->counts; }
#else
/* The counts of outputs are at the end of the staging memory, and stay until the next call. */
static unsigned char *tf_find_counts(const tf_context *context) {
  return context->arena + TF_ARENA + TF_STAGING - TF_COUNTS * TF_ALIGNMENT;
}
#endif

/* Memory that is allocated with a context: all of it, unless its size depends on dimensions and memory may grow. */
#ifndef TF_DIMENSIONS
#define TF_SCRATCH_AT_ONCE TF_SCRATCH
#define TF_TENSORS_AT_ONCE (uint64_t)TF_ARENA + TF_STAGING
#elif defined(TF_FREESTANDING)
#define TF_SCRATCH_AT_ONCE TF_LARGEST_SCRATCH
#define TF_TENSORS_AT_ONCE ((uint64_t)TF_LARGEST_TENSORS)
#else
#define TF_SCRATCH_AT_ONCE 0
#define TF_TENSORS_AT_ONCE 0
#endif

#ifdef TF_DEVICE
int TF(create)(const tf_options *given, tf_context **result) { return TF(create_on)(given, NULL, result); }

int TF(create_on)(const tf_options *given, const tf_choice *choice, tf_context **result) {
#else
int TF(create)(const tf_options *given, tf_context **result) {
#endif
  if (!result) return TF_STATUS(NULL_ARGUMENT);
  *result = NULL;
  tf_options options;
  int status = tf_choose_options(given, &options);
  if (status != TF_STATUS(OK)) return status;
  if (TF(missing_feature)()) return TF_STATUS(MISSING_FEATURE);
  tf_set_pointers();
  /* One block: the context, its tasks and threads, scratch memory, and the arena. */
  const size_t head = tf_padded(sizeof(tf_context));
  const size_t tasks = tf_padded(options.threads * sizeof(tf_task));
  size_t bytes = head + tasks;
#ifdef TF_FREESTANDING
  _Static_assert(sizeof(tf_context) + sizeof(tf_task) <= TF_CONTEXT_BYTES, "the header's MEMORY_BYTES");
#endif
#ifdef TF_THREADS
  const size_t workers = tf_padded(options.threads * sizeof(tf_worker));
  bytes += workers;
#endif
#ifdef TF_DIMENSIONS
  /* The values that depend on sizes; the arena is allocated later. */
  const size_t values = bytes;
  bytes += tf_padded(TF_VALUES * sizeof(int64_t));
  const size_t useful = bytes;
  bytes += tf_padded((TF_CALLS + 1) * sizeof(uint32_t));
  const size_t counts = bytes;
  bytes += TF_COUNTS * TF_ALIGNMENT;
#endif
  /* 32 bits may be too few for the scratch memory of many threads. */
  const size_t parts = options.threads == 1 ? 1 : options.threads + 1;
  const uint64_t tensors = TF_TENSORS_AT_ONCE;
  if (parts > SIZE_MAX / 4 / (TF_SCRATCH_AT_ONCE + (size_t)1) || tensors > SIZE_MAX / 4) return TF_STATUS(NO_MEMORY);
  const size_t scratch = parts * TF_SCRATCH_AT_ONCE;
  void *memory;
  status = tf_allocate(&options, bytes + scratch + (size_t)tensors, TF_CACHE_LINE, &memory);
  if (status != TF_STATUS(OK)) return status;
  unsigned char *block = memory;
  memset(block, 0, bytes);
  tf_context *context = (tf_context *)block;
  context->options = options;
  context->threads = options.threads;
  context->tasks = (tf_task *)(block + head);
  context->scratch = block + bytes;
  context->arena = block + bytes + scratch;
#ifdef TF_DIMENSIONS
#ifdef TF_FREESTANDING
  context->memory = block + bytes;
  context->capacity = scratch + (size_t)tensors;
#endif
  context->values = (int64_t *)(void *)(block + values);
  context->useful = (uint32_t *)(void *)(block + useful);
  context->counts = block + counts;
  for (size_t i = 0; i < TF_DIMENSIONS; ++i) context->values[i] = tf_dimensions[i].min;
#endif
  memset(tf_find_counts(context), 0, TF_COUNTS * TF_ALIGNMENT);
  atomic_flag_clear(&context->is_busy);
  status = tf_open_weights(context);
  if (status != TF_STATUS(OK)) {
    options.release(options.user, block);
    return status;
  }
#ifdef TF_THREADS
  context->workers = (tf_worker *)(block + head + tasks);
  if (!tf_start_workers(context)) {
    TF(destroy)(context);
    return TF_STATUS(NO_THREADS);
  }
#endif
#ifdef TF_DEVICE
  status = tf_enter_device(context, choice ? choice : &(tf_choice){.number = 0});
  if (status != TF_STATUS(OK)) {
    TF(destroy)(context);
    return status;
  }
#endif
#ifdef TF_STATES
  status = tf_reset(context);
  if (status != TF_STATUS(OK)) {
    TF(destroy)(context);
    return status;
  }
#endif
  *result = context;
  return TF_STATUS(OK);
}

int TF(destroy)(tf_context *context) {
  if (!context) return TF_STATUS(OK);
  const bool is_forked = tf_is_forked(context);
  /* After a fork, the thread that uses it may be the parent's. */
  if (atomic_flag_test_and_set(&context->is_busy) && !is_forked) return TF_STATUS(BUSY);
#ifdef TF_THREADS
  if (!is_forked) tf_stop_workers(context);
#endif
#ifdef TF_DEVICE
  /* The driver does not work in a child of the process that opened it. */
  if (!is_forked) tf_leave_device(context);
#endif
  tf_close_weights(context);
#ifdef TF_STATES
  tf_release_states(context);
#endif
#if defined(TF_DIMENSIONS) && !defined(TF_FREESTANDING)
  if (context->memory) context->options.release(context->options.user, context->memory);
#endif
  context->options.release(context->options.user, context);
  return TF_STATUS(OK);
}

/* ------------------------------------------------------------------ a call */

static bool tf_overlap(const tf_buffer *left, const tf_buffer *right) {
  const uintptr_t first = (uintptr_t)left->data, second = (uintptr_t)right->data;
  if (left->bytes == 0 || right->bytes == 0) return false;
  return first < second + right->bytes && second < first + left->bytes;
}

/* Buffers must have the present sizes, or without dimensions those of the descriptions. */
#ifdef TF_DIMENSIONS
typedef size_t tf_described;
#define TF_BYTES(described) described
#define TF_EXPECTED(direction) context->plan.direction
#define TF_WITH_CONTEXT(type) type context,
#else
typedef tf_tensor tf_described;
#define TF_BYTES(described) described.bytes
#define TF_EXPECTED(direction) TF(direction)()
#define TF_WITH_CONTEXT(type)
#endif

/* States to which a step appends: they are aligned, and their inputs and outputs are one memory. */
#ifdef TF_APPENDED_STATES
#define TF_APPENDS_TO(input) tf_appends_to[input]
#define TF_APPENDED(output) tf_is_appended[output]
#else
#define TF_APPENDS_TO(input) ((void)(input), false)
#define TF_APPENDED(output) ((void)(output), false)
#endif
#if defined(TF_APPENDED_STATES) && defined(TF_STATES)
#define TF_IN_STEP context->is_step
#else
#define TF_IN_STEP false
#endif

static int tf_check(const tf_buffer *buffers, size_t count, const tf_described *tensors, size_t expected, int wrong_size) {
  if (count != expected) return TF_STATUS(WRONG_COUNT);
  if (!buffers && expected) return TF_STATUS(NULL_ARGUMENT);
  for (size_t i = 0; i < count; ++i) {
    if (buffers[i].bytes != TF_BYTES(tensors[i])) return wrong_size + (int)i;
    if (!buffers[i].data && buffers[i].bytes) return TF_STATUS(NULL_ARGUMENT);
  }
  return TF_STATUS(OK);
}

static int tf_check_call(TF_WITH_CONTEXT(const tf_context *) const tf_buffer *inputs, size_t input_count,
                         const tf_buffer *outputs, size_t output_count) {
  int status = tf_check(inputs, input_count, TF_EXPECTED(inputs), TF_STATUS(INPUTS), TF_STATUS(WRONG_SIZE));
  const int of_outputs = TF_STATUS(WRONG_SIZE) + TF_STATUS(INPUTS);
  if (status == TF_STATUS(OK))
    status = tf_check(outputs, output_count, TF_EXPECTED(outputs), TF_STATUS(OUTPUTS), of_outputs);
  if (status != TF_STATUS(OK)) return status;
  for (size_t i = 0; i < output_count; ++i) {
    for (size_t j = 0; j < input_count; ++j)
      if (tf_overlap(&outputs[i], &inputs[j]) && !(TF_IN_STEP && TF_APPENDS_TO(j))) return TF_STATUS(OVERLAP);
    for (size_t j = 0; j < i; ++j)
      if (tf_overlap(&outputs[i], &outputs[j])) return TF_STATUS(OVERLAP);
  }
  return TF_STATUS(OK);
}

static bool tf_is_aligned(const void *data) { return (uintptr_t)data % TF_ALIGNMENT == 0; }

/* Run the steps with aligned memory: other inputs are copied before, and other outputs after. */
static int tf_run_aligned(tf_context *context, const tf_buffer *inputs, const tf_buffer *outputs) {
  unsigned char *in[TF_STATUS(INPUTS) + 1], *out[TF_STATUS(OUTPUTS) + TF_COUNTS + 1];
  unsigned char *staging = context->arena + TF_ARENA_OF(context);
  for (size_t i = 0; i < TF_STATUS(INPUTS); ++i) {
    in[i] = inputs[i].data;
    if (TF_APPENDS_TO(i)) continue;
    if (!tf_is_aligned(in[i])) in[i] = memcpy(staging, in[i], inputs[i].bytes);
    staging += tf_padded(inputs[i].bytes);
  }
  for (size_t i = 0; i < TF_STATUS(OUTPUTS); ++i) {
    out[i] = tf_is_aligned(outputs[i].data) ? outputs[i].data : staging;
    if (!TF_APPENDED(i)) staging += tf_padded(outputs[i].bytes);
  }
  for (size_t i = 0; i < TF_COUNTS; ++i) out[TF_STATUS(OUTPUTS) + i] = tf_find_counts(context) + i * TF_ALIGNMENT;
#ifdef TF_DEVICE
  int status = tf_begin_steps(context, in);
  if (status == TF_STATUS(OK)) status = tf_steps(context, context->arena, context->weights, in, out);
  status = tf_end_steps(context, status, out);
#else
  const int status = tf_steps(context, context->arena, context->weights, in, out);
#endif
  for (size_t i = 0; i < TF_STATUS(OUTPUTS) && status == TF_STATUS(OK); ++i)
    if (out[i] != outputs[i].data) memcpy(outputs[i].data, out[i], outputs[i].bytes);
  return status;
}

#ifdef TF_APPENDED_STATES
#include "append.c"
#endif

/* Without a system there are no thread-local variables: a task that interrupts a call has to wait. */
static bool tf_begin_call(tf_context *context) {
  if (atomic_flag_test_and_set_explicit(&context->is_busy, memory_order_acquire)) return false;
#ifdef TF_FREESTANDING
  if (atomic_flag_test_and_set_explicit(&tf_is_running, memory_order_acquire)) {
    atomic_flag_clear(&context->is_busy);
    return false;
  }
#endif
  return true;
}

static void tf_end_call(tf_context *context) {
#ifdef TF_FREESTANDING
  atomic_flag_clear_explicit(&tf_is_running, memory_order_release);
#endif
  atomic_flag_clear_explicit(&context->is_busy, memory_order_release);
}

/* Compute with a context that this thread has marked as busy. */
static int tf_call(tf_context *context, const tf_buffer *inputs, size_t input_count, const tf_buffer *outputs,
                   size_t output_count) {
#ifdef TF_DIMENSIONS
  int status = tf_update(context);
  if (status == TF_STATUS(OK)) status = tf_check_call(context, inputs, input_count, outputs, output_count);
  if (status == TF_STATUS(OK)) status = tf_reserve(context);
#else
  int status = tf_check_call(inputs, input_count, outputs, output_count);
#endif
  if (status != TF_STATUS(OK)) return status;
  const tf_thread before = tf_here;
  tf_here = (tf_thread){context, context->scratch, 0, context->threads == 1};
  if (context->threads > 1) {
    atomic_fetch_add(&context->calls, 1);
    tf_wake(context);
  }
#ifdef TF_APPENDED_STATES
  status = TF_IN_STEP ? tf_run_aligned(context, inputs, outputs) : tf_run_with_states(context, inputs, outputs);
#else
  status = tf_run_aligned(context, inputs, outputs);
#endif
  tf_here = before;
  return status;
}

#ifdef TF_DEVICE
static int tf_run(tf_context *context, const tf_buffer *inputs, size_t input_count, const tf_buffer *outputs,
                  size_t output_count, bool returns_early) {
#else
int TF(run)(tf_context *context, const tf_buffer *inputs, size_t input_count, const tf_buffer *outputs,
            size_t output_count) {
#endif
  if (!context) return TF_STATUS(NULL_ARGUMENT);
  if (!tf_begin_call(context)) return TF_STATUS(BUSY);
#ifdef TF_DEVICE
  context->returns_early = returns_early;
#endif
  const int status = tf_call(context, inputs, input_count, outputs, output_count);
  tf_end_call(context);
  return status;
}

/* ------------------------------------------------------------------ descriptions */

int TF(bounded_axis)(size_t output) { return output < TF_STATUS(OUTPUTS) ? tf_output_counts[output].axis : -1; }

#ifndef TF_DIMENSIONS
int TF(output_shape)(tf_context *context, size_t output, int64_t *shape) {
  if (!context || !shape) return TF_STATUS(NULL_ARGUMENT);
  if (output >= TF_STATUS(OUTPUTS)) return TF_STATUS(WRONG_COUNT);
  if (atomic_flag_test_and_set_explicit(&context->is_busy, memory_order_acquire)) return TF_STATUS(BUSY);
  const tf_tensor *tensor = &TF(outputs)()[output];
  const tf_output_count counted = tf_output_counts[output];
  for (size_t i = 0; i < tensor->rank; ++i) shape[i] = tensor->shape[i];
  if (counted.axis >= 0)
    memcpy(&shape[counted.axis], tf_find_counts(context) + counted.count * TF_ALIGNMENT, sizeof *shape);
  atomic_flag_clear_explicit(&context->is_busy, memory_order_release);
  return TF_STATUS(OK);
}
#endif

uint32_t TF(threads)(const tf_context *context) { return context ? context->threads : 0; }

size_t TF(kernel_count)(void) { return TF_KERNELS; }

const char *TF(kernel_name)(size_t kernel) { return kernel < TF_KERNELS ? tf_kernel_names[kernel] : NULL; }

int TF(profile)(tf_context *context, tf_hook hook, void *user) {
  if (!context) return TF_STATUS(NULL_ARGUMENT);
  if (atomic_flag_test_and_set(&context->is_busy)) return TF_STATUS(BUSY);
  context->hook = hook;
  context->hook_user = user;
  atomic_flag_clear(&context->is_busy);
  return TF_STATUS(OK);
}

const char *TF(message)(int status) {
  static const char *const messages[] = {
#ifdef TF_DIMENSIONS
      [TF_STATUS(WRONG_DIMENSION)] = TF_RANGES,
#endif
#ifdef TF_STATES
      [TF_STATUS(WRONG_LENGTH)] = "the states cannot have this length: a step grows them too far, or a call does not shorten them",
      [TF_STATUS(WRONG_STATE)] = "the saved state is damaged, or that of another model or version of tvmflow",
      [TF_STATUS(WRONG_SAMPLING)] = "temperature, top_k, top_p or the penalty is out of its range, or a token has no logit",
      [TF_STATUS(NOT_TRUNCATED)] = "a state that each step replaces cannot be shortened: reset it",
#endif
#ifdef TF_DEVICE
      [TF_STATUS(NO_DRIVER)] = "the driver of the device is not installed, or too old",
      [TF_STATUS(NO_DEVICE)] = "there is no such device, or it is none that the library was built for",
      [TF_STATUS(KERNEL_REFUSED)] = "the driver of the device does not build or start a kernel of the library",
      [TF_STATUS(DEVICE_LOST)] = "the device does not work any more: make another context",
#endif
      [TF_STATUS(MISALIGNED_MEMORY)] = "allocate returned memory that is not aligned as it was asked to be",
      [TF_STATUS(OK)] = "no error",
      "a pointer that must be given is NULL",
      "the options have another version than the library: compile the program with the library's own header",
      "an option has a value that it cannot have: more threads than the library allows, or allocate without release",
      "the number of inputs or outputs is not the model's, or it has no such output",
      [TF_STATUS(OVERLAP)] = "an output shares memory with an input or another output",
      "the context is in use by another thread: make a context for each thread",
      "there is not enough memory",
      "the system does not start another thread",
      "this CPU lacks an instruction set that the library was built for",
      "a kernel reported an error, or parallel_for did not do every task once",
#ifdef TF_WEIGHTS_HEAD
      "the options have no weights",
      "the weights are not those that were built with this library: use the file beside it",
      "the file of the weights is not complete",
      "the file of the weights cannot be opened or mapped into memory, or is a pipe, a device or a folder",
      "the options have weights in two places, or memory that does not begin at a multiple of 64 bytes",
#endif
  };
  static const char *const wrong_sizes[] = {TF_WRONG_SIZES};
  const size_t tensor = status >= TF_STATUS(WRONG_SIZE) ? (size_t)(status - TF_STATUS(WRONG_SIZE)) : SIZE_MAX;
  if (tensor < sizeof wrong_sizes / sizeof *wrong_sizes) return wrong_sizes[tensor];
#ifdef TF_FAILURES
  static const char *const failures[] = {TF_FAILURES};
  const size_t failure = status >= TF_STATUS(WRONG_VALUE) ? (size_t)(status - TF_STATUS(WRONG_VALUE)) : SIZE_MAX;
  if (failure < sizeof failures / sizeof *failures) return failures[failure];
#endif
  const bool is_known = status >= 0 && (size_t)status < sizeof messages / sizeof *messages && messages[status];
  return is_known ? messages[status] : "unknown error";
}
