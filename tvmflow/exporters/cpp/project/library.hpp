struct @PREFIX@_library {
  using Context = ::@PREFIX@_context;
  using Buffer = ::@PREFIX@_buffer;
  using Options = ::@PREFIX@_options;
  static constexpr std::uint32_t abi = @NAME@_ABI;
  static constexpr const char* name = @PART@;
  static constexpr std::array<std::size_t, @ARGUMENT_COUNT@> arguments = {@ARGUMENTS@};
  static constexpr std::array<std::size_t, @RESULT_COUNT@> results = {@RESULTS@};

  static int create(const Options* options, Context** context) { return @PREFIX@_create(options, context); }
  static int run(Context* context, const Buffer* inputs, std::size_t input_size, const Buffer* outputs,
                 std::size_t output_size) {
    return @PREFIX@_run(context, inputs, input_size, outputs, output_size);
  }
  static int output_shape(Context* context, std::size_t output, std::int64_t* shape) {
    return @PREFIX@_output_shape(context, output, shape);
  }
//@open
  static int set_dimension(Context* context, std::size_t dimension, std::int64_t size) {
    return @PREFIX@_set_dimension(context, dimension, size);
  }
  static int input_shape(Context* context, std::size_t input, std::int64_t* shape) {
    return @PREFIX@_input_shape(context, input, shape);
  }
  static int input_bytes(Context* context, std::size_t input, std::size_t* bytes) {
    return @PREFIX@_input_bytes(context, input, bytes);
  }
  static int output_bytes(Context* context, std::size_t output, std::size_t* bytes) {
    return @PREFIX@_output_bytes(context, output, bytes);
  }
//@all
  static int destroy(Context* context) { return @PREFIX@_destroy(context); }
  static const char* message(int status) { return @PREFIX@_message(status); }
  // What the machine lacks, or its driver says; may be null or empty.
  static const char* explain(int status) {
@EXPLANATION@  }
  static std::uint32_t threads(const Context* context) { return @PREFIX@_threads(context); }
  static std::size_t kernel_count() { return @PREFIX@_kernel_count(); }
  static const char* kernel_name(std::size_t kernel) { return @PREFIX@_kernel_name(kernel); }
  static int profile(Context* context, void (*hook)(void*, std::size_t, std::uint64_t), void* user) {
    return @PREFIX@_profile(context, hook, user);
  }
};
