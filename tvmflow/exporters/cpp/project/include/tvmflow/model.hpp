// A compiled model: load it, set its inputs, run it, get its outputs. Needs TVM's runtime and the headers of tvm_ffi.
// The model is one library, or several, each for a part of it.
//
// Everything that can be known before the library is loaded is checked before, because a library for another CPU
// dies of an illegal instruction without a message.
#ifndef TVMFLOW_MODEL_HPP_
#define TVMFLOW_MODEL_HPP_

// tvm_ffi exports its error class from every program, and the runtime would then use the program's: fatal
// where the two have different C++ libraries. Together with -fvisibility=hidden this prevents it.
#if !defined(TVM_FFI_DLL) && defined(__GNUC__) && !defined(__EMSCRIPTEN__) && !defined(_WIN32)
#define TVM_FFI_DLL
#define TVM_FFI_DLL_EXPORT __attribute__((visibility("default")))
#endif

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/map.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/dtype.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <iterator>
#include <new>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace tvmflow {

// An error whose what() is a message for people.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Name, shape and dtype (as in NumPy: float32, int64, bool, …) of one input or output.
struct TensorSpec {
  std::string name;
  std::vector<int64_t> shape;
  std::string dtype;

  std::size_t elements() const {
    std::size_t count = 1;
    for (int64_t size : shape) count *= static_cast<std::size_t>(size);
    return count;
  }
  std::size_t item_bytes() const {
    return (static_cast<std::size_t>(tvm::ffi::StringToDLDataType(dtype).bits) + 7) / 8;
  }
  std::size_t bytes() const { return elements() * item_bytes(); }

  // "data: float32[1, 3, 224, 224]"
  std::string text() const {
    std::ostringstream out;
    out << name << ": " << dtype << '[';
    for (std::size_t i = 0; i < shape.size(); ++i) out << (i ? ", " : "") << shape[i];
    out << ']';
    return out.str();
  }
};

namespace detail {

namespace ffi = tvm::ffi;
using Json = ffi::Map<ffi::Any, ffi::Any>;

// The runtime may have been built with another C++ library than this program, and then its exceptions
// cannot be caught here: every call uses its C interface, which throws none.
inline ffi::Any call_packed(const ffi::Function& function, const ffi::AnyView* arguments,
                            std::size_t count) {
  ffi::Any result;
  TVM_FFI_CHECK_SAFE_CALL(TVMFFIFunctionCall(
      ffi::details::ObjectUnsafe::TVMFFIObjectPtrFromObjectRef(function),
      reinterpret_cast<TVMFFIAny*>(const_cast<ffi::AnyView*>(arguments)),
      static_cast<int32_t>(count), reinterpret_cast<TVMFFIAny*>(&result)));
  return result;
}

template <typename... Args>
ffi::Any call(const ffi::Function& function, Args&&... args) {
  constexpr std::size_t kCount = sizeof...(Args);
  ffi::AnyView packed[kCount ? kCount : 1];
  ffi::PackedArgs::Fill(packed, std::forward<Args>(args)...);
  return call_packed(function, packed, kCount);
}

template <typename... Args>
ffi::Any call_global(const char* name, Args&&... args) {
  return call(ffi::Function::GetGlobalRequired(name), std::forward<Args>(args)...);
}

inline ffi::Function get_function(const ffi::Any& module, const char* name) {
  ffi::Any function = call_global("ffi.ModuleGetFunction", module, ffi::String(name), true);
  if (function == nullptr) throw Error(std::string("the library has no function ") + name);
  return function.cast<ffi::Function>();
}

// Calls `action` and throws the runtime's errors as Error, with `context` before their message.
template <typename Action>
auto with_context(const std::string& context, Action&& action) -> decltype(action()) {
  try {
    return action();
  } catch (const ffi::Error& error) {
    throw Error(context + ": " + std::string(error.message()));
  }
}

inline std::string read_text(const std::string& path) {
  std::ifstream stream(path, std::ios::binary);
  if (!stream) throw Error("there is no file " + path);
  return {std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>()};
}

inline std::string text_at(const Json& json, const char* name) {
  return std::string(json.at(ffi::String(name)).cast<ffi::String>());
}

inline std::vector<TensorSpec> specs_at(const Json& json, const char* name) {
  std::vector<TensorSpec> specs;
  for (const ffi::Any& entry : json.at(ffi::String(name)).cast<ffi::Array<ffi::Any>>()) {
    Json fields = entry.cast<Json>();
    TensorSpec spec{text_at(fields, "name"), {}, text_at(fields, "dtype")};
    for (const ffi::Any& size : fields.at(ffi::String("shape")).cast<ffi::Array<ffi::Any>>()) {
      spec.shape.push_back(size.cast<int64_t>());
    }
    specs.push_back(std::move(spec));
  }
  return specs;
}

// The architecture that this program was compiled for, by its name in model.json.
inline const char* architecture() {
#if defined(__x86_64__) || defined(_M_X64)
  return "x86_64";
#elif defined(__aarch64__) || defined(_M_ARM64)
  return "aarch64";
#elif defined(__arm__) || defined(_M_ARM)
  return "armv7";
#elif defined(__riscv) && __riscv_xlen == 64
  return "riscv64";
#elif defined(__i386__) || defined(_M_IX86)
  return "i386";
#else
  return "";
#endif
}

// The features of this CPU as the Linux kernel reports them; empty where it does not.
inline std::set<std::string> cpu_features() {
  std::set<std::string> features;
  std::ifstream stream("/proc/cpuinfo");
  for (std::string line; std::getline(stream, line);) {
    if (line.rfind("flags", 0) == 0 || line.rfind("Features", 0) == 0) {
      std::istringstream words(line.substr(line.find(':') + 1));
      for (std::string word; words >> word;) features.insert(word);
      break;
    }
  }
  return features;
}

// "0.27" of "0.27.0.post1"
inline std::string minor_version(const std::string& version) {
  return version.substr(0, version.find('.', version.find('.') + 1));
}

// The field `bundle` in the model.json of one library, and of parts with a folder each.
constexpr int64_t kLibraryFormat = 1, kPartitionedFormat = 2;

inline int64_t read_format(const Json& json, const std::string& path) {
  const int64_t format = json.at(ffi::String("bundle")).cast<int64_t>();
  if (format != kLibraryFormat && format != kPartitionedFormat) {
    throw Error(path + " has a format that this header does not read: use the header that was delivered with it");
  }
  return format;
}

// Throws Error when a library does not fit the machine, this program or the runtime.
inline void check_requirements(const Json& json, const std::string& path) {
  if (read_format(json, path) != kLibraryFormat) throw Error(path + " describes a partitioned model, not one library");
  std::string arch = text_at(json, "arch"), program_arch = architecture();
  if (!program_arch.empty() && arch != program_arch) {
    throw Error(path + " was built for " + arch + ", this program is for " + program_arch);
  }
  std::set<std::string> features = cpu_features();
  std::string missing;
  Json target = json.at(ffi::String("target")).cast<Json>();
  for (const ffi::Any& feature : target.at(ffi::String("features")).cast<ffi::Array<ffi::Any>>()) {
    std::string name(feature.cast<ffi::String>());
    if (!features.empty() && features.count(name) == 0) missing += (missing.empty() ? "" : ", ") + name;
  }
  if (!missing.empty()) {
    throw Error(path + " uses CPU instructions that this machine lacks: " + missing);
  }
  TVMFFIVersion version;
  TVMFFIGetVersion(&version);
  std::string built = minor_version(text_at(json, "tvm_ffi"));
  std::string installed = std::to_string(version.major) + "." + std::to_string(version.minor);
  if (built != installed) {
    throw Error(path + " was built with tvm_ffi " + built + ", the runtime here has " + installed);
  }
}

// Allocates with the alignment that kernels rely on.
struct AlignedAllocator {
  static constexpr std::align_val_t kAlignment{64};
  void AllocData(DLTensor* tensor) {
    std::size_t bytes = ffi::GetDataSize(*tensor);
    tensor->data = ::operator new(bytes ? bytes : 1, kAlignment);
  }
  void FreeData(DLTensor* tensor) { ::operator delete(tensor->data, kAlignment); }
};

inline ffi::Tensor new_tensor(const TensorSpec& spec) {
  ffi::Tensor tensor =
      ffi::Tensor::FromNDAlloc(AlignedAllocator(), ffi::Shape(spec.shape.begin(), spec.shape.end()),
                               ffi::StringToDLDataType(spec.dtype), DLDevice{kDLCPU, 0});
  std::memset(tensor.data_ptr(), 0, spec.bytes());
  return tensor;
}

inline Json read_json(const std::string& path) {
  const std::string text = read_text(path);
  return with_context(path + " cannot be read",
              [&] { return call_global("ffi.json.Parse", ffi::String(text)).cast<Json>(); });
}

// A loaded library: that of the model, or of one of its parts.
struct Library {
  std::string name;  // in error messages
  std::vector<TensorSpec> inputs, outputs;
  std::vector<std::size_t> arguments;  // the indices of its inputs among all tensors that exist before it runs
  ffi::Any vm;
  ffi::Function main;

  // Runs on some of the tensors, and appends its results to them.
  void run(std::vector<ffi::Tensor>* tensors) const {
    const std::size_t before = tensors->size();
    with_context(name + " failed", [&] {
      std::vector<ffi::AnyView> views;
      for (std::size_t index : arguments) views.emplace_back((*tensors)[index]);
      ffi::Any result = call_packed(main, views.data(), views.size());
      if (auto tensor = result.as<ffi::Tensor>()) {
        tensors->push_back(*tensor);
      } else {
        for (const ffi::Any& output : result.cast<ffi::Array<ffi::Any>>()) {
          tensors->push_back(output.cast<ffi::Tensor>());
        }
      }
    });
    if (tensors->size() - before != outputs.size()) {
      throw Error(name + " returned " + std::to_string(tensors->size() - before) + " outputs, not " +
                  std::to_string(outputs.size()));
    }
  }
};

// Loads the library in a folder, whose model.json is `json`. Its arguments are not set.
inline Library load_library(const std::string& folder, const Json& json, const std::string& name) {
  const std::string path = folder + "/model.json";
  Library loaded;
  loaded.name = name;
  const std::string file = with_context(path + " is not complete", [&] {
    check_requirements(json, path);
    loaded.inputs = specs_at(json, "inputs");
    loaded.outputs = specs_at(json, "outputs");
    return folder + "/" + text_at(json, "library");
  });
  if (!std::ifstream(file)) throw Error("there is no file " + file);
  with_context(file + " cannot be loaded", [&] {
    ffi::Any module = call_global("ffi.ModuleLoadFromFile", ffi::String(file));
    loaded.vm = call(get_function(module, "vm_load_executable"));
    constexpr int kPooledAllocator = 2;
    call(get_function(loaded.vm, "vm_initialization"), static_cast<int>(kDLCPU), 0, kPooledAllocator);
    loaded.main = get_function(loaded.vm, "main");
  });
  return loaded;
}

// Loads the libraries of a model in the order in which they run: its own, or those of its parts.
inline std::vector<Library> load_libraries(const std::string& folder, const Json& json) {
  const std::string path = folder + "/model.json";
  std::vector<std::pair<std::string, std::string>> parts;  // name, folder
  const bool is_library = with_context(path + " is not complete", [&] {
    if (read_format(json, path) == kLibraryFormat) return true;
    for (const ffi::Any& entry : json.at(ffi::String("parts")).cast<ffi::Array<ffi::Any>>()) {
      const Json fields = entry.cast<Json>();
      parts.emplace_back(text_at(fields, "name"), folder + "/" + text_at(fields, "folder"));
    }
    return false;
  });
  if (is_library) return {load_library(folder, json, "the model")};
  std::vector<Library> libraries;
  for (const auto& [name, part] : parts) {
    libraries.push_back(load_library(part, read_json(part + "/model.json"), "the part '" + name + "'"));
  }
  return libraries;
}

// Finds the indices of the `needed` tensors among the `available` ones. Throws Error when one is missing.
inline std::vector<std::size_t> find_indices(const std::vector<TensorSpec>& needed,
                                             const std::vector<TensorSpec>& available,
                                             const std::string& consumer) {
  std::vector<std::size_t> indices;
  for (const TensorSpec& spec : needed) {
    std::size_t end = available.size();
    while (end > 0 && available[end - 1].text() != spec.text()) --end;
    if (end == 0) throw Error(consumer + " needs " + spec.text() + ", which nothing before it computes");
    indices.push_back(end - 1);
  }
  return indices;
}

}  // namespace detail

// A loaded model. Used by one thread at a time.
class Model {
 public:
  // Loads the model in a folder with `model.json`, and its library or its parts. Throws Error with the reason when
  // it cannot run here. The folder of a part, `parts/NAME`, is loaded in the same way.
  static Model load(const std::string& folder) { return Model(folder); }

  const std::vector<TensorSpec>& inputs() const { return inputs_; }
  const std::vector<TensorSpec>& outputs() const { return outputs_; }

  // Copies an input's values, in C order. Throws Error when there is no such input, or for another number of bytes.
  void set_input(const std::string& name, const void* values, std::size_t bytes) {
    std::size_t index = index_of(inputs_, name, "input");
    if (bytes != inputs_[index].bytes()) {
      throw Error("input '" + name + "' takes " + std::to_string(inputs_[index].bytes()) + " bytes (" +
                  inputs_[index].text() + "), not " + std::to_string(bytes));
    }
    std::memcpy(tensors_[index].data_ptr(), values, bytes);
    is_set_[index] = true;
  }

  template <typename T>
  void set_input(const std::string& name, const std::vector<T>& values) {
    check_type<T>(inputs_[index_of(inputs_, name, "input")]);
    set_input(name, values.data(), values.size() * sizeof(T));
  }

  // Computes the outputs from the inputs, which keep their values. Throws Error when one was never set.
  void run() {
    for (std::size_t i = 0; i < inputs_.size(); ++i) {
      if (!is_set_[i]) throw Error("input '" + inputs_[i].name + "' was not set");
    }
    // The inputs, then the results of each library, which later libraries take as arguments.
    std::vector<detail::ffi::Tensor> tensors = tensors_;
    for (const detail::Library& library : libraries_) library.run(&tensors);
    results_.clear();
    for (std::size_t index : output_indices_) results_.push_back(tensors[index]);
  }

  // An output's values in C order, `outputs()[index].bytes()` bytes; valid until the next run.
  const void* output_data(std::size_t index) const {
    if (index >= outputs_.size()) throw Error("there is no output " + std::to_string(index));
    if (results_.empty()) throw Error("run the model before asking for its outputs");
    const detail::ffi::Tensor& tensor = results_[index];
    return static_cast<const char*>(tensor.data_ptr()) + tensor.byte_offset();
  }

  // A copy of an output's values.
  template <typename T>
  std::vector<T> output(std::size_t index) const {
    const void* data = output_data(index);
    check_type<T>(outputs_[index]);
    std::vector<T> values(outputs_[index].elements());
    std::memcpy(values.data(), data, outputs_[index].bytes());
    return values;
  }

  template <typename T>
  std::vector<T> output(const std::string& name) const {
    return output<T>(index_of(outputs_, name, "output"));
  }

 private:
  explicit Model(const std::string& folder) {
    const std::string path = folder + "/model.json";
    const detail::Json json = detail::read_json(path);
    libraries_ = detail::load_libraries(folder, json);
    detail::with_context(path + " is not complete", [&] {
      inputs_ = detail::specs_at(json, "inputs");
      outputs_ = detail::specs_at(json, "outputs");
    });
    std::vector<TensorSpec> available = inputs_;
    for (detail::Library& library : libraries_) {
      library.arguments = detail::find_indices(library.inputs, available, path + ": " + library.name);
      available.insert(available.end(), library.outputs.begin(), library.outputs.end());
    }
    output_indices_ = detail::find_indices(outputs_, available, path + ": the model");
    for (const TensorSpec& spec : inputs_) tensors_.push_back(detail::new_tensor(spec));
    is_set_.assign(inputs_.size(), false);
  }

  static std::size_t index_of(const std::vector<TensorSpec>& specs, const std::string& name,
                              const std::string& kind) {
    std::string names;
    for (std::size_t i = 0; i < specs.size(); ++i) {
      if (specs[i].name == name) return i;
      names += (i ? ", " : "") + specs[i].text();
    }
    throw Error("there is no " + kind + " '" + name + "' (there are " + names + ")");
  }

  template <typename T>
  static void check_type(const TensorSpec& spec) {
    static_assert(std::is_trivially_copyable<T>::value, "values are copied as bytes");
    const char kind = std::is_floating_point<T>::value ? 'f' : std::is_signed<T>::value ? 'i' : 'u';
    const bool is_bool = spec.dtype == "bool";
    const bool matches = is_bool ? sizeof(T) == 1 : spec.dtype[0] == kind || !std::is_arithmetic<T>::value;
    if (!matches || sizeof(T) != spec.item_bytes()) {
      throw Error("'" + spec.name + "' is " + spec.text() + ", which is another type in C++");
    }
  }

  std::vector<TensorSpec> inputs_, outputs_;
  std::vector<bool> is_set_;
  std::vector<detail::Library> libraries_;
  std::vector<std::size_t> output_indices_;  // among the inputs and the results of all libraries
  std::vector<detail::ffi::Tensor> tensors_, results_;
};

}  // namespace tvmflow

#endif  // TVMFLOW_MODEL_HPP_
