// A compiled model: load it, set its inputs, run it, get its outputs. Needs TVM's runtime and the headers of tvm_ffi.
// The model is one library, or several, each for a part of it.
//
// Everything that can be known before the library is loaded is checked before, because a library for another CPU
// dies of an illegal instruction and says nothing.
#ifndef TVMFLOW_MODEL_HPP_
#define TVMFLOW_MODEL_HPP_

// tvm_ffi exports its class of errors from every program, and the runtime would then take the program's: fatal
// where the two have different C++ libraries. Together with -fvisibility=hidden this keeps them apart.
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

// What went wrong, as a sentence.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Name, shape and type (as NumPy calls it: float32, int64, bool, …) of one input or output.
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
// cannot be caught here: every call goes through its C interface, which has none.
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

inline ffi::Function function_of(const ffi::Any& module, const char* name) {
  ffi::Any found = call_global("ffi.ModuleGetFunction", module, ffi::String(name), true);
  if (found == nullptr) throw Error(std::string("the library has no function ") + name);
  return found.cast<ffi::Function>();
}

// Turns the runtime's errors into ours.
template <typename Action>
auto told(const std::string& doing, Action&& action) -> decltype(action()) {
  try {
    return action();
  } catch (const ffi::Error& error) {
    throw Error(doing + ": " + std::string(error.message()));
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

// What this program was compiled for, as model.json calls it.
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

// What the kernel says that this CPU can do; empty where it does not say.
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
inline std::string minor_of(const std::string& version) {
  return version.substr(0, version.find('.', version.find('.') + 1));
}

// What `bundle` is in the model.json of one library, and of parts with a folder each.
constexpr int64_t kWhole = 1, kInParts = 2;

inline int64_t format_of(const Json& json, const std::string& path) {
  const int64_t format = json.at(ffi::String("bundle")).cast<int64_t>();
  if (format != kWhole && format != kInParts) {
    throw Error(path + " has another format than this header reads: use the header that came with it");
  }
  return format;
}

// What a library needs of the machine, of this program and of the runtime.
inline void check(const Json& json, const std::string& path) {
  if (format_of(json, path) != kWhole) throw Error(path + " is of a model in parts, not of one library");
  std::string arch = text_at(json, "arch"), here = architecture();
  if (!here.empty() && arch != here) {
    throw Error(path + " was built for " + arch + ", this program is for " + here);
  }
  std::set<std::string> features = cpu_features();
  std::string missing;
  Json target = json.at(ffi::String("target")).cast<Json>();
  for (const ffi::Any& each : target.at(ffi::String("features")).cast<ffi::Array<ffi::Any>>()) {
    std::string name(each.cast<ffi::String>());
    if (!features.empty() && features.count(name) == 0) missing += (missing.empty() ? "" : ", ") + name;
  }
  if (!missing.empty()) {
    throw Error(path + " uses CPU instructions that this machine lacks: " + missing);
  }
  TVMFFIVersion version;
  TVMFFIGetVersion(&version);
  std::string built = minor_of(text_at(json, "tvm_ffi"));
  std::string found = std::to_string(version.major) + "." + std::to_string(version.minor);
  if (built != found) {
    throw Error(path + " was built with tvm_ffi " + built + ", the one here is " + found);
  }
}

// Memory with the alignment that kernels count on.
struct Aligned {
  static constexpr std::align_val_t kAlignment{64};
  void AllocData(DLTensor* tensor) {
    std::size_t bytes = ffi::GetDataSize(*tensor);
    tensor->data = ::operator new(bytes ? bytes : 1, kAlignment);
  }
  void FreeData(DLTensor* tensor) { ::operator delete(tensor->data, kAlignment); }
};

inline ffi::Tensor tensor_of(const TensorSpec& spec) {
  ffi::Tensor tensor =
      ffi::Tensor::FromNDAlloc(Aligned(), ffi::Shape(spec.shape.begin(), spec.shape.end()),
                               ffi::StringToDLDataType(spec.dtype), DLDevice{kDLCPU, 0});
  std::memset(tensor.data_ptr(), 0, spec.bytes());
  return tensor;
}

inline Json read_json(const std::string& path) {
  const std::string text = read_text(path);
  return told(path + " cannot be read",
              [&] { return call_global("ffi.json.Parse", ffi::String(text)).cast<Json>(); });
}

// A library that is loaded: that of the model, or of one of its parts.
struct Library {
  std::string name;  // as errors call it
  std::vector<TensorSpec> inputs, outputs;
  std::vector<std::size_t> takes;  // where the tensors are that it takes, among all that there are before it
  ffi::Any machine;
  ffi::Function main;

  // Computes from what is there, and puts its results behind that.
  void run(std::vector<ffi::Tensor>* there) const {
    const std::size_t before = there->size();
    told(name + " failed", [&] {
      std::vector<ffi::AnyView> arguments;
      for (std::size_t place : takes) arguments.emplace_back((*there)[place]);
      ffi::Any result = call_packed(main, arguments.data(), arguments.size());
      if (auto one = result.as<ffi::Tensor>()) {
        there->push_back(*one);
      } else {
        for (const ffi::Any& each : result.cast<ffi::Array<ffi::Any>>()) {
          there->push_back(each.cast<ffi::Tensor>());
        }
      }
    });
    if (there->size() - before != outputs.size()) {
      throw Error(name + " gave " + std::to_string(there->size() - before) + " outputs, not " +
                  std::to_string(outputs.size()));
    }
  }
};

// The library in a folder, of which `json` is the model.json. It takes nothing yet.
inline Library load_library(const std::string& folder, const Json& json, const std::string& name) {
  const std::string path = folder + "/model.json";
  Library loaded;
  loaded.name = name;
  const std::string file = told(path + " is not whole", [&] {
    check(json, path);
    loaded.inputs = specs_at(json, "inputs");
    loaded.outputs = specs_at(json, "outputs");
    return folder + "/" + text_at(json, "library");
  });
  if (!std::ifstream(file)) throw Error("there is no file " + file);
  told(file + " cannot be loaded", [&] {
    ffi::Any module = call_global("ffi.ModuleLoadFromFile", ffi::String(file));
    loaded.machine = call(function_of(module, "vm_load_executable"));
    constexpr int kPooledAllocator = 2;
    call(function_of(loaded.machine, "vm_initialization"), static_cast<int>(kDLCPU), 0, kPooledAllocator);
    loaded.main = function_of(loaded.machine, "main");
  });
  return loaded;
}

// The libraries of a model in the order in which they run: its own, or those of its parts.
inline std::vector<Library> load_libraries(const std::string& folder, const Json& json) {
  const std::string path = folder + "/model.json";
  std::vector<std::pair<std::string, std::string>> parts;  // name, folder
  const bool is_whole = told(path + " is not whole", [&] {
    if (format_of(json, path) == kWhole) return true;
    for (const ffi::Any& entry : json.at(ffi::String("parts")).cast<ffi::Array<ffi::Any>>()) {
      const Json fields = entry.cast<Json>();
      parts.emplace_back(text_at(fields, "name"), folder + "/" + text_at(fields, "folder"));
    }
    return false;
  });
  if (is_whole) return {load_library(folder, json, "the model")};
  std::vector<Library> libraries;
  for (const auto& [name, below] : parts) {
    libraries.push_back(load_library(below, read_json(below + "/model.json"), "the part '" + name + "'"));
  }
  return libraries;
}

// Where among the tensors that are `there` those are that are `needed`. Throws Error when one is not.
inline std::vector<std::size_t> places_of(const std::vector<TensorSpec>& needed,
                                          const std::vector<TensorSpec>& there, const std::string& whose) {
  std::vector<std::size_t> places;
  for (const TensorSpec& spec : needed) {
    std::size_t place = there.size();
    while (place > 0 && there[place - 1].text() != spec.text()) --place;
    if (place == 0) throw Error(whose + " needs " + spec.text() + ", which nothing before it gives");
    places.push_back(place - 1);
  }
  return places;
}

}  // namespace detail

// A loaded model. Used by one thread at a time.
class Model {
 public:
  // The model in a folder with `model.json`, and its library or its parts. Throws Error when it cannot run here,
  // and says why. The folder of a part, `parts/NAME`, is loaded as any model.
  static Model load(const std::string& folder) { return Model(folder); }

  const std::vector<TensorSpec>& inputs() const { return inputs_; }
  const std::vector<TensorSpec>& outputs() const { return outputs_; }

  // Copies an input's values, in C order. Throws Error when there is no such input, or not so many bytes in it.
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
    // the inputs, and behind them what each library gives: those after it take it from there
    std::vector<detail::ffi::Tensor> there = tensors_;
    for (const detail::Library& library : libraries_) library.run(&there);
    results_.clear();
    for (std::size_t place : gives_) results_.push_back(there[place]);
  }

  // An output's values in C order, `outputs()[index].bytes()` of them; they stay until the next run.
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
    detail::told(path + " is not whole", [&] {
      inputs_ = detail::specs_at(json, "inputs");
      outputs_ = detail::specs_at(json, "outputs");
    });
    std::vector<TensorSpec> there = inputs_;
    for (detail::Library& library : libraries_) {
      library.takes = detail::places_of(library.inputs, there, path + ": " + library.name);
      there.insert(there.end(), library.outputs.begin(), library.outputs.end());
    }
    gives_ = detail::places_of(outputs_, there, path + ": the model");
    for (const TensorSpec& spec : inputs_) tensors_.push_back(detail::tensor_of(spec));
    is_set_.assign(inputs_.size(), false);
  }

  static std::size_t index_of(const std::vector<TensorSpec>& specs, const std::string& name,
                              const std::string& kind) {
    std::string there;
    for (std::size_t i = 0; i < specs.size(); ++i) {
      if (specs[i].name == name) return i;
      there += (i ? ", " : "") + specs[i].text();
    }
    throw Error("there is no " + kind + " '" + name + "' (there are " + there + ")");
  }

  template <typename T>
  static void check_type(const TensorSpec& spec) {
    static_assert(std::is_trivially_copyable<T>::value, "values are copied byte by byte");
    const char kind = std::is_floating_point<T>::value ? 'f' : std::is_signed<T>::value ? 'i' : 'u';
    const bool is_bool = spec.dtype == "bool";
    const bool fits = is_bool ? sizeof(T) == 1 : spec.dtype[0] == kind || !std::is_arithmetic<T>::value;
    if (!fits || sizeof(T) != spec.item_bytes()) {
      throw Error("'" + spec.name + "' is " + spec.text() + ": its values have another type in C++");
    }
  }

  std::vector<TensorSpec> inputs_, outputs_;
  std::vector<bool> is_set_;
  std::vector<detail::Library> libraries_;
  std::vector<std::size_t> gives_;  // where the outputs are, among the inputs and all that the libraries give
  std::vector<detail::ffi::Tensor> tensors_, results_;
};

}  // namespace tvmflow

#endif  // TVMFLOW_MODEL_HPP_
