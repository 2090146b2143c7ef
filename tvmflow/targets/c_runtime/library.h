/* %(title)s
 *
%(tensors)s
 *
 * Needs the C library, its mathematical functions and, where the system has them, threads%(needs)s; nothing else.
 *
 *   %(name)s_context *context;
%(create)s
 *   if (status != %(NAME)s_OK) fail(%(name)s_message(status));
 *   status = %(name)s_run(context, inputs, %(NAME)s_INPUTS, outputs, %(NAME)s_OUTPUTS);
 *   %(name)s_destroy(context);
 */
#ifndef %(NAME)s_H_
#define %(NAME)s_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* What stands before each function. */
#ifndef %(NAME)s_API
#define %(NAME)s_API
#endif

/* The version of this interface. A program that was compiled with another one gets WRONG_VERSION. */
#define %(NAME)s_ABI %(abi)s

/* The numbers of inputs and outputs, and the place of each. */
%(places)s
%(memory)s
/* What functions return. */
enum {
  %(NAME)s_OK = 0,
  %(NAME)s_NULL_ARGUMENT = 1,   /* a pointer that must be given is NULL */
  %(NAME)s_WRONG_VERSION = 2,   /* the options are those of another version of this header */
  %(NAME)s_WRONG_OPTION = 3,    /* an option has a value that it cannot have */
  %(NAME)s_WRONG_COUNT = 4,     /* too few or too many inputs or outputs, or there is no such output */
  %(NAME)s_OVERLAP = 6,         /* an output shares memory with an input or another output */
  %(NAME)s_BUSY = 7,            /* the context is in use: one call at a time; make one context a thread */
  %(NAME)s_NO_MEMORY = 8,       /* there is not enough memory */
  %(NAME)s_NO_THREADS = 9,      /* the system does not start another thread */
  %(NAME)s_MISSING_FEATURE = 10, /* the CPU lacks an instruction set that the library was built for */
  %(NAME)s_KERNEL_FAILED = 11,  /* a kernel reported an error, or parallel_for did not do every task once */
  %(NAME)s_MISALIGNED_MEMORY = 17, /* allocate returned memory that is not aligned as it was asked to be */
  /* This, and all above up to the next: an index is out of range, or a divisor is 0. The message names the input or
   * operator. */
  %(NAME)s_WRONG_VALUE = 1000,
  /* This, and all above: a tensor has another size than the model's, by its place among the inputs, then the outputs. The
   * message names it. */
  %(NAME)s_WRONG_SIZE = 65536
};
%(weights_statuses)s%(dimension_statuses)s
/* A model that is ready to run, with memory and threads of its own. The weights are shared by all. */
typedef struct %(name)s_context %(name)s_context;

/* A tensor in the caller's memory: dense, in C order, with any alignment; 64 bytes spare a copy. */
typedef struct {
  void *data;
  size_t bytes;
} %(name)s_buffer;

/* The same for an input in constant memory: inputs are only read. For %(name)s_run_const. */
typedef struct {
  const void *data;
  size_t bytes;
} %(name)s_input;

/* An input or output of the model; `dtype` is NumPy's name: float32, int64, bool, ... */
typedef struct {
  const char *name;
  const char *dtype;
  const int64_t *shape;
  size_t rank;
  size_t bytes;
} %(name)s_tensor;

/* All members may be 0 but `abi`%(required)s. */
typedef struct {
  uint32_t abi;     /* %(NAME)s_ABI */
  /* The caller's included; 0: one for each CPU that the process may use, at most %(threads)s. No more are started than the
   * largest kernel is worth. */
  uint32_t threads;
  /* Memory aligned to `alignment` bytes, and its return; by default the C library's, if there is a system. */
  void *(*allocate)(void *user, size_t bytes, size_t alignment);
  void (*release)(void *user, void *memory);
  /* Calls body(argument, task) once for each task below `tasks`, on any threads, and returns when all have returned. In
   * place of threads of the library's own. */
  void (*parallel_for)(void *user, uint32_t tasks, void (*body)(void *argument, uint32_t task), void *argument);
  void *user; /* the first argument of these functions */
%(weights_options)s} %(name)s_options;

/* Make a context.%(optional)s */
%(NAME)s_API int %(name)s_create(const %(name)s_options *options, %(name)s_context **context);

/* Compute the outputs. The context is not usable by another thread meanwhile. After fork(), the child has the context
 * without its threads: it computes on the caller's alone. */
%(NAME)s_API int %(name)s_run(%(name)s_context *context, const %(name)s_buffer *inputs, size_t input_count,
    const %(name)s_buffer *outputs, size_t output_count);

/* The same with inputs in constant memory. */
static inline int %(name)s_run_const(%(name)s_context *context, const %(name)s_input *inputs, size_t input_count,
    const %(name)s_buffer *outputs, size_t output_count) {
  %(name)s_buffer read[%(NAME)s_INPUTS + 1];
  size_t i;
  if (input_count != %(NAME)s_INPUTS) return %(NAME)s_WRONG_COUNT;
  if (!inputs && input_count) return %(NAME)s_NULL_ARGUMENT;
  for (i = 0; i < input_count; ++i) {
    read[i].data = (void *)(uintptr_t)inputs[i].data;
    read[i].bytes = inputs[i].bytes;
  }
  return %(name)s_run(context, read, input_count, outputs, output_count);
}

/* Stop the threads of a context and free its memory: before the library is unloaded. NULL is allowed. */
%(NAME)s_API int %(name)s_destroy(%(name)s_context *context);

/* The inputs (%(NAME)s_INPUTS of them) and outputs (%(NAME)s_OUTPUTS) of the model. */
%(NAME)s_API const %(name)s_tensor *%(name)s_inputs(void);
%(NAME)s_API const %(name)s_tensor *%(name)s_outputs(void);

/* The axis of an output whose size is known only after a call, and is at most that of the description; -1 for none. */
%(NAME)s_API int %(name)s_bounded_axis(size_t output);

/* Write the sizes that an output has after the last call, as many as the description has. The values are the first ones
 * of the output's memory; the rest of that is undefined. */
%(NAME)s_API int %(name)s_output_shape(%(name)s_context *context, size_t output, int64_t *shape);

%(dimension_functions)s/* A sentence for what a function returned. */
%(NAME)s_API const char *%(name)s_message(int status);

/* The CPU feature that MISSING_FEATURE is about, by the Linux kernel's name; NULL where none is missing. */
%(NAME)s_API const char *%(name)s_missing_feature(void);

/* The threads of a context, the caller's included. */
%(NAME)s_API uint32_t %(name)s_threads(const %(name)s_context *context);

/* The kernels in the order of their first call, %(name)s_kernel_count() of them. */
%(NAME)s_API size_t %(name)s_kernel_count(void);
%(NAME)s_API const char *%(name)s_kernel_name(size_t kernel);

/* Let a function be called after each kernel with its number and the nanoseconds that it took; NULL: no more. */
%(NAME)s_API int %(name)s_profile(
    %(name)s_context *context, void (*hook)(void *user, size_t kernel, uint64_t nanoseconds), void *user);

#ifdef __cplusplus
}
#endif

#endif
