/* The interface between a library whose kernels run on a device, such as a GPU, and its executor: one of `opencl.c` and
 * `cuda.c`, which is compiled into it. An executor opens the driver's library when a context is made. It declares the
 * driver's types and constants itself, and needs no headers, import libraries or runtimes of an SDK.
 *
 * All functions are static. Those that return an int return TF_STATUS(OK) or one of
 *   NO_DRIVER       the driver's library is not installed, or too old: a function is missing
 *   NO_DEVICE       it has no device of that number, or the code is not for this device
 *   NO_MEMORY       memory of the host or of the device is exhausted
 *   KERNEL_REFUSED  the driver does not build the code, or cannot start a function with its threads
 *   DEVICE_LOST     anything else that a driver reports: the device or its state cannot be used any more
 * and have called `tf_explain` with the driver's error. After an error of a stream, it is only waited for and closed.
 *
 * A device is opened and closed by one thread at a time. A stream is used by one thread at a time, and several streams of
 * a device at the same time by several threads. */

/* Tensors on the device begin at a multiple of so many bytes, enough for all drivers. */
#define TF_DEVICE_ALIGNMENT 512

/* Memory on a device, or a part of it: a cl_mem, a CUdeviceptr. 0 is none. */
typedef uint64_t tf_handle;

/* A driver and one of its devices with the code of this library. The executor defines and allocates it. */
typedef struct tf_device tf_device;

/* The commands of one context, done in the order of the calls: a command queue or a CUDA stream, and the context's own
 * kernel objects and events. The executor defines and allocates it. */
typedef struct tf_stream tf_stream;

/* A scalar argument of a launch: the first `bytes` of `bits`, in the byte order of this machine. */
typedef struct {
  uint64_t bits;
  uint32_t bytes;
} tf_scalar;

/* A launch of a function. It takes `count` pointers, which are those of the kernel's call at the places `arguments`, then
 * the scalars. */
typedef struct {
  uint32_t function; /* the place of its name in tf_device_functions */
  uint32_t grid[3];  /* blocks (work-groups) along x, y and z */
  uint32_t block[3]; /* threads (work-items) of each */
  uint32_t shared;   /* bytes of dynamic shared memory */
  uint32_t count;
  const uint16_t *arguments;
  uint32_t scalar_count;
  const tf_scalar *scalars;
} tf_device_launch;

/* A tensor in memory of the device. */
typedef struct {
  uint64_t offset; /* in the memory of weights on the device, or in the arena of a context there */
  uint64_t bytes;  /* not 0 */
  uint64_t source; /* of a weight: its offset in the weights of the library */
  bool is_weight;
} tf_place;

/* The device that a program asks for: see the public header. */
typedef TF(device) tf_choice;

/* Further definitions in generated code (`program.c`):
 *
 *   #define TF_DEVICE_CODE_BYTES …      the size of the code, without a 0 that follows it
 *   #define TF_DEVICE_CODE_DIGEST …     the digest of the code, as text
 *   #define TF_DEVICE_FUNCTIONS …       how many functions it has
 *   #define TF_DEVICE_ARENA …           the bytes of a context's arena on the device
 *   #define TF_DEVICE_WEIGHTS …         the bytes of the weights there
 *   #define TF_DEVICE_PLACES …          how many tensors there are
 *   #define TF_DEVICE_MOST_POINTERS …   the most tensors of a kernel
 *   extern const unsigned char TF_DEVICE_CODE[];     OpenCL C, PTX or machine code, aligned to 64 bytes
 *   static const char *const tf_device_functions[];  the names of its functions
 *   static const uint32_t tf_device_threads[];       the most threads of a block that each is started with
 *   static const tf_place tf_places[];               the tensors
 *   static const uint32_t tf_input_places[];   the tensor on the device that an input is copied to, or TF_NO_PLACE
 *   static const uint32_t tf_output_places[];  the one that an output is in when the steps have ended, or TF_NO_PLACE
 *   static const bool tf_host_inputs[];        whether steps on the host read an input */
#define TF_NO_PLACE UINT32_MAX

/* Set this thread's explanation of an error; the arguments are printf's, with %s, %d, %u and %llu. */
static void tf_explain(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Load the driver and build the code for a device: by its number, from 0, in the order of the driver with GPUs first; or
 * that of the program's own context, if it is not NULL. */
static int tf_open_device(const tf_choice *choice, tf_device **device);
static void tf_close_device(tf_device *device);

/* Make a stream, or use the program's own if `choice` has one. */
static int tf_open_stream(tf_device *device, const tf_choice *choice, tf_stream **stream);
/* Wait for all commands, and release the stream. */
static void tf_close_stream(tf_stream *stream);

/* Allocate memory on the device; `bytes` is not 0. */
static int tf_allocate_on_device(tf_device *device, uint64_t bytes, tf_handle *memory);
static void tf_release_on_device(tf_device *device, tf_handle memory);

/* Return a handle of a part of memory for launches; it is released before the memory. */
static int tf_open_view(tf_device *device, tf_handle memory, uint64_t offset, uint64_t bytes, tf_handle *view);
static void tf_close_view(tf_device *device, tf_handle view);

/* A program may need none of these. */
#define TF_MAYBE_UNUSED __attribute__((unused))

/* Copy to the device. The source may change when this returns. */
TF_MAYBE_UNUSED static int tf_copy_in(tf_stream *stream, tf_handle target, const void *source, size_t bytes);
/* Copy from the device. The target is complete after the next `tf_wait`. */
TF_MAYBE_UNUSED static int tf_copy_out(tf_stream *stream, void *target, tf_handle source, size_t bytes);
/* Copy on the device, between memory that does not overlap. */
TF_MAYBE_UNUSED static int tf_copy_on_device(tf_stream *stream, tf_handle target, tf_handle source, size_t bytes);

/* Start a function. `pointers` are those of the kernel of the launch. If `nanoseconds` is not NULL, wait for the end, and
 * add the time on the device. */
static int tf_start(tf_stream *stream, const tf_device_launch *launch, const tf_handle *pointers, uint64_t *nanoseconds);

/* Wait for all commands. */
static int tf_wait(tf_stream *stream);
