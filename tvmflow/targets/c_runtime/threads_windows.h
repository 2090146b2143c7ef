/* POSIX threads and the clock for the runtime, by functions of Windows. */
#define WIN32_LEAN_AND_MEAN
#include <windows.h>
#include <malloc.h>

typedef SRWLOCK pthread_mutex_t;
typedef CONDITION_VARIABLE pthread_cond_t;
typedef HANDLE pthread_t;
typedef SIZE_T pthread_attr_t; /* the size of the stack */

static inline int pthread_mutex_init(pthread_mutex_t *mutex, const void *attributes) {
  (void)attributes;
  *mutex = (SRWLOCK)SRWLOCK_INIT;
  return 0;
}

static inline void pthread_mutex_destroy(pthread_mutex_t *mutex) { (void)mutex; }

static inline void pthread_mutex_lock(pthread_mutex_t *mutex) { AcquireSRWLockExclusive(mutex); }

static inline void pthread_mutex_unlock(pthread_mutex_t *mutex) { ReleaseSRWLockExclusive(mutex); }

static inline void sched_yield(void) { SwitchToThread(); }

static inline int pthread_cond_init(pthread_cond_t *condition, const void *attributes) {
  (void)attributes;
  *condition = (CONDITION_VARIABLE)CONDITION_VARIABLE_INIT;
  return 0;
}

static inline void pthread_cond_destroy(pthread_cond_t *condition) { (void)condition; }

static inline void pthread_cond_wait(pthread_cond_t *condition, pthread_mutex_t *mutex) {
  SleepConditionVariableSRW(condition, mutex, INFINITE, 0);
}

static inline void pthread_cond_signal(pthread_cond_t *condition) { WakeConditionVariable(condition); }

static inline void pthread_cond_broadcast(pthread_cond_t *condition) { WakeAllConditionVariable(condition); }

static inline void pthread_attr_init(pthread_attr_t *attributes) { *attributes = 0; }

static inline void pthread_attr_setstacksize(pthread_attr_t *attributes, size_t bytes) { *attributes = bytes; }

static inline void pthread_attr_destroy(pthread_attr_t *attributes) { (void)attributes; }

static void *tf_serve(void *worker);

static DWORD WINAPI tf_serve_windows(void *worker) {
  tf_serve(worker);
  return 0;
}

/* All threads of the runtime run the same function. */
static inline int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*serve)(void *), void *worker) {
  (void)serve;
  *thread = CreateThread(NULL, *attributes, tf_serve_windows, worker, STACK_SIZE_PARAM_IS_A_RESERVATION, NULL);
  return *thread ? 0 : -1;
}

static inline void pthread_join(pthread_t thread, void **result) {
  (void)result;
  WaitForSingleObject(thread, INFINITE);
  CloseHandle(thread);
}

/* The CPUs that the process may use; with more than 64 in the machine, those of its group. */
static inline long tf_count_windows_cpus(void) {
  DWORD_PTR own = 0, all = 0;
  if (!GetProcessAffinityMask(GetCurrentProcess(), &own, &all)) return 1;
  return __builtin_popcountll(own);
}

static inline uint64_t tf_nanoseconds(void) {
  LARGE_INTEGER now, frequency; /* of a second */
  QueryPerformanceCounter(&now);
  QueryPerformanceFrequency(&frequency);
  const uint64_t count = (uint64_t)now.QuadPart, second = (uint64_t)frequency.QuadPart;
  return count / second * 1000000000u + count % second * 1000000000u / second;
}
