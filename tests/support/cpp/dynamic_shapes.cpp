// Uses the interface of a model of dynamic shape: writes outputs of many sizes to a file, and prints what each misuse is
// answered with.

#include <net.hpp>

#include <fstream>
#include <map>

#include "checks.hpp"

namespace {

using net::Status;

constexpr auto expect = expect_error<net::Error>;

std::vector<float> values_of(const net::Tensor& tensor) {
  std::vector<float> values(tensor.size());
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i % 13) / 16 - 0.5f;
  return values;
}

void write(std::ofstream& stream, const net::Span<const float>& values) {
  stream.write(reinterpret_cast<const char*>(values.data()), static_cast<std::streamsize>(values.size() * sizeof(float)));
}

void check_descriptions(net::Model& model) {
  REQUIRE(net::Model::dimensions().size() == NET_DIMENSIONS);
  const net::Dimension& seq = net::Model::dimensions()[NET_DIMENSION_SEQ];
  REQUIRE(seq.name == "seq" && seq.min == 2 && seq.max == 96 && seq.multiple_of == 2);
  REQUIRE(net::Model::inputs()[0].type() == "float32 [batch, seq, 24]" && net::Model::inputs()[0].size() == 0);
  REQUIRE(net::Model::outputs()[0].shape[0] == -1);
  REQUIRE(model.dimension("seq") == 2 && model.dimension(0) == 1);
  REQUIRE(model.input_tensor("x").type() == "float32 [1, 2, 24]" && model.input_tensor("x").bytes == 192);
}

// Memory of the caller's, and of the model's, with sizes in any order.
void run_sizes(std::ofstream& stream) {
  std::map<void*, std::align_val_t> blocks;
  std::size_t allocations = 0;
  net::Options options;
  options.threads = 2;
  options.allocate = [&](std::size_t bytes, std::size_t alignment) {
    ++allocations;
    void* memory = ::operator new(bytes, std::align_val_t(alignment));
    blocks.emplace(memory, std::align_val_t(alignment));
    return memory;
  };
  options.release = [&](void* memory) {
    const auto block = blocks.find(memory);
    REQUIRE(block != blocks.end());
    ::operator delete(memory, block->second);
    blocks.erase(block);
  };
  {
    net::Model model(options);
    std::size_t before = 0;
    for (int round = 0; round < 2; ++round) {
      for (const auto& [batch, seq] : std::vector<std::pair<std::int64_t, std::int64_t>>{
               {1, 16}, {6, 96}, {1, 4}, {2, 32}, {6, 2}, {1, 16}, {3, 94}}) {
        model.set_input_shapes({{"y", {batch, 24}}, {"x", {batch, seq, 24}}});
        REQUIRE(model.dimension("batch") == batch && model.dimension("seq") == seq);
        const std::vector<float> x = values_of(model.input_tensor("x")), y = values_of(model.input_tensor("y"));
        std::vector<float> first(model.output_tensor("out0").size()), second(model.output_tensor(1).size());
        REQUIRE((model.shape("out0") == std::vector<std::int64_t>{batch, 2 * seq, 24}));
        model.run({x, y}, {first, second});
        const net::Span<float> own_x = model.input<float>("x"), own_y = model.input<float>("y");
        std::copy(x.begin(), x.end(), own_x.begin());
        std::copy(y.begin(), y.end(), own_y.begin());
        model.run();
        const auto own = model.output<float>("out0");
        REQUIRE(std::equal(own.begin(), own.end(), first.begin(), first.end()));
        if (round == 1) continue;
        write(stream, {first.data(), first.size()});
        write(stream, {second.data(), second.size()});
      }
      REQUIRE(round == 0 || allocations == before);
      before = allocations;
    }
  }
  REQUIRE(blocks.empty());
}

void check_misuse() {
  net::Model model;
  model.set_dimensions({{"seq", 32}});
  const std::vector<float> x = values_of(model.input_tensor(0)), y = values_of(model.input_tensor(1));
  std::vector<float> first(model.output_tensor(0).size()), second(model.output_tensor(1).size());
  expect(Status::wrong_dimension, [&] { model.set_dimension("seq", 98); });
  expect(Status::wrong_dimension, [&] { model.set_dimension("batch", 0); });
  expect(Status::wrong_dimension, [&] { model.set_dimension(NET_DIMENSION_SEQ, 33); });
  expect(Status::wrong_dimension, [&] { model.set_dimensions({{"batch", 2}, {"seq", -4}}); });
  expect(Status::unknown_name, [&] { model.set_dimension("length", 8); });
  expect(Status::wrong_count, [&] { model.set_dimension(2, 8); });
  expect(Status::wrong_dimension, [&] { model.set_input_shapes({{"x", {2, 7, 24}}}); });
  expect(Status::wrong_size, [&] { model.set_input_shapes({{"x", {2, 8, 24}}, {"y", {3, 24}}}); });
  expect(Status::wrong_size, [&] { model.set_input_shapes({{"x", {2, 8, 25}}}); });
  expect(Status::wrong_size, [&] { model.set_input_shapes({{"y", {2, 8, 24}}}); });
  expect(Status::unknown_name, [&] { model.set_input_shapes({{"z", {2}}}); });
  // none of these has changed a size
  REQUIRE(model.dimension("batch") == 1 && model.dimension("seq") == 32);
  model.run({x, y}, {first, second});
  model.set_dimension("seq", 34);
  expect(Status::wrong_size, [&] { model.run({x, y}, {first, second}); });
  model.set_dimension("seq", 32);
  std::vector<float> longer(first.size() + 1);
  expect(Status::wrong_size, [&] { model.run({x, y}, {longer, second}); });
  bool is_told = false;
  model.profile([&](std::string_view, std::uint64_t) {
    if (!is_told) expect(Status::busy, [&] { model.set_dimension("seq", 8); });
    is_told = true;
  });
  model.run({x, y}, {first, second});
  net::Model moved = std::move(model);
  expect(Status::null_argument, [&] { model.set_dimension("seq", 8); });
  expect(Status::null_argument, [&] { model.input_tensor("x"); });
}

}  // namespace

int main(int, char** words) {
  net::Model model;
  check_descriptions(model);
  std::ofstream stream(words[1], std::ios::binary);
  run_sizes(stream);
  check_misuse();
}
