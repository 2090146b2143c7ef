// tvmflow-emulation-program LIBRARY INPUTS OUTPUTS: runs a model on every batch of a file of tensors.
#include <tvm/ffi/error.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <iostream>

#include "model.h"

namespace {

// Copies outputs: the virtual machine reuses their memory at the next call.
tvmflow::Batch Copy(const tvmflow::Batch& outputs) {
  tvmflow::Batch copies;
  for (const auto& output : outputs) {
    auto copy = tvmflow::NewTensor(output.shape(), output.dtype());
    std::memcpy(copy.data_ptr(), output.data_ptr(), tvm::ffi::GetDataSize(output));
    copies.push_back(copy);
  }
  return copies;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) {
    std::cerr << "usage: tvmflow-emulation-program LIBRARY INPUTS OUTPUTS\n";
    return 2;
  }
  try {
    tvmflow::Model model(argv[1]);
    std::vector<tvmflow::Batch> outputs;
    for (const auto& inputs : tvmflow::ReadTensors(argv[2])) {
      outputs.push_back(Copy(model.Run(inputs)));
    }
    tvmflow::WriteTensors(argv[3], outputs);
    return 0;
  } catch (const tvm::ffi::Error& error) {
    // Without the backtrace.
    std::cerr << "tvmflow-emulation-program: " << error.kind() << ": " << error.message() << "\n";
  } catch (const std::exception& error) {
    std::cerr << "tvmflow-emulation-program: " << error.what() << "\n";
  }
  return 1;
}
