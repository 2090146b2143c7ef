/* The executor of OpenCL 1.2 and later: see `device.h`. */
#ifdef _WIN32
#define TF_CL __stdcall
#else
#ifndef __ANDROID__
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>
#endif
#define TF_CL
#endif

typedef int32_t tf_cl_int;
typedef uint32_t tf_cl_uint;
typedef uint64_t tf_cl_flags;
typedef void *tf_cl_object; /* a platform, device, context, queue, program, kernel, memory or event */

enum {
  TF_CL_MEMORY_FAILURE = -4,
  TF_CL_OUT_OF_RESOURCES = -5,
  TF_CL_OUT_OF_HOST_MEMORY = -6,
  TF_CL_BUILD_FAILURE = -11,
  TF_CL_INVALID_PROGRAM = -44, /* from here to the next one, errors are about a kernel and how it is started */
  TF_CL_INVALID_OFFSET = -56,
  TF_CL_INVALID_GLOBAL_SIZE = -63,
  TF_CL_INVALID_BUFFER_SIZE = -61,
  TF_CL_NO_PLATFORM = -1001,
  TF_CL_PROFILING = 1 << 1,
  TF_CL_READ_WRITE = 1 << 0,
  TF_CL_REGION = 0x1220,
  TF_CL_DEVICE_ALIGNMENT = 0x1019,
  TF_CL_DEVICE_NAME = 0x102B,
  TF_CL_DEVICE_VENDOR = 0x102C,
  TF_CL_DRIVER_VERSION = 0x102D,
  TF_CL_DEVICE_VERSION = 0x102F,
  TF_CL_PROGRAM_DEVICES = 0x1162,
  TF_CL_BINARY_SIZES = 0x1165,
  TF_CL_BINARIES = 0x1166,
  TF_CL_BUILD_LOG = 0x1183,
  TF_CL_WORK_GROUP_SIZE = 0x11B0,
  TF_CL_COMMAND_START = 0x1282,
  TF_CL_COMMAND_END = 0x1283
};

typedef struct {
  size_t origin, size;
} tf_cl_region;

#define TF_CL_TEXT_OF(name) #name
#define TF_CL_TEXT(name) TF_CL_TEXT_OF(name)

/* The functions of the driver's library: result, name, arguments. */
#define TF_CL_FUNCTIONS(F)                                                                                              \
  F(tf_cl_int, GetPlatformIDs, (tf_cl_uint, tf_cl_object *, tf_cl_uint *))                                              \
  F(tf_cl_int, GetDeviceIDs, (tf_cl_object, tf_cl_flags, tf_cl_uint, tf_cl_object *, tf_cl_uint *))                     \
  F(tf_cl_int, GetDeviceInfo, (tf_cl_object, tf_cl_uint, size_t, void *, size_t *))                                     \
  F(tf_cl_object, CreateContext, (const void *, tf_cl_uint, const tf_cl_object *, void *, void *, tf_cl_int *))         \
  F(tf_cl_int, RetainContext, (tf_cl_object))                                                                           \
  F(tf_cl_int, ReleaseContext, (tf_cl_object))                                                                          \
  F(tf_cl_object, CreateCommandQueue, (tf_cl_object, tf_cl_object, tf_cl_flags, tf_cl_int *))                           \
  F(tf_cl_int, RetainCommandQueue, (tf_cl_object))                                                                      \
  F(tf_cl_int, ReleaseCommandQueue, (tf_cl_object))                                                                     \
  F(tf_cl_object, CreateProgramWithSource, (tf_cl_object, tf_cl_uint, const char **, const size_t *, tf_cl_int *))      \
  F(tf_cl_object, CreateProgramWithBinary,                                                                              \
    (tf_cl_object, tf_cl_uint, const tf_cl_object *, const size_t *, const unsigned char *const *, tf_cl_int *,         \
     tf_cl_int *))                                                                                                      \
  F(tf_cl_int, GetProgramInfo, (tf_cl_object, tf_cl_uint, size_t, void *, size_t *))                                    \
  F(tf_cl_int, BuildProgram, (tf_cl_object, tf_cl_uint, const tf_cl_object *, const char *, void *, void *))            \
  F(tf_cl_int, GetProgramBuildInfo, (tf_cl_object, tf_cl_object, tf_cl_uint, size_t, void *, size_t *))                 \
  F(tf_cl_int, ReleaseProgram, (tf_cl_object))                                                                          \
  F(tf_cl_object, CreateKernel, (tf_cl_object, const char *, tf_cl_int *))                                              \
  F(tf_cl_int, GetKernelWorkGroupInfo, (tf_cl_object, tf_cl_object, tf_cl_uint, size_t, void *, size_t *))              \
  F(tf_cl_int, SetKernelArg, (tf_cl_object, tf_cl_uint, size_t, const void *))                                          \
  F(tf_cl_int, ReleaseKernel, (tf_cl_object))                                                                           \
  F(tf_cl_object, CreateBuffer, (tf_cl_object, tf_cl_flags, size_t, void *, tf_cl_int *))                               \
  F(tf_cl_object, CreateSubBuffer, (tf_cl_object, tf_cl_flags, tf_cl_uint, const void *, tf_cl_int *))                  \
  F(tf_cl_int, ReleaseMemObject, (tf_cl_object))                                                                        \
  F(tf_cl_int, EnqueueWriteBuffer,                                                                                      \
    (tf_cl_object, tf_cl_object, tf_cl_uint, size_t, size_t, const void *, tf_cl_uint, const void *, tf_cl_object *))   \
  F(tf_cl_int, EnqueueReadBuffer,                                                                                       \
    (tf_cl_object, tf_cl_object, tf_cl_uint, size_t, size_t, void *, tf_cl_uint, const void *, tf_cl_object *))         \
  F(tf_cl_int, EnqueueCopyBuffer,                                                                                       \
    (tf_cl_object, tf_cl_object, tf_cl_object, size_t, size_t, size_t, tf_cl_uint, const void *, tf_cl_object *))       \
  F(tf_cl_int, EnqueueNDRangeKernel,                                                                                    \
    (tf_cl_object, tf_cl_object, tf_cl_uint, const size_t *, const size_t *, const size_t *, tf_cl_uint, const void *,  \
     tf_cl_object *))                                                                                                   \
  F(tf_cl_int, WaitForEvents, (tf_cl_uint, const tf_cl_object *))                                                       \
  F(tf_cl_int, GetEventProfilingInfo, (tf_cl_object, tf_cl_uint, size_t, void *, size_t *))                             \
  F(tf_cl_int, ReleaseEvent, (tf_cl_object))                                                                            \
  F(tf_cl_int, Finish, (tf_cl_object))

typedef struct {
#define TF_CL_POINTER(result, name, arguments) result(TF_CL *name) arguments;
  TF_CL_FUNCTIONS(TF_CL_POINTER)
} tf_opencl;

struct tf_device {
  tf_opencl cl;
  tf_cl_object id, context, program;
};

struct tf_stream {
  const tf_device *device;
  tf_cl_object queue;
  bool is_timed, is_own;
  tf_cl_object kernels[TF_DEVICE_FUNCTIONS + 1];
};

static int tf_fail_cl(const char *function, tf_cl_int code) {
  tf_explain("OpenCL: cl%s failed with error %d", function, (int)code);
  switch (code) {
    case TF_CL_MEMORY_FAILURE:
    case TF_CL_OUT_OF_RESOURCES:
    case TF_CL_OUT_OF_HOST_MEMORY:
    case TF_CL_INVALID_BUFFER_SIZE:
      return TF_STATUS(NO_MEMORY);
    default:
      return TF_STATUS(DEVICE_LOST);
  }
}

/* ------------------------------------------------------------------ the driver */

/* The library stays loaded: drivers have threads of their own. */
static void *tf_load_opencl(void) {
#if defined(_WIN32)
  return (void *)LoadLibraryA("OpenCL.dll");
#else
#if defined(__APPLE__)
  static const char *const names[] = {"/System/Library/Frameworks/OpenCL.framework/OpenCL"};
#elif defined(__ANDROID__)
  static const char *const names[] = {
      "libOpenCL.so",        "/vendor/lib64/libOpenCL.so",         "/system/vendor/lib64/libOpenCL.so",
      "/vendor/lib/libOpenCL.so", "/system/vendor/lib/libOpenCL.so", "libGLES_mali.so",
      "/vendor/lib64/egl/libGLES_mali.so", "libPVROCL.so",
  };
#else
  static const char *const names[] = {"libOpenCL.so.1", "libOpenCL.so"};
#endif
  for (size_t i = 0; i < sizeof names / sizeof *names; ++i) {
    void *library = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
    if (library) return library;
  }
  return NULL;
#endif
}

static void *tf_find_in_opencl(void *library, const char *name) {
#ifdef _WIN32
  return (void *)(uintptr_t)GetProcAddress((HMODULE)library, name);
#else
  return dlsym(library, name);
#endif
}

static int tf_load_driver(tf_opencl *cl) {
  void *library = tf_load_opencl();
  if (!library) {
    tf_explain("OpenCL is not installed: there is no library of that name");
    return TF_STATUS(NO_DRIVER);
  }
#define TF_CL_LOAD(result, name, arguments)                            \
  {                                                                    \
    void *function = tf_find_in_opencl(library, "cl" #name);           \
    if (!function) {                                                   \
      tf_explain("OpenCL's library has no function cl%s", #name);      \
      return TF_STATUS(NO_DRIVER);                                     \
    }                                                                  \
    memcpy(&cl->name, &function, sizeof function);                     \
  }
  TF_CL_FUNCTIONS(TF_CL_LOAD)
  return TF_STATUS(OK);
}

/* Find the device of a number: first the GPUs of all platforms, then accelerators, then CPUs. */
static int tf_find_device(const tf_opencl *cl, uint32_t number, tf_cl_object *device) {
  static const tf_cl_flags types[] = {1 << 2, 1 << 3, 1 << 1};
  tf_cl_object platforms[16], devices[16];
  tf_cl_uint platform_count = 0;
  uint32_t seen = 0;
  const tf_cl_int code = cl->GetPlatformIDs(16, platforms, &platform_count);
  if (code != 0 || platform_count == 0) {
    tf_explain("OpenCL has no driver of a device (error %d)", (int)code);
    return code == 0 || code == TF_CL_NO_PLATFORM ? TF_STATUS(NO_DRIVER) : tf_fail_cl("GetPlatformIDs", code);
  }
  if (platform_count > 16) platform_count = 16;
  for (size_t type = 0; type < sizeof types / sizeof *types; ++type) {
    for (tf_cl_uint i = 0; i < platform_count; ++i) {
      tf_cl_uint count = 0;
      /* A platform whose driver fails counts as one without devices. */
      if (cl->GetDeviceIDs(platforms[i], types[type], 16, devices, &count) != 0) continue;
      if (count > 16) count = 16;
      if (number - seen < count) {
        *device = devices[number - seen];
        return TF_STATUS(OK);
      }
      seen += count;
    }
  }
  tf_explain("OpenCL has %u devices here, and none of the number %u", (unsigned)seen, (unsigned)number);
  return TF_STATUS(NO_DEVICE);
}

/* ------------------------------------------------------------------ devices */

/* Explain by the end of the driver's log why a program cannot be built. */
static int tf_refuse_program(const tf_device *device, tf_cl_int code) {
  char *log = NULL;
  size_t bytes = 0;
  if (device->cl.GetProgramBuildInfo(device->program, device->id, TF_CL_BUILD_LOG, 0, NULL, &bytes) == 0 && bytes)
    log = calloc(bytes + 1, 1);
  if (log) device->cl.GetProgramBuildInfo(device->program, device->id, TF_CL_BUILD_LOG, bytes, log, NULL);
  tf_explain("OpenCL: clBuildProgram failed with error %d: %s", (int)code, log ? log : "");
  free(log);
  return code == TF_CL_OUT_OF_HOST_MEMORY ? TF_STATUS(NO_MEMORY) : TF_STATUS(KERNEL_REFUSED);
}

/* ------------------------------------------------------------------ binaries */

/* A cache of built programs, in a folder that the caller or the variable NAME_DEVICE_CACHE names. A file has a head, the
 * identity of code, device and driver, and the binary. If the file does not match, the code is built from its source, and the
 * file is written again. On Windows, drivers have a cache of their own. */
#ifdef _WIN32

static bool tf_load_binary(tf_device *device, const tf_choice *choice) {
  (void)device, (void)choice;
  return false;
}

static void tf_keep_binary(const tf_device *device, const tf_choice *choice) { (void)device, (void)choice; }

#else

enum { TF_CL_IDENTITY = 1024, TF_CL_PATH = 4096 };

typedef struct {
  char magic[8];
  uint64_t identity_bytes, binary_bytes, checksum;
} tf_binary_head;

static const char tf_binary_magic[8] = {'t', 'f', 'c', 'l', 'b', 'i', 'n', '1'};

/* The identity of a binary, and its file. */
typedef struct {
  char identity[TF_CL_IDENTITY], path[TF_CL_PATH];
  size_t identity_bytes, path_bytes;
} tf_binary_place;

/* FNV-1a: it finds damage, but no attack by the owner of the file, who is trusted. */
static uint64_t tf_add_checksum(uint64_t checksum, const void *data, size_t bytes) {
  for (const unsigned char *byte = data, *end = byte + bytes; byte < end; ++byte)
    checksum = (checksum ^ *byte) * UINT64_C(0x100000001b3);
  return checksum;
}

static uint64_t tf_checksum_of(const tf_binary_place *place, const void *binary, size_t bytes) {
  const uint64_t checksum = tf_add_checksum(UINT64_C(0xcbf29ce484222325), place->identity, place->identity_bytes);
  return tf_add_checksum(checksum, binary, bytes);
}

static bool tf_add_text(char *target, size_t room, size_t *length, const char *text) {
  const size_t bytes = strlen(text);
  if (bytes >= room - *length) return false;
  memcpy(target + *length, text, bytes + 1);
  *length += bytes;
  return true;
}

/* Find the place of a binary; false without a cache, or if the identity is too long. */
static bool tf_find_binary(const tf_device *device, const tf_choice *choice, tf_binary_place *place) {
  static const tf_cl_uint parts[] = {TF_CL_DEVICE_NAME, TF_CL_DEVICE_VENDOR, TF_CL_DEVICE_VERSION, TF_CL_DRIVER_VERSION};
  const char *folder = choice->cache ? choice->cache : tf_environment(TF_CL_TEXT(TF_STATUS(DEVICE_CACHE)));
  if (!folder || !*folder) return false;
  place->identity_bytes = place->path_bytes = 0;
  if (!tf_add_text(place->identity, TF_CL_IDENTITY, &place->identity_bytes, TF_DEVICE_CODE_DIGEST)) return false;
  for (size_t i = 0; i < sizeof parts / sizeof *parts; ++i) {
    size_t bytes = 0;
    const size_t room = TF_CL_IDENTITY - place->identity_bytes;
    if (device->cl.GetDeviceInfo(device->id, parts[i], room, place->identity + place->identity_bytes, &bytes) != 0) return false;
    /* With the 0 at the end, so that different lists of texts differ. */
    place->identity_bytes += bytes;
  }
  uint64_t digest = tf_checksum_of(place, NULL, 0);
  char name[] = "/0000000000000000.clbin";
  for (size_t i = 16; i > 0; --i, digest >>= 4) name[i] = "0123456789abcdef"[digest & 15];
  return tf_add_text(place->path, TF_CL_PATH, &place->path_bytes, folder) &&
         tf_add_text(place->path, TF_CL_PATH, &place->path_bytes, name);
}

static bool tf_read_all(int file, void *target, size_t bytes) {
  for (char *place = target; bytes;) {
    const ssize_t count = read(file, place, bytes);
    if (count <= 0) return false;
    place += count;
    bytes -= (size_t)count;
  }
  return true;
}

static bool tf_write_all(int file, const void *source, size_t bytes) {
  for (const char *place = source; bytes;) {
    const ssize_t count = write(file, place, bytes);
    if (count <= 0) return false;
    place += count;
    bytes -= (size_t)count;
  }
  return true;
}

/* The driver runs the content of the file, so no other user may write to it. */
static bool tf_is_own_file(const struct stat *found) {
  const unsigned others_write = 022;
  return S_ISREG(found->st_mode) && found->st_uid == geteuid() && (found->st_mode & others_write) == 0;
}

/* Return the binary in an open file, or NULL. */
static unsigned char *tf_read_binary(int file, const tf_binary_place *place, size_t *bytes) {
  tf_binary_head head;
  char identity[TF_CL_IDENTITY];
  struct stat found;
  if (fstat(file, &found) != 0 || !tf_is_own_file(&found) || (uint64_t)found.st_size < sizeof head) return NULL;
  if (!tf_read_all(file, &head, sizeof head)) return NULL;
  const uint64_t rest = (uint64_t)found.st_size - sizeof head;
  if (memcmp(head.magic, tf_binary_magic, sizeof head.magic) != 0 || head.identity_bytes != place->identity_bytes ||
      rest <= head.identity_bytes || head.binary_bytes != rest - head.identity_bytes || head.binary_bytes > SIZE_MAX ||
      !tf_read_all(file, identity, place->identity_bytes) ||
      memcmp(identity, place->identity, place->identity_bytes) != 0)
    return NULL;
  *bytes = (size_t)head.binary_bytes;
  unsigned char *binary = malloc(*bytes);
  if (binary && tf_read_all(file, binary, *bytes) && tf_checksum_of(place, binary, *bytes) == head.checksum) return binary;
  free(binary);
  return NULL;
}

/* Build the program from the cache; false if there is no binary that the driver accepts. */
static bool tf_load_binary(tf_device *device, const tf_choice *choice) {
  tf_binary_place place;
  if (!tf_find_binary(device, choice, &place)) return false;
  const int file = open(place.path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (file < 0) return false;
  size_t bytes = 0;
  unsigned char *binary = tf_read_binary(file, &place, &bytes);
  close(file);
  if (!binary) return false;
  const unsigned char *const binaries[] = {binary};
  tf_cl_int status = 0, error = 0;
  device->program =
      device->cl.CreateProgramWithBinary(device->context, 1, &device->id, &bytes, binaries, &status, &error);
  free(binary);
  if (!device->program) return false;
  if (status == 0 && device->cl.BuildProgram(device->program, 1, &device->id, "", NULL, NULL) == 0) return true;
  device->cl.ReleaseProgram(device->program);
  device->program = NULL;
  return false;
}

/* Write a file under another name, then rename it: another process may read it. */
static void tf_write_binary(tf_binary_place *place, const unsigned char *binary, size_t bytes) {
  tf_binary_head head = {.identity_bytes = place->identity_bytes, .binary_bytes = bytes};
  char aside[TF_CL_PATH + 32];
  size_t length = 0;
  memcpy(head.magic, tf_binary_magic, sizeof head.magic);
  head.checksum = tf_checksum_of(place, binary, bytes);
  uint64_t number = (uint64_t)getpid();
  char name[] = ".0000000000000000";
  for (size_t i = 16; i > 0; --i, number >>= 4) name[i] = "0123456789abcdef"[number & 15];
  if (!tf_add_text(aside, sizeof aside, &length, place->path) || !tf_add_text(aside, sizeof aside, &length, name)) return;
  const int file = open(aside, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (file < 0) return;
  const bool is_written = tf_write_all(file, &head, sizeof head) &&
                          tf_write_all(file, place->identity, place->identity_bytes) &&
                          tf_write_all(file, binary, bytes);
  if (close(file) != 0 || !is_written || rename(aside, place->path) != 0) unlink(aside);
}

/* Write the binary of a program for one device to the cache. */
static void tf_keep_binary(const tf_device *device, const tf_choice *choice) {
  tf_binary_place place;
  tf_cl_uint devices = 0;
  size_t bytes = 0;
  if (!tf_find_binary(device, choice, &place)) return;
  const tf_opencl *cl = &device->cl;
  if (cl->GetProgramInfo(device->program, TF_CL_PROGRAM_DEVICES, sizeof devices, &devices, NULL) != 0 || devices != 1) return;
  if (cl->GetProgramInfo(device->program, TF_CL_BINARY_SIZES, sizeof bytes, &bytes, NULL) != 0 || !bytes) return;
  unsigned char *binary = malloc(bytes);
  if (!binary) return;
  if (cl->GetProgramInfo(device->program, TF_CL_BINARIES, sizeof binary, &binary, NULL) == 0)
    tf_write_binary(&place, binary, bytes);
  free(binary);
}

#endif

static int tf_build_program(tf_device *device, const tf_choice *choice) {
  if (tf_load_binary(device, choice)) return TF_STATUS(OK);
  const char *code = (const char *)TF_DEVICE_CODE;
  const size_t bytes = TF_DEVICE_CODE_BYTES;
  tf_cl_int error = 0;
  device->program = device->cl.CreateProgramWithSource(device->context, 1, &code, &bytes, &error);
  if (!device->program) return tf_fail_cl("CreateProgramWithSource", error);
  error = device->cl.BuildProgram(device->program, 1, &device->id, "", NULL, NULL);
  if (error != 0) return tf_refuse_program(device, error);
  tf_keep_binary(device, choice);
  return TF_STATUS(OK);
}

/* Check that the device can start all functions with the threads of their launches. */
static int tf_check_functions(const tf_device *device) {
  for (size_t i = 0; i < TF_DEVICE_FUNCTIONS; ++i) {
    const char *name = tf_device_functions[i];
    tf_cl_int error = 0;
    size_t most = 0;
    tf_cl_object kernel = device->cl.CreateKernel(device->program, name, &error);
    if (!kernel) {
      tf_explain("OpenCL: the driver has no function %s (error %d)", name, (int)error);
      return TF_STATUS(KERNEL_REFUSED);
    }
    error = device->cl.GetKernelWorkGroupInfo(kernel, device->id, TF_CL_WORK_GROUP_SIZE, sizeof most, &most, NULL);
    device->cl.ReleaseKernel(kernel);
    if (error == 0 && most < tf_device_threads[i]) {
      tf_explain("%s needs blocks of %u threads, and this device runs at most %u of it", name,
                 (unsigned)tf_device_threads[i], (unsigned)most);
      return TF_STATUS(KERNEL_REFUSED);
    }
  }
  return TF_STATUS(OK);
}

static int tf_check_alignment(const tf_device *device) {
  tf_cl_uint bits = 0;
  const tf_cl_int error = device->cl.GetDeviceInfo(device->id, TF_CL_DEVICE_ALIGNMENT, sizeof bits, &bits, NULL);
  if (error != 0) return tf_fail_cl("GetDeviceInfo", error);
  if (bits <= TF_DEVICE_ALIGNMENT * 8) return TF_STATUS(OK);
  tf_explain("this device aligns memory to %u bits, more than %d", (unsigned)bits, TF_DEVICE_ALIGNMENT * 8);
  return TF_STATUS(NO_DEVICE);
}

static int tf_open_context(tf_device *device, const tf_choice *choice) {
  tf_cl_int error = 0;
  if (choice->context) {
    device->id = choice->device;
    error = device->cl.RetainContext(choice->context);
    if (error != 0) return tf_fail_cl("RetainContext", error);
    device->context = choice->context;
    return TF_STATUS(OK);
  }
  const int status = tf_find_device(&device->cl, choice->number, &device->id);
  if (status != TF_STATUS(OK)) return status;
  device->context = device->cl.CreateContext(NULL, 1, &device->id, NULL, NULL, &error);
  return device->context ? TF_STATUS(OK) : tf_fail_cl("CreateContext", error);
}

static void tf_close_device(tf_device *device) {
  if (device->program) device->cl.ReleaseProgram(device->program);
  if (device->context) device->cl.ReleaseContext(device->context);
  free(device);
}

static int tf_open_device(const tf_choice *choice, tf_device **result) {
  tf_device *device = calloc(1, sizeof *device);
  if (!device) return TF_STATUS(NO_MEMORY);
  int status = tf_load_driver(&device->cl);
  if (status == TF_STATUS(OK)) status = tf_open_context(device, choice);
  if (status == TF_STATUS(OK)) status = tf_check_alignment(device);
  if (status == TF_STATUS(OK)) status = tf_build_program(device, choice);
  if (status == TF_STATUS(OK)) status = tf_check_functions(device);
  if (status == TF_STATUS(OK)) *result = device;
  else tf_close_device(device);
  return status;
}

/* ------------------------------------------------------------------ memory */

static int tf_allocate_on_device(tf_device *device, uint64_t bytes, tf_handle *memory) {
  tf_cl_int error = 0;
  if (bytes > SIZE_MAX) return TF_STATUS(NO_MEMORY);
  const tf_cl_object object =
      device->cl.CreateBuffer(device->context, TF_CL_READ_WRITE, (size_t)bytes, NULL, &error);
  if (!object) {
    const int status = tf_fail_cl("CreateBuffer", error);
    tf_explain("OpenCL: the device has no memory of %llu bytes (error %d)", (unsigned long long)bytes, (int)error);
    return status;
  }
  *memory = (tf_handle)(uintptr_t)object;
  return TF_STATUS(OK);
}

static void tf_release_on_device(tf_device *device, tf_handle memory) {
  device->cl.ReleaseMemObject((tf_cl_object)(uintptr_t)memory);
}

static int tf_open_view(tf_device *device, tf_handle memory, uint64_t offset, uint64_t bytes, tf_handle *view) {
  tf_cl_int error = 0;
  const tf_cl_region region = {(size_t)offset, (size_t)bytes};
  const tf_cl_object object = device->cl.CreateSubBuffer((tf_cl_object)(uintptr_t)memory, TF_CL_READ_WRITE,
                                                         TF_CL_REGION, &region, &error);
  if (!object) return tf_fail_cl("CreateSubBuffer", error);
  *view = (tf_handle)(uintptr_t)object;
  return TF_STATUS(OK);
}

static void tf_close_view(tf_device *device, tf_handle view) { tf_release_on_device(device, view); }

/* ------------------------------------------------------------------ streams */

static void tf_close_stream(tf_stream *stream) {
  const tf_opencl *cl = &stream->device->cl;
  if (stream->queue) {
    cl->Finish(stream->queue);
    cl->ReleaseCommandQueue(stream->queue);
  }
  for (size_t i = 0; i < TF_DEVICE_FUNCTIONS; ++i)
    if (stream->kernels[i]) cl->ReleaseKernel(stream->kernels[i]);
  free(stream);
}

static int tf_open_queue(tf_stream *stream, tf_cl_flags flags) {
  const tf_device *device = stream->device;
  tf_cl_int error = 0;
  const tf_cl_object queue = device->cl.CreateCommandQueue(device->context, device->id, flags, &error);
  if (!queue) return tf_fail_cl("CreateCommandQueue", error);
  stream->queue = queue;
  stream->is_timed = flags != 0;
  return TF_STATUS(OK);
}

static int tf_open_stream(tf_device *device, const tf_choice *choice, tf_stream **result) {
  tf_stream *stream = calloc(1, sizeof *stream);
  if (!stream) return TF_STATUS(NO_MEMORY);
  stream->device = device;
  int status = TF_STATUS(OK);
  tf_cl_int error = 0;
  if (choice->queue) {
    error = device->cl.RetainCommandQueue(choice->queue);
    if (error == 0) stream->queue = choice->queue;
    else status = tf_fail_cl("RetainCommandQueue", error);
  } else {
    status = tf_open_queue(stream, 0);
    stream->is_own = true;
  }
  for (size_t i = 0; i < TF_DEVICE_FUNCTIONS && status == TF_STATUS(OK); ++i) {
    stream->kernels[i] = device->cl.CreateKernel(device->program, tf_device_functions[i], &error);
    if (!stream->kernels[i]) status = tf_fail_cl("CreateKernel", error);
  }
  if (status == TF_STATUS(OK)) *result = stream;
  else tf_close_stream(stream);
  return status;
}

static int tf_copy_in(tf_stream *stream, tf_handle target, const void *source, size_t bytes) {
  const tf_cl_int error = stream->device->cl.EnqueueWriteBuffer(stream->queue, (tf_cl_object)(uintptr_t)target, true, 0,
                                                                bytes, source, 0, NULL, NULL);
  return error == 0 ? TF_STATUS(OK) : tf_fail_cl("EnqueueWriteBuffer", error);
}

static int tf_copy_out(tf_stream *stream, void *target, tf_handle source, size_t bytes) {
  const tf_cl_int error = stream->device->cl.EnqueueReadBuffer(stream->queue, (tf_cl_object)(uintptr_t)source, false, 0,
                                                               bytes, target, 0, NULL, NULL);
  return error == 0 ? TF_STATUS(OK) : tf_fail_cl("EnqueueReadBuffer", error);
}

static int tf_copy_on_device(tf_stream *stream, tf_handle target, tf_handle source, size_t bytes) {
  const tf_cl_int error =
      stream->device->cl.EnqueueCopyBuffer(stream->queue, (tf_cl_object)(uintptr_t)source,
                                           (tf_cl_object)(uintptr_t)target, 0, 0, bytes, 0, NULL, NULL);
  return error == 0 ? TF_STATUS(OK) : tf_fail_cl("EnqueueCopyBuffer", error);
}

static int tf_wait(tf_stream *stream) {
  const tf_cl_int error = stream->device->cl.Finish(stream->queue);
  return error == 0 ? TF_STATUS(OK) : tf_fail_cl("Finish", error);
}

/* Add the time of a command. */
static int tf_read_time(const tf_opencl *cl, tf_cl_object event, uint64_t *nanoseconds) {
  uint64_t start = 0, end = 0;
  tf_cl_int error = cl->WaitForEvents(1, &event);
  if (error != 0) return tf_fail_cl("WaitForEvents", error);
  error = cl->GetEventProfilingInfo(event, TF_CL_COMMAND_START, sizeof start, &start, NULL);
  if (error == 0) error = cl->GetEventProfilingInfo(event, TF_CL_COMMAND_END, sizeof end, &end, NULL);
  /* The program's own queue may not measure times. */
  if (error == 0) *nanoseconds += end - start;
  return TF_STATUS(OK);
}

static int tf_start(tf_stream *stream, const tf_device_launch *launch, const tf_handle *pointers, uint64_t *nanoseconds) {
  const tf_opencl *cl = &stream->device->cl;
  const tf_cl_object kernel = stream->kernels[launch->function];
  tf_cl_object event = NULL;
  size_t global[3], local[3];
  tf_cl_int error = 0;
  if (nanoseconds && stream->is_own && !stream->is_timed) {
    /* Measuring takes time, so a queue does it only on request. */
    const tf_cl_object before = stream->queue;
    int status = tf_wait(stream);
    if (status == TF_STATUS(OK)) status = tf_open_queue(stream, TF_CL_PROFILING);
    if (status != TF_STATUS(OK)) return status;
    cl->ReleaseCommandQueue(before);
  }
  for (uint32_t i = 0; i < launch->count && error == 0; ++i) {
    const tf_cl_object memory = (tf_cl_object)(uintptr_t)pointers[launch->arguments[i]];
    error = cl->SetKernelArg(kernel, i, sizeof memory, &memory);
  }
  for (uint32_t i = 0; i < launch->scalar_count && error == 0; ++i)
    error = cl->SetKernelArg(kernel, launch->count + i, launch->scalars[i].bytes, &launch->scalars[i].bits);
  if (error != 0) return tf_fail_cl("SetKernelArg", error);
  for (size_t i = 0; i < 3; ++i) {
    local[i] = launch->block[i];
    global[i] = (size_t)launch->grid[i] * launch->block[i];
  }
  error = cl->EnqueueNDRangeKernel(stream->queue, kernel, 3, NULL, global, local, 0, NULL, nanoseconds ? &event : NULL);
  if (error != 0) {
    const int status = tf_fail_cl("EnqueueNDRangeKernel", error);
    const bool is_refused = error == TF_CL_OUT_OF_RESOURCES || (error <= TF_CL_INVALID_PROGRAM && error >= TF_CL_INVALID_OFFSET) ||
                            error == TF_CL_INVALID_GLOBAL_SIZE;
    tf_explain("OpenCL: the driver does not start %s: error %d", tf_device_functions[launch->function], (int)error);
    return is_refused ? TF_STATUS(KERNEL_REFUSED) : status;
  }
  if (!nanoseconds) return TF_STATUS(OK);
  const int status = tf_read_time(cl, event, nanoseconds);
  cl->ReleaseEvent(event);
  return status;
}
