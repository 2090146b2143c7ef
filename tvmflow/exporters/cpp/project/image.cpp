// Runs the model @TITLE@ on an image, and prints the best classes, if it has names of classes:
//
//   run_image image.png [output.npz]

#include <@TITLE@-images.hpp>

#include <cstdio>
#include <exception>
#include <iostream>
#include <map>
#include <string>
#include <vector>

#include "image_file.hpp"
#include "npz.hpp"

namespace {

namespace model = @NAMESPACE@;
using model::Model;

template <typename T>
void print_best(const model::Span<const T>& scores, const std::string& output) {
  // of a batch, whose images are all the same
  const model::Span<const T> first(scores.data(), model::labels().size());
  const char* how = model::are_probabilities(first) ? "" : "softmax of ";
  std::printf("probabilities: %sthe output '%s'\n", how, output.c_str());
  for (const auto& best : model::rank(first)) {
    std::printf("  %6.2f%%  %.*s\n", best.probability * 100, static_cast<int>(best.label.size()), best.label.data());
  }
}

void print_best(Model& net) {
  const model::Tensor& tensor = Model::outputs()[0];
  const std::string name(tensor.name);
  if (tensor.dtype == "float32") print_best(net.output<float>(name), name);
  else if (tensor.dtype == "float64") print_best(net.output<double>(name), name);
  else if (tensor.dtype == "uint8") print_best(net.output<std::uint8_t>(name), name);
  else if (tensor.dtype == "int8") print_best(net.output<std::int8_t>(name), name);
  else throw npz::Error("scores of type " + std::string(tensor.dtype) + " are not supported here");
}

void write_outputs(Model& net, const std::string& path) {
  std::map<std::string, npz::Array> arrays;
  for (const model::Tensor& tensor : Model::outputs()) {
    const auto values = net.output<std::byte>(tensor.name);
//@fixed
    arrays[std::string(tensor.name)] = {{tensor.shape.begin(), tensor.shape.end()},
//@open
    arrays[std::string(tensor.name)] = {net.shape(tensor.name),
//@all
                                        std::string(tensor.dtype),
                                        {reinterpret_cast<const char*>(values.data()), values.size()}};
  }
  npz::write(path, arrays);
}

}  // namespace

int main(int count, char** words) {
  try {
    const bool has_output = count == 3;
    if (count != 2 && !has_output) {
      std::fprintf(stderr, "usage: %s image.png [output.npz]\n", words[0]);
      return 2;
    }
    const image_file::Pixels pixels = image_file::read(words[1]);
    const model::Image image{pixels.values.data(), pixels.height, pixels.width, pixels.channels};
    Model net;
    for (const model::Tensor& tensor : Model::inputs()) {
//@fixed
      for (std::int64_t place = 0; place < tensor.shape[0]; ++place) {
//@open
      for (std::int64_t place = 0; place < net.input_tensor(tensor.name).shape[0]; ++place) {
//@all
        model::preprocess(image, tensor.name, net.input<std::byte>(tensor.name), static_cast<std::size_t>(place));
      }
    }
    net.run();
    if (model::labels().size() != 0) print_best(net);
    if (has_output) write_outputs(net, words[2]);
    return 0;
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return 1;
  }
}
