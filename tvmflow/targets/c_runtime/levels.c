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

/* Lists of functions: X(prefix, result, name, parameters, arguments). First those of the level of a context. */
#define TF_CONTEXT_FUNCTIONS(X, prefix)                                                                               \
  X(prefix, int, run,                                                                                                 \
    (tf_context * context, const tf_buffer *inputs, size_t input_count, const tf_buffer *outputs, size_t output_count), \
    (tf_inner(context), inputs, input_count, outputs, output_count))                                                  \
  X(prefix, int, destroy, (tf_context * context), (tf_inner(context)))                                                \
  X(prefix, int, output_shape, (tf_context * context, size_t output, int64_t *shape), (tf_inner(context), output, shape)) \
  X(prefix, uint32_t, threads, (const tf_context *context), (tf_inner(context)))                                      \
  X(prefix, int, profile, (tf_context * context, tf_hook hook, void *user), (tf_inner(context), hook, user))
/* Those that are the same at all levels. */
#define TF_COMMON_FUNCTIONS(X, prefix)                       \
  X(prefix, const tf_tensor *, inputs, (void), ())           \
  X(prefix, const tf_tensor *, outputs, (void), ())          \
  X(prefix, int, bounded_axis, (size_t output), (output))
/* Those that this file calls itself. */
#define TF_OWN_FUNCTIONS(X, prefix)                                                      \
  X(prefix, int, create, (const tf_options *options, tf_context **context), ())          \
  X(prefix, const char *, message, (int status), ())                                     \
  X(prefix, size_t, kernel_count, (void), ())                                            \
  X(prefix, const char *, kernel_name, (size_t kernel), ())

#ifdef TF_DIMENSIONS
typedef TF(dimension) tf_dimension;
#define TF_DIMENSION_FUNCTIONS(X, prefix)                                                                             \
  X(prefix, int, set_dimension, (tf_context * context, size_t dimension, int64_t size), (tf_inner(context), dimension, size)) \
  X(prefix, int64_t, get_dimension, (const tf_context *context, size_t dimension), (tf_inner(context), dimension))    \
  X(prefix, int, set_input_shape, (tf_context * context, size_t input, const int64_t *shape, size_t rank),            \
    (tf_inner(context), input, shape, rank))                                                                          \
  X(prefix, int, input_shape, (tf_context * context, size_t input, int64_t *shape), (tf_inner(context), input, shape)) \
  X(prefix, int, input_bytes, (tf_context * context, size_t input, size_t *bytes), (tf_inner(context), input, bytes)) \
  X(prefix, int, output_bytes, (tf_context * context, size_t output, size_t *bytes), (tf_inner(context), output, bytes))
#define TF_COMMON_DIMENSION_FUNCTIONS(X, prefix) X(prefix, const tf_dimension *, dimensions, (void), ())
#else
#define TF_DIMENSION_FUNCTIONS(X, prefix)
#define TF_COMMON_DIMENSION_FUNCTIONS(X, prefix)
#endif

#ifdef TF_HAS_STATES
typedef TF(sampling) tf_sampling;
#define TF_STATE_FUNCTIONS(X, prefix)                                                                                 \
  X(prefix, int, step,                                                                                                \
    (tf_context * context, const tf_buffer *inputs, size_t input_count, const tf_buffer *outputs, size_t output_count), \
    (tf_inner(context), inputs, input_count, outputs, output_count))                                                  \
  X(prefix, int, reset, (tf_context * context), (tf_inner(context)))                                                  \
  X(prefix, int64_t, length, (const tf_context *context), (tf_inner(context)))                                        \
  X(prefix, int64_t, dropped, (const tf_context *context), (tf_inner(context)))                                       \
  X(prefix, int, truncate, (tf_context * context, int64_t length), (tf_inner(context), length))                       \
  X(prefix, int, drop, (tf_context * context, int64_t count), (tf_inner(context), count))                             \
  X(prefix, int, state, (tf_context * context, size_t state, const void **data, size_t *bytes),                       \
    (tf_inner(context), state, data, bytes))                                                                          \
  X(prefix, int, state_bytes, (tf_context * context, size_t *bytes), (tf_inner(context), bytes))                      \
  X(prefix, int, save_state, (tf_context * context, void *data, size_t bytes), (tf_inner(context), data, bytes))      \
  X(prefix, int, load_state, (tf_context * context, const void *data, size_t bytes), (tf_inner(context), data, bytes)) \
  X(prefix, int, sample,                                                                                              \
    (tf_context * context, float *logits, size_t count, const tf_sampling *sampling, const int64_t *recent,           \
     size_t recent_count, int64_t *token),                                                                            \
    (tf_inner(context), logits, count, sampling, recent, recent_count, token))                                        \
  X(prefix, int, seed, (tf_context * context, uint64_t seed), (tf_inner(context), seed))
#define TF_FORK(X, prefix) X(prefix, int, fork, (tf_context * context, tf_context **copy), ())
#else
#define TF_STATE_FUNCTIONS(X, prefix)
#define TF_FORK(X, prefix)
#endif

#define TF_FUNCTIONS(X, prefix)                                                        \
  TF_OWN_FUNCTIONS(X, prefix)                                                          \
  TF_FORK(X, prefix)                                                                   \
  TF_COMMON_FUNCTIONS(X, prefix)                                                       \
  TF_COMMON_DIMENSION_FUNCTIONS(X, prefix)                                             \
  TF_CONTEXT_FUNCTIONS(X, prefix)                                                      \
  TF_DIMENSION_FUNCTIONS(X, prefix)                                                    \
  TF_STATE_FUNCTIONS(X, prefix)

#define TF_MEMBER(prefix, result, name, parameters, arguments) result(*name) parameters;
#define TF_DECLARE(prefix, result, name, parameters, arguments) result prefix##_##name parameters;
#define TF_ADDRESS(prefix, result, name, parameters, arguments) prefix##_##name,

typedef struct {
  const char *level;
  const char *const *features; /* that the level before lacks */
  TF_FUNCTIONS(TF_MEMBER, )
} tf_level;

#define TF_DECLARE_LEVEL(number, prefix, name) TF_FUNCTIONS(TF_DECLARE, prefix)
#define TF_LEVEL(number, prefix, name) {name, tf_features##number, TF_FUNCTIONS(TF_ADDRESS, prefix)},

TF_LEVELS(TF_DECLARE_LEVEL)
TF_FEATURES_OF_LEVELS
static const tf_level tf_levels[] = {TF_LEVELS(TF_LEVEL)};
#define TF_LEVEL_COUNT (sizeof tf_levels / sizeof *tf_levels)
_Static_assert(TF_LEVEL_COUNT <= TF_ALIGNMENT, "the levels that a context can tell");

static const tf_level *tf_level_of(const tf_context *context) {
  return &tf_levels[(uintptr_t)context % TF_ALIGNMENT];
}

static tf_context *tf_handle_of(tf_context *context, const tf_level *level) {
  return (tf_context *)((uintptr_t)context + (uintptr_t)(level - tf_levels));
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
    if (strcmp(tf_levels[i].level, name) != 0) continue;
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
  if (status == TF_STATUS(OK)) *result = tf_handle_of(context, level);
  return status;
}

const char *TF(message)(int status) {
  return status == TF_STATUS(WRONG_LEVEL) ? TF_LEVEL_MESSAGE : tf_levels->message(status);
}

size_t TF(kernel_count)(void) { return tf_next_level()->kernel_count(); }

const char *TF(kernel_name)(size_t kernel) { return tf_next_level()->kernel_name(kernel); }

const char *TF(level)(const tf_context *context) {
  return context ? tf_level_of(context)->level : tf_next_level()->level;
}

#define TF_CALL_FIRST(prefix, result, name, parameters, arguments) \
  result TF(name) parameters { return tf_levels->name arguments; }
TF_COMMON_FUNCTIONS(TF_CALL_FIRST, )
TF_COMMON_DIMENSION_FUNCTIONS(TF_CALL_FIRST, )

#define TF_CALL_LEVEL(prefix, result, name, parameters, arguments) \
  result TF(name) parameters { return tf_level_of(context)->name arguments; }
TF_CONTEXT_FUNCTIONS(TF_CALL_LEVEL, )
TF_DIMENSION_FUNCTIONS(TF_CALL_LEVEL, )
TF_STATE_FUNCTIONS(TF_CALL_LEVEL, )

#ifdef TF_HAS_STATES
int TF(fork)(tf_context *context, tf_context **copy) {
  const tf_level *level = tf_level_of(context);
  const int status = level->fork(tf_inner(context), copy);
  if (status == TF_STATUS(OK)) *copy = tf_handle_of(*copy, level);
  return status;
}
#endif
