/* The part of a library that is on a device: what its contexts share, what each has of its own, and its launches. */
#define TF_MOST_DEVICES 32
#define TF_EXPLANATION 2048

static _Thread_local char tf_explanation[TF_EXPLANATION];

static void tf_explain(const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(tf_explanation, sizeof tf_explanation, format, arguments);
  va_end(arguments);
}

const char *TF(device_error)(void) { return tf_explanation; }

/* ------------------------------------------------------------------ what contexts share */

/* A device with the code and the weights: the first context on it opens it, the last one closes it. */
struct tf_shared {
  tf_choice choice;
  tf_device *device;
  tf_handle weights;
  tf_handle *views; /* of weights, by the number of their tensor */
  uint32_t users;
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
  *shared = (struct tf_shared){.users = 0};
}

static int tf_open_shared(struct tf_shared *shared, const tf_choice *choice, const unsigned char *weights) {
  *shared = (struct tf_shared){.choice = *choice, .users = 1};
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

/* Two contexts of a program share what is on one device, in the program's own context if it has one. */
static bool tf_is_same_device(const tf_choice *left, const tf_choice *right) {
  return left->number == right->number && left->context == right->context && left->device == right->device;
}

static int tf_share_device(const tf_choice *choice, const unsigned char *weights, struct tf_shared **result) {
  struct tf_shared *found = NULL;
  int status = TF_STATUS(OK);
  pthread_mutex_lock(&tf_shared_mutex);
  for (size_t i = 0; i < TF_MOST_DEVICES; ++i) {
    struct tf_shared *shared = &tf_all_shared[i];
    if (shared->users && tf_is_same_device(&shared->choice, choice)) {
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
    tf_close_views(context->shared->device, false, context->handles);
    if (context->device_arena) tf_release_on_device(context->shared->device, context->device_arena);
    tf_leave_shared(context->shared);
  }
  free(context->handles);
}

static int tf_enter_device(tf_context *context, const tf_choice *choice) {
  tf_explain("%s", "");
  context->handles = calloc(TF_DEVICE_PLACES + 1, sizeof *context->handles);
  if (!context->handles) return TF_STATUS(NO_MEMORY);
  struct tf_shared *shared;
  int status = tf_share_device(choice, context->weights, &shared);
  if (status == TF_STATUS(OK)) {
    context->shared = shared;
    for (size_t i = 0; i < TF_DEVICE_PLACES; ++i)
      if (tf_places[i].is_weight) context->handles[i] = shared->views[i];
    status = tf_open_stream(shared->device, choice, &context->stream);
  }
  if (status == TF_STATUS(OK) && TF_DEVICE_ARENA != 0) {
    status = tf_allocate_on_device(shared->device, TF_DEVICE_ARENA, &context->device_arena);
    if (status == TF_STATUS(OK))
      status = tf_open_views(shared->device, context->device_arena, false, context->handles);
  }
  return status;
}

/* ------------------------------------------------------------------ a call */

/* A device that was lost, and a process that was forked from the one that opened it, cannot be used. */
static int tf_check_device(tf_context *context) {
  if (context->is_lost) return TF_STATUS(DEVICE_LOST);
  if (!tf_is_forked(context)) return TF_STATUS(OK);
  tf_explain("the context was made before fork(): make one in this process");
  return TF_STATUS(DEVICE_LOST);
}

/* Wait for the end of all steps: nothing writes to the program's memory afterwards. */
static int tf_end_steps(tf_context *context, int status) {
  const int waited = status == TF_STATUS(DEVICE_LOST) ? status : tf_wait(context->stream);
  if (status == TF_STATUS(OK)) status = waited;
  if (status == TF_STATUS(DEVICE_LOST)) context->is_lost = true;
  return status;
}

/* Launch the functions of a kernel, whose tensors are at these places. */
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
