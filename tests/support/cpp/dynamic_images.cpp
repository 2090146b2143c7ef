// Fills batches of several sizes with the image of a file of 8x8 pixels, and prints what each misuse is answered with.

#include <net-images.hpp>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>

namespace {

void require(bool condition, const char* text) {
  if (condition) return;
  std::fprintf(stderr, "not so: %s\n", text);
  std::exit(1);
}
#define REQUIRE(condition) require(condition, #condition)

template <typename Misuse>
void expect(const Misuse& misuse) {
  try {
    misuse();
  } catch (const net::Error& error) {
    std::printf("%d %s\n", static_cast<int>(error.status()), error.what());
    return;
  }
  REQUIRE(!"an error was thrown");
}

}  // namespace

int main(int, char** words) {
  std::ifstream stream(words[1], std::ios::binary);
  const std::vector<char> bytes((std::istreambuf_iterator<char>(stream)), std::istreambuf_iterator<char>());
  const net::Image image{reinterpret_cast<const std::uint8_t*>(bytes.data()), 8, 8, 1};
  net::Model model;
  std::vector<float> first;
  for (const std::int64_t batch : {1, 6, 3}) {
    model.set_dimension("batch", batch);
    for (std::size_t place = 0; place < static_cast<std::size_t>(batch); ++place) {
      net::preprocess(image, "x", model.input<float>("x"), place);
    }
    model.run();
    const auto scores = model.output<float>(0);
    if (first.empty()) first.assign(scores.begin(), scores.end());
    REQUIRE(scores.size() == first.size() * static_cast<std::size_t>(batch));
    for (std::size_t i = 0; i < scores.size(); ++i) REQUIRE(scores[i] == first[i % first.size()]);
  }
  expect([&] { net::preprocess(image, "x", model.input<float>("x"), 3); });
  std::vector<float> odd(191);
  expect([&] { net::preprocess(image, "x", odd); });
}
