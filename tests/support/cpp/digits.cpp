// Uses all of the interface of the digits, and prints what each misuse is answered with.

#include <digits.hpp>

#include <map>
#include <set>

#include "checks.hpp"

namespace {

using digits::Status;

constexpr auto expect = expect_error<digits::Error>;

void check_descriptions() {
  REQUIRE(digits::Model::inputs().size() == DIGITS_INPUTS);
  const digits::Tensor& data = digits::Model::inputs()[DIGITS_INPUT_DATA];
  REQUIRE(data.name == "data" && data.dtype == "float32" && data.bytes == 256 && data.size() == 64);
  REQUIRE(data.shape.size() == 4 && data.shape[2] == 8);
  REQUIRE(digits::Model::outputs()[0].type() == "float32 [1, 10]");
}

void check_misuse(digits::Model& model, std::vector<float>& pixels, std::vector<float>& scores) {
  std::vector<double> doubles(64);
  std::vector<float> short_pixels(63), long_scores(11);
  const std::vector<std::uint32_t> bits(64);
  expect(Status::wrong_dtype, [&] { model.run({doubles}, {scores}); });
  expect(Status::wrong_dtype, [&] { model.run({bits}, {scores}); });
  expect(Status::wrong_dtype, [&] { model.output<std::int64_t>("softmax_output"); });
  expect(Status::wrong_size, [&] { model.run({short_pixels}, {scores}); });
  expect(Status::wrong_size, [&] { model.run({pixels}, {long_scores}); });
  expect(Status::wrong_count, [&] { model.run({pixels, pixels}, {scores}); });
  expect(Status::wrong_count, [&] { model.run({pixels}, {}); });
  expect(Status::wrong_count, [&] { model.output<float>(1); });
  expect(Status::unknown_name, [&] { model.run({{"date", pixels}}, {scores}); });
  expect(Status::overlap, [&] { model.run({pixels}, {digits::Span<float>(pixels.data(), 10)}); });
}

void check_options(const std::vector<float>& pixels, const std::vector<float>& expected) {
  digits::Options options;
  options.threads = 100000;
  expect(Status::wrong_option, [&] { digits::Model model(options); });
  options.threads = 3;
  std::map<void*, std::align_val_t> blocks;
  bool is_full = false;
  options.allocate = [&](std::size_t bytes, std::size_t alignment) {
    if (is_full) throw std::bad_alloc();
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
  std::uint32_t tasks = 0;
  options.parallel_for = [&](std::uint32_t count, digits::Body body) {
    for (std::uint32_t task = count; task-- > 0; ++tasks) body(task);
  };
  {
    digits::Model model(options);
    REQUIRE(model.threads() >= 1 && model.threads() <= 3 && !blocks.empty());
    std::vector<float> scores(10);
    model.run({pixels}, {scores});
    REQUIRE(scores == expected && tasks % model.threads() == 0);
    REQUIRE((tasks > 0) == (model.threads() > 1));
  }
  REQUIRE(blocks.empty());
  is_full = true;
  expect(Status::no_memory, [&] { digits::Model model(options); });
}

void check_profile(digits::Model& model, const std::vector<float>& pixels, std::vector<float>& scores) {
  std::set<std::string> kernels;
  std::size_t calls = 0;
  model.profile([&](std::string_view kernel, std::uint64_t) {
    kernels.insert(std::string(kernel));
    // the model is in use now
    if (calls++ == 0) expect(Status::busy, [&] { model.run(); });
  });
  model.run({pixels}, {scores});
  REQUIRE(kernels.count("softmax") == 1 && calls >= 4);
  model.profile(nullptr);
  const std::size_t before = calls;
  model.run({pixels}, {scores});
  REQUIRE(calls == before);
}

}  // namespace

int main() {
  check_descriptions();
  std::vector<float> pixels(64), scores(10), named(10);
  for (std::size_t i = 0; i < 64; ++i) pixels[i] = static_cast<float>(i % 17);
  digits::Model model;
  model.run({pixels}, {scores});
  model.run({{"data", pixels}}, {{"softmax_output", named}});
  REQUIRE(scores == named);
  // bytes are values of any type, at any address
  std::vector<std::byte> bytes(257), result(41);
  std::memcpy(bytes.data() + 1, pixels.data(), 256);
  model.run({digits::Span<std::byte>(bytes.data() + 1, 256)}, {digits::Span<std::byte>(result.data() + 1, 40)});
  REQUIRE(std::memcmp(result.data() + 1, scores.data(), 40) == 0);
  // lists that are put together when the program runs
  model.run(std::vector<digits::Input>{{"data", pixels}}, std::vector<digits::Output>{named});
  const auto input = model.input<float>("data");
  REQUIRE(reinterpret_cast<std::uintptr_t>(input.data()) % 64 == 0);
  std::copy(pixels.begin(), pixels.end(), input.begin());
  model.run();
  const auto output = model.output<float>(0);
  REQUIRE(std::equal(output.begin(), output.end(), scores.begin(), scores.end()));
  check_misuse(model, pixels, scores);
  check_options(pixels, scores);
  check_profile(model, pixels, scores);
  digits::Model moved = std::move(model);
  expect(Status::null_argument, [&] { model.run({pixels}, {scores}); });
  moved.run({pixels}, {named});
  REQUIRE(scores == named);
}
