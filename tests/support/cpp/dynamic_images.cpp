// Fills batches of several sizes with the image of a file of 8x8 pixels, and prints what each misuse is answered with.

#include <net-images.hpp>

#include <fstream>
#include <iterator>

#include "checks.hpp"

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
  expect_error<net::Error>(net::Status::wrong_count,
                           [&] { net::preprocess(image, "x", model.input<float>("x"), 3); });
  std::vector<float> odd(191);
  expect_error<net::Error>(net::Status::wrong_size, [&] { net::preprocess(image, "x", odd); });
}
