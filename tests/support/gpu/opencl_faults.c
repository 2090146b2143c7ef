/* Lets each call of OpenCL's driver that a library makes fail in turn. It is linked with -Wl,--wrap=dlsym, which gives the
 * library the functions below in place of the driver's.
 *
 * Whatever fails, the library returns a code with a text, releases all that it made, and a context that is made afterwards
 * works. Arguments: what the call returns, and whether all calls after it fail as well, but for releases. */
#include "library.h"
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef void *object;
typedef const void *in;
void *__real_dlsym(void *, const char *);

/* M makes an object, K keeps one, R releases one, L launches and may make an event, W waits even where it fails, D does
 * something, and A asks something that may stay without an answer. */
#define FUNCTIONS(F)                                                                                                        \
  F(D, GetPlatformIDs, (unsigned a, object *b, unsigned *c), (a, b, c))                                                     \
  F(A, GetDeviceIDs, (object a, uint64_t b, unsigned c, object *d, unsigned *e), (a, b, c, d, e))                           \
  F(D, GetDeviceInfo, (object a, unsigned b, size_t c, void *d, size_t *e), (a, b, c, d, e))                                \
  F(M, CreateContext, (in a, unsigned b, const object *c, void *d, void *e, int *error), (a, b, c, d, e, error))            \
  F(K, RetainContext, (object a), (a))                                                                                      \
  F(R, ReleaseContext, (object a), (a))                                                                                     \
  F(M, CreateCommandQueue, (object a, object b, uint64_t c, int *error), (a, b, c, error))                                  \
  F(K, RetainCommandQueue, (object a), (a))                                                                                 \
  F(R, ReleaseCommandQueue, (object a), (a))                                                                                \
  F(M, CreateProgramWithSource, (object a, unsigned b, const char **c, const size_t *d, int *error), (a, b, c, d, error))   \
  F(M, CreateProgramWithBinary,                                                                                             \
    (object a, unsigned b, const object *c, const size_t *d, const unsigned char *const *e, int *f, int *error),            \
    (a, b, c, d, e, f, error))                                                                                              \
  F(A, GetProgramInfo, (object a, unsigned b, size_t c, void *d, size_t *e), (a, b, c, d, e))                               \
  F(D, BuildProgram, (object a, unsigned b, const object *c, const char *d, void *e, void *f), (a, b, c, d, e, f))          \
  F(A, GetProgramBuildInfo, (object a, object b, unsigned c, size_t d, void *e, size_t *f), (a, b, c, d, e, f))             \
  F(R, ReleaseProgram, (object a), (a))                                                                                     \
  F(M, CreateKernel, (object a, const char *b, int *error), (a, b, error))                                                  \
  F(A, GetKernelWorkGroupInfo, (object a, object b, unsigned c, size_t d, void *e, size_t *f), (a, b, c, d, e, f))          \
  F(D, SetKernelArg, (object a, unsigned b, size_t c, in d), (a, b, c, d))                                                  \
  F(R, ReleaseKernel, (object a), (a))                                                                                      \
  F(M, CreateBuffer, (object a, uint64_t b, size_t c, void *d, int *error), (a, b, c, d, error))                            \
  F(M, CreateSubBuffer, (object a, uint64_t b, unsigned c, in d, int *error), (a, b, c, d, error))                          \
  F(R, ReleaseMemObject, (object a), (a))                                                                                   \
  F(D, EnqueueWriteBuffer, (object a, object b, unsigned c, size_t d, size_t e, in f, unsigned g, in h, object *i),         \
    (a, b, c, d, e, f, g, h, i))                                                                                            \
  F(D, EnqueueReadBuffer, (object a, object b, unsigned c, size_t d, size_t e, void *f, unsigned g, in h, object *i),       \
    (a, b, c, d, e, f, g, h, i))                                                                                            \
  F(D, EnqueueCopyBuffer, (object a, object b, object c, size_t d, size_t e, size_t f, unsigned g, in h, object *i),        \
    (a, b, c, d, e, f, g, h, i))                                                                                            \
  F(L, EnqueueNDRangeKernel,                                                                                                \
    (object a, object b, unsigned c, const size_t *d, const size_t *e, const size_t *f, unsigned g, in h, object *event),   \
    (a, b, c, d, e, f, g, h, event))                                                                                        \
  F(W, WaitForEvents, (unsigned a, const object *b), (a, b))                                                                \
  F(A, GetEventProfilingInfo, (object a, unsigned b, size_t c, void *d, size_t *e), (a, b, c, d, e))                        \
  F(R, ReleaseEvent, (object a), (a))                                                                                       \
  F(W, Finish, (object a), (a))

#define NUMBER(kind, name, parameters, arguments) N_##name,
enum { FUNCTIONS(NUMBER) COUNT };
#define NAME(kind, name, parameters, arguments) "cl" #name,
static const char *const names[] = {FUNCTIONS(NAME)};

static void *real[COUNT];
static int calls[COUNT], code, objects, contexts, failing = -1, failing_call;
static bool stays, has_failed;

static bool fails(int function) {
  const bool is_it = calls[function]++ == failing_call && function == failing;
  if (is_it) has_failed = true;
  return is_it || (stays && has_failed);
}

#define TYPE_M object
#define TYPE_K int
#define TYPE_R int
#define TYPE_L int
#define TYPE_D int
#define TYPE_W int
#define TYPE_A int
#define FAIL_M(function) if (fails(function)) return *error = code, NULL
#define FAIL_D(function) if (fails(function)) return code
#define FAIL_K FAIL_D
#define FAIL_L FAIL_D
#define FAIL_A FAIL_D
#define FAIL_R(function) const int refused = fails(function) && !stays ? code : 0
#define FAIL_W(function) const int refused = fails(function) ? code : 0
#define COUNT_M objects += result != NULL
#define COUNT_K objects += result == 0
#define COUNT_L objects += result == 0 && event
#define COUNT_R objects -= result == 0; if (refused) return refused
#define COUNT_W if (refused) return refused
#define COUNT_D (void)0
#define COUNT_A (void)0
#define DEFINE(kind, name, parameters, arguments)      \
  static TYPE_##kind fake_##name parameters {          \
    FAIL_##kind(N_##name);                             \
    TYPE_##kind(*function) parameters;                 \
    memcpy(&function, &real[N_##name], sizeof(void *)); \
    const TYPE_##kind result = function arguments;     \
    COUNT_##kind;                                      \
    return result;                                     \
  }
FUNCTIONS(DEFINE)

void *__wrap_dlsym(void *library, const char *name) {
#define FIND(kind, function, parameters, arguments)           \
  if (!strcmp(name, "cl" #function)) {                        \
    real[N_##function] = __real_dlsym(library, name);         \
    TYPE_##kind(*found) parameters = fake_##function;         \
    void *address;                                            \
    memcpy(&address, &found, sizeof address);                 \
    return address;                                           \
  }
  FUNCTIONS(FIND)
  return __real_dlsym(library, name);
}

/* ------------------------------------------------------------------ what the program does */

static float image[64], expected[10];
static const net_buffer input = {image, sizeof image};
static uint64_t measured;

static void add(void *user, size_t kernel, uint64_t nanoseconds) { measured += nanoseconds + (user ? kernel : 0); }

/* Check that an error has a text, and return it. */
static int checked(int status) {
  if (status == NET_OK) return status;
  const bool is_known = status == NET_NO_MEMORY || (status >= NET_NO_DRIVER && status <= NET_DEVICE_LOST);
  if (!is_known || !*net_device_error()) printf("status %d without a text\n", status), exit(1);
  if (!strcmp(net_message(status), "unknown error")) printf("no message for %d\n", status), exit(1);
  return status;
}

static int run(net_context *context) {
  float scores[10];
  const net_buffer output = {scores, sizeof scores};
  const int status = checked(net_run(context, &input, 1, &output, 1));
  if (status == NET_OK && memcmp(scores, expected, sizeof scores)) printf("other scores\n"), exit(1);
  /* a lost device stays lost */
  if (status == NET_DEVICE_LOST && checked(net_run(context, &input, 1, &output, 1)) != status) printf("not lost\n"), exit(1);
  return status;
}

/* Two contexts of the library's own, one of which is measured. */
static int use_own(void) {
  net_context *contexts_here[2] = {NULL, NULL};
  int status = NET_OK;
  for (int i = 0; i < 2 && status == NET_OK; ++i) status = checked(net_create(NULL, &contexts_here[i]));
  if (status == NET_OK) net_profile(contexts_here[1], add, NULL);
  for (int i = 0; i < 3 && status == NET_OK; ++i) status = run(contexts_here[i % 2]);
  if (status == NET_DEVICE_LOST && contexts_here[1] && !stays) {
    /* what was lost is left to those that have it */
    net_context *other;
    failing = -1;
    if (checked(net_create(NULL, &other)) != NET_OK || run(other) != NET_OK) printf("no device after a lost one\n"), exit(1);
    net_destroy(other);
  }
  for (int i = 0; i < 2; ++i) net_destroy(contexts_here[i]);
  return status;
}

#define REAL(type, name, parameters) \
  type(*name) parameters;            \
  memcpy(&name, &real[N_##name], sizeof(void *))

/* A context in the program's own one, with its queue and memory. */
static int use_given(void) {
  REAL(int, GetPlatformIDs, (unsigned, object *, unsigned *));
  REAL(int, GetDeviceIDs, (object, uint64_t, unsigned, object *, unsigned *));
  REAL(object, CreateContext, (in, unsigned, const object *, void *, void *, int *));
  REAL(object, CreateCommandQueue, (object, object, uint64_t, int *));
  REAL(object, CreateBuffer, (object, uint64_t, size_t, void *, int *));
  REAL(int, EnqueueWriteBuffer, (object, object, unsigned, size_t, size_t, in, unsigned, in, object *));
  REAL(int, EnqueueReadBuffer, (object, object, unsigned, size_t, size_t, void *, unsigned, in, object *));
  REAL(int, ReleaseMemObject, (object));
  REAL(int, ReleaseCommandQueue, (object));
  REAL(int, ReleaseContext, (object));
  object platform, device;
  if (GetPlatformIDs(1, &platform, NULL) || GetDeviceIDs(platform, 0xFFFFFFFF, 1, &device, NULL)) exit(2);
  object own = CreateContext(NULL, 1, &device, NULL, NULL, NULL), queue = CreateCommandQueue(own, device, 0, NULL);
  object memory[] = {CreateBuffer(own, 1, sizeof image, NULL, NULL), CreateBuffer(own, 1, sizeof expected, NULL, NULL)};
  float scores[10] = {0};
  EnqueueWriteBuffer(queue, memory[0], 1, 0, sizeof image, image, 0, NULL, NULL);
  net_context *context = NULL;
  int status = checked(net_create_on(NULL, &(net_device){.context = own, .device = device, .queue = queue}, &context));
  for (size_t i = 0; i < 2 && status == NET_OK; ++i) status = net_use_device_memory(context, i, memory[i]);
  if (status == NET_OK) status = checked(net_enqueue(context));
  if (status == NET_OK) status = checked(net_wait(context));
  if (status == NET_OK) {
    EnqueueReadBuffer(queue, memory[1], 1, 0, sizeof scores, scores, 0, NULL, NULL);
    if (memcmp(scores, expected, sizeof scores)) printf("other scores on the device\n"), exit(1);
  }
  net_destroy(context);
  for (size_t i = 0; i < 2; ++i) ReleaseMemObject(memory[i]);
  ReleaseCommandQueue(queue);
  ReleaseContext(own);
  return status;
}

int main(int count, char **arguments) {
  if (count != 3) return 2;
  code = atoi(arguments[1]);
  stays = atoi(arguments[2]);
  for (int i = 0; i < 64; ++i) image[i] = (float)i / 64;
  net_context *context;
  const net_buffer output = {expected, sizeof expected};
  if (net_create(NULL, &context) || net_run(context, &input, 1, &output, 1)) return 2;
  net_destroy(context);

  int (*const uses[])(void) = {use_own, use_given};
  int failed = 0, passed = 0;
  for (int use = 0; use < 2; ++use) {
    int most[COUNT];
    has_failed = false;
    memset(calls, 0, sizeof calls);
    if (uses[use]() != NET_OK) return printf("the use %d fails\n", use), 1;
    memcpy(most, calls, sizeof most);
    for (int function = 0; function < COUNT; ++function) {
      for (int call = 0; call < most[function]; ++call) {
        memset(calls, 0, sizeof calls);
        has_failed = false;
        failing = function;
        failing_call = call;
        const int status = uses[use]();
        const bool was_reached = has_failed;
        failing = -1;
        has_failed = false;
        status == NET_OK ? ++passed : ++failed;
        if (objects) return printf("%d objects are left after %s %d\n", objects, names[function], call), 1;
        if (!was_reached) return printf("%s %d is not reached\n", names[function], call), 1;
        /* the next use shows it for all others */
        if (status == NET_OK || call + 1 < most[function]) continue;
        if (net_create(NULL, &context) || run(context)) return printf("nothing works after %s %d\n", names[function], call), 1;
        net_destroy(context);
      }
    }
  }
  printf("%d errors, %d without\n", failed, passed);
  return 0;
}
