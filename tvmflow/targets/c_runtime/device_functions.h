
/* What functions return for the device. */
enum {
  %(NAME)s_NO_DRIVER = 20,      /* the driver of the device is not installed, or too old */
  %(NAME)s_NO_DEVICE = 21,      /* there is no such device, or it is none that the library was built for */
  %(NAME)s_KERNEL_REFUSED = 22, /* the driver does not build or start a kernel of the library */
  %(NAME)s_DEVICE_LOST = 23     /* the device does not work any more, or the process was forked: make another context */
};
//----
/* The device that a context is on: the one of a number, GPUs first, in the order of the driver; or the program's own one,
 * where `context` is not NULL. The driver's library is loaded when the first context is made. Contexts on one device share
 * the weights there. */
typedef struct {
  uint32_t number;
%(members)s} %(name)s_device;

/* Make a context on a device; `create` takes the first one. The first context of a process on a device has to wait until the
 * driver has built the kernels. */
%(NAME)s_API int %(name)s_create_on(
    const %(name)s_options *options, const %(name)s_device *device, %(name)s_context **context);

/* Let the next calls read an input, or write an output, in the program's own memory on the device, without a copy: %(memory)s,
 * of at least the tensor's bytes. Inputs come first, then outputs: input 0 is the tensor 0, output 0 the tensor
 * %(NAME)s_INPUTS. What `run` is given for it is then not used. NULL: the memory that `run` is given, as before. */
%(NAME)s_API int %(name)s_use_device_memory(%(name)s_context *context, size_t tensor, void *memory);

/* Start a call all of whose inputs and outputs are on the device, and return before its end (steps on the CPU wait for what
 * they read). Calls of one context are done in their order; `wait` waits for the end of all. */
%(NAME)s_API int %(name)s_enqueue(%(name)s_context *context);
%(NAME)s_API int %(name)s_wait(%(name)s_context *context);

/* What the driver said of the last error that a function returned on this thread; empty for nothing. */
%(NAME)s_API const char *%(name)s_device_error(void);

