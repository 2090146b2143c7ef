/* A library with code for several levels of CPUs. Each level is a library inside it with names of its own. A context
 * belongs to the best level that the CPU has; all levels share the weights. */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef _WIN32
#define WIN32_LEAN_AND_MEAN
#include <windows.h>
#endif

#include "cpu.c"

/* Contexts begin at a multiple of this, and the low bits of a handle are the level. */
#define TF_ALIGNMENT 64
#define TF_MAX_THREADS 1024

typedef TF(context) tf_context;
typedef TF(buffer) tf_buffer;
typedef TF(tensor) tf_tensor;
typedef TF(options) tf_options;
typedef void (*tf_hook)(void *user, size_t kernel, uint64_t nanoseconds);

#define TF_DECLARE(prefix)                                                                                   \
  int prefix##_create(const tf_options *, tf_context **);                                                    \
  int prefix##_run(tf_context *, const tf_buffer *, size_t, const tf_buffer *, size_t);                      \
  int prefix##_destroy(tf_context *);                                                                        \
  const tf_tensor *prefix##_inputs(void);                                                                    \
  const tf_tensor *prefix##_outputs(void);                                                                   \
  int prefix##_bounded_axis(size_t);                                                                         \
  int prefix##_output_shape(tf_context *, size_t, int64_t *);                                                \
  const char *prefix##_message(int);                                                                         \
  uint32_t prefix##_threads(const tf_context *);                                                             \
  size_t prefix##_kernel_count(void);                                                                        \
  const char *prefix##_kernel_name(size_t);                                                                  \
  int prefix##_profile(tf_context *, tf_hook, void *);
#define TF_FUNCTIONS(prefix)                                                                                 \
  prefix##_create, prefix##_run, prefix##_destroy, prefix##_inputs, prefix##_outputs, prefix##_bounded_axis, \
      prefix##_output_shape, prefix##_message, prefix##_threads, prefix##_kernel_count, prefix##_kernel_name, \
      prefix##_profile

#ifdef TF_DIMENSIONS
typedef TF(dimension) tf_dimension;
#define TF_DECLARE_DIMENSIONS(prefix)                                        \
  const tf_dimension *prefix##_dimensions(void);                             \
  int prefix##_set_dimension(tf_context *, size_t, int64_t);                 \
  int64_t prefix##_get_dimension(const tf_context *, size_t);                \
  int prefix##_set_input_shape(tf_context *, size_t, const int64_t *, size_t); \
  int prefix##_input_shape(tf_context *, size_t, int64_t *);                 \
  int prefix##_input_bytes(tf_context *, size_t, size_t *);                  \
  int prefix##_output_bytes(tf_context *, size_t, size_t *);
#define TF_DIMENSION_FUNCTIONS(prefix)                                                       \
  , prefix##_dimensions, prefix##_set_dimension, prefix##_get_dimension, prefix##_set_input_shape, \
      prefix##_input_shape, prefix##_input_bytes, prefix##_output_bytes
#else
#define TF_DECLARE_DIMENSIONS(prefix)
#define TF_DIMENSION_FUNCTIONS(prefix)
#endif

typedef struct {
  const char *name;
  const char *const *features; /* that the level before lacks */
  int (*create)(const tf_options *, tf_context **);
  int (*run)(tf_context *, const tf_buffer *, size_t, const tf_buffer *, size_t);
  int (*destroy)(tf_context *);
  const tf_tensor *(*inputs)(void);
  const tf_tensor *(*outputs)(void);
  int (*bounded_axis)(size_t);
  int (*output_shape)(tf_context *, size_t, int64_t *);
  const char *(*message)(int);
  uint32_t (*threads)(const tf_context *);
  size_t (*kernel_count)(void);
  const char *(*kernel_name)(size_t);
  int (*profile)(tf_context *, tf_hook, void *);
#ifdef TF_DIMENSIONS
  const tf_dimension *(*dimensions)(void);
  int (*set_dimension)(tf_context *, size_t, int64_t);
  int64_t (*get_dimension)(const tf_context *, size_t);
  int (*set_input_shape)(tf_context *, size_t, const int64_t *, size_t);
  int (*input_shape)(tf_context *, size_t, int64_t *);
  int (*input_bytes)(tf_context *, size_t, size_t *);
  int (*output_bytes)(tf_context *, size_t, size_t *);
#endif
} tf_level;

#define TF_DECLARE_LEVEL(number, prefix, name) TF_DECLARE(prefix) TF_DECLARE_DIMENSIONS(prefix)
#define TF_LEVEL(number, prefix, name) {name, tf_features##number, TF_FUNCTIONS(prefix) TF_DIMENSION_FUNCTIONS(prefix)},

TF_LEVELS(TF_DECLARE_LEVEL)
TF_FEATURES_OF_LEVELS
static const tf_level tf_levels[] = {TF_LEVELS(TF_LEVEL)};
#define TF_LEVEL_COUNT (sizeof tf_levels / sizeof *tf_levels)
_Static_assert(TF_LEVEL_COUNT <= TF_ALIGNMENT, "the levels that a context can tell");

static const tf_level *tf_level_of(const tf_context *context) {
  return &tf_levels[(uintptr_t)context % TF_ALIGNMENT];
}

/* The context without the bits of its level. */
static tf_context *tf_inner(const tf_context *context) {
  return (tf_context *)((uintptr_t)context / TF_ALIGNMENT * TF_ALIGNMENT);
}

/* The number of levels that the CPU has; queried once, since virtual machines answer slowly. */
static size_t tf_count_levels(void) {
  static size_t known;
  size_t count = __atomic_load_n(&known, __ATOMIC_RELAXED);
  if (count) return count - 1;
  for (; count < TF_LEVEL_COUNT; ++count) {
    const char *const *feature = tf_levels[count].features;
    while (*feature && tf_has_feature(*feature)) ++feature;
    if (*feature) break;
  }
  __atomic_store_n(&known, count + 1, __ATOMIC_RELAXED);
  return count;
}

/* Find the level that the environment names, or the best one that the CPU has. */
static int tf_choose_level(const tf_level **level) {
  const size_t count = tf_count_levels();
#ifdef _WIN32
  char buffer[64];
  const DWORD length = GetEnvironmentVariableA(TF_LEVEL_VARIABLE, buffer, sizeof buffer);
  const char *name = length ? length < sizeof buffer ? buffer : "?" : NULL;
#else
  const char *name = tf_environment(TF_LEVEL_VARIABLE);
#endif
  if (!name || !*name) {
    if (count == 0) return TF_STATUS(MISSING_FEATURE);
    *level = &tf_levels[count - 1];
    return TF_STATUS(OK);
  }
  for (size_t i = 0; i < count; ++i) {
    if (strcmp(tf_levels[i].name, name) != 0) continue;
    *level = &tf_levels[i];
    return TF_STATUS(OK);
  }
  return TF_STATUS(WRONG_LEVEL);
}

/* The level of a new context; the first one if the CPU has none. */
static const tf_level *tf_next_level(void) {
  const tf_level *level = tf_levels;
  tf_choose_level(&level);
  return level;
}

int TF(create)(const tf_options *options, tf_context **result) {
  if (!result) return TF_STATUS(NULL_ARGUMENT);
  *result = NULL;
  const tf_level *level;
  int status = tf_choose_level(&level);
  if (status != TF_STATUS(OK)) return status;
  tf_context *context;
  status = level->create(options, &context);
  if (status == TF_STATUS(OK)) *result = (tf_context *)((uintptr_t)context + (uintptr_t)(level - tf_levels));
  return status;
}

int TF(run)(tf_context *context, const tf_buffer *inputs, size_t input_count, const tf_buffer *outputs,
            size_t output_count) {
  return tf_level_of(context)->run(tf_inner(context), inputs, input_count, outputs, output_count);
}

int TF(destroy)(tf_context *context) { return tf_level_of(context)->destroy(tf_inner(context)); }

const tf_tensor *TF(inputs)(void) { return tf_levels->inputs(); }

const tf_tensor *TF(outputs)(void) { return tf_levels->outputs(); }

int TF(bounded_axis)(size_t output) { return tf_levels->bounded_axis(output); }

int TF(output_shape)(tf_context *context, size_t output, int64_t *shape) {
  return tf_level_of(context)->output_shape(tf_inner(context), output, shape);
}

const char *TF(message)(int status) {
  return status == TF_STATUS(WRONG_LEVEL) ? TF_LEVEL_MESSAGE : tf_levels->message(status);
}

uint32_t TF(threads)(const tf_context *context) { return tf_level_of(context)->threads(tf_inner(context)); }

size_t TF(kernel_count)(void) { return tf_next_level()->kernel_count(); }

const char *TF(kernel_name)(size_t kernel) { return tf_next_level()->kernel_name(kernel); }

int TF(profile)(tf_context *context, tf_hook hook, void *user) {
  return tf_level_of(context)->profile(tf_inner(context), hook, user);
}

const char *TF(level)(const tf_context *context) {
  return context ? tf_level_of(context)->name : tf_next_level()->name;
}

#ifdef TF_DIMENSIONS
const tf_dimension *TF(dimensions)(void) { return tf_levels->dimensions(); }

int TF(set_dimension)(tf_context *context, size_t dimension, int64_t size) {
  return tf_level_of(context)->set_dimension(tf_inner(context), dimension, size);
}

int64_t TF(get_dimension)(const tf_context *context, size_t dimension) {
  return tf_level_of(context)->get_dimension(tf_inner(context), dimension);
}

int TF(set_input_shape)(tf_context *context, size_t input, const int64_t *shape, size_t rank) {
  return tf_level_of(context)->set_input_shape(tf_inner(context), input, shape, rank);
}

int TF(input_shape)(tf_context *context, size_t input, int64_t *shape) {
  return tf_level_of(context)->input_shape(tf_inner(context), input, shape);
}

int TF(input_bytes)(tf_context *context, size_t input, size_t *bytes) {
  return tf_level_of(context)->input_bytes(tf_inner(context), input, bytes);
}

int TF(output_bytes)(tf_context *context, size_t output, size_t *bytes) {
  return tf_level_of(context)->output_bytes(tf_inner(context), output, bytes);
}
#endif
