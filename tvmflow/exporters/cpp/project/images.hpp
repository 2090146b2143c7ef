// Images for the model @TITLE@: pixels of 8 bits become inputs, as in Python bit for bit, and scores become names.
#ifndef @NAME@_IMAGES_HPP_
#define @NAME@_IMAGES_HPP_

#include <@TITLE@-images.h>
#include <@TITLE@.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

inline namespace tvmflow_models {
namespace @NAMESPACE@ {

// Rows of pixels from the top, each pixel with 1 (gray), 3 (RGB) or 4 (RGBA, whose alpha is left out) values.
struct Image {
  const std::uint8_t* pixels;
  std::size_t height;
  std::size_t width;
  std::size_t channels;
};

// A class with its probability, and its place among the scores.
struct Prediction {
  std::string_view label;
  double probability;
  std::size_t position;
};

namespace detail {

inline constexpr bool are_probabilities = @ARE_PROBABILITIES@;

}  // namespace detail

// The names of the classes, in the order of the first output; none where the model has none.
inline Span<const std::string_view> labels() {
  static const std::vector<std::string_view> names(@PREFIX@_labels, @PREFIX@_labels + @NAME@_LABELS);
  return {names.data(), names.size()};
}

// Writes an image into an input, as image `place` of the batch:
//
//   @NAMESPACE@::preprocess({pixels, 480, 640, 3}, "data", model.input<float>("data"));
template <typename Values>
void preprocess(const Image& image, std::string_view input, Values&& values, std::size_t place = 0) {
  const std::size_t index = detail::find(Model::inputs(), input, "input");
  const @PREFIX@_preprocessing_* to = @PREFIX@_find_preprocessing_(index);
  if (!to) throw Error(Status::unknown_name, "no input '" + std::string(input) + "' takes images");
  const Tensor& tensor = Model::inputs()[index];
//@fixed
  detail::check_view(detail::view_of<const void*>(input, values), tensor, "input");
  const auto batch = static_cast<std::size_t>(tensor.shape[0]);
//@open
  const auto view = detail::view_of<const void*>(input, values);
  const std::size_t image_bytes = to->height * to->width * to->channels * to->value_bytes;
  std::vector<std::int64_t> shape(tensor.shape.begin(), tensor.shape.end());
  if (shape[0] < 0) shape[0] = static_cast<std::int64_t>(view.size * view.item_bytes / image_bytes);
  Tensor now = tensor;
  now.shape = {shape.data(), shape.size()};
  now.bytes = now.size() * to->value_bytes;
  detail::check_view(view, now, "input");
  const auto batch = static_cast<std::size_t>(now.shape[0]);
//@all
  if (place >= batch) {
    throw Error(Status::wrong_count, "a batch has " + std::to_string(batch) + " images, counted from 0");
  }
  const @PREFIX@_pixels pixels{image.pixels, image.height, image.width, image.channels, 0};
  const int status = @PREFIX@_preprocess(&pixels, index, place, std::data(values));
  if (status == @NAME@_PREPROCESS_OK) return;
  throw Error(status == @NAME@_PREPROCESS_NO_MEMORY ? Status::no_memory : Status::wrong_size,
              @PREFIX@_preprocess_error(status));
}

// Tells whether the scores of a sample are probabilities: by the model's last operator, else by their sum.
template <typename Scores>
bool are_probabilities(const Scores& scores) {
  if (detail::are_probabilities) return true;
  double sum = 0.0;
  for (const auto& score : scores) {
    if (!(static_cast<double>(score) >= 0.0)) return false;
    sum += static_cast<double>(score);
  }
  return std::abs(sum - 1.0) <= 1e-2;
}

// Returns the classes with the largest scores of a sample, the best first. Scores that are not
// probabilities become such by softmax.
template <typename Scores>
std::vector<Prediction> rank(const Scores& scores, std::size_t count = 5) {
  using Value = std::remove_cv_t<detail::Element<const Scores>>;
  if (std::size(scores) != labels().size()) {
    throw Error(Status::wrong_size, "there are " + std::to_string(labels().size()) + " names of classes for " +
                                        std::to_string(std::size(scores)) + " scores");
  }
  std::vector<Prediction> best;
  double largest = -std::numeric_limits<double>::infinity(), total = 0.0;
  for (const auto& score : scores) {
    double value = static_cast<double>(score);
    if (std::isnan(value)) value = -std::numeric_limits<double>::infinity();
    // probabilities of 8 bits are multiples of 1/256
    if (std::is_integral_v<Value>) value = (value - static_cast<double>(std::numeric_limits<Value>::min())) / 256;
    largest = std::max(largest, value);
    best.push_back({labels()[best.size()], value, best.size()});
  }
  if (!are_probabilities(scores)) {
    for (Prediction& prediction : best) total += prediction.probability = std::exp(prediction.probability - largest);
    for (Prediction& prediction : best) prediction.probability /= total;
  }
  std::stable_sort(best.begin(), best.end(),
                   [](const Prediction& a, const Prediction& b) { return a.probability > b.probability; });
  best.resize(std::min(count, best.size()));
  return best;
}

}  // namespace @NAMESPACE@
}  // namespace tvmflow_models

#endif  // @NAME@_IMAGES_HPP_
