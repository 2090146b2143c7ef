// Writes the inputs that five models make of an image: `preprocess image output.npz`.

#include <bgr-images.hpp>
#include <classifier-images.hpp>
#include <cropped-images.hpp>
#include <half-images.hpp>
#include <letterbox-images.hpp>

#include <cstdio>
#include <exception>
#include <map>
#include <string>
#include <vector>

#include "image_file.hpp"
#include "npz.hpp"

namespace {

std::map<std::string, npz::Array> arrays;

template <typename Model, typename Image, typename Preprocess>
void add(const std::string& name, const image_file::Pixels& pixels, Preprocess preprocess) {
  const auto& tensor = Model::inputs()[0];
  std::vector<std::byte> values(tensor.bytes);
  const Image image{pixels.values.data(), pixels.height, pixels.width, pixels.channels};
  for (std::size_t place = 0; place < static_cast<std::size_t>(tensor.shape[0]); ++place) {
    preprocess(image, values, place);
  }
  arrays[name] = {{tensor.shape.begin(), tensor.shape.end()},
                  std::string(tensor.dtype),
                  {reinterpret_cast<const char*>(values.data()), values.size()}};
}

}  // namespace

int main(int, char** words) {
  try {
    const image_file::Pixels pixels = image_file::read(words[1]);
#define ADD(name) \
  add<name::Model, name::Image>(#name, pixels, [](const auto& image, auto& values, std::size_t place) { \
    name::preprocess(image, "data", values, place); \
  })
    ADD(bgr);
    ADD(classifier);
    ADD(cropped);
    ADD(half);
    ADD(letterbox);
    npz::write(words[2], arrays);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
