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

// Raw values: as many batches as there are bytes for.
tvmflow::NumpyArray read_raw(const tvmflow::TensorSpec& spec, const std::string& path) {
  tvmflow::NumpyArray array{spec.shape, spec.dtype, tvmflow::detail::read_text(path)};
  if (array.values.empty() || array.values.size() % spec.bytes() != 0) {
    throw tvmflow::Error(path + " has " + std::to_string(array.values.size()) + " bytes; " + spec.text() +
                         " takes " + std::to_string(spec.bytes()) + ", or several times that");
  }
  if (!array.shape.empty()) array.shape[0] *= static_cast<int64_t>(array.values.size() / spec.bytes());
  return array;
}

Arrays read_inputs(const tvmflow::Model& model, const std::vector<std::string>& words) {
  Arrays arrays;
  for (const std::string& word : words) {
    const std::size_t sign = word.find('=');
    if (sign == std::string::npos) {
      for (auto& each : tvmflow::read_npz(word)) arrays[each.first] = each.second;
      continue;
    }
    const std::string name = word.substr(0, sign);
    for (const tvmflow::TensorSpec& spec : model.inputs()) {
      if (spec.name == name) arrays[name] = read_raw(spec, word.substr(sign + 1));
    }
    if (arrays.count(name) == 0) throw tvmflow::Error("there is no input '" + name + "'");
  }
  return arrays;
}

// How many batches an array holds for an input. Throws Error when it does not fit.
std::size_t batches_of(const tvmflow::TensorSpec& spec, const Arrays& arrays) {
  const auto found = arrays.find(spec.name);
  if (found == arrays.end()) throw tvmflow::Error("there is no array for the input " + spec.text());
  const tvmflow::NumpyArray& array = found->second;
  std::vector<int64_t> one = array.shape;
  std::size_t batches = 1;
  if (!one.empty() && !spec.shape.empty() && spec.shape[0] > 0 && one[0] % spec.shape[0] == 0) {
    batches = static_cast<std::size_t>(one[0] / spec.shape[0]);
    one[0] = spec.shape[0];
  }
  if (one != spec.shape || array.dtype != spec.dtype || batches == 0) {
    throw tvmflow::Error("the input " + spec.text() + " does not fit the array " +
                         tvmflow::TensorSpec{spec.name, array.shape, array.dtype}.text());
  }
  return batches;
}

Arrays run(tvmflow::Model& model, const Arrays& arrays) {
  std::vector<std::size_t> batches;
  for (const tvmflow::TensorSpec& spec : model.inputs()) batches.push_back(batches_of(spec, arrays));
  const std::size_t times = batches.empty() ? 1 : batches[0];
  if (std::any_of(batches.begin(), batches.end(), [&](std::size_t each) { return each != times; })) {
    throw tvmflow::Error("the arrays do not hold equally many batches");
  }
  Arrays results;
  for (std::size_t index = 0; index < times; ++index) {
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
      if (array.shape.empty() && times > 1) array.shape = {1};
      array.values.append(static_cast<const char*>(model.output_data(i)), spec.bytes());
    }
  }
  for (auto& each : results) {
    if (!each.second.shape.empty()) each.second.shape[0] *= static_cast<int64_t>(times);
  }
  return results;
}

}  // namespace

int main(int count, char** words) {
  if (count < 4) {
    std::cerr << "usage: " << words[0] << " MODEL (input.npz | NAME=values.bin …) output.npz\n";
    return 2;
  }
  try {
    tvmflow::Model model = tvmflow::Model::load(words[1]);
    const Arrays arrays = read_inputs(model, std::vector<std::string>(words + 2, words + count - 1));
    tvmflow::write_npz(words[count - 1], run(model, arrays));
    return 0;
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return 1;
  }
}
