// Runs the model @TITLE@ on the arrays of a file:
//
//   run input.npz output.npz
//@fixed
//   run NAME=values.bin ... output.npz
//@open
//   run --size DIMENSION=SIZE NAME=values.bin ... output.npz
//@all
//
//@fixed
// Inputs that hold several batches are run one after the other.
//@open
// Sizes that each call chooses are those of the arrays. Inputs that hold several batches along a first axis of a fixed size
// are run one after the other.
//@all

#include <@TITLE@.hpp>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <exception>
#include <iostream>
#include <map>
#include <string>
#include <vector>

#include "npz.hpp"

namespace {

using @NAMESPACE@::Model;
using @NAMESPACE@::Options;
using @NAMESPACE@::Tensor;

using Arrays = std::map<std::string, npz::Array>;

struct Arguments {
  std::vector<std::string> inputs;
  std::string output;
  std::string labels;  // the array with the right classes; empty for none
  Options options;
  bool has_profile = false;
//@open
  std::map<std::string, std::int64_t> sizes;  // of dimensions, by name
//@all
};

const char* const kUsage =
//@fixed
    "usage: %s [--threads N] [--labels NAME] [--profile] (input.npz | NAME=values.bin ...) output.npz\n";
//@open
    "usage: %s [--threads N] [--labels NAME] [--profile] [--size DIMENSION=SIZE ...] (input.npz | NAME=values.bin ...) output.npz\n";
//@all

//@open
// Reads the size of a dimension: `seq=37`.
std::pair<std::string, std::int64_t> read_size(const std::string& word) {
  const std::size_t sign = word.find('=');
  const std::string digits = sign == std::string::npos ? "" : word.substr(sign + 1);
  const bool is_size = !digits.empty() && digits.size() < 16 && digits.find_first_not_of("0123456789") == std::string::npos;
  if (!is_size) throw npz::Error("--size takes DIMENSION=SIZE, such as @FIRST_DIMENSION@, not '" + word + "'");
  return {word.substr(0, sign), std::stoll(digits)};
}

//@all
Arguments read_arguments(int count, char** words) {
  Arguments arguments;
  for (int i = 1; i < count; ++i) {
    const std::string word = words[i];
//@fixed
    const bool has_value = word == "--threads" || word == "--labels";
//@open
    const bool has_value = word == "--threads" || word == "--labels" || word == "--size";
//@all
    if (has_value && i + 1 == count) throw npz::Error(word + " needs a value");
    if (word == "--threads") {
      const std::string value = words[++i];
      const bool is_number = !value.empty() && value.size() < 6 && value.find_first_not_of("0123456789") == std::string::npos;
      if (!is_number) throw npz::Error("--threads takes a number, not '" + value + "'");
      arguments.options.threads = static_cast<std::uint32_t>(std::stoul(value));
    } else if (word == "--labels") {
      arguments.labels = words[++i];
//@open
    } else if (word == "--size") {
      const auto [name, size] = read_size(words[++i]);
      arguments.sizes[name] = size;
//@all
    } else if (word == "--profile") {
      arguments.has_profile = true;
    } else {
      arguments.inputs.push_back(word);
    }
  }
  if (arguments.inputs.size() >= 2) {
    arguments.output = arguments.inputs.back();
    arguments.inputs.pop_back();
  }
  return arguments;
}

std::string describe(const std::string& name, const std::string& dtype, const std::vector<std::int64_t>& shape) {
  const Tensor tensor{name, dtype, {shape.data(), shape.size()}, 0};
  return name + ": " + tensor.type();
}

std::string describe(const Tensor& tensor) { return std::string(tensor.name) + ": " + tensor.type(); }

// Reads raw values: as many batches as the file has bytes for.
npz::Array read_raw(const Tensor& tensor, const std::string& path) {
  npz::Array array{{tensor.shape.begin(), tensor.shape.end()}, std::string(tensor.dtype), npz::read_file(path)};
  if (array.values.empty() || array.values.size() % tensor.bytes != 0) {
    throw npz::Error(path + " has " + std::to_string(array.values.size()) + " bytes; " + describe(tensor) + " takes " +
                     std::to_string(tensor.bytes) + ", or several times that");
  }
  if (!array.shape.empty()) array.shape[0] *= static_cast<std::int64_t>(array.values.size() / tensor.bytes);
  return array;
}

//@fixed
Arrays read_inputs(const std::vector<std::string>& words) {
  Arrays arrays;
//@open
// Chooses the sizes of dimensions: those of arrays, or else those of the command line, or else the smallest.
void choose_sizes(Model& net, const Arrays& arrays, const std::map<std::string, std::int64_t>& sizes) {
  net.set_dimensions({sizes.begin(), sizes.end()});
  std::map<std::string_view, std::vector<std::int64_t>> shapes;
  for (const Tensor& tensor : Model::inputs()) {
    const auto entry = arrays.find(std::string(tensor.name));
    if (entry == arrays.end()) continue;
    std::vector<std::int64_t>& shape = shapes[tensor.name] = entry->second.shape;
    const std::int64_t one = tensor.shape.size() == 0 ? 0 : tensor.shape[0];
    // several batches
    if (one > 0 && shape.size() == tensor.shape.size() && shape[0] > 0 && shape[0] % one == 0) shape[0] = one;
  }
  net.set_input_shapes(shapes);
  for (const auto& [name, size] : sizes) {
    if (net.dimension(name) == size) continue;
    throw npz::Error("--size says that " + name + " is " + std::to_string(size) + ", and the arrays have " +
                     std::to_string(net.dimension(name)));
  }
}

Arrays read_inputs(Model& net, const std::vector<std::string>& words, const std::map<std::string, std::int64_t>& sizes) {
  Arrays arrays;
  for (const std::string& word : words) {
    if (word.find('=') != std::string::npos) continue;
    for (auto& entry : npz::read(word)) arrays[entry.first] = entry.second;
  }
  choose_sizes(net, arrays, sizes);
//@all
  for (const std::string& word : words) {
    const std::size_t sign = word.find('=');
//@fixed
    if (sign == std::string::npos) {
      for (auto& entry : npz::read(word)) arrays[entry.first] = entry.second;
      continue;
    }
//@open
    if (sign == std::string::npos) continue;
//@all
    const std::string name = word.substr(0, sign);
    for (const Tensor& tensor : Model::inputs()) {
//@fixed
      if (tensor.name == name) arrays[name] = read_raw(tensor, word.substr(sign + 1));
//@open
      if (tensor.name == name) arrays[name] = read_raw(net.input_tensor(name), word.substr(sign + 1));
//@all
    }
    if (arrays.count(name) == 0) throw npz::Error("there is no input '" + name + "'");
  }
  return arrays;
}

// Counts the batches that an array holds for an input. Throws an error when it has another shape or dtype.
std::size_t count_batches(const Tensor& tensor, const Arrays& arrays) {
  const auto entry = arrays.find(std::string(tensor.name));
  if (entry == arrays.end()) throw npz::Error("there is no array for the input " + describe(tensor));
  const npz::Array& array = entry->second;
  const std::vector<std::int64_t> one(tensor.shape.begin(), tensor.shape.end());
  std::vector<std::int64_t> shape = array.shape;
  std::size_t batches = 1;
  if (!shape.empty() && !one.empty() && one[0] > 0 && shape[0] % one[0] == 0) {
    batches = static_cast<std::size_t>(shape[0] / one[0]);
    shape[0] = one[0];
  }
  if (shape != one || array.dtype != tensor.dtype || batches == 0) {
    throw npz::Error("the input " + describe(tensor) + " does not fit the array " +
                     describe(entry->first, array.dtype, array.shape));
  }
  return batches;
}

Arrays run(Model& net, const Arrays& arrays) {
  std::vector<std::size_t> batches;
//@fixed
  for (const Tensor& tensor : net.inputs()) batches.push_back(count_batches(tensor, arrays));
//@open
  for (const Tensor& tensor : net.inputs()) {
    batches.push_back(count_batches(net.input_tensor(tensor.name), arrays));
    if (batches.back() > 1 && tensor.shape[0] < 0) {
      throw npz::Error("the input " + describe(tensor) + " has values for larger sizes: choose them with --size");
    }
  }
//@all
  const std::size_t count = batches.empty() ? 1 : batches[0];
  if (std::any_of(batches.begin(), batches.end(), [&](std::size_t other) { return other != count; })) {
    throw npz::Error("the arrays do not hold the same number of batches");
  }
  Arrays results;
  for (std::size_t index = 0; index < count; ++index) {
    for (const Tensor& tensor : net.inputs()) {
      const std::string& values = arrays.at(std::string(tensor.name)).values;
      const auto input = net.input<std::byte>(tensor.name);
//@fixed
      std::memcpy(input.data(), values.data() + index * tensor.bytes, tensor.bytes);
//@open
      std::memcpy(input.data(), values.data() + index * input.size(), input.size());
//@all
    }
    net.run();
    for (const Tensor& tensor : net.outputs()) {
      npz::Array& array = results[std::string(tensor.name)];
      array.dtype = tensor.dtype;
      const std::vector<std::int64_t> shape = net.shape(tensor.name);
      if (tensor.bounded_axis > 0 && index > 0 && !std::equal(shape.begin() + 1, shape.end(), array.shape.begin() + 1)) {
        throw npz::Error("the output " + describe(tensor) + " has another size in each batch: run one at a time");
      }
      const std::int64_t rows = index > 0 && !array.shape.empty() ? array.shape[0] : 0;
      array.shape = shape;
      if (array.shape.empty() && count > 1) array.shape = {1};
      if (!array.shape.empty()) array.shape[0] += rows;
      const auto output = net.output<std::byte>(tensor.name);
      array.values.append(reinterpret_cast<const char*>(output.data()), output.size());
    }
  }
  return results;
}

// Returns the values of an array as numbers.
std::vector<double> numbers_of(const std::string& name, const npz::Array& array) {
  std::vector<double> numbers;
  const auto convert = [&](auto zero) {
    for (std::size_t at = 0; at + sizeof zero <= array.values.size(); at += sizeof zero) {
      std::memcpy(&zero, array.values.data() + at, sizeof zero);
      numbers.push_back(static_cast<double>(zero));
    }
  };
  if (array.dtype == "float32") convert(float());
  else if (array.dtype == "float64") convert(double());
  else if (array.dtype == "int64") convert(std::int64_t());
  else if (array.dtype == "int32") convert(std::int32_t());
  else if (array.dtype == "uint8") convert(std::uint8_t());
  else if (array.dtype == "int8") convert(std::int8_t());
  else throw npz::Error("'" + name + "' is " + array.dtype + ": labels and scores are float32, float64, int64, int32, uint8 or int8");
  return numbers;
}

// Prints for how many labels the largest of the scores is theirs.
void print_accuracy(const std::string& name, const Arrays& inputs, const Arrays& results) {
  const auto entry = inputs.find(name);
  if (entry == inputs.end()) throw npz::Error("there is no array '" + name + "' with labels");
  const std::string first(Model::outputs()[0].name);
  const std::vector<double> labels = numbers_of(name, entry->second), scores = numbers_of(first, results.at(first));
  if (labels.empty() || scores.size() % labels.size() != 0) {
    throw npz::Error("there are " + std::to_string(labels.size()) + " labels for " + std::to_string(scores.size()) + " scores");
  }
  const auto classes = static_cast<std::ptrdiff_t>(scores.size() / labels.size());
  std::size_t hits = 0;
  auto begin = scores.begin();
  for (const double label : labels) {
    const auto best = std::max_element(begin, begin + classes) - begin;
    hits += static_cast<double>(best) == label;
    begin += classes;
  }
  std::printf("accuracy: %.4f (%zu of %zu)\n", static_cast<double>(hits) / static_cast<double>(labels.size()), hits, labels.size());
}

// Adds up the time of each kernel, and prints it: the longest first.
class Profile {
 public:
  void watch(Model& net) {
    net.profile([this](std::string_view kernel, std::uint64_t nanoseconds) { times_[std::string(kernel)] += nanoseconds; });
  }
  void print() const {
    std::vector<std::pair<std::uint64_t, std::string>> rows;
    for (const auto& entry : times_) rows.emplace_back(entry.second, entry.first);
    std::sort(rows.rbegin(), rows.rend());
    for (const auto& row : rows) std::printf("%12.1f us  %s\n", static_cast<double>(row.first) / 1e3, row.second.c_str());
  }

 private:
  std::map<std::string, std::uint64_t> times_;
};

}  // namespace

int main(int count, char** words) {
  try {
    const Arguments arguments = read_arguments(count, words);
    if (arguments.output.empty()) {
      std::fprintf(stderr, kUsage, words[0]);
      return 2;
    }
    Model net(arguments.options);
    Profile profile;
    if (arguments.has_profile) profile.watch(net);
//@fixed
    const Arrays inputs = read_inputs(arguments.inputs), results = run(net, inputs);
//@open
    const Arrays inputs = read_inputs(net, arguments.inputs, arguments.sizes), results = run(net, inputs);
//@all
    if (!arguments.labels.empty()) print_accuracy(arguments.labels, inputs, results);
    npz::write(arguments.output, results);
    profile.print();
    return 0;
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return 1;
  }
}
