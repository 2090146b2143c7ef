// Images for the model @TITLE@: pixels of 8 bits become inputs, as in Python bit for bit, and scores become names.
#ifndef @NAME@_IMAGES_HPP_
#define @NAME@_IMAGES_HPP_

#include <@TITLE@.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
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

// How an image becomes an input.
struct Preprocessing {
  std::string_view input;
  std::size_t height, width, channels;
  std::size_t resize_height, resize_width;  // both 0: as it is; the width alone 0: the height is the shorter side
  int pad;                                  // the level beside an image that keeps its aspect ratio; below 0: none
  bool is_cubic, is_bgr, is_channels_last;
  const void* table;                        // the number for each level of each channel
};

@TABLES@
inline constexpr std::array<Preprocessing, @COUNT@> preprocessings = {{@PREPROCESSINGS@}};

inline constexpr std::array<std::string_view, @LABEL_COUNT@> labels = {@LABELS@};
inline constexpr bool are_probabilities = @ARE_PROBABILITIES@;

// Pixels in rows, as bytes.
struct Pixels {
  std::size_t height, width, channels;
  std::vector<std::uint8_t> values;
};

// Keeps a product from becoming one operation with the sum that follows: it would be rounded once instead of twice.
inline double rounded(double value) {
  volatile double kept = value;
  return kept;
}

inline double triangle(double distance) { return distance < 1.0 ? 1.0 - distance : 0.0; }

// The cubic convolution kernel of Keys with a = -0.5.
inline double cubic(double x) {
  constexpr double a = -0.5;
  if (x < 1.0) return rounded(rounded((rounded((a + 2.0) * x) - (a + 3.0)) * x) * x) + 1;
  if (x < 2.0) return (rounded((rounded((x - 5) * x) + 8) * x) - 4) * a;
  return 0.0;
}

constexpr int weight_bits = 22;

// Resizes the middle dimension of `[outer, size, inner]`: each new value is a weighted sum of those in its support,
// which grows with the reduction. Source: Resample.c of Pillow.
inline std::vector<std::uint8_t> resize(const std::vector<std::uint8_t>& values, std::size_t outer, std::size_t size,
                                        std::size_t inner, std::size_t new_size, bool is_cubic) {
  const double scale = static_cast<double>(size) / static_cast<double>(new_size);
  const double filter_scale = std::max(scale, 1.0), reciprocal = 1.0 / filter_scale;
  const double support = rounded((is_cubic ? 2.0 : 1.0) * filter_scale);
  std::vector<std::uint8_t> resized(outer * new_size * inner);
  std::vector<double> exact;
  std::vector<std::int32_t> weights, sums(inner);
  for (std::size_t i = 0; i < new_size; ++i) {
    const double center = rounded((static_cast<double>(i) + 0.5) * scale);
    const auto start = static_cast<std::size_t>(std::max(center - support + 0.5, 0.0));
    const std::size_t end = std::min(static_cast<std::size_t>(center + support + 0.5), size);
    exact.assign(end - start, 0.0);
    double total = 0.0;
    for (std::size_t tap = 0; tap < exact.size(); ++tap) {
      const double distance = std::abs(rounded((static_cast<double>(tap + start) - center + 0.5) * reciprocal));
      exact[tap] = is_cubic ? cubic(distance) : triangle(distance);
      total += exact[tap];
    }
    weights.clear();
    for (const double weight : exact) {
      const double fixed = (total != 0.0 ? weight / total : weight) * (1 << weight_bits);
      weights.push_back(static_cast<std::int32_t>(fixed + (fixed < 0 ? -0.5 : 0.5)));
    }
    for (std::size_t row = 0; row < outer; ++row) {
      std::fill(sums.begin(), sums.end(), 1 << (weight_bits - 1));
      for (std::size_t tap = 0; tap < weights.size(); ++tap) {
        const std::uint8_t* source = values.data() + (row * size + start + tap) * inner;
        for (std::size_t k = 0; k < inner; ++k) sums[k] += weights[tap] * source[k];
      }
      std::uint8_t* target = resized.data() + (row * new_size + i) * inner;
      for (std::size_t k = 0; k < inner; ++k) {
        // the shift of a negative number would not be the same everywhere
        target[k] = sums[k] < 0 ? std::uint8_t{0} : static_cast<std::uint8_t>(std::min(sums[k] >> weight_bits, 255));
      }
    }
  }
  return resized;
}

// Returns the colours of the input; gray is weighed by ITU-R BT.601.
inline Pixels convert_colours(const Image& image, const Preprocessing& to) {
  Pixels pixels{image.height, image.width, to.channels, {}};
  pixels.values.resize(image.height * image.width * to.channels);
  for (std::size_t at = 0; at < image.height * image.width; ++at) {
    const std::uint8_t* source = image.pixels + at * image.channels;
    std::uint8_t* target = pixels.values.data() + at * to.channels;
    const std::uint8_t red = source[0], green = source[image.channels == 1 ? 0 : 1], blue = source[image.channels == 1 ? 0 : 2];
    if (to.channels == 3) {
      target[to.is_bgr ? 2 : 0] = red;
      target[1] = green;
      target[to.is_bgr ? 0 : 2] = blue;
    } else {
      const std::uint32_t gray = red * 19595u + green * 38470u + blue * 7471u + (1u << 15);
      target[0] = image.channels == 1 ? red : static_cast<std::uint8_t>(gray >> 16);
    }
  }
  return pixels;
}

// Returns the size of an image after it is resized.
inline std::array<std::size_t, 2> resized_size(std::size_t height, std::size_t width, const Preprocessing& to) {
  const std::size_t new_height = to.resize_height, new_width = to.resize_width;
  if (new_height == 0) return {height, width};
  if (new_width == 0) {
    const std::size_t shorter = std::min(height, width);
    return {height * new_height / shorter, width * new_height / shorter};
  }
  if (to.pad < 0) return {new_height, new_width};
  if (new_height * width <= new_width * height) {
    return {new_height, std::max<std::size_t>(1, (2 * width * new_height + height) / (2 * height))};
  }
  return {std::max<std::size_t>(1, (2 * height * new_width + width) / (2 * width)), new_width};
}

// Returns where a window of `new_size` begins in the middle of a side, below 0 where the side is shorter.
inline std::ptrdiff_t window_offset(std::size_t size, std::size_t new_size) {
  if (size < new_size) return -static_cast<std::ptrdiff_t>((new_size - size) / 2);
  const std::size_t half = (size - new_size) / 2;
  const bool is_odd = (size - new_size) % 2 != 0;
  // halves are rounded to even numbers, as Python does
  return static_cast<std::ptrdiff_t>(half + (is_odd && half % 2 != 0 ? 1 : 0));
}

// Returns an image in size and colours of the input.
inline Pixels fit(const Image& image, const Preprocessing& to) {
  Pixels pixels = convert_colours(image, to);
  const auto [height, width] = resized_size(image.height, image.width, to);
  if (width != pixels.width) {
    pixels.values = resize(pixels.values, pixels.height, pixels.width, to.channels, width, to.is_cubic);
  }
  if (height != pixels.height) {
    pixels.values = resize(pixels.values, 1, pixels.height, width * to.channels, height, to.is_cubic);
  }
  Pixels fitted{to.height, to.width, to.channels, {}};
  fitted.values.assign(to.height * to.width * to.channels, static_cast<std::uint8_t>(std::max(to.pad, 0)));
  const std::ptrdiff_t top = window_offset(height, to.height), left = window_offset(width, to.width);
  for (std::size_t row = 0; row < to.height; ++row) {
    const std::ptrdiff_t from = static_cast<std::ptrdiff_t>(row) + top;
    if (from < 0 || from >= static_cast<std::ptrdiff_t>(height)) continue;
    const auto skipped = static_cast<std::size_t>(std::max<std::ptrdiff_t>(-left, 0));
    const auto first = static_cast<std::size_t>(std::max<std::ptrdiff_t>(left, 0));
    const std::size_t count = std::min(width - first, to.width - skipped);
    std::copy_n(pixels.values.data() + (static_cast<std::size_t>(from) * width + first) * to.channels, count * to.channels,
                fitted.values.data() + (row * to.width + skipped) * to.channels);
  }
  return fitted;
}

// Writes an image in the layout of the input, with the numbers of the table.
template <std::size_t bytes>
void write_tensor(const Pixels& pixels, const Preprocessing& to, unsigned char* tensor) {
  const auto* table = static_cast<const unsigned char*>(to.table);
  const std::size_t area = pixels.height * pixels.width;
  for (std::size_t at = 0; at < area; ++at) {
    for (std::size_t channel = 0; channel < pixels.channels; ++channel) {
      const std::size_t level = pixels.values[at * pixels.channels + channel];
      const std::size_t place = to.is_channels_last ? at * pixels.channels + channel : channel * area + at;
      std::memcpy(tensor + place * bytes, table + (channel * 256 + level) * bytes, bytes);
    }
  }
}

}  // namespace detail

// The names of the classes, in the order of the first output; none where the model has none.
inline constexpr Span<const std::string_view> labels() { return {detail::labels.data(), detail::labels.size()}; }

// Writes an image into an input, as image `place` of the batch:
//
//   @NAMESPACE@::preprocess({pixels, 480, 640, 3}, "data", model.input<float>("data"));
template <typename Values>
void preprocess(const Image& image, std::string_view input, Values&& values, std::size_t place = 0) {
  const auto to = std::find_if(detail::preprocessings.begin(), detail::preprocessings.end(),
                               [&](const detail::Preprocessing& other) { return other.input == input; });
  if (to == detail::preprocessings.end()) {
    throw Error(Status::unknown_name, "no input '" + std::string(input) + "' takes images");
  }
  const Tensor& tensor = Model::inputs()[detail::find(Model::inputs(), input, "input")];
//@fixed
  detail::check_view(detail::view_of<const void*>(input, values), tensor, "input");
//@open
  const auto view = detail::view_of<const void*>(input, values);
  const char digit = tensor.dtype.back();
  const std::size_t bytes = digit == '8' ? 1 : digit == '6' ? 2 : digit == '2' ? 4 : 8;
  const std::size_t image_bytes = to->height * to->width * to->channels * bytes;
  std::vector<std::int64_t> shape(tensor.shape.begin(), tensor.shape.end());
  if (shape[0] < 0) shape[0] = static_cast<std::int64_t>(view.size * view.item_bytes / image_bytes);
  Tensor now = tensor;
  now.shape = {shape.data(), shape.size()};
  now.bytes = now.size() * bytes;
  detail::check_view(view, now, "input");
//@all
  const bool is_image = image.pixels && image.height && image.width &&
                        (image.channels == 1 || image.channels == 3 || image.channels == 4);
  if (!is_image) throw Error(Status::wrong_size, "an image has pixels of 1, 3 or 4 values");
//@fixed
  const auto batch = static_cast<std::size_t>(tensor.shape[0]);
//@open
  const auto batch = static_cast<std::size_t>(now.shape[0]);
//@all
  if (place >= batch) {
    throw Error(Status::wrong_count, "a batch has " + std::to_string(batch) + " images, counted from 0");
  }
//@fixed
  const std::size_t bytes = tensor.bytes / tensor.size();
  auto* start = reinterpret_cast<unsigned char*>(std::data(values)) + place * (tensor.bytes / batch);
//@open
  auto* start = reinterpret_cast<unsigned char*>(std::data(values)) + place * image_bytes;
//@all
  const detail::Pixels pixels = detail::fit(image, *to);
  if (bytes == 1) detail::write_tensor<1>(pixels, *to, start);
  if (bytes == 2) detail::write_tensor<2>(pixels, *to, start);
  if (bytes == 4) detail::write_tensor<4>(pixels, *to, start);
  if (bytes == 8) detail::write_tensor<8>(pixels, *to, start);
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

// Returns the classes with the largest scores of a sample, the best first. Scores that are no probabilities become such
// by softmax.
template <typename Scores>
std::vector<Prediction> rank(const Scores& scores, std::size_t count = 5) {
  using Value = std::remove_cv_t<detail::Element<const Scores>>;
  if (std::size(scores) != detail::labels.size()) {
    throw Error(Status::wrong_size, "there are " + std::to_string(detail::labels.size()) + " names of classes for " +
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
    best.push_back({detail::labels[best.size()], value, best.size()});
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
