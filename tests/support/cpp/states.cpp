// Uses the interface of a model with a KV cache: writes outputs and states to a file, and prints what each misuse is
// answered with. Its arguments are the file to write, a state that Python saved, and the file for a saved state.

#include <cached.hpp>

#include <fstream>
#include <map>

#include "checks.hpp"

namespace {

using cached::Status;

constexpr auto expect = expect_error<cached::Error>;

// The outputs of a step of some tokens.
std::vector<float> step(cached::Model& model, std::int64_t tokens) {
  model.set_dimension("seq", tokens);
  std::vector<float> x(model.input_tensor("x").size()), mask(model.input_tensor("mask").size(), 1);
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i % 13) / 16 - 0.5f;
  std::vector<float> y(model.output_tensor("y").size());
  if (tokens % 2) {
    model.step({x, mask}, {y});
  } else {
    model.step({{"mask", mask}, {"x", x}}, {{"y", y}});
  }
  return y;
}

template <typename Values>
void write(std::ofstream& stream, const Values& values) {
  stream.write(reinterpret_cast<const char*>(values.data()),
               static_cast<std::streamsize>(values.size() * sizeof(*values.data())));
}

std::vector<char> read(const char* path) {
  std::ifstream stream(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), {}};
}

void refuse(cached::Model& model) {
  const std::vector<std::byte> saved = model.save_state();
  std::vector<std::byte> damaged = saved;
  damaged[damaged.size() / 2] ^= std::byte{1};
  std::vector<float> x(32), y(32), mask(1);
  model.set_dimension("seq", 1);
  const std::int64_t length = model.length();
  expect(Status::wrong_length, [&] { model.truncate(length + 1); });
  expect(Status::wrong_length, [&] { model.truncate(-1); });
  expect(Status::wrong_length, [&] { model.drop(length + 1); });
  expect(Status::wrong_state, [&] { model.load_state(damaged); });
  expect(Status::wrong_size, [&] { model.step({x, mask}, {y}); });
  expect(Status::wrong_count, [&] { model.step({x}, {y}); });
  expect(Status::unknown_name, [&] { model.step({{"x", x}, {"past_key", y}}, {y}); });
  expect(Status::unknown_name, [&] { model.state<float>("key"); });
  expect(Status::wrong_dtype, [&] { model.state<double>("past_key"); });
  expect(Status::wrong_sampling, [&] { model.sample(y, {-1, 0, 0, 0}); });
  expect(Status::wrong_dtype, [&] { model.sample(std::vector<int>(3)); });
  expect(Status::wrong_length, [&] {
    cached::Model copy = model.fork();
    while (true) step(copy, 12);
  });
  REQUIRE(model.length() == length && model.save_state() == saved);
}

void choose_tokens(cached::Model& model) {
  std::vector<float> logits = {0, 1, 3, 2};
  REQUIRE(model.sample(logits) == 2);
  REQUIRE(model.sample(logits, {0, 0, 0, 2}, {2}) == 3 && logits[2] == 1.5f);
  const auto draw = [&](cached::Model& drawn) {
    std::vector<std::int64_t> tokens(20);
    for (std::int64_t& token : tokens) token = drawn.sample(logits, {1, 3, 0, 0});
    return tokens;
  };
  model.seed(7);
  const auto saved = model.save_state();
  cached::Model copy = model.fork();
  const auto tokens = draw(model);
  REQUIRE(draw(copy) == tokens && draw(copy) != tokens);
  copy.load_state(saved);
  REQUIRE(draw(copy) == tokens);
}

}  // namespace

int main(int, char** arguments) {
  std::ofstream stream(arguments[1], std::ios::binary), saved_stream(arguments[3], std::ios::binary);
  std::size_t blocks = 0;
  {
    cached::Options options;
    options.threads = 1;
    options.allocate = [&](std::size_t bytes, std::size_t alignment) {
      ++blocks;
      return ::operator new(bytes, std::align_val_t(alignment));
    };
    options.release = [&](void* memory) {
      --blocks;
      ::operator delete(memory, std::align_val_t(64));
    };
    auto model = std::make_unique<cached::Model>(options);
    REQUIRE(model->length() == 0 && model->state<float>("past_key").size() == 0);
    for (std::int64_t tokens : {5, 1, 12}) write(stream, step(*model, tokens));
    REQUIRE(model->length() == 18 && model->dimension("past") == 18);
    for (const char* name : {"past_key", "past_value"}) write(stream, model->state<float>(name));
    REQUIRE(model->state<std::byte>(1).size() == 2 * 18 * 16 * sizeof(float));
    const auto saved = model->save_state();
    write(saved_stream, saved);

    cached::Model copy = model->fork();
    const auto following = step(*model, 2);
    model->truncate(18);
    REQUIRE(step(*model, 2) == following);
    model.reset();
    REQUIRE(step(copy, 2) == following && copy.length() == 20);
    write(stream, following);
    {
      cached::Model dropping = copy.fork();
      dropping.drop(13);
      REQUIRE(dropping.length() == 7 && dropping.dropped() == 13 && copy.length() == 20 && copy.dropped() == 0);
      write(stream, dropping.state<float>("past_value"));
    }
    copy.truncate(7);
    write(stream, copy.state<float>("past_value"));
    refuse(copy);
    write(stream, step(copy, 3));
    copy.load_state(saved);
    REQUIRE(step(copy, 2) == following);
    copy.load_state(read(arguments[2]));
    write(stream, step(copy, 4));
    choose_tokens(copy);
    copy.set_dimensions({{"past", 2}, {"seq", 1}});
    copy.run();  // with states as inputs of any length, which are not those of the model
    REQUIRE(copy.length() > 2);
    copy.reset();
    REQUIRE(copy.length() == 0);
    write(stream, step(copy, 5));
  }
  REQUIRE(blocks == 0);
  return 0;
}
