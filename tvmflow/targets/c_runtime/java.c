/* JNI functions for a class of Java, by the public header. They return a status, and the class throws. */

/* The used part of JNI's table of functions: no headers of a JDK are installed with tvmflow. */
typedef const struct tf_jni *tf_env;
struct tf_jni {
  void *to_delete_local[23];
  void (*delete_local)(tf_env *env, void *object);
  void *to_array_length[147];
  int32_t (*array_length)(tf_env *env, void *array);
  void *new_objects;
  void *(*object_at)(tf_env *env, void *array, int32_t index);
  void *to_new_bytes[2];
  void *(*new_bytes)(tf_env *env, int32_t length);
  void *to_new_longs[3];
  void *(*new_longs)(tf_env *env, int32_t length);
  void *to_set_bytes[27];
  void (*set_bytes)(tf_env *env, void *array, int32_t start, int32_t length, const int8_t *bytes);
  void *to_set_longs[3];
  void (*set_longs)(tf_env *env, void *array, int32_t start, int32_t length, const int64_t *longs);
  void *to_address[17];
  void *(*address)(tf_env *env, void *buffer);
  int64_t (*capacity)(tf_env *env, void *buffer);
};

#define TF_NATIVE(name) __attribute__((visibility("default"))) TF_JAVA(name)

static TF(context) *tf_context_of(int64_t handle) { return (TF(context) *)(uintptr_t)handle; }

/* A text as bytes: JNI's own strings are not UTF-8. */
static void *tf_text(tf_env *env, const char *text) {
  size_t length = 0;
  while (text && text[length]) ++length;
  void *array = (*env)->new_bytes(env, (int32_t)length);
  if (array) (*env)->set_bytes(env, array, 0, (int32_t)length, (const int8_t *)text);
  return array;
}

static void *tf_longs(tf_env *env, const int64_t *values, size_t count) {
  void *array = (*env)->new_longs(env, (int32_t)count);
  if (array) (*env)->set_longs(env, array, 0, (int32_t)count, values);
  return array;
}

void *TF_NATIVE(message)(tf_env *env, void *type, int32_t status) {
  (void)type;
  return tf_text(env, TF(message)(status));
}

void *TF_NATIVE(missingFeature)(tf_env *env, void *type) {
  (void)type;
  return tf_text(env, TF(missing_feature)());
}

/* The handle and the status. */
static void *tf_give(tf_env *env, TF(context) *const *context, int status) {
  const int64_t results[] = {(int64_t)(uintptr_t)*context, status};
  void *array = tf_longs(env, results, 2);
  if (!array) TF(destroy)(*context);
  return array;
}

void *TF_NATIVE(create)(tf_env *env, void *type, int32_t threads) {
  (void)type;
  const TF(options) options = {.abi = TF_STATUS(ABI), .threads = (uint32_t)threads};
  TF(context) *context = NULL;
  const int status = TF(create)(&options, &context);
  return tf_give(env, &context, status);
}

int32_t TF_NATIVE(destroy)(tf_env *env, void *type, int64_t handle) {
  (void)env, (void)type;
  return TF(destroy)(tf_context_of(handle));
}

static void tf_read_buffer(tf_env *env, void *buffer, TF(buffer) *memory) {
  memory->data = (*env)->address(env, buffer);
  memory->bytes = (size_t)(*env)->capacity(env, buffer);
}

static int tf_read_buffers(tf_env *env, void *array, TF(buffer) *buffers, int32_t count) {
  if ((*env)->array_length(env, array) != count) return TF_STATUS(WRONG_COUNT);
  for (int32_t i = 0; i < count; ++i) {
    void *buffer = (*env)->object_at(env, array, i);
    tf_read_buffer(env, buffer, &buffers[i]);
    (*env)->delete_local(env, buffer);
  }
  return TF_STATUS(OK);
}

/* Define a native method that calls a function with buffers for some inputs and outputs. */
#define TF_CALL_WITH(method, function, in_count, out_count)                                                         \
  int32_t TF_NATIVE(method)(tf_env *env, void *type, int64_t handle, void *inputs, void *outputs) {                 \
    (void)type;                                                                                                     \
    TF(buffer) in[in_count + 1], out[out_count + 1];                                                                \
    int status = tf_read_buffers(env, inputs, in, in_count);                                                        \
    if (status == TF_STATUS(OK)) status = tf_read_buffers(env, outputs, out, out_count);                            \
    if (status != TF_STATUS(OK)) return status;                                                                     \
    return TF(function)(tf_context_of(handle), in, in_count, out, out_count);                                       \
  }

TF_CALL_WITH(compute, run, TF_STATUS(INPUTS), TF_STATUS(OUTPUTS))

/* The shape of an input or output in the next call, or of an output after a call; NULL if there is none. */
void *TF_NATIVE(shapeOf)(tf_env *env, void *type, int64_t handle, uint8_t is_output, int32_t index) {
  (void)type;
  int64_t shape[64];
  const size_t count = is_output ? TF_STATUS(OUTPUTS) : TF_STATUS(INPUTS);
  if (index < 0 || (size_t)index >= count) return NULL;
  const TF(tensor) *tensor = (is_output ? TF(outputs)() : TF(inputs)()) + index;
  if (tensor->rank > sizeof shape / sizeof *shape) return NULL;
  int status = TF_STATUS(OK);
  if (is_output) {
    status = TF(output_shape)(tf_context_of(handle), (size_t)index, shape);
  } else {
#ifdef TF_OPEN_SIZES
    status = TF(input_shape)(tf_context_of(handle), (size_t)index, shape);
#else
    for (size_t i = 0; i < tensor->rank; ++i) shape[i] = tensor->shape[i];
#endif
  }
  return status == TF_STATUS(OK) ? tf_longs(env, shape, tensor->rank) : NULL;
}

int32_t TF_NATIVE(choose)(tf_env *env, void *type, int64_t handle, int32_t dimension, int64_t size) {
  (void)env, (void)type;
#ifdef TF_OPEN_SIZES
  return TF(set_dimension)(tf_context_of(handle), (size_t)dimension, size);
#else
  (void)handle, (void)dimension, (void)size;
  return TF_STATUS(WRONG_COUNT);
#endif
}

#ifdef TF_HAS_STATES
TF_CALL_WITH(takeStep, step, TF_STATUS(STEP_INPUTS), TF_STATUS(STEP_OUTPUTS))

int32_t TF_NATIVE(resetStates)(tf_env *env, void *type, int64_t handle) {
  (void)env, (void)type;
  return TF(reset)(tf_context_of(handle));
}

#define TF_CHANGE(method, call)                                                           \
  int32_t TF_NATIVE(method)(tf_env *env, void *type, int64_t handle, int64_t value) {     \
    (void)env, (void)type;                                                                \
    return call;                                                                          \
  }
TF_CHANGE(truncateStates, TF(truncate)(tf_context_of(handle), value))
TF_CHANGE(dropRows, TF(drop)(tf_context_of(handle), value))
TF_CHANGE(setSeed, TF(seed)(tf_context_of(handle), (uint64_t)value))

/* The length of the states, the rows that were dropped, and the bytes of a saved state. */
void *TF_NATIVE(measureStates)(tf_env *env, void *type, int64_t handle) {
  (void)type;
  TF(context) *context = tf_context_of(handle);
  size_t bytes = 0;
  TF(state_bytes)(context, &bytes);
  const int64_t results[] = {TF(length)(context), TF(dropped)(context), (int64_t)bytes};
  return tf_longs(env, results, 3);
}

int32_t TF_NATIVE(readState)(tf_env *env, void *type, int64_t handle, int32_t state, void *values) {
  (void)type;
  TF(buffer) memory;
  tf_read_buffer(env, values, &memory);
  const void *data;
  size_t bytes;
  const int status = TF(state)(tf_context_of(handle), (size_t)state, &data, &bytes);
  if (status != TF_STATUS(OK)) return status;
  if (bytes != memory.bytes) return TF_STATUS(WRONG_COUNT);
  for (size_t i = 0; i < bytes; ++i) ((unsigned char *)memory.data)[i] = ((const unsigned char *)data)[i];
  return TF_STATUS(OK);
}

int32_t TF_NATIVE(saveStates)(tf_env *env, void *type, int64_t handle, void *saved) {
  (void)type;
  TF(buffer) memory;
  tf_read_buffer(env, saved, &memory);
  return TF(save_state)(tf_context_of(handle), memory.data, memory.bytes);
}

int32_t TF_NATIVE(loadStates)(tf_env *env, void *type, int64_t handle, void *saved) {
  (void)type;
  TF(buffer) memory;
  tf_read_buffer(env, saved, &memory);
  return TF(load_state)(tf_context_of(handle), memory.data, memory.bytes);
}

void *TF_NATIVE(forkStates)(tf_env *env, void *type, int64_t handle) {
  (void)type;
  TF(context) *copy = NULL;
  const int status = TF(fork)(tf_context_of(handle), &copy);
  return tf_give(env, &copy, status);
}

/* The token and the status. */
void *TF_NATIVE(chooseToken)(tf_env *env, void *type, int64_t handle, void *logits, float temperature, int32_t top_k,
                             float top_p, float penalty, void *recent) {
  (void)type;
  TF(buffer) values, tokens;
  tf_read_buffer(env, logits, &values);
  tf_read_buffer(env, recent, &tokens);
  const TF(sampling) sampling = {temperature, (uint32_t)top_k, top_p, penalty};
  int64_t results[] = {0, 0};
  results[1] = TF(sample)(tf_context_of(handle), values.data, values.bytes / sizeof(float), &sampling, tokens.data,
                          tokens.bytes / sizeof(int64_t), results);
  return tf_longs(env, results, 2);
}
#endif
