#include "model.h"

#include <tvm/ffi/container/array.h>

#include <stdexcept>
#include <vector>

#include "elf_library.h"

namespace tvmflow {
namespace {

// TVM's number of the allocator that keeps freed memory for the next request.
constexpr int kPooledAllocator = 2;

tvm::ffi::Function Get(const tvm::ffi::Module& module, const char* name) {
  const auto found = module->GetFunction(name, /*query_imports=*/true);
  if (!found.has_value()) throw std::runtime_error(std::string("the library has no function ") + name);
  return found.value();
}

tvm::ffi::Module Machine(const std::string& path) {
  const tvm::ffi::Module library = LoadElfLibrary(path);
  auto machine = Get(library, "vm_load_executable")().cast<tvm::ffi::Module>();
  Get(machine, "vm_initialization")(static_cast<int>(kDLCPU), 0, kPooledAllocator);
  return machine;
}

}  // namespace

Model::Model(const std::string& path) : machine_(Machine(path)), main_(Get(machine_, "main")) {}

Batch Model::Run(const Batch& inputs) {
  const std::vector<tvm::ffi::AnyView> arguments(inputs.begin(), inputs.end());
  tvm::ffi::Any result;
  main_.CallPacked(arguments.data(), static_cast<int>(arguments.size()), &result);
  if (auto tensor = result.try_cast<Tensor>()) return {*tensor};
  const auto tensors = result.cast<tvm::ffi::Array<Tensor>>();
  return Batch(tensors.begin(), tensors.end());
}

}  // namespace tvmflow
