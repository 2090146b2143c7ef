#include "tensors.h"

#include <tvm/ffi/dtype.h>

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <stdexcept>

namespace tvmflow {
namespace {

constexpr char kMagic[] = "TVMFLOW1";
constexpr size_t kMagicBytes = sizeof(kMagic) - 1;
constexpr size_t kAlignment = 64;

struct AlignedAllocator {
  void AllocData(DLTensor* tensor) {
    const size_t bytes = tvm::ffi::GetDataSize(*tensor);
    // The size must be a multiple of the alignment, and not zero.
    tensor->data = std::aligned_alloc(kAlignment, (bytes / kAlignment + 1) * kAlignment);
    if (tensor->data == nullptr) throw std::bad_alloc();
  }
  void FreeData(DLTensor* tensor) { std::free(tensor->data); }
};

template <typename T>
T Read(std::istream& file) {
  T value;
  file.read(reinterpret_cast<char*>(&value), sizeof(T));
  return value;
}

template <typename T>
void Write(std::ostream& file, T value) {
  file.write(reinterpret_cast<const char*>(&value), sizeof(T));
}

Tensor ReadTensor(std::istream& file) {
  std::string name(Read<uint32_t>(file), '\0');
  file.read(name.data(), name.size());
  std::vector<int64_t> shape(Read<uint32_t>(file));
  for (int64_t& size : shape) size = Read<int64_t>(file);
  const uint64_t bytes = Read<uint64_t>(file);
  Tensor tensor = NewTensor({shape.data(), shape.size()}, tvm::ffi::StringToDLDataType(name));
  if (bytes != tvm::ffi::GetDataSize(tensor)) {
    throw std::runtime_error("a tensor's size does not fit its shape");
  }
  file.read(static_cast<char*>(tensor.data_ptr()), bytes);
  return tensor;
}

void WriteTensor(std::ostream& file, const Tensor& tensor) {
  if (!tensor.IsContiguous()) throw std::runtime_error("an output is not contiguous");
  const std::string name = tvm::ffi::DLDataTypeToString(tensor.dtype());
  Write<uint32_t>(file, name.size());
  file.write(name.data(), name.size());
  Write<uint32_t>(file, tensor.ndim());
  for (int i = 0; i < tensor.ndim(); ++i) Write<int64_t>(file, tensor.shape()[i]);
  const uint64_t bytes = tvm::ffi::GetDataSize(tensor);
  Write<uint64_t>(file, bytes);
  file.write(static_cast<const char*>(tensor.data_ptr()), bytes);
}

}  // namespace

Tensor NewTensor(tvm::ffi::ShapeView shape, DLDataType dtype) {
  return Tensor::FromNDAlloc(AlignedAllocator(), shape, dtype, DLDevice{kDLCPU, 0});
}

std::vector<Batch> ReadTensors(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  char magic[kMagicBytes] = {};
  file.read(magic, kMagicBytes);
  if (!file || std::memcmp(magic, kMagic, kMagicBytes) != 0) {
    throw std::runtime_error(path + " is not a file of tensors");
  }
  file.exceptions(std::ios::failbit | std::ios::badbit);
  try {
    std::vector<Batch> batches(Read<uint32_t>(file));
    const uint32_t tensors = Read<uint32_t>(file);
    for (Batch& batch : batches) {
      for (uint32_t i = 0; i < tensors; ++i) batch.push_back(ReadTensor(file));
    }
    return batches;
  } catch (const std::ios::failure&) {
    throw std::runtime_error(path + " ends too early");
  }
}

void WriteTensors(const std::string& path, const std::vector<Batch>& batches) {
  std::ofstream file(path, std::ios::binary);
  file.write(kMagic, kMagicBytes);
  Write<uint32_t>(file, batches.size());
  Write<uint32_t>(file, batches.empty() ? 0 : batches.front().size());
  for (const Batch& batch : batches) {
    for (const Tensor& tensor : batch) WriteTensor(file, tensor);
  }
  file.close();
  if (!file) throw std::runtime_error("cannot write " + path);
}

}  // namespace tvmflow
