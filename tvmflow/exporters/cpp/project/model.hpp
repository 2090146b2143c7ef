// @TITLE@ in C++17: classes over the functions of @HEADERS@.
//
@TENSORS@
//
@EXAMPLE@
#ifndef @NAME@_HPP_
#define @NAME@_HPP_

@INCLUDES@

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <iterator>
//@open
#include <map>
//@all
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

// A namespace of its own keeps a model's name apart from functions of the C library: `time::Model` works.
inline namespace tvmflow_models {
namespace @NAMESPACE@ {

// What went wrong: the numbers of the C library's header, and three that only this header finds.
enum class Status : int {
@STATUSES@
  unknown_name = -1,   // there is no input or output of this name
  wrong_dtype = -2,    // values of another type than the model's
  repeated_tensor = -3 // an input or output is named twice
};

// An error whose what() is a message for people.
class Error : public std::runtime_error {
 public:
  Error(Status status, const std::string& message) : std::runtime_error("@TITLE@: " + message), status_(status) {}
  Status status() const noexcept { return status_; }

 private:
  Status status_;
};

// Values that lie one after the other: what std::span of C++20 is.
template <typename T>
class Span {
 public:
  constexpr Span() = default;
  constexpr Span(T* data, std::size_t size) : data_(data), size_(size) {}

  constexpr T* data() const { return data_; }
  constexpr std::size_t size() const { return size_; }
  constexpr T* begin() const { return data_; }
  constexpr T* end() const { return data_ + size_; }
  constexpr T& operator[](std::size_t index) const { return data_[index]; }

 private:
  T* data_ = nullptr;
  std::size_t size_ = 0;
};

//@fixed
// An input or output of the model; `dtype` is NumPy's name: float32, int64, bool, ... The size along `bounded_axis`, if it
// is not -1, is known after a call, and at most that of `shape`.
struct Tensor {
//@open
// A size of inputs that each call chooses: from `min` to `max`, a multiple of `multiple_of`.
struct Dimension {
  std::string_view name;
  std::int64_t min;
  std::int64_t max;
  std::int64_t multiple_of;
};

// An input or output of the model; `dtype` is NumPy's name: float32, int64, bool, ... The size along `bounded_axis`, if it
// is not -1, is known after a call, and at most that of `shape`.
//
// In Model::inputs() and Model::outputs(), sizes that depend on dimensions are -1, `sizes` says how, and `bytes` is that
// of the largest tensor. Those of the next call are input_tensor() and output_tensor() of a model.
struct Tensor {
//@all
  std::string_view name;
  std::string_view dtype;
  Span<const std::int64_t> shape;
  std::size_t bytes;
  int bounded_axis = -1;
//@open
  Span<const std::string_view> sizes = {};
//@all

//@fixed
  constexpr std::size_t size() const {
    std::size_t count = 1;
    for (std::int64_t length : shape) count *= static_cast<std::size_t>(length);
    return count;
  }
//@open
  // 0 where a size depends on dimensions.
  constexpr std::size_t size() const {
    std::size_t count = 1;
    for (std::int64_t length : shape) count *= static_cast<std::size_t>(length < 0 ? 0 : length);
    return count;
  }
//@all

//@fixed
  // "float32 [1, 3, 224, 224]"
//@open
  // "float32 [1, 3, 224, 224]", or "float32 [batch, 3, 224, 224]"
//@all
  std::string type() const {
    std::string text;
//@fixed
    int axis = 0;
    for (std::int64_t length : shape) {
      text += (text.empty() ? "" : ", ") + std::string(axis++ == bounded_axis ? "at most " : "") + std::to_string(length);
    }
//@open
    for (std::size_t axis = 0; axis < shape.size(); ++axis) {
      text += text.empty() ? "" : ", ";
      text += static_cast<int>(axis) == bounded_axis ? "at most " : "";
      text += shape[axis] < 0 ? std::string(sizes[axis]) : std::to_string(shape[axis]);
    }
//@all
    return std::string(dtype) + " [" + text + "]";
  }
};

// Called with each task below the number of tasks, on any thread.
class Body {
 public:
  Body(void (*function)(void*, std::uint32_t), void* argument) : function_(function), argument_(argument) {}
  void operator()(std::uint32_t task) const { function_(argument_, task); }

 private:
  void (*function_)(void*, std::uint32_t);
  void* argument_;
};

// None of these functions may throw, but for `allocate`.
struct Options {
  // The caller's included; 0: one for each CPU that the process may use.
  std::uint32_t threads = 0;
  // Memory aligned to so many bytes, and its return; both or none.
  std::function<void*(std::size_t bytes, std::size_t alignment)> allocate;
  std::function<void(void* memory)> release;
  // Calls the body for each task, and returns when all calls have returned. In place of threads of the library's own.
  std::function<void(std::uint32_t tasks, Body body)> parallel_for;
};

// Called after each kernel with its name and the time that it took.
using Hook = std::function<void(std::string_view kernel, std::uint64_t nanoseconds)>;

namespace detail {

template <typename Values>
using Element = std::remove_reference_t<decltype(*std::data(std::declval<Values&>()))>;

// NumPy's name of a type; "bytes" for std::byte, which may be values of any type; empty for types that it has no name
// for, such as those of 16-bit floating-point numbers.
template <typename T>
constexpr std::string_view dtype_of() {
  using Value = std::remove_cv_t<T>;
  constexpr std::size_t bytes = sizeof(Value);
  if constexpr (std::is_same_v<Value, bool>) {
    return "bool";
  } else if constexpr (std::is_same_v<Value, std::byte>) {
    return "bytes";
  } else if constexpr (std::is_floating_point_v<Value>) {
    return bytes == 4 ? "float32" : bytes == 8 ? "float64" : "";
  } else if constexpr (!std::is_integral_v<Value>) {
    return "";
  } else if constexpr (std::is_signed_v<Value>) {
    return bytes == 1 ? "int8" : bytes == 2 ? "int16" : bytes == 4 ? "int32" : "int64";
  } else {
    return bytes == 1 ? "uint8" : bytes == 2 ? "uint16" : bytes == 4 ? "uint32" : "uint64";
  }
}

// The caller's values for a tensor.
template <typename Pointer>
struct View {
  std::string_view tensor;  // its name; empty: the one in the same place
  Pointer data;
  std::size_t size;
  std::size_t item_bytes;
  std::string_view dtype;
};

template <typename Pointer, typename Values>
View<Pointer> view_of(std::string_view name, Values& values) {
  using Value = Element<Values>;
  static_assert(std::is_trivially_copyable_v<Value>, "tensors are plain numbers");
  return {name, std::data(values), std::size(values), sizeof(Value), dtype_of<Value>()};
}

// Tells whether values of a type can be those of a tensor. Where C++ has no type, unsigned integers hold the bits.
inline bool has_type(const Tensor& tensor, std::string_view dtype, std::size_t item_bytes) {
  if (dtype == tensor.dtype || dtype == "bytes") return true;
  const bool is_same_size = item_bytes * tensor.size() == tensor.bytes;
  const bool is_plain = tensor.dtype.substr(0, 3) == "int" || tensor.dtype.substr(0, 4) == "uint" ||
                        tensor.dtype == "float32" || tensor.dtype == "float64";
  return is_same_size && (dtype.empty() || (!is_plain && dtype.substr(0, 4) == "uint"));
}

// Throws Error when values are not those of a tensor.
template <typename Pointer>
void check_view(const View<Pointer>& view, const Tensor& tensor, const char* kind) {
  const std::string takes = std::string(kind) + " '" + std::string(tensor.name) + "' is " + tensor.type();
  if (!has_type(tensor, view.dtype, view.item_bytes)) {
    throw Error(Status::wrong_dtype, takes + ", not " + (view.dtype.empty() ? "of this type" : std::string(view.dtype)));
  }
  if (view.size * view.item_bytes != tensor.bytes) {
    const std::size_t size = tensor.bytes / view.item_bytes;
    throw Error(Status::wrong_size, takes + ": " + std::to_string(size) + " values, not " + std::to_string(view.size));
  }
}

// Returns the place of a tensor. Throws Error when there is none of this name, or in this place.
inline std::size_t find(Span<const Tensor> tensors, std::string_view name, const char* kind) {
  std::string names;
  for (const Tensor& tensor : tensors) {
    if (tensor.name == name) return static_cast<std::size_t>(&tensor - tensors.begin());
    names += (names.empty() ? "'" : ", '") + std::string(tensor.name) + "'";
  }
  throw Error(Status::unknown_name, "there is no " + std::string(kind) + " '" + std::string(name) + "' (there is " +
                                        (names.empty() ? "none" : names) + ")");
}

inline std::size_t find(Span<const Tensor> tensors, std::size_t place, const char* kind) {
  if (place < tensors.size()) return place;
  throw Error(Status::wrong_count, "there is no " + std::string(kind) + " " + std::to_string(place) + " (there are " +
                                       std::to_string(tensors.size()) + ", counted from 0)");
}

//@open
// Returns the place of a dimension. Throws Error when there is none of this name, or in this place.
inline std::size_t find(Span<const Dimension> dimensions, std::string_view name) {
  std::string names;
  for (const Dimension& dimension : dimensions) {
    if (dimension.name == name) return static_cast<std::size_t>(&dimension - dimensions.begin());
    names += (names.empty() ? "'" : ", '") + std::string(dimension.name) + "'";
  }
  throw Error(Status::unknown_name, "there is no dimension '" + std::string(name) + "' (there is " + names + ")");
}

inline std::size_t find(Span<const Dimension> dimensions, std::size_t place) {
  if (place < dimensions.size()) return place;
  throw Error(Status::wrong_count, "there is no dimension " + std::to_string(place) + " (there are " +
                                       std::to_string(dimensions.size()) + ", counted from 0)");
}

// Throws Error when a dimension cannot have a size.
inline void check_size(const Dimension& dimension, std::int64_t size) {
  if (size >= dimension.min && size <= dimension.max && size % dimension.multiple_of == 0) return;
  std::string text = "the dimension " + std::string(dimension.name) + " is " + std::to_string(size) +
                     ", and its sizes are " + std::to_string(dimension.min) + " to " + std::to_string(dimension.max);
  if (dimension.multiple_of > 1) text += ", multiples of " + std::to_string(dimension.multiple_of);
  throw Error(Status::wrong_dimension, text);
}

//@all
// The functions of a C library, and the tensors that it takes and computes, by their places in `tensors`.
@LIBRARIES@

// The inputs and outputs of the model, and what its parts hand to each other.
@SHAPES@
inline constexpr std::array<Tensor, @TENSOR_COUNT@> tensors = {{@TENSOR_TABLE@}};
//@open
inline constexpr std::array<Dimension, @DIMENSION_COUNT@> dimensions = {{@DIMENSIONS@}};
using Sizes = std::array<std::int64_t, dimensions.size()>;
// The place of the dimension along each axis of each input; -1 for a fixed size.
@INPUT_AXES@
//@all
inline constexpr std::size_t input_count = @INPUT_COUNT@, output_count = @OUTPUT_COUNT@;
// Outputs that are an input or another output as well: the place of each, and that of its values.
inline constexpr std::array<std::pair<std::size_t, std::size_t>, @COPY_COUNT@> copies = {{@COPIES@}};

//@states
// States, and the inputs and outputs of a step, by their places in `tensors`; the dimension that is the states' length, or -1.
inline constexpr std::array<std::size_t, @STATE_COUNT@> states = {@STATES@};
inline constexpr std::array<std::size_t, @STEP_INPUT_COUNT@> step_inputs = {@STEP_INPUTS@};
inline constexpr std::array<std::size_t, @STEP_OUTPUT_COUNT@> step_outputs = {@STEP_OUTPUTS@};
inline constexpr int length_dimension = @LENGTH_DIMENSION@;

//@all
inline constexpr std::size_t alignment = 64;

//@open
// The tensors with the shapes and bytes that they have in the next call.
struct CallTensors {
  CallTensors() {
    for (std::size_t i = 0; i < all.size(); ++i) {
      all[i] = tensors[i];
      shapes[i].assign(all[i].shape.begin(), all[i].shape.end());
      all[i].shape = {shapes[i].data(), shapes[i].size()};
    }
  }
  CallTensors(const CallTensors&) = delete;
  CallTensors& operator=(const CallTensors&) = delete;

  std::array<Tensor, tensors.size()> all;
  std::array<std::vector<std::int64_t>, tensors.size()> shapes;
};

//@all
// Memory for the tensors in some places of `tensors`, aligned, and 0 at first.
class Memory {
 public:
  Memory() = default;
//@fixed
  Memory(const Options& options, std::size_t first, std::size_t end, void** addresses) : options_(&options) {
    std::size_t bytes = 0;
    for (std::size_t i = first; i < end; ++i) bytes += padded(tensors[i].bytes);
    if (bytes == 0) return;
//@open
  Memory(const Options& options, std::size_t bytes) : options_(&options), bytes_(bytes) {
//@all
    if (options.allocate) {
      data_ = options.allocate(bytes, alignment);
    } else {
      data_ = ::operator new(bytes, std::align_val_t(alignment), std::nothrow);
    }
    if (!data_) throw Error(Status::no_memory, "there are no " + std::to_string(bytes) + " bytes of memory");
    std::memset(data_, 0, bytes);
//@fixed
    char* address = static_cast<char*>(data_);
    for (std::size_t i = first; i < end; address += padded(tensors[i++].bytes)) addresses[i] = address;
//@all
  }
//@open

  // Places the inputs and outputs of the next call. Memory grows where it must, and never shrinks.
  static void place(Memory& memory, const Options& options, const CallTensors& now, void** addresses) {
    std::size_t bytes = 0;
    for (const Tensor& tensor : now.all) {
      if (tensor.bytes > SIZE_MAX / 2 - bytes) throw Error(Status::no_memory, "the tensors are larger than all memory");
      bytes += padded(tensor.bytes);
    }
    if (bytes > memory.bytes_) {
      memory = Memory();
      memory = Memory(options, bytes);
    }
    char* address = static_cast<char*>(memory.data_);
    for (std::size_t i = 0; i < now.all.size(); address += padded(now.all[i++].bytes)) addresses[i] = address;
  }

//@all
  Memory(const Memory&) = delete;
  Memory& operator=(Memory&& other) noexcept {
    std::swap(options_, other.options_);
    std::swap(data_, other.data_);
//@open
    std::swap(bytes_, other.bytes_);
//@all
    return *this;
  }
  explicit operator bool() const { return data_; }
  ~Memory() {
    if (!data_) return;
    if (options_->release) {
      options_->release(data_);
    } else {
      ::operator delete(data_, std::align_val_t(alignment));
    }
  }

 private:
  static constexpr std::size_t padded(std::size_t bytes) { return (bytes + alignment - 1) / alignment * alignment; }

  const Options* options_ = nullptr;
  void* data_ = nullptr;
//@open
  std::size_t bytes_ = 0;
//@all
};

// A context of a C library.
template <typename Library>
class Context {
 public:
  // The options stay where they are as long as the context exists.
  explicit Context(Options& options) {
    typename Library::Options chosen{};
    chosen.abi = Library::abi;
    chosen.threads = options.threads;
    chosen.user = &options;
    if (options.allocate) chosen.allocate = allocate;
    if (options.release) chosen.release = release;
    if (options.parallel_for) chosen.parallel_for = parallel_for;
    check(Library::create(&chosen, &context_));
  }
//@states
  // Copies the states, and shares the options.
  explicit Context(Context& source) { check(::@PREFIX@_fork(source.context_, &context_)); }
//@all
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;
  ~Context() { Library::destroy(context_); }

//@fixed
  void run(void* const* addresses) {
    std::array<typename Library::Buffer, Library::arguments.size()> inputs;
    std::array<typename Library::Buffer, Library::results.size()> outputs;
    fill(inputs, Library::arguments, addresses);
    fill(outputs, Library::results, addresses);
//@open
  void run(void* const* addresses, const CallTensors& now) {
    std::array<typename Library::Buffer, Library::arguments.size()> inputs;
    std::array<typename Library::Buffer, Library::results.size()> outputs;
    fill(inputs, Library::arguments, addresses, now);
    fill(outputs, Library::results, addresses, now);
//@all
    check(Library::run(context_, inputs.data(), inputs.size(), outputs.data(), outputs.size()));
  }

  // Writes the sizes that a tensor has after a call; false for one that this library does not compute.
  bool read_shape(std::size_t place, std::int64_t* shape) {
    const auto found = std::find(Library::results.begin(), Library::results.end(), place);
    if (found == Library::results.end()) return false;
    check(Library::output_shape(context_, static_cast<std::size_t>(found - Library::results.begin()), shape));
    return true;
  }

//@open
  // Sets the sizes of all dimensions, and writes the shapes and bytes that tensors have at these.
  void set_dimensions(const Sizes& sizes, CallTensors& now) {
    for (std::size_t i = 0; i < sizes.size(); ++i) check(Library::set_dimension(context_, i, sizes[i]));
    for (std::size_t i = 0; i < Library::arguments.size(); ++i) {
      const std::size_t place = Library::arguments[i];
      if (!now.shapes[place].empty()) check(Library::input_shape(context_, i, now.shapes[place].data()));
      check(Library::input_bytes(context_, i, &now.all[place].bytes));
    }
    for (std::size_t i = 0; i < Library::results.size(); ++i) {
      const std::size_t place = Library::results[i];
      if (!now.shapes[place].empty()) check(Library::output_shape(context_, i, now.shapes[place].data()));
      check(Library::output_bytes(context_, i, &now.all[place].bytes));
    }
  }

//@all
  std::uint32_t threads() const { return Library::threads(context_); }
//@states
  std::int64_t length() const { return ::@PREFIX@_length(context_); }
  std::int64_t dropped() const { return ::@PREFIX@_dropped(context_); }

  // Calls a function of the library with its context.
  template <typename Function, typename... Arguments>
  void call(Function* function, Arguments... arguments) {
    check(function(context_, arguments...));
  }
//@all

  // The hook stays where it is until the next call of this function.
  void profile(const Hook* hook) {
    check(Library::profile(context_, hook ? report : nullptr, this));
    hook_ = hook;
    for (std::size_t i = kernels_.size(); i < Library::kernel_count(); ++i) {
      kernels_.push_back(Library::name + std::string(Library::kernel_name(i)));
    }
  }

 private:
  template <std::size_t size>
  static void fill(std::array<typename Library::Buffer, size>& buffers, const std::array<std::size_t, size>& places,
//@fixed
                   void* const* addresses) {
    for (std::size_t i = 0; i < size; ++i) buffers[i] = {addresses[places[i]], tensors[places[i]].bytes};
//@open
                   void* const* addresses, const CallTensors& now) {
    for (std::size_t i = 0; i < size; ++i) buffers[i] = {addresses[places[i]], now.all[places[i]].bytes};
//@all
  }

  static void check(int status) {
    if (status == static_cast<int>(Status::ok)) return;
    const char* explanation = Library::explain(status);
    throw Error(Status(status), std::string(Library::name) + Library::message(status) +
                                    (explanation && *explanation ? ": " + std::string(explanation) : ""));
  }

  static void* allocate(void* user, std::size_t bytes, std::size_t alignment_bytes) noexcept {
    try {
      return static_cast<Options*>(user)->allocate(bytes, alignment_bytes);
    } catch (...) {
      return nullptr;
    }
  }
  static void release(void* user, void* memory) noexcept { static_cast<Options*>(user)->release(memory); }
  static void parallel_for(void* user, std::uint32_t tasks, void (*body)(void*, std::uint32_t), void* argument) noexcept {
    static_cast<Options*>(user)->parallel_for(tasks, Body(body, argument));
  }
  static void report(void* user, std::size_t kernel, std::uint64_t nanoseconds) noexcept {
    const Context& context = *static_cast<Context*>(user);
    (*context.hook_)(context.kernels_[kernel], nanoseconds);
  }

  typename Library::Context* context_ = nullptr;
  const Hook* hook_ = nullptr;
  std::vector<std::string> kernels_;
};

// A context of each library, to be called one after the other.
template <typename... Library>
struct Contexts : Context<Library>... {
//@fixed
  static constexpr bool are_several = sizeof...(Library) > 1;

//@all
  explicit Contexts(Options& options) : Context<Library>(options)... {}
//@states
  explicit Contexts(Contexts& source) : Context<Library>(source)... {}
//@all

//@fixed
  void run(void* const* addresses) { (Context<Library>::run(addresses), ...); }
//@open
  void run(void* const* addresses, const CallTensors& now) { (Context<Library>::run(addresses, now), ...); }
  void set_dimensions(const Sizes& sizes, CallTensors& now) { (Context<Library>::set_dimensions(sizes, now), ...); }
//@all
  bool read_shape(std::size_t place, std::int64_t* shape) { return (Context<Library>::read_shape(place, shape) || ...); }
  void profile(const Hook* hook) { (Context<Library>::profile(hook), ...); }
  std::uint32_t threads() const { return (std::max)({Context<Library>::threads()...}); }
};

using ModelContexts = Contexts<@LIBRARY_NAMES@>;

}  // namespace detail

// The caller's values for an input: a vector, an array, a Span, ... of numbers, which is not copied; 64 bytes of
// alignment spare a copy in the library. Inputs without a name are those in the same places of inputs().
class Input : public detail::View<const void*> {
 public:
  template <typename Values, typename = detail::Element<const Values>>
  Input(const Values& values) : Input(std::string_view(), values) {}
  template <typename Values, typename = detail::Element<const Values>>
  Input(std::string_view name, const Values& values) : View(detail::view_of<const void*>(name, values)) {}
};

// The caller's memory for an output.
class Output : public detail::View<void*> {
 public:
  template <typename Values, typename = std::enable_if_t<!std::is_const_v<detail::Element<Values>>>>
  Output(Values&& values) : Output(std::string_view(), values) {}
  template <typename Values, typename = std::enable_if_t<!std::is_const_v<detail::Element<Values>>>>
  Output(std::string_view name, Values&& values) : View(detail::view_of<void*>(name, values)) {}
};

//@states
// How sample() chooses a token: temperature, top_k, top_p and repetition_penalty; with all 0, that of the largest logit.
using Sampling = ::@PREFIX@_sampling;

//@all
// The model, ready to run. It serves one call at a time: make one for each thread; all share the weights.
class Model {
 public:
  explicit Model(Options options = {}) : state_(std::make_unique<State>(std::move(options))) {}

  static constexpr Span<const Tensor> inputs() { return {detail::tensors.data(), detail::input_count}; }
  static constexpr Span<const Tensor> outputs() {
    return {detail::tensors.data() + detail::input_count, detail::output_count};
  }

//@open
  static constexpr Span<const Dimension> dimensions() { return {detail::dimensions.data(), detail::dimensions.size()}; }

  // The size of a dimension, by its name or place: its smallest one, until another one is set.
  template <typename Key = std::size_t>
  std::int64_t dimension(const Key& key) const {
    return state().sizes[detail::find(dimensions(), key)];
  }

  // Chooses the size of a dimension for the next calls: `model.set_dimension("seq", 37)`. Throws Error when it cannot have
  // this size. What is in the model's own memory is lost then, where the size differs from the one before.
  template <typename Key = std::size_t>
  void set_dimension(const Key& key, std::int64_t size) {
    const std::size_t place = detail::find(dimensions(), key);
    detail::check_size(detail::dimensions[place], size);
    const Call call(state());
    detail::Sizes sizes = state().sizes;
    sizes[place] = size;
    state().resize(sizes);
  }

  // The same for several dimensions: `model.set_dimensions({{"batch", 2}, {"seq", 37}})`. After an error, all are as before.
  void set_dimensions(const std::map<std::string_view, std::int64_t>& chosen) {
    const Call call(state());
    detail::Sizes sizes = state().sizes;
    for (const auto& [name, size] : chosen) {
      const std::size_t place = detail::find(dimensions(), name);
      detail::check_size(detail::dimensions[place], size);
      sizes[place] = size;
    }
    state().resize(sizes);
  }

  // Derives the sizes of dimensions from shapes of inputs: `model.set_input_shapes({{"x", {2, 37}}, {"y", {2, 8}}})`.
  // Dimensions that none of them has stay as they are.
  void set_input_shapes(const std::map<std::string_view, std::vector<std::int64_t>>& shapes) {
    const Call call(state());
    detail::Sizes sizes = state().sizes;
    std::array<std::string, detail::dimensions.size()> found;
    for (const auto& [name, shape] : shapes) {
      derive_sizes(detail::find(inputs(), name, "input"), shape, sizes, found);
    }
    const detail::Sizes before = state().sizes;
    state().resize(sizes);
    for (const auto& [name, shape] : shapes) {
      const Tensor& tensor = state().now.all[detail::find(inputs(), name, "input")];
      if (std::equal(shape.begin(), shape.end(), tensor.shape.begin(), tensor.shape.end())) continue;
      const std::string text = "input '" + std::string(tensor.name) + "' is " + tensor.type() + " with these dimensions";
      state().resize(before);
      throw Error(Status::wrong_size, text);
    }
  }

  // An input or output, by name or place, as it is in the next call: with its shape and its bytes, and with size(), the
  // number of its values. The reference is valid as long as the model exists, and follows the dimensions.
  template <typename Key = std::size_t>
  const Tensor& input_tensor(const Key& key) const {
    return state().now.all[detail::find(inputs(), key, "input")];
  }
  template <typename Key = std::size_t>
  const Tensor& output_tensor(const Key& key) const {
    return state().now.all[detail::input_count + detail::find(outputs(), key, "output")];
  }

//@all
  // Computes the outputs in the caller's memory: `model.run({pixels}, {scores})`, or by name,
  // `model.run({{"data", pixels}}, {{"scores", scores}})`.
  void run(std::initializer_list<Input> in, std::initializer_list<Output> out) {
    run(in.begin(), in.size(), out.begin(), out.size());
  }
  void run(const std::vector<Input>& in, const std::vector<Output>& out) {
    run(in.data(), in.size(), out.data(), out.size());
  }

//@fixed
  // The model's own memory for an input, to be written before run(): `model.input<float>("data")`, or by place.
//@open
  // The model's own memory for an input, to be written before run(): `model.input<float>("data")`, or by place. It is valid
  // until a dimension changes.
//@all
  template <typename T, typename Key = std::size_t>
  Span<T> input(const Key& key) {
    return own_memory<T>(detail::find(inputs(), key, "input"), "input");
  }

  // Computes the outputs from the inputs in the model's own memory.
  void run() {
    allocate();
    run(state().own);
  }

  // What run() computed, until the next call: as many values as there are in this call.
  template <typename T, typename Key = std::size_t>
  Span<const T> output(const Key& key) {
    const std::size_t place = detail::find(outputs(), key, "output");
    const Span<T> memory = own_memory<T>(detail::input_count + place, "output");
//@fixed
    const Tensor& tensor = outputs()[place];
//@open
    const Tensor& tensor = output_tensor(place);
//@all
    if (tensor.bounded_axis < 0 || memory.size() == 0) return {memory.data(), memory.size()};
    const auto axis = static_cast<std::size_t>(tensor.bounded_axis);
    const std::size_t part = memory.size() / static_cast<std::size_t>(tensor.shape[axis]);
    return {memory.data(), part * static_cast<std::size_t>(shape(place)[axis])};
  }

//@fixed
  // The sizes of an output after the last call; its values are the first ones of its memory.
//@open
  // The sizes of an output in the next call. Along its `bounded_axis`, it is that of the last call, unless a dimension has
  // changed since; the values are the first ones of its memory.
//@all
  template <typename Key = std::size_t>
  std::vector<std::int64_t> shape(const Key& key) {
    const std::size_t output = detail::find(outputs(), key, "output");
//@fixed
    const Tensor& tensor = outputs()[output];
//@open
    const Tensor& tensor = output_tensor(output);
//@all
    std::vector<std::int64_t> sizes(tensor.shape.begin(), tensor.shape.end());
    if (tensor.bounded_axis < 0) return sizes;
    std::size_t place = detail::input_count + output;
    for (const auto& [copy, source] : detail::copies) {
      if (copy == place) place = source;
    }
    const Call call(state());
    state().contexts.read_shape(place, sizes.data());
    return sizes;
  }

//@states
  // Computes the next step from the inputs and outputs that are not states, in their order or by name, as run() does. The
  // states stay in the model. After an error, they are as before.
  void step(std::initializer_list<Input> in, std::initializer_list<Output> out) {
    step(in.begin(), in.size(), out.begin(), out.size());
  }
  void step(const std::vector<Input>& in, const std::vector<Output>& out) {
    step(in.data(), in.size(), out.data(), out.size());
  }

  // Starts again: growing states are empty, the others 0, or what the model begins with.
  void reset() { change(::@PREFIX@_reset); }

  // The length of the growing states, such as the tokens in a KV cache; 0 where none grows.
  std::int64_t length() const { return state().contexts.length(); }

  // The rows that drop() has taken since the beginning: the next position of a token is this plus length().
  std::int64_t dropped() const { return state().contexts.dropped(); }

  // Drops everything after a length of the growing states.
  void truncate(std::int64_t length) { change(::@PREFIX@_truncate, length); }

  // Drops the oldest rows of the growing states.
  void drop(std::int64_t count) { change(::@PREFIX@_drop, count); }

  // The values of a state, by the name of its input or by place, valid until it changes: `model.state<float>(0)`. As
  // std::byte, the bytes of any type.
  template <typename T, typename Key = std::size_t>
  Span<const T> state(const Key& key) {
    const Call call(state());
    const auto tensors = pick(detail::states);
    const std::size_t place = detail::find({tensors.data(), tensors.size()}, key, "state");
    const void* data = nullptr;
    std::size_t bytes = 0;
    state().contexts.call(::@PREFIX@_state, place, &data, &bytes);
    const Span<const T> values(static_cast<const T*>(data), bytes / sizeof(T));
    detail::check_view(detail::view_of<const void*>("", values), tensors[place], "state");
    return values;
  }

  // All states with a checksum, for load_state() of any model of this library. It refuses what is damaged.
  std::vector<std::byte> save_state() {
    const Call call(state());
    std::size_t bytes = 0;
    state().contexts.call(::@PREFIX@_state_bytes, &bytes);
    std::vector<std::byte> saved(bytes);
    state().contexts.call(::@PREFIX@_save_state, saved.data(), bytes);
    return saved;
  }
  void load_state(const Input& saved) { change(::@PREFIX@_load_state, saved.data, saved.size * saved.item_bytes); }

  // Another model with a copy of the states. Both call the functions of the same options.
  Model fork() {
    const Call call(state());
    return Model(std::make_unique<State>(state()));
  }

  // Chooses a token by its logits, float32, which the penalty for `recent` tokens changes.
  std::int64_t sample(const Output& logits, const Sampling& sampling = {}, const std::vector<std::int64_t>& recent = {}) {
    if (logits.dtype != "float32") throw Error(Status::wrong_dtype, "logits are float32");
    std::int64_t token = 0;
    change(::@PREFIX@_sample, static_cast<float*>(logits.data), logits.size, &sampling, recent.data(), recent.size(), &token);
    return token;
  }

  // Sets the random state of sample(), which is saved, forked and reset with the states.
  void seed(std::uint64_t seed) { change(::@PREFIX@_seed, seed); }

//@all
  // The threads that compute, the caller's included.
  std::uint32_t threads() const { return state().contexts.threads(); }

  // Lets a function be called after each kernel; an empty one: no more.
  void profile(Hook hook) {
    const Call call(state());
    auto kept = std::make_unique<Hook>(std::move(hook));
    const Hook* called = *kept ? kept.get() : nullptr;
    state().contexts.profile(called);
    state().hook = std::move(kept);
  }

 private:
  using Addresses = std::array<void*, detail::tensors.size()>;
  static constexpr std::size_t outer_count = detail::input_count + detail::output_count;

  // Everything that C code has the address of.
  struct State {
//@fixed
    explicit State(Options chosen)
        : options(std::make_shared<Options>(std::move(chosen))), contexts(*options),
          between(*options, outer_count, detail::tensors.size(), own.data()) {}

//@states fixed
    explicit State(State& source) : options(source.options), contexts(source.contexts) {}

//@states open
    explicit State(State& source) : options(source.options), contexts(source.contexts), sizes(source.sizes) {
      contexts.set_dimensions(sizes, now);
    }

//@open
    explicit State(Options chosen) : options(std::make_shared<Options>(std::move(chosen))), contexts(*options) {
      for (std::size_t i = 0; i < sizes.size(); ++i) sizes[i] = detail::dimensions[i].min;
      contexts.set_dimensions(sizes, now);
    }

    void resize(const detail::Sizes& wanted) {
      if (wanted == sizes) return;
      are_placed = false;
      try {
        contexts.set_dimensions(wanted, now);
      } catch (...) {
        contexts.set_dimensions(sizes, now);
        throw;
      }
      sizes = wanted;
    }

//@all
    std::shared_ptr<Options> options;
    std::unique_ptr<Hook> hook;
    detail::ModelContexts contexts;
    Addresses own{};
//@fixed
    detail::Memory between, outer;
//@open
    detail::Sizes sizes{};
    detail::CallTensors now;
    detail::Memory outer;
    bool are_placed = false;
//@all
    std::atomic_flag is_busy = ATOMIC_FLAG_INIT;
  };

  // A call in progress. Throws Error when there is one already.
  class Call {
   public:
    explicit Call(State& state) : flag_(state.is_busy) {
      if (!flag_.test_and_set(std::memory_order_acquire)) return;
      throw Error(Status::busy, "the model is in use by another thread: make one for each thread");
    }
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;
    ~Call() { flag_.clear(std::memory_order_release); }

   private:
    std::atomic_flag& flag_;
  };

//@states
  explicit Model(std::unique_ptr<State> state) : state_(std::move(state)) {}

//@all
  State& state() const {
    if (state_) return *state_;
    throw Error(Status::null_argument, "this model was moved to another variable");
  }

  void run(const Input* in, std::size_t in_count, const Output* out, std::size_t out_count) {
//@fixed
    Addresses addresses = state().own;
    place(in, in_count, inputs(), "input", addresses.data());
    place(out, out_count, outputs(), "output", addresses.data() + detail::input_count);
    if (detail::ModelContexts::are_several || !detail::copies.empty()) check_overlap(addresses);
    run(addresses);
//@open
    Addresses addresses{};
    const Tensor* tensors = state().now.all.data();
    place(in, in_count, {tensors, detail::input_count}, "input", addresses.data());
    place(out, out_count, {tensors + detail::input_count, detail::output_count}, "output",
          addresses.data() + detail::input_count);
    run(addresses);
//@all
  }

  void run(const Addresses& addresses) {
    const Call call(state());
//@fixed
    state().contexts.run(addresses.data());
    for (const auto& [output, source] : detail::copies) {
      std::memcpy(addresses[output], addresses[source], detail::tensors[source].bytes);
    }
//@open
    state().contexts.run(addresses.data(), state().now);
//@all
  }

//@states
  void step(const Input* in, std::size_t in_count, const Output* out, std::size_t out_count) {
    const Call call(state());
    const auto inputs = place_step(in, in_count, detail::step_inputs, "input");
    const auto outputs = place_step(out, out_count, detail::step_outputs, "output");
    state().contexts.call(::@PREFIX@_step, inputs.data(), inputs.size(), outputs.data(), outputs.size());
    update_length();
  }

  template <typename View, std::size_t size>
  std::array<::@PREFIX@_buffer, size> place_step(const View* views, std::size_t count,
                                         const std::array<std::size_t, size>& places, const char* kind) {
    const auto tensors = pick(places);
    std::array<void*, size> addresses{};
    place(views, count, {tensors.data(), size}, kind, addresses.data());
    std::array<::@PREFIX@_buffer, size> buffers{};
    for (std::size_t i = 0; i < size; ++i) buffers[i] = {addresses[i], tensors[i].bytes};
    return buffers;
  }

  // Calls a function that may change the states.
  template <typename Function, typename... Arguments>
  void change(Function* function, Arguments... arguments) {
    const Call call(state());
    state().contexts.call(function, arguments...);
    update_length();
  }

  // The tensors in some places, with the shapes that they have in the next step.
  template <std::size_t size>
  std::array<Tensor, size> pick(const std::array<std::size_t, size>& places) {
    update_length();
    std::array<Tensor, size> tensors{};
//@states fixed
    for (std::size_t i = 0; i < size; ++i) tensors[i] = detail::tensors[places[i]];
//@states open
    for (std::size_t i = 0; i < size; ++i) tensors[i] = state().now.all[places[i]];
//@states
    return tensors;
  }

  // Lets the dimension that is the length of the states follow it.
  void update_length() {
//@states open
    detail::Sizes sizes = state().sizes;
    if (detail::length_dimension >= 0) sizes[static_cast<std::size_t>(detail::length_dimension)] = length();
    state().resize(sizes);
//@states
  }

//@all
  // Writes the address of each tensor's values. Throws Error when there are too few or too many, or others.
  template <typename View>
  static void place(const View* views, std::size_t count, Span<const Tensor> tensors, const char* kind, void** addresses) {
    if (count != tensors.size()) {
      throw Error(Status::wrong_count, "takes " + std::to_string(tensors.size()) + " " + kind +
                                           (tensors.size() == 1 ? "" : "s") + ", not " + std::to_string(count));
    }
    std::array<bool, outer_count> is_placed{};
    for (std::size_t i = 0; i < count; ++i) {
      const std::size_t place = views[i].tensor.empty() ? i : detail::find(tensors, views[i].tensor, kind);
      detail::check_view(views[i], tensors[place], kind);
      if (is_placed[place]) {
        throw Error(Status::repeated_tensor, std::string(kind) + " '" + std::string(tensors[place].name) + "' is there twice");
      }
      is_placed[place] = true;
      addresses[place] = const_cast<void*>(static_cast<const void*>(views[i].data));
    }
  }

//@fixed
  // Throws Error when an output shares memory with an input or another output.
  static void check_overlap(const Addresses& addresses) {
    const auto begin = [&](std::size_t i) { return reinterpret_cast<std::uintptr_t>(addresses[i]); };
    for (std::size_t output = detail::input_count; output < outer_count; ++output) {
      for (std::size_t other = 0; other < output; ++other) {
        if (begin(output) < begin(other) + detail::tensors[other].bytes &&
            begin(other) < begin(output) + detail::tensors[output].bytes) {
          throw Error(Status::overlap, "output '" + std::string(detail::tensors[output].name) + "' shares memory with '" +
                                           std::string(detail::tensors[other].name) + "'");
        }
      }
    }
  }

  void allocate() {
    if (!state().outer) state().outer = detail::Memory(*state().options, 0, outer_count, state().own.data());
  }
//@open
  // Adds the sizes that an input of some shape has; `found` says where each came from.
  static void derive_sizes(std::size_t input, const std::vector<std::int64_t>& shape, detail::Sizes& sizes,
                           std::array<std::string, detail::dimensions.size()>& found) {
    const Tensor& tensor = inputs()[input];
    const std::string name = "input '" + std::string(tensor.name) + "'";
    if (shape.size() != tensor.shape.size()) {
      throw Error(Status::wrong_size, name + " is " + tensor.type() + ": a shape of " +
                                          std::to_string(tensor.shape.size()) + " sizes, not " + std::to_string(shape.size()));
    }
    for (std::size_t axis = 0; axis < shape.size(); ++axis) {
      const std::string size = std::to_string(shape[axis]);
      const std::string where = "size " + std::to_string(axis) + " of " + name;
      const int dimension = detail::input_axes[input][axis];
      if (dimension == -2) continue;  // it follows from other axes: compared when all are known
      if (dimension < 0) {
        if (shape[axis] == tensor.shape[axis]) continue;
        throw Error(Status::wrong_size, where + " is " + size + ", and the model's is " + std::to_string(tensor.shape[axis]));
      }
      const auto place = static_cast<std::size_t>(dimension);
      if (!found[place].empty() && sizes[place] != shape[axis]) {
        throw Error(Status::wrong_size, "the dimension " + std::string(detail::dimensions[place].name) + " has two sizes: " +
                                            where + " is " + size + ", and " + found[place] + " is " +
                                            std::to_string(sizes[place]));
      }
      detail::check_size(detail::dimensions[place], shape[axis]);
      sizes[place] = shape[axis];
      found[place] = where;
    }
  }

  void allocate() {
    if (state().are_placed) return;
    detail::Memory::place(state().outer, *state().options, state().now, state().own.data());
    state().are_placed = true;
  }
//@all

  template <typename T>
  Span<T> own_memory(std::size_t place, const char* kind) {
    allocate();
//@fixed
    const Tensor& tensor = detail::tensors[place];
//@open
    const Tensor& tensor = state().now.all[place];
//@all
    const Span<T> memory(static_cast<T*>(state().own[place]), tensor.bytes / sizeof(T));
    detail::check_view(detail::view_of<const void*>("", memory), tensor, kind);
    return memory;
  }

  std::unique_ptr<State> state_;
};

}  // namespace @NAMESPACE@
}  // namespace tvmflow_models

#endif  // @NAME@_HPP_
