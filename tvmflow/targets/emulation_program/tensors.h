// Tensor files: batches of inputs that the program reads, batches of outputs that it writes.
//
// A file holds the eight bytes "TVMFLOW1", then the number of batches and the number of tensors in
// each (32 bits each), then the tensors: the length of the dtype's name (32 bits) and the name, the
// number of dimensions (32 bits) and each dimension (64 bits), the number of bytes (64 bits) and
// the elements. All numbers are little-endian, and there is no padding.
#ifndef TVMFLOW_TENSORS_H_
#define TVMFLOW_TENSORS_H_

#include <tvm/ffi/container/tensor.h>

#include <string>
#include <vector>

namespace tvmflow {

using tvm::ffi::Tensor;
using Batch = std::vector<Tensor>;

// Allocates a tensor on the CPU with the alignment that kernels rely on.
Tensor NewTensor(tvm::ffi::ShapeView shape, DLDataType dtype);

// Read and write a file. Both throw std::runtime_error.
std::vector<Batch> ReadTensors(const std::string& path);
void WriteTensors(const std::string& path, const std::vector<Batch>& batches);

}  // namespace tvmflow

#endif  // TVMFLOW_TENSORS_H_
