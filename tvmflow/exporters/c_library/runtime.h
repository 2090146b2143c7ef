/* What generated code and the runtime share. Each library compiles this with names of its own: TF(name). */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define TF_ALIGNMENT 64

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

typedef void (*tf_hook)(void *user, size_t kernel, uint64_t nanoseconds);

static uint64_t tf_nanoseconds(void);

#define TF_BEGIN(tf, arena, weights, in, out)                             \
  const bool tf_alone = (tf)->threads == 1, tf_hooked = (tf)->hook != NULL; \
  uint64_t tf_start = 0;                                                  \
  (void)(arena), (void)(weights), (void)(in), (void)(out), (void)tf_alone, (void)tf_hooked, (void)tf_start

/* Call a kernel. */
#define TF_CALL(number, call)                                                     \
  do {                                                                              \
    if (tf_hooked) tf_start = tf_nanoseconds();                                     \
    if ((call) != 0) return TF_STATUS(KERNEL_FAILED);                               \
    if (tf_hooked) tf->hook(tf->hook_user, (number), tf_nanoseconds() - tf_start);  \
  } while (0)

