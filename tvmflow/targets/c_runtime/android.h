/* Declarations of Android's C library (bionic) since Android 5, whose headers are not installed with tvmflow. */

#ifdef __LP64__
#define TF_LP64(bits64, bits32) bits64
#else
#define TF_LP64(bits64, bits32) bits32
#endif

void *memcpy(void *target, const void *source, size_t bytes);
void *memset(void *target, int value, size_t bytes);
int strcmp(const char *left, const char *right);
int strncmp(const char *left, const char *right, size_t bytes);
int memcmp(const void *left, const void *right, size_t bytes);
size_t strlen(const char *text);
char *strstr(const char *text, const char *part);
char *getenv(const char *name);
int posix_memalign(void **memory, size_t alignment, size_t bytes);
void *calloc(size_t count, size_t bytes);
void *malloc(size_t bytes);
void free(void *memory);
_Noreturn void abort(void);

struct timespec {
  long tv_sec, tv_nsec;
};
#define CLOCK_MONOTONIC 1
#define TIME_UTC 1
int clock_gettime(int clock, struct timespec *now);
/* bionic has it since Android 10. */
static inline int timespec_get(struct timespec *now, int base) { return clock_gettime(0, now) == 0 ? base : 0; }

/* The processors: bionic's set of them has 1024 bits, or 32. */
typedef struct {
  unsigned long bits[TF_LP64(16, 1)];
} cpu_set_t;
#define TF_CPU_BITS (8 * sizeof(unsigned long))
static inline void tf_cpu_clear(size_t cpu, cpu_set_t *set) {
  if (cpu < 8 * sizeof *set) set->bits[cpu / TF_CPU_BITS] &= ~(1ul << cpu % TF_CPU_BITS);
}
static inline int tf_cpu_count(const cpu_set_t *set) {
  int count = 0;
  for (size_t i = 0; i < sizeof set->bits / sizeof *set->bits; ++i) count += __builtin_popcountl(set->bits[i]);
  return count;
}
#define CPU_CLR(cpu, set) tf_cpu_clear((size_t)(cpu), set)
#define CPU_COUNT(set) tf_cpu_count(set)
int sched_getcpu(void);
int sched_yield(void);
int sched_getaffinity(int process, size_t bytes, cpu_set_t *set);
int sched_setaffinity(int process, size_t bytes, const cpu_set_t *set);
#define _SC_NPROCESSORS_ONLN 0x61
long sysconf(int name);
unsigned long getauxval(unsigned long type);

typedef int pid_t;
pid_t getpid(void);

typedef long pthread_t;
typedef int pthread_key_t;
typedef struct {
  int32_t content[TF_LP64(10, 1)];
} pthread_mutex_t;
typedef struct {
  int32_t content[TF_LP64(12, 1)];
} pthread_cond_t;
typedef struct {
  void *content[TF_LP64(7, 6)];
} pthread_attr_t;
#define PTHREAD_MUTEX_INITIALIZER {{0}}
int pthread_mutex_init(pthread_mutex_t *mutex, const long *attributes);
int pthread_mutex_lock(pthread_mutex_t *mutex);
int pthread_mutex_unlock(pthread_mutex_t *mutex);
int pthread_mutex_destroy(pthread_mutex_t *mutex);
int pthread_cond_init(pthread_cond_t *condition, const long *attributes);
int pthread_cond_wait(pthread_cond_t *condition, pthread_mutex_t *mutex);
int pthread_cond_signal(pthread_cond_t *condition);
int pthread_cond_broadcast(pthread_cond_t *condition);
int pthread_cond_destroy(pthread_cond_t *condition);
int pthread_attr_init(pthread_attr_t *attributes);
int pthread_attr_setstacksize(pthread_attr_t *attributes, size_t bytes);
int pthread_attr_destroy(pthread_attr_t *attributes);
int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*function)(void *), void *argument);
int pthread_join(pthread_t thread, void **result);
pthread_t pthread_self(void);
int pthread_setname_np(pthread_t thread, const char *name);
int pthread_key_create(pthread_key_t *key, void (*release)(void *));
void *pthread_getspecific(pthread_key_t key);
int pthread_setspecific(pthread_key_t key, const void *value);

typedef unsigned long sigset_t;
#define SIG_SETMASK 2
int sigfillset(sigset_t *set);
int pthread_sigmask(int how, const sigset_t *set, sigset_t *before);

void *dlopen(const char *path, int flags);
void *dlsym(void *library, const char *name);
#define RTLD_NOW TF_LP64(2, 0)
#define RTLD_LOCAL 0

/* Files of weights and of code. Linux for ARM and x86 has the same numbers. */
#define O_RDONLY 0
#define O_WRONLY 1
#define O_CREAT 0100
#define O_EXCL 0200
#define O_NONBLOCK 04000
#define O_CLOEXEC 02000000
int open(const char *path, int flags, ...);
int close(int file);
typedef long ssize_t;
ssize_t read(int file, void *target, size_t bytes);
ssize_t write(int file, const void *source, size_t bytes);
int rename(const char *before, const char *after);
int unlink(const char *path);
unsigned geteuid(void);
struct stat {
#if defined(__x86_64__)
  uint64_t st_dev, st_ino, st_nlink;
  uint32_t st_mode, st_uid, st_gid, padding;
  uint64_t st_rdev;
#elif defined(__aarch64__)
  uint64_t st_dev, st_ino;
  uint32_t st_mode, st_nlink, st_uid, st_gid;
  uint64_t st_rdev, padding;
#else
  uint64_t st_dev;
  uint32_t padding, st_ino_low, st_mode, st_nlink, st_uid, st_gid;
  uint64_t st_rdev;
  uint64_t padding_after;
#endif
  int64_t st_size;
  uint64_t rest[16];
};
#define S_ISREG(mode) (((mode) & 0170000) == 0100000)
int fstat(int file, struct stat *found);
#define PROT_READ 1
#define MAP_SHARED 1
#define MAP_FAILED ((void *)-1)
void *mmap(void *address, size_t bytes, int protection, int flags, int file, long offset);
int munmap(void *address, size_t bytes);
