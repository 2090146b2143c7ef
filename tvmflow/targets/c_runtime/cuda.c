/* The executor for NVIDIA GPUs: it calls only the driver (libcuda.so.1, nvcuda.dll), of CUDA 10.0 or later.
 *
 * Types and constants are those of cuda.h. A device is used by its primary context, which the program shares with CUDA's
 * runtime; it is current only within a call. */
#ifdef _WIN32
#define TF_CUDA_CALL __stdcall
#define TF_CUDA_DRIVER "nvcuda.dll"
#else
#include <dlfcn.h>
#define TF_CUDA_CALL
#define TF_CUDA_DRIVER "libcuda.so.1"
#endif

typedef unsigned long long tf_cuda_memory; /* CUdeviceptr */
typedef struct tf_cuda_context_of_driver *tf_cuda_context;
typedef struct tf_cuda_module_of_driver *tf_cuda_module;
typedef struct tf_cuda_function_of_driver *tf_cuda_function;
typedef struct tf_cuda_stream_of_driver *tf_cuda_stream;
typedef struct tf_cuda_event_of_driver *tf_cuda_event;

/* Results of the driver: CUresult. */
enum {
  TF_CUDA_SUCCESS = 0,
  TF_CUDA_INVALID_VALUE = 1,
  TF_CUDA_OUT_OF_MEMORY = 2,
  TF_CUDA_NOT_INITIALIZED = 3,
  TF_CUDA_NO_DEVICE = 100,
  TF_CUDA_INVALID_DEVICE = 101,
  TF_CUDA_INVALID_IMAGE = 200,
  TF_CUDA_NO_BINARY_FOR_GPU = 209,
  TF_CUDA_INVALID_PTX = 218,
  TF_CUDA_JIT_COMPILER_NOT_FOUND = 221,
  TF_CUDA_UNSUPPORTED_PTX_VERSION = 222,
  TF_CUDA_NOT_FOUND = 500,
  TF_CUDA_LAUNCH_OUT_OF_RESOURCES = 701,
};

/* Attributes of functions, pointers and devices, flags, and options of the driver's compiler. */
enum {
  TF_CUDA_MOST_THREADS = 0,
  TF_CUDA_MOST_SHARED_MEMORY = 8,
  TF_CUDA_MEMORY_TYPE = 2,
  TF_CUDA_MAJOR = 75,
  TF_CUDA_MINOR = 76,
  TF_CUDA_NON_BLOCKING = 1,
  TF_CUDA_ERROR_LOG = 5,
  TF_CUDA_ERROR_LOG_BYTES = 6,
};

/* For more shared memory than this in a block, an attribute of the function must be set. */
#define TF_CUDA_SHARED_MEMORY (48 << 10)
/* Kernels of fixed sizes take few scalars. */
#define TF_CUDA_MOST_SCALARS 16

/* The driver's functions: name in this file, name in the library, and type. */
#define TF_CUDA_FUNCTIONS(F)                                                                                          \
  F(start, "cuInit", (unsigned flags))                                                                                \
  F(error_name, "cuGetErrorName", (int code, const char **text))                                                      \
  F(error_text, "cuGetErrorString", (int code, const char **text))                                                    \
  F(count_devices, "cuDeviceGetCount", (int *count))                                                                  \
  F(find_device, "cuDeviceGet", (int *device, int number))                                                            \
  F(device_attribute, "cuDeviceGetAttribute", (int *value, int attribute, int device))                                \
  F(retain, "cuDevicePrimaryCtxRetain", (tf_cuda_context * context, int device))                                      \
  F(release, "cuDevicePrimaryCtxRelease", (int device))                                                               \
  F(enter, "cuCtxPushCurrent_v2", (tf_cuda_context context))                                                          \
  F(leave, "cuCtxPopCurrent_v2", (tf_cuda_context * context))                                                         \
  F(current_device, "cuCtxGetDevice", (int *device))                                                                  \
  F(load, "cuModuleLoadDataEx", (tf_cuda_module * module, const void *image, unsigned count, int *names, void **values)) \
  F(unload, "cuModuleUnload", (tf_cuda_module module))                                                                \
  F(find_function, "cuModuleGetFunction", (tf_cuda_function * function, tf_cuda_module module, const char *name))     \
  F(function_attribute, "cuFuncGetAttribute", (int *value, int attribute, tf_cuda_function function))                 \
  F(set_function_attribute, "cuFuncSetAttribute", (tf_cuda_function function, int attribute, int value))              \
  F(allocate, "cuMemAlloc_v2", (tf_cuda_memory * memory, size_t bytes))                                               \
  F(free, "cuMemFree_v2", (tf_cuda_memory memory))                                                                    \
  F(pointer_attribute, "cuPointerGetAttribute", (void *value, int attribute, tf_cuda_memory pointer))                 \
  F(copy_in, "cuMemcpyHtoDAsync_v2", (tf_cuda_memory to, const void *from, size_t bytes, tf_cuda_stream stream))      \
  F(copy_out, "cuMemcpyDtoHAsync_v2", (void *to, tf_cuda_memory from, size_t bytes, tf_cuda_stream stream))           \
  F(copy, "cuMemcpyDtoDAsync_v2", (tf_cuda_memory to, tf_cuda_memory from, size_t bytes, tf_cuda_stream stream))      \
  F(open_stream, "cuStreamCreate", (tf_cuda_stream * stream, unsigned flags))                                         \
  F(close_stream, "cuStreamDestroy_v2", (tf_cuda_stream stream))                                                      \
  F(wait, "cuStreamSynchronize", (tf_cuda_stream stream))                                                             \
  F(open_event, "cuEventCreate", (tf_cuda_event * event, unsigned flags))                                             \
  F(close_event, "cuEventDestroy_v2", (tf_cuda_event event))                                                          \
  F(record, "cuEventRecord", (tf_cuda_event event, tf_cuda_stream stream))                                            \
  F(wait_for_event, "cuEventSynchronize", (tf_cuda_event event))                                                      \
  F(elapsed, "cuEventElapsedTime", (float *milliseconds, tf_cuda_event from, tf_cuda_event to))                       \
  F(launch, "cuLaunchKernel",                                                                                         \
    (tf_cuda_function function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y, \
     unsigned block_z, unsigned shared, tf_cuda_stream stream, void **parameters, void **more))

#define TF_CUDA_MEMBER(name, symbol, parameters) int(TF_CUDA_CALL *name) parameters;
typedef struct {
  TF_CUDA_FUNCTIONS(TF_CUDA_MEMBER)
} tf_cuda_functions;

/* The driver stays loaded until the process ends: it has threads of its own. */
static tf_cuda_functions tf_cuda;
static bool tf_cuda_is_loaded;

struct tf_device {
  int number;
  bool is_own; /* the context is the device's primary one, which is released in the end */
  tf_cuda_context context;
  tf_cuda_module module;
  tf_cuda_function functions[TF_DEVICE_FUNCTIONS + 1];
};

struct tf_stream {
  tf_device *device;
  tf_cuda_stream commands;
  bool is_own;
  tf_cuda_event events[2]; /* before and after a launch that is timed; NULL until then */
};

/* Code of all functions for some devices: machine code, or PTX. */
typedef struct {
  uint64_t offset;
  uint64_t bytes;
} tf_cuda_image;

/* Explain the driver's result of a call, and return its status. */
static int tf_cuda_fail(const char *action, int code) {
  const char *name = NULL, *text = NULL;
  if (tf_cuda.error_name(code, &name) != TF_CUDA_SUCCESS || !name) name = "an unknown error";
  if (tf_cuda.error_text(code, &text) != TF_CUDA_SUCCESS || !text) text = "no text";
  tf_explain("NVIDIA's driver cannot %s: %s (%s, %d)", action, text, name, code);
  switch (code) {
    case TF_CUDA_OUT_OF_MEMORY: return TF_STATUS(NO_MEMORY);
    case TF_CUDA_NO_DEVICE:
    case TF_CUDA_INVALID_DEVICE:
    case TF_CUDA_NO_BINARY_FOR_GPU: return TF_STATUS(NO_DEVICE);
    case TF_CUDA_INVALID_VALUE:
    case TF_CUDA_INVALID_IMAGE:
    case TF_CUDA_INVALID_PTX:
    case TF_CUDA_JIT_COMPILER_NOT_FOUND:
    case TF_CUDA_UNSUPPORTED_PTX_VERSION:
    case TF_CUDA_NOT_FOUND:
    case TF_CUDA_LAUNCH_OUT_OF_RESOURCES: return TF_STATUS(KERNEL_REFUSED);
    default: return TF_STATUS(DEVICE_LOST);
  }
}

/* Find the driver's functions. */
static int tf_cuda_find_functions(void) {
#ifdef _WIN32
  HMODULE library = LoadLibraryA(TF_CUDA_DRIVER);
#define TF_CUDA_SYMBOL(symbol) (void *)(uintptr_t)GetProcAddress(library, symbol)
#else
  void *library = dlopen(TF_CUDA_DRIVER, RTLD_NOW | RTLD_LOCAL);
#define TF_CUDA_SYMBOL(symbol) dlsym(library, symbol)
#endif
  if (!library) {
    tf_explain("NVIDIA's driver is not installed: there is no %s", TF_CUDA_DRIVER);
    return TF_STATUS(NO_DRIVER);
  }
  void *address;
#define TF_CUDA_FIND(name, symbol, parameters)                                                   \
  address = TF_CUDA_SYMBOL(symbol);                                                              \
  if (!address) {                                                                                \
    tf_explain("NVIDIA's driver is too old for this library: it has no %s", symbol);              \
    return TF_STATUS(NO_DRIVER);                                                                 \
  }                                                                                              \
  memcpy(&tf_cuda.name, &address, sizeof address);
  TF_CUDA_FUNCTIONS(TF_CUDA_FIND)
  tf_cuda_is_loaded = true;
  return TF_STATUS(OK);
}

static int tf_cuda_load_driver(void) {
  int status = tf_cuda_is_loaded ? TF_STATUS(OK) : tf_cuda_find_functions();
  if (status != TF_STATUS(OK)) return status;
  const int code = tf_cuda.start(0);
  if (code == TF_CUDA_SUCCESS) return TF_STATUS(OK);
  if (code == TF_CUDA_NOT_INITIALIZED) {
    tf_explain("NVIDIA's driver was started before this process was forked, and does not work in it");
    return TF_STATUS(DEVICE_LOST);
  }
  status = tf_cuda_fail("be started", code);
  return status == TF_STATUS(NO_DEVICE) ? status : TF_STATUS(NO_DRIVER);
}

/* Enter the context of a device; leaving it makes the one before current again. */
static int tf_cuda_enter(const tf_device *device) {
  const int code = tf_cuda.enter(device->context);
  return code == TF_CUDA_SUCCESS ? TF_STATUS(OK) : tf_cuda_fail("use its context", code);
}

static void tf_cuda_leave(void) {
  tf_cuda_context context;
  tf_cuda.leave(&context);
}

/* Return the compute capability of a device as a number: 62 for 6.2. */
static int tf_cuda_capability(int number) {
  int major = 0, minor = 0;
  tf_cuda.device_attribute(&major, TF_CUDA_MAJOR, number);
  tf_cuda.device_attribute(&minor, TF_CUDA_MINOR, number);
  return 10 * major + minor;
}

/* Load one image of the code. */
static int tf_cuda_load_image(tf_device *device, const void *image) {
  char log[600] = "";
  int options[] = {TF_CUDA_ERROR_LOG, TF_CUDA_ERROR_LOG_BYTES};
  void *values[] = {log, (void *)(uintptr_t)(sizeof log - 1)};
  const int code = tf_cuda.load(&device->module, image, 2, options, values);
  if (code == TF_CUDA_SUCCESS) return TF_STATUS(OK);
  const int status = tf_cuda_fail("load the kernels", code);
  if (status == TF_STATUS(NO_DEVICE))
    tf_explain("the kernels are not for this GPU, which is sm_%d", tf_cuda_capability(device->number));
  else if (log[0])
    tf_explain("NVIDIA's driver refuses the kernels for sm_%d: %s", tf_cuda_capability(device->number), log);
  return status;
}

/* Load the first image that the driver accepts for this device, and find its functions. */
static int tf_cuda_load_code(tf_device *device) {
  uint64_t count;
  memcpy(&count, TF_DEVICE_CODE, sizeof count);
  int status = TF_STATUS(NO_DEVICE);
  for (uint64_t i = 0; i < count; ++i) {
    tf_cuda_image image;
    memcpy(&image, TF_DEVICE_CODE + sizeof count + i * sizeof image, sizeof image);
    status = tf_cuda_load_image(device, TF_DEVICE_CODE + image.offset);
    if (status == TF_STATUS(OK) || status == TF_STATUS(NO_MEMORY) || status == TF_STATUS(DEVICE_LOST)) break;
  }
  for (uint32_t i = 0; status == TF_STATUS(OK) && i < TF_DEVICE_FUNCTIONS; ++i) {
    int code = tf_cuda.find_function(&device->functions[i], device->module, tf_device_functions[i]);
    int threads = 0;
    if (code == TF_CUDA_SUCCESS) code = tf_cuda.function_attribute(&threads, TF_CUDA_MOST_THREADS, device->functions[i]);
    if (code != TF_CUDA_SUCCESS) return tf_cuda_fail("find a kernel", code);
    if (tf_device_threads[i] <= (uint32_t)threads) continue;
    tf_explain("%s needs blocks of %u threads, and this GPU runs at most %d of it", tf_device_functions[i],
               (unsigned)tf_device_threads[i], threads);
    return TF_STATUS(KERNEL_REFUSED);
  }
  return status;
}

/* Use the program's own context, or the primary one of a device. */
static int tf_cuda_open_context(tf_device *device, const tf_choice *choice) {
  int count = 0;
  if (choice->context) {
    device->context = choice->context;
    const int status = tf_cuda_enter(device);
    if (status != TF_STATUS(OK)) return status;
    const int code = tf_cuda.current_device(&device->number);
    tf_cuda_leave();
    return code == TF_CUDA_SUCCESS ? status : tf_cuda_fail("find the device of the context", code);
  }
  int code = tf_cuda.count_devices(&count);
  if (code != TF_CUDA_SUCCESS) return tf_cuda_fail("count its devices", code);
  if (choice->number >= (uint32_t)count) {
    tf_explain("NVIDIA's driver has %d GPUs here, and none of the number %u", count, (unsigned)choice->number);
    return TF_STATUS(NO_DEVICE);
  }
  code = tf_cuda.find_device(&device->number, (int)choice->number);
  if (code == TF_CUDA_SUCCESS) code = tf_cuda.retain(&device->context, device->number);
  device->is_own = code == TF_CUDA_SUCCESS;
  return device->is_own ? TF_STATUS(OK) : tf_cuda_fail("open the GPU", code);
}

static void tf_close_device(tf_device *device) {
  if (device->module && tf_cuda_enter(device) == TF_STATUS(OK)) {
    tf_cuda.unload(device->module);
    tf_cuda_leave();
  }
  if (device->is_own) tf_cuda.release(device->number);
  free(device);
}

static int tf_open_device(const tf_choice *choice, tf_device **result) {
  int status = tf_cuda_load_driver();
  if (status != TF_STATUS(OK)) return status;
  tf_device *device = calloc(1, sizeof *device);
  if (!device) return TF_STATUS(NO_MEMORY);
  status = tf_cuda_open_context(device, choice);
  if (status == TF_STATUS(OK)) status = tf_cuda_enter(device);
  if (status == TF_STATUS(OK)) {
    status = tf_cuda_load_code(device);
    tf_cuda_leave();
  }
  if (status == TF_STATUS(OK)) *result = device;
  else tf_close_device(device);
  return status;
}

static int tf_open_stream(tf_device *device, const tf_choice *choice, tf_stream **result) {
  tf_stream *stream = calloc(1, sizeof *stream);
  if (!stream) return TF_STATUS(NO_MEMORY);
  stream->device = device;
  stream->commands = choice->queue;
  int status = stream->commands ? TF_STATUS(OK) : tf_cuda_enter(device);
  if (status == TF_STATUS(OK) && !stream->commands) {
    const int code = tf_cuda.open_stream(&stream->commands, TF_CUDA_NON_BLOCKING);
    stream->is_own = code == TF_CUDA_SUCCESS;
    if (!stream->is_own) status = tf_cuda_fail("make a stream", code);
    tf_cuda_leave();
  }
  if (status == TF_STATUS(OK)) *result = stream;
  else free(stream);
  return status;
}

static void tf_close_stream(tf_stream *stream) {
  if (tf_cuda_enter(stream->device) == TF_STATUS(OK)) {
    tf_cuda.wait(stream->commands);
    for (int i = 0; i < 2; ++i)
      if (stream->events[i]) tf_cuda.close_event(stream->events[i]);
    if (stream->is_own) tf_cuda.close_stream(stream->commands);
    tf_cuda_leave();
  }
  free(stream);
}

static int tf_allocate_on_device(tf_device *device, uint64_t bytes, tf_handle *memory) {
  tf_cuda_memory allocated = 0;
  int status = tf_cuda_enter(device);
  if (status != TF_STATUS(OK)) return status;
  const int code = bytes > SIZE_MAX ? TF_CUDA_OUT_OF_MEMORY : tf_cuda.allocate(&allocated, (size_t)bytes);
  if (code != TF_CUDA_SUCCESS) status = tf_cuda_fail("allocate memory", code);
  if (code == TF_CUDA_OUT_OF_MEMORY) tf_explain("the GPU has no memory of %llu bytes", (unsigned long long)bytes);
  tf_cuda_leave();
  *memory = allocated;
  return status;
}

static void tf_release_on_device(tf_device *device, tf_handle memory) {
  if (tf_cuda_enter(device) != TF_STATUS(OK)) return;
  tf_cuda.free(memory);
  tf_cuda_leave();
}

static int tf_open_view(tf_device *device, tf_handle memory, uint64_t offset, uint64_t bytes, tf_handle *view) {
  (void)device, (void)bytes;
  *view = memory + offset;
  return TF_STATUS(OK);
}

static void tf_close_view(tf_device *device, tf_handle view) { (void)device, (void)view; }

static int tf_copy_in(tf_stream *stream, tf_handle target, const void *source, size_t bytes) {
  unsigned type = 0;
  int status = tf_cuda_enter(stream->device);
  if (status != TF_STATUS(OK)) return status;
  int code = tf_cuda.copy_in(target, source, bytes, stream->commands);
  /* The driver reads pinned memory later, but copies all other memory at once. */
  if (code == TF_CUDA_SUCCESS &&
      tf_cuda.pointer_attribute(&type, TF_CUDA_MEMORY_TYPE, (tf_cuda_memory)(uintptr_t)source) == TF_CUDA_SUCCESS)
    code = tf_cuda.wait(stream->commands);
  if (code != TF_CUDA_SUCCESS) status = tf_cuda_fail("copy to the GPU", code);
  tf_cuda_leave();
  return status;
}

static int tf_copy_out(tf_stream *stream, void *target, tf_handle source, size_t bytes) {
  int status = tf_cuda_enter(stream->device);
  if (status != TF_STATUS(OK)) return status;
  const int code = tf_cuda.copy_out(target, source, bytes, stream->commands);
  if (code != TF_CUDA_SUCCESS) status = tf_cuda_fail("copy from the GPU", code);
  tf_cuda_leave();
  return status;
}

static int tf_copy_on_device(tf_stream *stream, tf_handle target, tf_handle source, size_t bytes) {
  int status = tf_cuda_enter(stream->device);
  if (status != TF_STATUS(OK)) return status;
  const int code = tf_cuda.copy(target, source, bytes, stream->commands);
  if (code != TF_CUDA_SUCCESS) status = tf_cuda_fail("copy on the GPU", code);
  tf_cuda_leave();
  return status;
}

static int tf_cuda_launch(tf_stream *stream, const tf_device_launch *launch, const tf_handle *pointers) {
  tf_cuda_memory addresses[TF_DEVICE_MOST_POINTERS + 1];
  void *parameters[TF_DEVICE_MOST_POINTERS + TF_CUDA_MOST_SCALARS + 1];
  uint32_t count = 0;
  if (launch->scalar_count > TF_CUDA_MOST_SCALARS) return TF_CUDA_INVALID_VALUE;
  for (; count < launch->count; ++count) {
    addresses[count] = pointers[launch->arguments[count]];
    parameters[count] = &addresses[count];
  }
  for (uint32_t i = 0; i < launch->scalar_count; ++i) parameters[count++] = (void *)(uintptr_t)&launch->scalars[i].bits;
  const tf_cuda_function function = stream->device->functions[launch->function];
  if (launch->shared > TF_CUDA_SHARED_MEMORY) {
    const int code = tf_cuda.set_function_attribute(function, TF_CUDA_MOST_SHARED_MEMORY, (int)launch->shared);
    if (code != TF_CUDA_SUCCESS) return code;
  }
  const uint32_t *grid = launch->grid, *block = launch->block;
  return tf_cuda.launch(function, grid[0], grid[1], grid[2], block[0], block[1], block[2], launch->shared,
                        stream->commands, parameters, NULL);
}

/* The same between two events; their distance is added to `nanoseconds`. */
static int tf_cuda_time(tf_stream *stream, const tf_device_launch *launch, const tf_handle *pointers,
                        uint64_t *nanoseconds) {
  float milliseconds = 0;
  int code = TF_CUDA_SUCCESS;
  for (int i = 0; i < 2 && code == TF_CUDA_SUCCESS; ++i)
    if (!stream->events[i]) code = tf_cuda.open_event(&stream->events[i], 0);
  if (code == TF_CUDA_SUCCESS) code = tf_cuda.record(stream->events[0], stream->commands);
  if (code == TF_CUDA_SUCCESS) code = tf_cuda_launch(stream, launch, pointers);
  if (code == TF_CUDA_SUCCESS) code = tf_cuda.record(stream->events[1], stream->commands);
  if (code == TF_CUDA_SUCCESS) code = tf_cuda.wait_for_event(stream->events[1]);
  if (code == TF_CUDA_SUCCESS) code = tf_cuda.elapsed(&milliseconds, stream->events[0], stream->events[1]);
  if (code == TF_CUDA_SUCCESS) *nanoseconds += (uint64_t)(1e6 * (double)milliseconds);
  return code;
}

static int tf_start(tf_stream *stream, const tf_device_launch *launch, const tf_handle *pointers, uint64_t *nanoseconds) {
  int status = tf_cuda_enter(stream->device);
  if (status != TF_STATUS(OK)) return status;
  const int code = nanoseconds ? tf_cuda_time(stream, launch, pointers, nanoseconds) : tf_cuda_launch(stream, launch, pointers);
  if (code != TF_CUDA_SUCCESS) status = tf_cuda_fail("start a kernel", code);
  tf_cuda_leave();
  return status;
}

static int tf_wait(tf_stream *stream) {
  int status = tf_cuda_enter(stream->device);
  if (status != TF_STATUS(OK)) return status;
  const int code = tf_cuda.wait(stream->commands);
  if (code != TF_CUDA_SUCCESS) status = tf_cuda_fail("finish the kernels", code);
  tf_cuda_leave();
  return status;
}
