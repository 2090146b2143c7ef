/* What a program may do around a library besides calling it; the first argument is the name of a check. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "digits.h"

#define CHECK(condition)                                                     \
  do {                                                                       \
    if (!(condition)) {                                                      \
      fprintf(stderr, "%s:%d: not %s\n", __FILE__, __LINE__, #condition);    \
      _exit(1);                                                              \
    }                                                                        \
  } while (0)

enum { THREADS = 3 };

static float data[64], expected[10];

static digits_context *create(uint32_t threads) {
  const digits_options options = {.abi = DIGITS_ABI, .threads = threads};
  digits_context *context;
  CHECK(digits_create(&options, &context) == DIGITS_OK);
  return context;
}

static int run(digits_context *context, float *scores) {
  const digits_buffer input = {data, sizeof data}, output = {scores, 10 * sizeof *scores};
  return digits_run(context, &input, 1, &output, 1);
}

static void check_run(digits_context *context) {
  float scores[10];
  CHECK(run(context, scores) == DIGITS_OK);
  CHECK(memcmp(scores, expected, sizeof scores) == 0);
}

static void wait_for(pid_t child) {
  int status;
  CHECK(child > 0 && waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static unsigned count_entries(const char *folder) {
  DIR *entries = opendir(folder);
  unsigned count = 0;
  CHECK(entries);
  while (readdir(entries)) ++count;
  closedir(entries);
  return count;
}

static long resident_pages(void) {
  long size, resident;
  FILE *file = fopen("/proc/self/statm", "r");
  CHECK(file && fscanf(file, "%ld %ld", &size, &resident) == 2);
  fclose(file);
  return resident;
}

/* Children use the context of their parent and one of their own, whatever the parent's threads do meanwhile. */
static void check_fork(void) {
  digits_context *context = create(THREADS);
  for (unsigned i = 0; i < 200; ++i) {
    check_run(context);
    usleep(i % 4 * 20); /* threads look for work, go to sleep, or sleep */
    const pid_t child = fork();
    if (child == 0) {
      alarm(20);
      for (unsigned call = 0; call < 20; ++call) check_run(context);
      digits_context *own = create(THREADS);
      check_run(own);
      if (i % 8 == 0) {
        const pid_t grandchild = fork();
        if (grandchild == 0) {
          check_run(context), check_run(own);
          CHECK(digits_destroy(own) == DIGITS_OK && digits_destroy(context) == DIGITS_OK);
          _exit(0);
        }
        wait_for(grandchild);
      }
      CHECK(digits_destroy(own) == DIGITS_OK && digits_destroy(context) == DIGITS_OK);
      _exit(0);
    }
    wait_for(child);
    check_run(context);
  }
  CHECK(digits_destroy(context) == DIGITS_OK);
}

static atomic_bool is_over;

static void *call_until_over(void *context) {
  while (!atomic_load(&is_over)) check_run(context);
  return NULL;
}

/* A thread that the child does not have was using the context: it is busy forever, and can be destroyed. */
static void check_fork_during_calls(void) {
  digits_context *context = create(THREADS);
  pthread_t thread;
  CHECK(pthread_create(&thread, NULL, call_until_over, context) == 0);
  for (unsigned i = 0; i < 200; ++i) {
    const pid_t child = fork();
    if (child == 0) {
      alarm(20);
      float scores[10];
      const int status = run(context, scores);
      CHECK(status == DIGITS_OK || status == DIGITS_BUSY);
      CHECK(digits_destroy(context) == DIGITS_OK);
      _exit(0);
    }
    wait_for(child);
  }
  atomic_store(&is_over, true);
  pthread_join(thread, NULL);
  CHECK(digits_destroy(context) == DIGITS_OK);
}

static void *call_on_small_stack(void *unused) {
  digits_context *context = create(THREADS);
  for (unsigned call = 0; call < 100; ++call) check_run(context);
  CHECK(digits_destroy(context) == DIGITS_OK);
  return unused;
}

static void check_small_stack(void) {
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  CHECK(pthread_attr_setstacksize(&attributes, 64 << 10) == 0);
  pthread_t thread;
  CHECK(pthread_create(&thread, &attributes, call_on_small_stack, NULL) == 0);
  pthread_join(thread, NULL);
}

/* No leak of memory, threads or open files; whether the threads have begun to wait or not. */
static void check_lifetimes(void) {
  long pages = 0;
  const unsigned threads = count_entries("/proc/self/task"), files = count_entries("/proc/self/fd");
  for (unsigned i = 0; i < 10000; ++i) {
    digits_context *context = create(THREADS);
    if (i % 2) check_run(context);
    if (i % 500 == 1) usleep(200);
    CHECK(digits_destroy(context) == DIGITS_OK);
    if (i == 1000) pages = resident_pages();
  }
  CHECK(resident_pages() - pages < 64);
  CHECK(count_entries("/proc/self/task") == threads);
  CHECK(count_entries("/proc/self/fd") == files);
}

static pthread_t main_thread;
static volatile sig_atomic_t signals, is_elsewhere;

static void count_signal(int signal) {
  (void)signal;
  ++signals;
  if (!pthread_equal(pthread_self(), main_thread)) is_elsewhere = 1;
}

/* Signals of the process interrupt its own threads alone. */
static void check_signals(void) {
  main_thread = pthread_self();
  signal(SIGUSR1, count_signal);
  digits_context *context = create(THREADS);
  for (unsigned i = 0; i < 1000; ++i) {
    CHECK(kill(getpid(), SIGUSR1) == 0);
    check_run(context);
  }
  CHECK(signals == 1000 && !is_elsewhere);
  CHECK(digits_destroy(context) == DIGITS_OK);
}

/* The threads have the model's name in `top` and debuggers; the program's own thread keeps its name. */
static void check_names(void) {
  digits_context *context = create(THREADS);
  check_run(context);
  usleep(20000);
  unsigned named = 0;
  DIR *tasks = opendir("/proc/self/task");
  for (struct dirent *task; (task = readdir(tasks));) {
    char path[PATH_MAX], name[32] = "";
    snprintf(path, sizeof path, "/proc/self/task/%s/comm", task->d_name);
    FILE *file = fopen(path, "r");
    if (file && fgets(name, sizeof name, file)) named += strcmp(name, "digits\n") == 0;
    if (file) fclose(file);
  }
  closedir(tasks);
  CHECK(named == THREADS - 1);
  CHECK(digits_destroy(context) == DIGITS_OK);
}

/* A library is loaded, used and unloaded; nothing of it stays. */
static void check_unloading(const char *library) {
  for (unsigned i = 0; i < 100; ++i) {
    void *handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
    CHECK(handle);
    __typeof__(digits_create) *create = (__typeof__(create))dlsym(handle, "digits_create");
    __typeof__(digits_run) *run = (__typeof__(run))dlsym(handle, "digits_run");
    __typeof__(digits_destroy) *destroy = (__typeof__(destroy))dlsym(handle, "digits_destroy");
    const digits_options options = {.abi = DIGITS_ABI, .threads = THREADS};
    digits_context *context;
    float scores[10];
    const digits_buffer input = {data, sizeof data}, output = {scores, sizeof scores};
    CHECK(create(&options, &context) == DIGITS_OK);
    CHECK(run(context, &input, 1, &output, 1) == DIGITS_OK);
    CHECK(memcmp(scores, expected, sizeof scores) == 0);
    CHECK(destroy(context) == DIGITS_OK);
    CHECK(dlclose(handle) == 0);
    CHECK(!dlopen(library, RTLD_NOW | RTLD_NOLOAD));
  }
}

/* A system that starts no more threads is an error, and the program goes on. */
static void check_limits(void) {
  struct rlimit before, limited;
  CHECK(getrlimit(RLIMIT_AS, &before) == 0);
  limited = before;
  long size;
  FILE *file = fopen("/proc/self/statm", "r");
  CHECK(file && fscanf(file, "%ld", &size) == 1);
  fclose(file);
  limited.rlim_cur = (rlim_t)(size * sysconf(_SC_PAGESIZE)) + (16 << 20);
  CHECK(setrlimit(RLIMIT_AS, &limited) == 0);
  const digits_options options = {.abi = DIGITS_ABI, .threads = 64};
  digits_context *context = (digits_context *)data;
  CHECK(digits_create(&options, &context) == DIGITS_NO_THREADS && context == NULL);
  CHECK(setrlimit(RLIMIT_AS, &before) == 0);
  context = create(64);
  check_run(context);
  CHECK(digits_destroy(context) == DIGITS_OK);
}

/* exit() with threads that look for work, and with sleeping ones. */
static void check_exit(void) {
  for (unsigned i = 0; i < 200; ++i) {
    const pid_t child = fork();
    if (child == 0) {
      alarm(20);
      check_run(create(THREADS));
      usleep(i % 4 * 20);
      exit(0);
    }
    wait_for(child);
  }
}

int main(int count, char **arguments) {
  for (int i = 0; i < 64; ++i) data[i] = (float)(i % 17);
  digits_context *context = create(1);
  CHECK(run(context, expected) == DIGITS_OK);
  CHECK(digits_destroy(context) == DIGITS_OK);
  const char *check = count > 1 ? arguments[1] : "";
  if (strcmp(check, "fork") == 0) check_fork();
  else if (strcmp(check, "fork during calls") == 0) check_fork_during_calls();
  else if (strcmp(check, "small stack") == 0) check_small_stack();
  else if (strcmp(check, "lifetimes") == 0) check_lifetimes();
  else if (strcmp(check, "signals") == 0) check_signals();
  else if (strcmp(check, "names") == 0) check_names();
  else if (strcmp(check, "unloading") == 0) check_unloading(arguments[2]);
  else if (strcmp(check, "limits") == 0) check_limits();
  else if (strcmp(check, "exit") == 0) check_exit();
  else CHECK(!"a check has this name");
}
