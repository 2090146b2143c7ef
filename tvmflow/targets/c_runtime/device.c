/* The part of a library that is on a device: code and weights of all contexts, memory of each, and launches. */
#define TF_MOST_DEVICES 32
#define TF_EXPLANATION 2048

static _Thread_local char tf_explanation[TF_EXPLANATION];

/* Add text to the explanation, as far as there is room. */
static void tf_append(size_t *length, const char *text) {
  while (*text && *length + 1 < sizeof tf_explanation) tf_explanation[(*length)++] = *text++;
  tf_explanation[*length] = 0;
}

static void tf_append_number(size_t *length, unsigned long long number, bool is_negative) {
  char digits[24];
  size_t start = sizeof digits - 1;
  digits[start] = 0;
  do digits[--start] = (char)('0' + number % 10);
  while (number /= 10);
  if (is_negative) digits[--start] = '-';
  tf_append(length, digits + start);
}

/* A printf for systems whose C library is not linked, with %s, %d, %u and %llu. */
static void tf_explain(const char *format, ...) {
  size_t length = 0;
  va_list arguments;
  va_start(arguments, format);
  tf_append(&length, "");
  for (; *format; ++format) {
    if (*format != '%') {
      tf_append(&length, (const char[]){*format, 0});
    } else if (*++format == 's') {
      tf_append(&length, va_arg(arguments, const char *));
    } else if (*format == 'd') {
      const long long number = va_arg(arguments, int);
      tf_append_number(&length, (unsigned long long)(number < 0 ? -number : number), number < 0);
    } else if (*format == 'u') {
      tf_append_number(&length, va_arg(arguments, unsigned), false);
    } else {
      format += 2;
      tf_append_number(&length, va_arg(arguments, unsigned long long), false);
    }
  }
  va_end(arguments);
}

const char *TF(device_error)(void) { return tf_explanation; }

/* ------------------------------------------------------------------ shared by all contexts */

/* A device with the code and the weights. The first context on it opens it, and the last one closes it. */
struct tf_shared {
  tf_choice choice;
  tf_device *device;
  tf_handle weights;
  tf_handle *views; /* of weights, by the number of their tensor */
  uint32_t users;
  atomic_bool is_lost; /* only contexts that there are already stay with it */
};

static struct tf_shared tf_all_shared[TF_MOST_DEVICES];
#ifdef _WIN32
static SRWLOCK tf_shared_mutex = SRWLOCK_INIT;
#else
static pthread_mutex_t tf_shared_mutex = PTHREAD_MUTEX_INITIALIZER;
#endif

/* Return handles of the tensors in memory of the device: those of weights, or all others. */
static int tf_open_views(tf_device *device, tf_handle memory, bool are_weights, tf_handle *views) {
  for (size_t i = 0; i < TF_DEVICE_PLACES; ++i) {
    const tf_place *place = &tf_places[i];
    if (place->is_weight != are_weights) continue;
    const int status = tf_open_view(device, memory, place->offset, place->bytes, &views[i]);
    if (status != TF_STATUS(OK)) return status;
  }
  return TF_STATUS(OK);
}

static void tf_close_views(tf_device *device, bool are_weights, const tf_handle *views) {
  for (size_t i = 0; views && i < TF_DEVICE_PLACES; ++i)
    if (tf_places[i].is_weight == are_weights && views[i]) tf_close_view(device, views[i]);
}

static int tf_upload_weights(const struct tf_shared *shared, const unsigned char *weights) {
  tf_stream *stream;
  int status = tf_open_stream(shared->device, &shared->choice, &stream);
  if (status != TF_STATUS(OK)) return status;
  for (size_t i = 0; i < TF_DEVICE_PLACES && status == TF_STATUS(OK); ++i)
    if (tf_places[i].is_weight)
      status = tf_copy_in(stream, shared->views[i], weights + tf_places[i].source, (size_t)tf_places[i].bytes);
  if (status == TF_STATUS(OK)) status = tf_wait(stream);
  tf_close_stream(stream);
  return status;
}

static void tf_close_shared(struct tf_shared *shared) {
  tf_close_views(shared->device, true, shared->views);
  free(shared->views);
  if (shared->weights) tf_release_on_device(shared->device, shared->weights);
  if (shared->device) tf_close_device(shared->device);
  shared->device = NULL;
  shared->weights = 0;
  shared->views = NULL;
  shared->users = 0;
}

static int tf_open_shared(struct tf_shared *shared, const tf_choice *choice, const unsigned char *weights) {
  shared->choice = *choice;
  shared->users = 1;
  atomic_store_explicit(&shared->is_lost, false, memory_order_relaxed);
  shared->views = calloc(TF_DEVICE_PLACES + 1, sizeof *shared->views);
  int status = shared->views ? tf_open_device(choice, &shared->device) : TF_STATUS(NO_MEMORY);
  if (status == TF_STATUS(OK) && TF_DEVICE_WEIGHTS != 0) {
    status = tf_allocate_on_device(shared->device, TF_DEVICE_WEIGHTS, &shared->weights);
    if (status == TF_STATUS(OK)) status = tf_open_views(shared->device, shared->weights, true, shared->views);
    if (status == TF_STATUS(OK)) status = tf_upload_weights(shared, weights);
  }
  if (status != TF_STATUS(OK)) tf_close_shared(shared);
  return status;
}

/* Contexts with the same number, and the same context of the program if it has one, share a device. */
static bool tf_is_same_device(const tf_choice *left, const tf_choice *right) {
  return left->number == right->number && left->context == right->context && left->device == right->device;
}

static int tf_share_device(const tf_choice *choice, const unsigned char *weights, struct tf_shared **result) {
  struct tf_shared *found = NULL;
  int status = TF_STATUS(OK);
  pthread_mutex_lock(&tf_shared_mutex);
  for (size_t i = 0; i < TF_MOST_DEVICES; ++i) {
    struct tf_shared *shared = &tf_all_shared[i];
    const bool is_lost = atomic_load_explicit(&shared->is_lost, memory_order_relaxed);
    if (shared->users && !is_lost && tf_is_same_device(&shared->choice, choice)) {
      found = shared;
      break;
    }
    if (!shared->users && !found) found = shared;
  }
  if (!found) {
    tf_explain("contexts on more than %d devices", TF_MOST_DEVICES);
    status = TF_STATUS(NO_DEVICE);
  } else if (found->users) {
    ++found->users;
  } else {
    status = tf_open_shared(found, choice, weights);
  }
  pthread_mutex_unlock(&tf_shared_mutex);
  *result = found;
  return status;
}

static void tf_leave_shared(struct tf_shared *shared) {
  pthread_mutex_lock(&tf_shared_mutex);
  if (--shared->users == 0) tf_close_shared(shared);
  pthread_mutex_unlock(&tf_shared_mutex);
}

/* ------------------------------------------------------------------ a context */

static void tf_leave_device(tf_context *context) {
  if (context->stream) tf_close_stream(context->stream);
  if (context->shared) {
    tf_close_views(context->shared->device, false, context->views);
    if (context->device_arena) tf_release_on_device(context->shared->device, context->device_arena);
    tf_leave_shared(context->shared);
  }
  free(context->handles);
  free(context->views);
}

static int tf_enter_device(tf_context *context, const tf_choice *choice) {
  tf_explain("%s", "");
  context->handles = calloc(TF_DEVICE_PLACES + 1, sizeof *context->handles);
  context->views = calloc(TF_DEVICE_PLACES + 1, sizeof *context->views);
  if (!context->handles || !context->views) return TF_STATUS(NO_MEMORY);
  struct tf_shared *shared;
  int status = tf_share_device(choice, context->weights, &shared);
  if (status == TF_STATUS(OK)) {
    context->shared = shared;
    status = tf_open_stream(shared->device, choice, &context->stream);
  }
  if (status == TF_STATUS(OK) && TF_DEVICE_ARENA != 0) {
    status = tf_allocate_on_device(shared->device, TF_DEVICE_ARENA, &context->device_arena);
    if (status == TF_STATUS(OK))
      status = tf_open_views(shared->device, context->device_arena, false, context->views);
  }
  for (size_t i = 0; i < TF_DEVICE_PLACES && status == TF_STATUS(OK); ++i)
    context->handles[i] = tf_places[i].is_weight ? shared->views[i] : context->views[i];
  return status;
}

/* ------------------------------------------------------------------ a call */

/* A lost device cannot be used, nor can any device by a child of the process that opened it. */
static int tf_check_device(tf_context *context) {
  if (!context->is_lost && !tf_is_forked(context)) return TF_STATUS(OK);
  if (context->is_lost) tf_explain("an earlier call lost the device: make another context");
  else tf_explain("the context was made before fork(): make one in this process");
  return TF_STATUS(DEVICE_LOST);
}

/* Mark the device as lost; new contexts open it again. */
static void tf_lose_device(tf_context *context) {
  context->is_lost = true;
  atomic_store_explicit(&context->shared->is_lost, true, memory_order_relaxed);
}

/* Copy inputs from the program's memory on the device to the host, if steps read them there. */
static int tf_begin_steps(tf_context *context, unsigned char *const *in) {
  bool waits = false;
  int status = tf_check_device(context);
  for (size_t i = 0; i < TF_STATUS(INPUTS) && status == TF_STATUS(OK); ++i) {
    const size_t bytes = TF(inputs)()[i].bytes;
    if (!context->bound[i] || !tf_host_inputs[i] || !bytes) continue;
    status = tf_copy_out(context->stream, in[i], context->bound[i], bytes);
    waits = true;
  }
  return waits && status == TF_STATUS(OK) ? tf_wait(context->stream) : status;
}

/* Copy outputs of steps on the host to the program's memory on the device, and wait for the end of all steps. Nothing
 * writes to the program's memory afterwards, even after an error. */
static int tf_end_steps(tf_context *context, int status, unsigned char *const *out) {
  for (size_t i = 0; i < TF_STATUS(OUTPUTS) && status == TF_STATUS(OK); ++i) {
    const tf_handle bound = context->bound[TF_STATUS(INPUTS) + i];
    const size_t bytes = TF(outputs)()[i].bytes;
    if (!bound || tf_output_places[i] != TF_NO_PLACE || !bytes) continue;
    status = tf_copy_in(context->stream, bound, out[i], bytes);
  }
  if (context->returns_early && status == TF_STATUS(OK)) return status;
  if (status == TF_STATUS(OK)) {
    status = tf_wait(context->stream);
  } else if (!context->is_lost && !tf_is_forked(context)) {
    char explanation[TF_EXPLANATION];
    memcpy(explanation, tf_explanation, sizeof explanation);
    (void)tf_wait(context->stream);
    memcpy(tf_explanation, explanation, sizeof explanation);
  }
  if (status == TF_STATUS(DEVICE_LOST) && !tf_is_forked(context)) tf_lose_device(context);
  return status;
}

/* Launch the functions of a kernel on the tensors at these places. */
static int tf_launch_kernel(tf_context *context, size_t kernel, const tf_device_launch *launches, size_t count,
                            const uint32_t *places, size_t tensors) {
  tf_handle pointers[TF_DEVICE_MOST_POINTERS + 1];
  uint64_t nanoseconds = 0;
  for (size_t i = 0; i < tensors; ++i) pointers[i] = context->handles[places[i]];
  for (size_t i = 0; i < count; ++i) {
    const int status = tf_start(context->stream, &launches[i], pointers, context->hook ? &nanoseconds : NULL);
    if (status != TF_STATUS(OK)) return status;
  }
  if (context->hook) context->hook(context->hook_user, kernel, nanoseconds);
  return TF_STATUS(OK);
}

/* ------------------------------------------------------------------ the program's memory on the device */

int TF(use_device_memory)(tf_context *context, size_t tensor, void *memory) {
  if (!context) return TF_STATUS(NULL_ARGUMENT);
  if (tensor >= TF_STATUS(INPUTS) + TF_STATUS(OUTPUTS)) return TF_STATUS(WRONG_COUNT);
  if (atomic_flag_test_and_set_explicit(&context->is_busy, memory_order_acquire)) return TF_STATUS(BUSY);
  const bool is_input = tensor < TF_STATUS(INPUTS);
  const uint32_t place = is_input ? tf_input_places[tensor] : tf_output_places[tensor - TF_STATUS(INPUTS)];
  context->bound[tensor] = (tf_handle)(uintptr_t)memory;
  if (place != TF_NO_PLACE) context->handles[place] = memory ? context->bound[tensor] : context->views[place];
  atomic_flag_clear_explicit(&context->is_busy, memory_order_release);
  return TF_STATUS(OK);
}

/* Give tensors in the program's memory on the device staging memory, for steps on the host. */
static void tf_stage(const tf_context *context, size_t first, const tf_buffer *buffers, size_t count,
                     const tf_tensor *tensors, unsigned char **staging, tf_buffer *staged) {
  for (size_t i = 0; i < count; ++i) {
    staged[i] = buffers ? buffers[i] : (tf_buffer){NULL, 0};
    if (context->bound[first + i]) staged[i] = (tf_buffer){*staging, tensors[i].bytes};
    *staging += tf_padded(tensors[i].bytes);
  }
}

static int tf_run(tf_context *context, const tf_buffer *inputs, size_t input_count, const tf_buffer *outputs,
                  size_t output_count, bool returns_early);

int TF(run)(tf_context *context, const tf_buffer *inputs, size_t input_count, const tf_buffer *outputs,
            size_t output_count) {
  tf_buffer in[TF_STATUS(INPUTS) + 1], out[TF_STATUS(OUTPUTS) + 1];
  if (!context) return TF_STATUS(NULL_ARGUMENT);
  if (input_count != TF_STATUS(INPUTS) || output_count != TF_STATUS(OUTPUTS)) return TF_STATUS(WRONG_COUNT);
  if ((!inputs && input_count) || (!outputs && output_count)) return TF_STATUS(NULL_ARGUMENT);
  unsigned char *staging = context->arena + TF_ARENA;
  tf_stage(context, 0, inputs, input_count, TF(inputs)(), &staging, in);
  tf_stage(context, input_count, outputs, output_count, TF(outputs)(), &staging, out);
  return tf_run(context, in, input_count, out, output_count, false);
}

int TF(enqueue)(tf_context *context) {
  if (!context) return TF_STATUS(NULL_ARGUMENT);
  for (size_t i = 0; i < TF_STATUS(INPUTS) + TF_STATUS(OUTPUTS); ++i)
    if (!context->bound[i]) return TF_STATUS(NULL_ARGUMENT);
  tf_buffer in[TF_STATUS(INPUTS) + 1], out[TF_STATUS(OUTPUTS) + 1];
  unsigned char *staging = context->arena + TF_ARENA;
  tf_stage(context, 0, NULL, TF_STATUS(INPUTS), TF(inputs)(), &staging, in);
  tf_stage(context, TF_STATUS(INPUTS), NULL, TF_STATUS(OUTPUTS), TF(outputs)(), &staging, out);
  return tf_run(context, in, TF_STATUS(INPUTS), out, TF_STATUS(OUTPUTS), true);
}

int TF(wait)(tf_context *context) {
  if (!context) return TF_STATUS(NULL_ARGUMENT);
  if (atomic_flag_test_and_set_explicit(&context->is_busy, memory_order_acquire)) return TF_STATUS(BUSY);
  int status = tf_check_device(context);
  if (status == TF_STATUS(OK)) {
    status = tf_wait(context->stream);
    if (status == TF_STATUS(DEVICE_LOST)) tf_lose_device(context);
  }
  atomic_flag_clear_explicit(&context->is_busy, memory_order_release);
  return status;
}
