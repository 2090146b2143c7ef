// Runs a model on the arrays of a file:
//
//   run MODEL input.npz output.npz
//   run MODEL NAME=values.bin … output.npz
//
// MODEL is the folder with model.json. Inputs that hold several batches are run one after the other.

#include <tvmflow/model.hpp>
#include <tvmflow/npz.hpp>

#include <algorithm>
#include <exception>
#include <iostream>
#include <map>
#include <string>
#include <vector>

namespace {

using Arrays = std::map<std::string, tvmflow::NumpyArray>;

// Reads raw values: as many batches as the file has bytes for.
tvmflow::NumpyArray read_raw(const tvmflow::TensorSpec& spec, const std::string& path) {
  tvmflow::NumpyArray array{spec.shape, spec.dtype, tvmflow::detail::read_text(path)};
  if (array.values.empty() || array.values.size() % spec.bytes() != 0) {
    throw tvmflow::Error(path + " has " + std::to_string(array.values.size()) + " bytes; " + spec.text() +
                         " takes " + std::to_string(spec.bytes()) + ", or several times that");
  }
  if (!array.shape.empty()) array.shape[0] *= static_cast<int64_t>(array.values.size() / spec.bytes());
  return array;
}

Arrays read_inputs(const tvmflow::Model& model, const std::vector<std::string>& arguments) {
  Arrays arrays;
  for (const std::string& argument : arguments) {
    const std::size_t sign = argument.find('=');
    if (sign == std::string::npos) {
      for (auto& entry : tvmflow::read_npz(argument)) arrays[entry.first] = entry.second;
      continue;
    }
    const std::string name = argument.substr(0, sign);
    for (const tvmflow::TensorSpec& spec : model.inputs()) {
      if (spec.name == name) arrays[name] = read_raw(spec, argument.substr(sign + 1));
    }
    if (arrays.count(name) == 0) throw tvmflow::Error("there is no input '" + name + "'");
  }
  return arrays;
}

// Counts the batches that an array holds for an input. Throws Error when it has another shape or dtype.
std::size_t count_batches(const tvmflow::TensorSpec& spec, const Arrays& arrays) {
  const auto entry = arrays.find(spec.name);
  if (entry == arrays.end()) throw tvmflow::Error("there is no array for the input " + spec.text());
  const tvmflow::NumpyArray& array = entry->second;
  std::vector<int64_t> shape = array.shape;
  std::size_t batches = 1;
  if (!shape.empty() && !spec.shape.empty() && spec.shape[0] > 0 && shape[0] % spec.shape[0] == 0) {
    batches = static_cast<std::size_t>(shape[0] / spec.shape[0]);
    shape[0] = spec.shape[0];
  }
  if (shape != spec.shape || array.dtype != spec.dtype || batches == 0) {
    throw tvmflow::Error("the input " + spec.text() + " does not fit the array " +
                         tvmflow::TensorSpec{spec.name, array.shape, array.dtype}.text());
  }
  return batches;
}

Arrays run(tvmflow::Model& model, const Arrays& arrays) {
  std::vector<std::size_t> batches;
  for (const tvmflow::TensorSpec& spec : model.inputs()) batches.push_back(count_batches(spec, arrays));
  const std::size_t count = batches.empty() ? 1 : batches[0];
  if (std::any_of(batches.begin(), batches.end(), [&](std::size_t other) { return other != count; })) {
    throw tvmflow::Error("the arrays do not hold the same number of batches");
  }
  Arrays results;
  for (std::size_t index = 0; index < count; ++index) {
    for (const tvmflow::TensorSpec& spec : model.inputs()) {
      const std::string& values = arrays.at(spec.name).values;
      model.set_input(spec.name, values.data() + index * spec.bytes(), spec.bytes());
    }
    model.run();
    for (std::size_t i = 0; i < model.outputs().size(); ++i) {
      const tvmflow::TensorSpec& spec = model.outputs()[i];
      tvmflow::NumpyArray& array = results[spec.name];
      array.dtype = spec.dtype;
      array.shape = spec.shape;
      if (array.shape.empty() && count > 1) array.shape = {1};
      array.values.append(static_cast<const char*>(model.output_data(i)), spec.bytes());
    }
  }
  for (auto& entry : results) {
    if (!entry.second.shape.empty()) entry.second.shape[0] *= static_cast<int64_t>(count);
  }
  return results;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4) {
    std::cerr << "usage: " << argv[0] << " MODEL (input.npz | NAME=values.bin …) output.npz\n";
    return 2;
  }
  try {
    tvmflow::Model model = tvmflow::Model::load(argv[1]);
    const Arrays arrays = read_inputs(model, std::vector<std::string>(argv + 2, argv + argc - 1));
    tvmflow::write_npz(argv[argc - 1], run(model, arrays));
    return 0;
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return 1;
  }
}
