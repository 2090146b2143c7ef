/* The program that runs a model under an emulator: PROGRAM INPUTS OUTPUTS [THREADS].
 *
 * It reads batches of inputs from one file of tensors and writes the outputs of each to another; `emulation.py`
 * reads and writes these files, too:
 *
 *   "TVMFLOW1", uint32 number of batches, uint32 number of tensors in each, then the tensors, each:
 *   uint32 length of the dtype's name, the name as NumPy has it, uint32 rank, int64 each dimension, uint64 bytes, data
 *
 * All numbers are little-endian, as are the CPUs that this is compiled for. The first batch is computed with another
 * number of threads, too: results that differ are an error.
 *
 * This is compiled together with the C code of the model, whose names it uses (runtime.h).
 */
#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>

#define MAGIC "TVMFLOW1"

__attribute__((noreturn, format(printf, 1, 2))) static void fail(const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  fputs("tvmflow-emulation-program: ", stderr);
  vfprintf(stderr, format, arguments);
  fputs("\n", stderr);
  va_end(arguments);
  exit(1);
}

static void check(int status) {
  const char *feature = status == TF_STATUS(MISSING_FEATURE) ? TF(missing_feature)() : NULL;
  if (status != TF_STATUS(OK)) fail("%s%s%s", TF(message)(status), feature ? ": " : "", feature ? feature : "");
}

/* ------------------------------------------------------------------ files of tensors */

typedef struct {
  const char *path;
  FILE *stream;
} file;

static file open_file(const char *path, const char *mode) {
  const file opened = {path, fopen(path, mode)};
  if (!opened.stream) fail("%s cannot be opened: %s", path, strerror(errno));
  return opened;
}

static void read_bytes(file from, void *data, size_t bytes) {
  if (fread(data, 1, bytes, from.stream) == bytes) return;
  fail("%s %s", from.path, ferror(from.stream) ? strerror(errno) : "ends too early");
}

static void write_bytes(file to, const void *data, size_t bytes) {
  if (fwrite(data, 1, bytes, to.stream) != bytes) fail("%s cannot be written: %s", to.path, strerror(errno));
}

static uint32_t read_number(file from) {
  uint32_t number;
  read_bytes(from, &number, sizeof number);
  return number;
}

static void write_number(file to, size_t value) {
  const uint32_t number = (uint32_t)value;
  write_bytes(to, &number, sizeof number);
}

/* Read what comes before the batches, and return their number. */
static uint32_t read_head(file from, size_t tensors) {
  char magic[sizeof MAGIC - 1];
  read_bytes(from, magic, sizeof magic);
  if (memcmp(magic, MAGIC, sizeof magic) != 0) fail("%s is not a file of tensors", from.path);
  const uint32_t batches = read_number(from), count = read_number(from);
  if (batches > 0 && count != tensors)
    fail("%s has %" PRIu32 " tensors in a batch, and the model has %zu inputs", from.path, count, tensors);
  return batches;
}

/* Read the shape of a tensor, which must be as the model describes it, or gives the sizes of dimensions. */
static void read_shape(file from, tf_context *context, size_t input) {
  const tf_tensor *tensor = &TF(inputs)()[input];
  int64_t shape[tensor->rank + 1];
  read_bytes(from, shape, tensor->rank * sizeof *shape);
  for (uint32_t i = 0; i < tensor->rank; ++i) {
    if (tensor->shape[i] >= 0 && shape[i] != tensor->shape[i])
      fail("dimension %" PRIu32 " of input '%s' is %" PRId64 ", not %" PRId64, i, tensor->name, shape[i],
           tensor->shape[i]);
  }
#ifdef TF_DIMENSIONS
  check(TF(set_input_shape)(context, input, shape, tensor->rank));
#else
  (void)context;
#endif
}

/* Read the data of a tensor. Its size is checked later: it may depend on the shapes of inputs that follow. */
static void read_tensor(file from, tf_context *context, size_t input, tf_buffer *buffer) {
  const tf_tensor *tensor = &TF(inputs)()[input];
  const uint32_t length = read_number(from);
  char dtype[32] = "";
  if (length >= sizeof dtype) fail("%s is damaged", from.path);
  read_bytes(from, dtype, length);
  if (strcmp(dtype, tensor->dtype) != 0) fail("input '%s' is %s, not %s", tensor->name, dtype, tensor->dtype);
  const uint32_t rank = read_number(from);
  if (rank != tensor->rank)
    fail("input '%s' has %" PRIu32 " dimensions, not %zu", tensor->name, rank, tensor->rank);
  read_shape(from, context, input);
  uint64_t bytes;
  read_bytes(from, &bytes, sizeof bytes);
  if (bytes > tensor->bytes) fail("input '%s' has %" PRIu64 " bytes, more than %zu", tensor->name, bytes, tensor->bytes);
  buffer->bytes = (size_t)bytes;
  read_bytes(from, buffer->data, buffer->bytes);
}

/* Check the sizes of all inputs, when all dimensions are known. */
static void check_sizes(tf_context *context, const tf_buffer *buffers) {
  for (size_t i = 0; i < TF_STATUS(INPUTS); ++i) {
    size_t bytes = TF(inputs)()[i].bytes;
#ifdef TF_DIMENSIONS
    check(TF(input_bytes)(context, i, &bytes));
#else
    (void)context;
#endif
    if (buffers[i].bytes != bytes)
      fail("input '%s' has %zu bytes, not %zu", TF(inputs)()[i].name, buffers[i].bytes, bytes);
  }
}

/* The sizes of a batch's outputs along their bounded axes before a call: the most that these can be. */
typedef struct {
  int64_t most[TF_STATUS(OUTPUTS) + 1];
} bounds;

/* Let the buffers of outputs be as large as the sizes of the inputs make them. */
static void size_outputs(tf_context *context, tf_buffer *buffers, bounds *bounded) {
  for (size_t i = 0; i < TF_STATUS(OUTPUTS); ++i) {
    const tf_tensor *tensor = &TF(outputs)()[i];
    const int axis = TF(bounded_axis)(i);
    bounded->most[i] = axis < 0 ? 0 : tensor->shape[axis];
#ifdef TF_DIMENSIONS
    int64_t shape[tensor->rank + 1];
    check(TF(output_bytes)(context, i, &buffers[i].bytes));
    check(TF(output_shape)(context, i, shape));
    if (axis >= 0) bounded->most[i] = shape[axis];
#else
    (void)context;
    (void)buffers;
#endif
  }
}

/* Write an output with the sizes that it has after a call: the first values of its memory. */
static void write_output(file to, tf_context *context, size_t output, const tf_buffer *buffer, const bounds *bounded) {
  const tf_tensor *tensor = &TF(outputs)()[output];
  int64_t shape[tensor->rank + 1];
  check(TF(output_shape)(context, output, shape));
  uint64_t bytes = buffer->bytes;
  const int axis = TF(bounded_axis)(output);
  const int64_t most = bounded->most[output];
  if (axis >= 0 && most > 0) bytes = bytes / (uint64_t)most * (uint64_t)shape[axis];
  write_number(to, strlen(tensor->dtype));
  write_bytes(to, tensor->dtype, strlen(tensor->dtype));
  write_number(to, tensor->rank);
  write_bytes(to, shape, tensor->rank * sizeof *shape);
  write_bytes(to, &bytes, sizeof bytes);
  write_bytes(to, buffer->data, bytes);
}

/* ------------------------------------------------------------------ the model */

typedef struct {
  tf_buffer inputs[TF_STATUS(INPUTS) + 1], outputs[TF_STATUS(OUTPUTS) + 1];
} batch;

static void allocate(tf_buffer *buffers, const tf_tensor *tensors, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    buffers[i].bytes = tensors[i].bytes;
    if (posix_memalign(&buffers[i].data, TF_ALIGNMENT, tensors[i].bytes ? tensors[i].bytes : 1) != 0)
      fail("there is not enough memory for %zu bytes", tensors[i].bytes);
  }
}

static tf_context *create(uint32_t threads) {
  const tf_options options = {.abi = TF_STATUS(ABI), .threads = threads};
  tf_context *context;
  check(TF(create)(&options, &context));
  return context;
}

static void run(tf_context *context, const batch *tensors) {
  check(TF(run)(context, tensors->inputs, TF_STATUS(INPUTS), tensors->outputs, TF_STATUS(OUTPUTS)));
}

/* Compute a batch once more with another number of threads; where there are none, that is the same number. */
static void check_threads(tf_context *with, const batch *expected, uint32_t threads) {
  tf_context *context = create(threads > 1 ? 1 : 2);
  batch actual = *expected;
  allocate(actual.outputs, TF(outputs)(), TF_STATUS(OUTPUTS));
#ifdef TF_DIMENSIONS
  for (size_t i = 0; i < TF_DIMENSIONS; ++i) check(TF(set_dimension)(context, i, TF(get_dimension)(with, i)));
  for (size_t i = 0; i < TF_STATUS(OUTPUTS); ++i) actual.outputs[i].bytes = expected->outputs[i].bytes;
#else
  (void)with;
#endif
  run(context, &actual);
  for (size_t i = 0; i < TF_STATUS(OUTPUTS); ++i) {
    if (memcmp(actual.outputs[i].data, expected->outputs[i].data, actual.outputs[i].bytes) != 0)
      fail("output '%s' differs with the number of threads: %" PRIu32 " or %" PRIu32, TF(outputs)()[i].name, threads,
           TF(threads)(context));
    free(actual.outputs[i].data);
  }
  TF(destroy)(context);
}

int main(int count, char **arguments) {
  if (count != 3 && count != 4) {
    fprintf(stderr, "usage: %s INPUTS OUTPUTS [THREADS]\n", arguments[0]);
    return 2;
  }
  const long threads = count == 4 ? strtol(arguments[3], NULL, 10) : 1;
  if (threads < 1 || threads > TF_MAX_THREADS) fail("%s is not a number of threads", arguments[3]);
  tf_context *context = create((uint32_t)threads);
  const file inputs = open_file(arguments[1], "rb"), outputs = open_file(arguments[2], "wb");
  const uint32_t batches = read_head(inputs, TF_STATUS(INPUTS));
  write_bytes(outputs, MAGIC, sizeof MAGIC - 1);
  write_number(outputs, batches);
  write_number(outputs, TF_STATUS(OUTPUTS));
  batch tensors;
  allocate(tensors.inputs, TF(inputs)(), TF_STATUS(INPUTS));
  allocate(tensors.outputs, TF(outputs)(), TF_STATUS(OUTPUTS));
  for (uint32_t i = 0; i < batches; ++i) {
    for (size_t j = 0; j < TF_STATUS(INPUTS); ++j) read_tensor(inputs, context, j, &tensors.inputs[j]);
    check_sizes(context, tensors.inputs);
    bounds bounded;
    size_outputs(context, tensors.outputs, &bounded);
    run(context, &tensors);
    if (i == 0) check_threads(context, &tensors, TF(threads)(context));
    for (size_t j = 0; j < TF_STATUS(OUTPUTS); ++j) write_output(outputs, context, j, &tensors.outputs[j], &bounded);
  }
  if (fclose(outputs.stream) != 0) fail("%s cannot be written: %s", outputs.path, strerror(errno));
  TF(destroy)(context);
  return 0;
}
