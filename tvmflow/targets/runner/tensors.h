// Tensors in files: batches of inputs on their way in, batches of outputs on their way out.
//
// A file is the eight bytes "TVMFLOW1", then 32 bits each for the number of batches and of
// tensors in one, then the tensors: the length of the dtype's name (32 bits) and the name, the
// number of dimensions (32 bits) and each of them (64 bits), the number of bytes (64 bits) and
// the elements. All numbers are little-endian, and nothing is padded.
#ifndef TVMFLOW_TENSORS_H_
#define TVMFLOW_TENSORS_H_

#include <tvm/ffi/container/tensor.h>

#include <string>
#include <vector>

namespace tvmflow {

using tvm::ffi::Tensor;
using Batch = std::vector<Tensor>;

// A tensor on the CPU with room for its elements, aligned as kernels count on it.
Tensor NewTensor(tvm::ffi::ShapeView shape, DLDataType dtype);

// Both throw std::runtime_error.
std::vector<Batch> ReadTensors(const std::string& path);
void WriteTensors(const std::string& path, const std::vector<Batch>& batches);

}  // namespace tvmflow

#endif  // TVMFLOW_TENSORS_H_
