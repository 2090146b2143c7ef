// tvmflow-runner LIBRARY INPUTS OUTPUTS: run a model on every batch of a file of tensors.
#include <tvm/ffi/error.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <iostream>

#include "model.h"

namespace {

// The machine takes the memory of its outputs back at the next call.
tvmflow::Batch Copied(const tvmflow::Batch& outputs) {
  tvmflow::Batch copies;
  for (const auto& each : outputs) {
    auto copy = tvmflow::NewTensor(each.shape(), each.dtype());
    std::memcpy(copy.data_ptr(), each.data_ptr(), tvm::ffi::GetDataSize(each));
    copies.push_back(copy);
  }
  return copies;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) {
    std::cerr << "usage: tvmflow-runner LIBRARY INPUTS OUTPUTS\n";
    return 2;
  }
  try {
    tvmflow::Model model(argv[1]);
    std::vector<tvmflow::Batch> outputs;
    for (const auto& inputs : tvmflow::ReadTensors(argv[2])) {
      outputs.push_back(Copied(model.Run(inputs)));
    }
    tvmflow::WriteTensors(argv[3], outputs);
    return 0;
  } catch (const tvm::ffi::Error& error) {
    // without the trace of functions
    std::cerr << "tvmflow-runner: " << error.kind() << ": " << error.message() << "\n";
  } catch (const std::exception& error) {
    std::cerr << "tvmflow-runner: " << error.what() << "\n";
  }
  return 1;
}
