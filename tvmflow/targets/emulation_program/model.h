// A model in a shared library, ready to run on this CPU.
#ifndef TVMFLOW_MODEL_H_
#define TVMFLOW_MODEL_H_

#include <tvm/ffi/function.h>
#include <tvm/ffi/extra/module.h>

#include <string>

#include "tensors.h"

namespace tvmflow {

class Model {
 public:
  // Loads the library at `path`: the `.so` that tvmflow delivers, or the `library.so` in a
  // bundle. Throws std::runtime_error for a library that this CPU cannot run.
  explicit Model(const std::string& path);

  // Returns the outputs for one batch of inputs, in the order of the model's signature. They are
  // valid until the next call. Throws tvm::ffi::Error for inputs of another shape or dtype.
  Batch Run(const Batch& inputs);

 private:
  tvm::ffi::Module vm_;
  tvm::ffi::Function main_;
};

}  // namespace tvmflow

#endif  // TVMFLOW_MODEL_H_
