/* One counted call of ONNX Runtime on a model with one input and one output, with one thread, after one that is not
 * counted: program LIBRARY MODEL INPUT OUTPUT INPUT_NAME OUTPUT_NAME ELEMENT_TYPE SIZE... The type of the input's
 * elements is ONNX's number of it. The functions are those of its table OrtApi, which only grows, by their places in
 * it. */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

enum {
  GET_ERROR_MESSAGE = 2, CREATE_ENV = 3, CREATE_SESSION = 7, RUN = 9, CREATE_SESSION_OPTIONS = 10,
  SET_OPTIMIZATION_LEVEL = 23, SET_INTRA_OP_THREADS = 24, SET_INTER_OP_THREADS = 25, CREATE_TENSOR = 49,
  GET_TENSOR_DATA = 51, CREATE_CPU_MEMORY = 69
};
enum { API_VERSION = 14, LOG_ERRORS = 3, ALL_OPTIMIZATIONS = 99, ARENA = 1, MAX_RANK = 8 };

static void **api;

static void check(void *status) {
  if (!status) return;
  fprintf(stderr, "%s\n", ((const char *(*)(void *))api[GET_ERROR_MESSAGE])(status));
  exit(1);
}

#define CALL(function, ...) check(((void *(*)())api[function])(__VA_ARGS__))

int main(int count, char **arguments) {
  if (count < 9 || count > 8 + MAX_RANK) return 2;
  void *library = dlopen(arguments[1], RTLD_NOW);
  if (!library) return fprintf(stderr, "%s\n", dlerror()), 1;
  struct { void **(*get)(uint32_t); } *base = ((void *(*)(void))dlsym(library, "OrtGetApiBase"))();
  api = base->get(API_VERSION);
  void *environment, *options, *session, *memory, *input;
  CALL(CREATE_ENV, LOG_ERRORS, "arm", &environment);
  CALL(CREATE_SESSION_OPTIONS, &options);
  CALL(SET_INTRA_OP_THREADS, options, 1);
  CALL(SET_INTER_OP_THREADS, options, 1);
  CALL(SET_OPTIMIZATION_LEVEL, options, ALL_OPTIMIZATIONS);
  CALL(CREATE_SESSION, environment, arguments[2], options, &session);
  CALL(CREATE_CPU_MEMORY, ARENA, 0, &memory);
  int64_t shape[MAX_RANK];
  size_t rank = 0;
  for (int i = 8; i < count; ++i) shape[rank++] = atoll(arguments[i]);
  FILE *file = fopen(arguments[3], "rb");
  if (!file || fseek(file, 0, SEEK_END)) return 3;
  size_t bytes = ftell(file);
  void *data = malloc(bytes);
  rewind(file);
  if (fread(data, 1, bytes, file) != bytes) return 3;
  CALL(CREATE_TENSOR, memory, data, bytes, shape, rank, atoi(arguments[7]), &input);
  const char *inputs[] = {arguments[5]}, *outputs[] = {arguments[6]};
  void *given[] = {input}, *result[1];
  for (int call = 0; call < 2; ++call) {
    result[0] = NULL;
    syscall(4095, 1);
    CALL(RUN, session, NULL, inputs, given, (size_t)1, outputs, (size_t)1, result);
  }
  syscall(4095, 2);
  void *values;
  CALL(GET_TENSOR_DATA, result[0], &values);
  file = fopen(arguments[4], "wb");
  /* as many as the caller compares */
  size_t size = strtoull(getenv("OUTPUT_BYTES"), NULL, 10);
  int is_wrong = !file || fwrite(values, 1, size, file) != size || fclose(file);
  /* its threads of other models do not end under emulation */
  _exit(is_wrong);
}
