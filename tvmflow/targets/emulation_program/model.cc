#include "model.h"

#include <tvm/ffi/container/array.h>

#include <stdexcept>
#include <vector>

#include "elf_library.h"

namespace tvmflow {
namespace {

// AllocatorType::kPooled in tvm/runtime/memory/memory_manager.h: freed memory is reused.
constexpr int kPooledAllocator = 2;

tvm::ffi::Function GetFunction(const tvm::ffi::Module& module, const char* name) {
  const auto function = module->GetFunction(name, /*query_imports=*/true);
  if (!function.has_value()) throw std::runtime_error(std::string("the library has no function ") + name);
  return function.value();
}

tvm::ffi::Module CreateVirtualMachine(const std::string& path) {
  const tvm::ffi::Module library = LoadElfLibrary(path);
  auto vm = GetFunction(library, "vm_load_executable")().cast<tvm::ffi::Module>();
  GetFunction(vm, "vm_initialization")(static_cast<int>(kDLCPU), 0, kPooledAllocator);
  return vm;
}

}  // namespace

Model::Model(const std::string& path) : vm_(CreateVirtualMachine(path)), main_(GetFunction(vm_, "main")) {}

Batch Model::Run(const Batch& inputs) {
  const std::vector<tvm::ffi::AnyView> arguments(inputs.begin(), inputs.end());
  tvm::ffi::Any result;
  main_.CallPacked(arguments.data(), static_cast<int>(arguments.size()), &result);
  if (auto tensor = result.try_cast<Tensor>()) return {*tensor};
  const auto tensors = result.cast<tvm::ffi::Array<Tensor>>();
  return Batch(tensors.begin(), tensors.end());
}

}  // namespace tvmflow
