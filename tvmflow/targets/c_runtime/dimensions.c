/* Dimensions of inputs: dependent values are computed when a dimension changes, and memory grows to fit. */

/* The count of an output, valid until the next call or the next change of a dimension. */
static int64_t *tf_count_of(const tf_context *context, size_t count) {
  return (int64_t *)(void *)(context->counts + count * TF_ALIGNMENT);
}

/* Compute sizes, offsets and tasks, if a dimension has changed. */
static int tf_update(tf_context *context) {
  if (context->is_planned) return TF_STATUS(OK);
  if (!tf_plan(context->values, context->useful, &context->plan)) return TF_STATUS(WRONG_DIMENSION);
  /* Until the next call, the count of an output is its largest value. */
  for (size_t i = 0; i < TF_STATUS(OUTPUTS); ++i) {
    int64_t shape[TF_MAX_RANK];
    if (tf_output_counts[i].axis < 0) continue;
    tf_output_shape(context->values, i, shape);
    *tf_count_of(context, tf_output_counts[i].count) = shape[tf_output_counts[i].axis];
  }
  context->is_planned = true;
  return TF_STATUS(OK);
}

static size_t tf_count_parts(const tf_context *context) {
  return context->threads == 1 ? 1 : context->threads + (size_t)1;
}

/* Reserve memory for the present sizes. It never shrinks, so that earlier sizes need no allocation. */
static int tf_reserve(tf_context *context) {
  int status = tf_update(context);
  if (status != TF_STATUS(OK)) return status;
  const size_t parts = tf_count_parts(context);
  const uint64_t scratch = context->plan.scratch, tensors = context->plan.arena + context->plan.staging;
  if (scratch > SIZE_MAX / 4 / parts || tensors > SIZE_MAX / 4) return TF_STATUS(NO_MEMORY);
  const size_t bytes = (size_t)scratch * parts + (size_t)tensors;
#ifndef TF_FREESTANDING
  if (bytes > context->capacity || !context->memory) {
    const tf_options *options = &context->options;
    /* a cache that grows with each call would otherwise need an allocation each time */
    const size_t larger = context->capacity / 4 * 5, capacity = bytes > larger ? bytes : larger;
    void *memory;
    if (context->memory) options->release(options->user, context->memory);
    context->memory = NULL;
    context->capacity = 0;
    status = tf_allocate(options, capacity + TF_CACHE_LINE, TF_CACHE_LINE, &memory);
    if (status != TF_STATUS(OK)) return status;
    context->memory = memory;
    context->capacity = capacity;
  }
#else
  if (bytes > context->capacity) return TF_STATUS(NO_MEMORY);
#endif
  context->scratch = context->memory;
  context->arena = context->memory + (size_t)scratch * parts;
  return TF_STATUS(OK);
}

static bool tf_is_size(size_t dimension, int64_t size) {
  const tf_dimension *range = &tf_dimensions[dimension];
  return size >= range->min && size <= range->max && size % range->multiple_of == 0;
}

static void tf_set(tf_context *context, size_t dimension, int64_t size) {
  if (context->values[dimension] == size) return;
  context->values[dimension] = size;
  context->is_planned = false;
}

const tf_dimension *TF(dimensions)(void) { return tf_dimensions; }

int TF(set_dimension)(tf_context *context, size_t dimension, int64_t size) {
  if (!context) return TF_STATUS(NULL_ARGUMENT);
  if (dimension >= TF_DIMENSIONS) return TF_STATUS(WRONG_COUNT);
  if (!tf_is_size(dimension, size)) return TF_STATUS(WRONG_DIMENSION);
  if (atomic_flag_test_and_set_explicit(&context->is_busy, memory_order_acquire)) return TF_STATUS(BUSY);
  tf_set(context, dimension, size);
  atomic_flag_clear_explicit(&context->is_busy, memory_order_release);
  return TF_STATUS(OK);
}

int64_t TF(get_dimension)(const tf_context *context, size_t dimension) {
  return context && dimension < TF_DIMENSIONS ? context->values[dimension] : -1;
}

/* Find the dimensions that give an input a shape. All of them are right before any of them changes. */
static int tf_derive(const tf_context *context, size_t input, const int64_t *shape, int64_t *sizes) {
  const size_t rank = TF(inputs)()[input].rank;
  const int64_t *fixed = TF(inputs)()[input].shape;
  const int *axes = tf_input_axes[input];
  bool is_there[TF_DIMENSIONS] = {false};
  for (size_t i = 0; i < TF_DIMENSIONS; ++i) sizes[i] = context->values[i];
  for (size_t axis = 0; axis < rank; ++axis) {
    const int dimension = axes[axis];
    if (dimension == -2) continue; /* it follows from dimensions of other axes, and a call compares the bytes */
    if (dimension < 0) {
      if (shape[axis] != fixed[axis]) return TF_STATUS(WRONG_SIZE) + (int)input;
      continue;
    }
    if (!tf_is_size((size_t)dimension, shape[axis])) return TF_STATUS(WRONG_DIMENSION);
    if (is_there[dimension] && sizes[dimension] != shape[axis]) return TF_STATUS(WRONG_SIZE) + (int)input;
    is_there[dimension] = true;
    sizes[dimension] = shape[axis];
  }
  return TF_STATUS(OK);
}

int TF(set_input_shape)(tf_context *context, size_t input, const int64_t *shape, size_t rank) {
  int64_t sizes[TF_DIMENSIONS];
  if (!context || (!shape && rank)) return TF_STATUS(NULL_ARGUMENT);
  if (input >= TF_STATUS(INPUTS)) return TF_STATUS(WRONG_COUNT);
  if (rank != TF(inputs)()[input].rank) return TF_STATUS(WRONG_SIZE) + (int)input;
  if (atomic_flag_test_and_set_explicit(&context->is_busy, memory_order_acquire)) return TF_STATUS(BUSY);
  const int status = tf_derive(context, input, shape, sizes);
  for (size_t i = 0; i < TF_DIMENSIONS && status == TF_STATUS(OK); ++i) tf_set(context, i, sizes[i]);
  atomic_flag_clear_explicit(&context->is_busy, memory_order_release);
  return status;
}

/* Write the shape of an input or output, or its size in bytes, for the dimensions of now. */
static int tf_describe(tf_context *context, bool is_input, size_t place, int64_t *shape, size_t *bytes) {
  if (!context || !(shape || bytes)) return TF_STATUS(NULL_ARGUMENT);
  if (place >= (is_input ? TF_STATUS(INPUTS) : TF_STATUS(OUTPUTS))) return TF_STATUS(WRONG_COUNT);
  if (atomic_flag_test_and_set_explicit(&context->is_busy, memory_order_acquire)) return TF_STATUS(BUSY);
  const int status = tf_update(context);
  if (status == TF_STATUS(OK) && bytes) *bytes = (is_input ? context->plan.inputs : context->plan.outputs)[place];
  if (status == TF_STATUS(OK) && shape) (is_input ? tf_input_shape : tf_output_shape)(context->values, place, shape);
  if (status == TF_STATUS(OK) && shape && !is_input && tf_output_counts[place].axis >= 0)
    shape[tf_output_counts[place].axis] = *tf_count_of(context, tf_output_counts[place].count);
  atomic_flag_clear_explicit(&context->is_busy, memory_order_release);
  return status;
}

int TF(input_shape)(tf_context *context, size_t input, int64_t *shape) {
  return tf_describe(context, true, input, shape, NULL);
}

int TF(output_shape)(tf_context *context, size_t output, int64_t *shape) {
  return tf_describe(context, false, output, shape, NULL);
}

int TF(input_bytes)(tf_context *context, size_t input, size_t *bytes) {
  return tf_describe(context, true, input, NULL, bytes);
}

int TF(output_bytes)(tf_context *context, size_t output, size_t *bytes) {
  return tf_describe(context, false, output, NULL, bytes);
}
