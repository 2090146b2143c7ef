// A stand-in for a GPU: the functions of CUDA's driver and runtime that TVM's CUDA runtime calls, and those of the driver
// that C libraries call, on this machine's CPU.
//
// Copies and kernels stay in a queue, one for all streams, until a caller synchronizes, so that a caller
// that reads too early reads old content. Only copies and kernels can access device memory: any other
// access ends the process. A process that was forked from one that had used the GPU gets an error. The
// "machine code" is a shared library for this machine (see kernels.h), after a magic word, its
// architecture and its length; so is "PTX", which runs on later GPUs, too. C libraries must make a context
// current, and release all that they take: STAND_IN_REPORT prints what is left when the process ends.
// After STAND_IN_LAUNCHES launches, the GPU is lost.

#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define EXPORTED extern "C" __attribute__((visibility("default")))

enum { OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, NO_DEVICE = 100 };
enum { INVALID_CONTEXT = 201, NO_BINARY_FOR_GPU = 209, NOT_FOUND = 500, LAUNCH_FAILED = 719 };
enum { MOST_BLOCKS = 1 << 16, MOST_WAITING = 1 << 16, MOST_PARAMETERS = 64 };

static int last_error = OK;

static int say(int code) {
  if (code) last_error = code;
  return code;
}

// The first process that uses the GPU owns it: a process that is forked from it gets an error.
static bool is_forked() {
  static pid_t owner = 0;
  if (!owner) owner = getpid();
  if (owner == getpid()) return false;
  fprintf(stderr, "stand-in GPU: used in a process forked from one that had used it\n");
  return true;
}

// ---------------------------------------------------------------- memory

struct Block {
  char* start;
  size_t size;
};

static Block blocks[MOST_BLOCKS];
static int block_count = 0;

static void protect(int how) {
  for (int i = 0; i < block_count; ++i) mprotect(blocks[i].start, blocks[i].size, how);
}

static size_t pages(size_t size) { return (size + 4095) / 4096 * 4096 + 4096; }

// ---------------------------------------------------------------- streams: one queue for all

typedef void (*Kernel)(void** arguments, const unsigned* grid, const unsigned* block);

struct Function {
  Kernel run;
  int parameters;
  unsigned threads;
};

struct Work {
  Function* function;
  uint64_t values[MOST_PARAMETERS];
  unsigned grid[3], block[3];
  char *to;
  const char* from;
  char* kept;  // a copy of the source, which its owner may change
  size_t size;
  double* clock;
};

static Work* waiting = nullptr;
static int waiting_count = 0;

static double now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1e3 + time.tv_nsec / 1e6;
}

static int flush() {
  if (!waiting_count) return OK;
  protect(PROT_READ | PROT_WRITE);
  for (int i = 0; i < waiting_count; ++i) {
    Work& work = waiting[i];
    if (work.clock) {
      *work.clock = now();
    } else if (work.function) {
      void* arguments[MOST_PARAMETERS];
      for (int n = 0; n < MOST_PARAMETERS; ++n) arguments[n] = &work.values[n];
      work.function->run(arguments, work.grid, work.block);
    } else {
      memcpy(work.to, work.from, work.size);
      free(work.kept);
    }
  }
  waiting_count = 0;
  protect(PROT_NONE);
  return OK;
}

static Work* next() {
  if (!waiting) waiting = static_cast<Work*>(calloc(MOST_WAITING, sizeof(Work)));
  if (waiting_count == MOST_WAITING) flush();
  Work* work = &waiting[waiting_count++];
  *work = Work{};
  return work;
}

// ---------------------------------------------------------------- the driver

struct LaunchConfig {
  unsigned grid[3], block[3], shared;
  void* stream;
  void* attributes;
  unsigned attribute_count;
};

static int number(const char* name, int otherwise) {
  const char* set = getenv(name);
  return set ? atoi(set) : otherwise;
}

static int capability() { return number("STAND_IN_GPU", 90); }

static int count() {
  const char* set = getenv("CUDA_VISIBLE_DEVICES");
  return set && !*set ? 0 : 1;
}

static int attribute(int which) {
  switch (which) {
    case 1: return 1024;         // threads in a block
    case 2: case 3: return 1024; // along x, along y
    case 4: return 64;           // along z
    case 5: return 2147483647;   // blocks along x
    case 6: case 7: return 65535;
    case 8: return 49152;        // bytes of shared memory for a block
    case 10: return 32;          // threads in a warp
    case 12: return 65536;       // registers for a block
    case 13: return 1980000;     // kHz
    case 16: return 4;           // multiprocessors
    case 38: return 1 << 20;     // bytes of level 2 cache
    case 75: return capability() / 10;
    case 76: return capability() % 10;
    case 97: return 232448;      // bytes of shared memory for a block that opts in to more
    default: return 0;
  }
}

static const char NAME[] = "Stand-in GPU";

EXPORTED int cuInit(unsigned) { return is_forked() ? NOT_INITIALIZED : count() ? OK : NO_DEVICE; }
EXPORTED int cuDriverGetVersion(int* version) { return *version = number("STAND_IN_DRIVER", 13000), OK; }
EXPORTED int cuDeviceGetCount(int* found) { return *found = count(), OK; }
EXPORTED int cuDeviceGet(int* device, int ordinal) { return *device = ordinal, OK; }
EXPORTED int cuDeviceGetName(char* name, int size, int) { return snprintf(name, size, "%s", NAME), OK; }
EXPORTED int cuDeviceGetAttribute(int* value, int which, int) { return *value = attribute(which), OK; }
EXPORTED int cuGetErrorName(int, const char** text) { return *text = "CUDA_ERROR", OK; }
EXPORTED int cuGetErrorString(int, const char** text) { return *text = "an error of the stand-in GPU", OK; }
EXPORTED int cuFuncSetAttribute(void*, int, int) { return OK; }
EXPORTED int cuTensorMapEncodeTiled(void) { return NOT_FOUND; }

EXPORTED int cuModuleLoadData(void** module, const void* image) {
  const char* code = static_cast<const char*>(image);
  if (is_forked()) return NOT_INITIALIZED;
  const bool is_ptx = !memcmp(code, "STAND-PT", 8);
  if (!is_ptx && memcmp(code, "STAND-IN", 8)) return NO_BINARY_FOR_GPU;
  uint64_t arch, size;
  memcpy(&arch, code + 8, 8);
  memcpy(&size, code + 16, 8);
  const uint64_t here = capability();
  if ((!is_ptx && arch / 10 != here / 10) || arch > here) return NO_BINARY_FOR_GPU;
  // a new name each time: loading a name twice gives the first file
  char path[] = "/tmp/stand-in-XXXXXX";
  int file = mkstemp(path);
  if (file < 0 || write(file, code + 24, size) != static_cast<ssize_t>(size)) return OUT_OF_MEMORY;
  close(file);
  *module = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!*module) fprintf(stderr, "stand-in GPU: %s\n", dlerror());
  unlink(path);
  return *module ? OK : NO_BINARY_FOR_GPU;
}

static void forget_module();
EXPORTED int cuModuleUnload(void* module) { return flush(), forget_module(), dlclose(module), OK; }

EXPORTED int cuModuleGetFunction(void** function, void* module, const char* name) {
  char symbol[1024];
  snprintf(symbol, sizeof symbol, "%s__function", name);
  *function = dlsym(module, symbol);
  return *function ? OK : NOT_FOUND;
}

EXPORTED int cuLaunchKernelEx(const LaunchConfig* config, Function* function, void** arguments, void**) {
  if (is_forked()) return NOT_INITIALIZED;
  const unsigned threads = config->block[0] * config->block[1] * config->block[2];
  if (!threads || threads > function->threads) {
    fprintf(stderr, "stand-in GPU: %u threads in a block for a kernel of %u\n", threads, function->threads);
    return say(LAUNCH_FAILED);
  }
  Work* work = next();
  work->function = function;
  memcpy(work->grid, config->grid, sizeof work->grid);
  memcpy(work->block, config->block, sizeof work->block);
  for (int i = 0; i < function->parameters; ++i) memcpy(&work->values[i], arguments[i], 8);
  return OK;
}

// ---------------------------------------------------------------- the runtime

EXPORTED int cudaGetLastError() {
  int code = last_error;
  last_error = OK;
  return code;
}
EXPORTED int cudaPeekAtLastError() { return last_error; }
EXPORTED const char* cudaGetErrorString(int) { return "an error of the stand-in GPU"; }
EXPORTED const char* cudaGetErrorName(int) { return "cudaError"; }
EXPORTED int cudaGetDeviceCount(int* found) { return *found = count(), count() ? OK : say(NO_DEVICE); }
EXPORTED int cudaGetDevice(int* device) { return *device = 0, OK; }
EXPORTED int cudaSetDevice(int device) { return device ? say(101) : OK; }
EXPORTED int cudaDeviceGetAttribute(int* value, int which, int) { return *value = attribute(which), OK; }
EXPORTED int cudaGetDeviceProperties(char* properties, int) { return strcpy(properties, NAME), OK; }
EXPORTED int cudaMemGetInfo(size_t* free, size_t* total) { return *free = *total = size_t(8) << 30, OK; }

EXPORTED int cudaMalloc(void** pointer, size_t size) {
  if (is_forked()) return say(NOT_INITIALIZED);
  flush();
  if (!number("STAND_IN_MEMORY", 1)) return say(OUT_OF_MEMORY);
  void* start = mmap(nullptr, pages(size), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (start == MAP_FAILED || block_count == MOST_BLOCKS) return say(OUT_OF_MEMORY);
  blocks[block_count++] = {static_cast<char*>(start), pages(size)};
  *pointer = start;
  return OK;
}

EXPORTED int cudaFree(void* pointer) {
  flush();
  for (int i = 0; i < block_count; ++i)
    if (blocks[i].start == pointer) {
      munmap(blocks[i].start, blocks[i].size);
      blocks[i] = blocks[--block_count];
      return OK;
    }
  return pointer ? say(INVALID_VALUE) : OK;
}

EXPORTED int cudaMallocHost(void** pointer, size_t size) { return *pointer = malloc(size), OK; }
EXPORTED int cudaFreeHost(void* pointer) { return flush(), free(pointer), OK; }

EXPORTED int cudaMemcpyAsync(void* to, const void* from, size_t size, int, void*) {
  Work* work = next();
  work->to = static_cast<char*>(to);
  work->from = static_cast<const char*>(from);
  work->size = size;
  return OK;
}

EXPORTED int cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t size, void* stream) {
  return cudaMemcpyAsync(to, from, size, 3, stream);
}

EXPORTED int cudaStreamCreate(void** stream) { return *stream = malloc(1), OK; }
EXPORTED int cudaStreamCreateWithFlags(void** stream, unsigned) { return cudaStreamCreate(stream); }
EXPORTED int cudaStreamDestroy(void* stream) { return flush(), free(stream), OK; }
EXPORTED int cudaStreamSynchronize(void*) { return flush(); }
EXPORTED int cudaStreamWaitEvent(void*, void*, unsigned) { return OK; }
EXPORTED int cudaEventCreate(void** event) { return *event = calloc(1, sizeof(double)), OK; }
EXPORTED int cudaEventDestroy(void* event) { return flush(), free(event), OK; }
EXPORTED int cudaEventRecord(void* event, void*) { return next()->clock = static_cast<double*>(event), OK; }
EXPORTED int cudaEventSynchronize(void*) { return flush(); }
EXPORTED int cudaEventElapsedTime(float* milliseconds, void* from, void* to) {
  *milliseconds = static_cast<float>(*static_cast<double*>(to) - *static_cast<double*>(from));
  return OK;
}

// ---------------------------------------------------------------- what C libraries call of the driver

static int entered = 0, retained = 0, modules = 0, streams = 0, events = 0, launches = 0;
static char primary;

static void forget_module() { --modules; }

struct Report {
  ~Report() {
    if (getenv("STAND_IN_REPORT"))
      fprintf(stderr, "stand-in GPU: left %d blocks, %d modules, %d streams, %d events, %d contexts, %d entered\n",
              block_count, modules, streams, events, retained, entered);
  }
};
static Report report;

// What every call in a context returns before it does anything.
static int state() {
  const int most = number("STAND_IN_LAUNCHES", 0);
  if (is_forked()) return NOT_INITIALIZED;
  if (most && launches > most) return LAUNCH_FAILED;
  return entered ? OK : INVALID_CONTEXT;
}

EXPORTED int cuDevicePrimaryCtxRetain(void** context, int) { return *context = &primary, ++retained, OK; }
EXPORTED int cuDevicePrimaryCtxRelease(int) { return --retained, OK; }
EXPORTED int cuCtxPushCurrent_v2(void* context) { return context == &primary && retained ? (++entered, OK) : INVALID_CONTEXT; }
EXPORTED int cuCtxPopCurrent_v2(void** context) { return *context = &primary, --entered, OK; }

EXPORTED int cuCtxGetDevice(int* device) { return *device = 0, state(); }

EXPORTED int cuModuleLoadDataEx(void** module, const void* image, unsigned count, int* options, void** values) {
  if (int code = state()) return code;
  const int code = cuModuleLoadData(module, image);
  for (unsigned i = 0; code && i < count; ++i)
    if (options[i] == 5) strcpy(static_cast<char*>(values[i]), "no code of this GPU");
  if (!code) ++modules;
  return code;
}

EXPORTED int cuFuncGetAttribute(int* value, int which, Function* function) {
  return *value = which ? 0 : static_cast<int>(function->threads), state();
}
EXPORTED int cuPointerGetAttribute(void*, int, uint64_t) { return INVALID_VALUE; }

EXPORTED int cuMemAlloc_v2(uint64_t* memory, size_t size) {
  void* pointer = nullptr;
  if (int code = state()) return code;
  const int code = cudaMalloc(&pointer, size);
  *memory = reinterpret_cast<uint64_t>(pointer);
  return code;
}
EXPORTED int cuMemFree_v2(uint64_t memory) {
  if (int code = state()) return code;
  return cudaFree(reinterpret_cast<void*>(memory));
}

EXPORTED int cuMemcpyHtoDAsync_v2(uint64_t to, const void* from, size_t size, void*) {
  if (int code = state()) return code;
  char* kept = static_cast<char*>(malloc(size));
  memcpy(kept, from, size);
  Work* work = next();
  work->to = reinterpret_cast<char*>(to);
  work->from = work->kept = kept;
  work->size = size;
  return OK;
}
EXPORTED int cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t size, void* stream) {
  if (int code = state()) return code;
  return cudaMemcpyAsync(to, reinterpret_cast<void*>(from), size, 2, stream);
}
EXPORTED int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t size, void* stream) {
  if (int code = state()) return code;
  return cudaMemcpyAsync(reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), size, 3, stream);
}

EXPORTED int cuStreamCreate(void** stream, unsigned) {
  if (int code = state()) return code;
  return ++streams, cudaStreamCreate(stream);
}
EXPORTED int cuStreamDestroy_v2(void* stream) { return --streams, cudaStreamDestroy(stream); }
EXPORTED int cuStreamSynchronize(void*) {
  const int code = state();
  return code ? code : flush();
}
EXPORTED int cuEventCreate(void** event, unsigned) {
  if (int code = state()) return code;
  return ++events, cudaEventCreate(event);
}
EXPORTED int cuEventDestroy_v2(void* event) { return --events, cudaEventDestroy(event); }
EXPORTED int cuEventRecord(void* event, void* stream) {
  const int code = state();
  return code ? code : cudaEventRecord(event, stream);
}
EXPORTED int cuEventSynchronize(void*) { return cuStreamSynchronize(nullptr); }
EXPORTED int cuEventElapsedTime(float* time, void* from, void* to) { return cudaEventElapsedTime(time, from, to); }

EXPORTED int cuLaunchKernel(Function* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                            unsigned shared, void* stream, void** arguments, void**) {
  ++launches;
  if (int code = state()) return code;
  const LaunchConfig config = {{gx, gy, gz}, {bx, by, bz}, shared, stream, nullptr, 0};
  return cuLaunchKernelEx(&config, function, arguments, nullptr);
}

// graphs of calls, which are not supported
EXPORTED int cudaStreamBeginCapture(void*, int) { return say(NOT_FOUND); }
EXPORTED int cudaStreamEndCapture(void*, void**) { return say(NOT_FOUND); }
EXPORTED int cudaGraphInstantiate(void**, void*, unsigned long long) { return say(NOT_FOUND); }
EXPORTED int cudaGraphLaunch(void*, void*) { return say(NOT_FOUND); }
EXPORTED int cudaGraphDestroy(void*) { return OK; }
EXPORTED int cudaGraphExecDestroy(void*) { return OK; }
