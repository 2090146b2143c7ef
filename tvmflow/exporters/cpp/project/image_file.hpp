// Reads images as pixels of 8 bits: PNG (gray, palette, RGB, with or without alpha, not interlaced) and binary PGM and
// PPM; and BMP, GIF and JPEG by stb_image.h, if the compiler finds it. Alpha and EXIF data are left out.
#ifndef IMAGE_FILE_HPP_
#define IMAGE_FILE_HPP_

#include <algorithm>
#include <array>
#include <climits>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "npz.hpp"

#if __has_include("stb_image.h")
#define IMAGE_FILE_STB "stb_image.h"
#elif __has_include("stb/stb_image.h")
#define IMAGE_FILE_STB "stb/stb_image.h"
#endif
#ifdef IMAGE_FILE_STB
#define STB_IMAGE_IMPLEMENTATION
#define STB_IMAGE_STATIC
#define STBI_NO_STDIO
#define STBI_ONLY_BMP
#define STBI_ONLY_GIF
#define STBI_ONLY_JPEG
#include IMAGE_FILE_STB
#endif

namespace image_file {

using npz::Error;

// Rows of pixels from the top, each pixel with 1 (gray) or 3 (RGB) values.
struct Pixels {
  std::size_t height = 0, width = 0, channels = 0;
  std::vector<std::uint8_t> values;
};

namespace detail {

constexpr std::size_t max_bytes = std::size_t{1} << 30;

// The bits of a compressed stream, the lowest of each byte first.
class Bits {
 public:
  explicit Bits(const std::string& data) : data_(data) {}

  unsigned read(int count) {
    unsigned value = 0;
    for (int i = 0; i < count; ++i) value |= next() << i;
    return value;
  }
  unsigned next() {
    if (at_ / 8 >= data_.size()) throw Error("its compressed data ends too early");
    const unsigned bit = static_cast<unsigned char>(data_[at_ / 8]) >> at_ % 8 & 1u;
    ++at_;
    return bit;
  }
  void skip_to_byte() { at_ = (at_ + 7) / 8 * 8; }

 private:
  const std::string& data_;
  std::size_t at_ = 0;
};

// A canonical Huffman code: codes of one length are consecutive numbers, in the order of their symbols.
class Code {
 public:
  explicit Code(const std::vector<unsigned>& lengths) {
    for (const unsigned length : lengths) ++counts_[length];
    counts_[0] = 0;
    std::array<std::size_t, 17> offsets{};
    for (std::size_t length = 1; length < 16; ++length) offsets[length + 1] = offsets[length] + counts_[length];
    symbols_.resize(lengths.size());
    for (std::size_t symbol = 0; symbol < lengths.size(); ++symbol) {
      if (lengths[symbol] != 0) symbols_[offsets[lengths[symbol]]++] = static_cast<unsigned>(symbol);
    }
  }

  unsigned read(Bits& bits) const {
    std::size_t code = 0, first = 0, index = 0;
    for (std::size_t length = 1; length < 16; ++length) {
      code |= bits.next();
      if (code < first + counts_[length]) {
        if (code < first) break;
        return symbols_[index + code - first];
      }
      index += counts_[length];
      first = (first + counts_[length]) * 2;
      code *= 2;
    }
    throw Error("its compressed data is damaged");
  }

 private:
  std::array<std::size_t, 16> counts_{};
  std::vector<unsigned> symbols_;
};

// The code for lengths of copies and literal bytes, and that for distances.
struct Codes {
  Code literals, distances;
};

inline Codes fixed_codes() {
  std::vector<unsigned> lengths(288, 8);
  std::fill(lengths.begin() + 144, lengths.begin() + 256, 9u);
  std::fill(lengths.begin() + 256, lengths.begin() + 280, 7u);
  return {Code(lengths), Code(std::vector<unsigned>(30, 5))};
}

inline Codes read_codes(Bits& bits) {
  static constexpr std::array<std::size_t, 19> order = {16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15};
  const std::size_t literals = bits.read(5) + 257u, distances = bits.read(5) + 1u, count = bits.read(4) + 4u;
  std::vector<unsigned> lengths(order.size());
  for (std::size_t i = 0; i < count; ++i) lengths[order[i]] = bits.read(3);
  const Code code(lengths);
  lengths.clear();
  while (lengths.size() < literals + distances) {
    const unsigned symbol = code.read(bits);
    if (symbol == 16 && lengths.empty()) throw Error("its compressed data is damaged");
    const unsigned value = symbol < 16 ? symbol : symbol == 16 ? lengths.back() : 0;
    const unsigned times = symbol < 16 ? 1 : symbol == 16 ? 3 + bits.read(2) : symbol == 17 ? 3 + bits.read(3) : 11 + bits.read(7);
    lengths.insert(lengths.end(), times, value);
  }
  if (lengths.size() > literals + distances) throw Error("its compressed data is damaged");
  const auto middle = lengths.begin() + static_cast<std::ptrdiff_t>(literals);
  return {Code({lengths.begin(), middle}), Code({middle, lengths.end()})};
}

inline void read_block(Bits& bits, const Codes& codes, std::string& output, std::size_t limit) {
  static constexpr std::array<unsigned, 29> lengths = {3,  4,  5,  6,  7,  8,  9,  10, 11,  13,  15,  17,  19,  23, 27,
                                                       31, 35, 43, 51, 59, 67, 83, 99, 115, 131, 163, 195, 227, 258};
  static constexpr std::array<unsigned, 30> distances = {1,   2,   3,   4,   5,   7,    9,    13,   17,   25,
                                                         33,  49,  65,  97,  129, 193,  257,  385,  513,  769,
                                                         1025, 1537, 2049, 3073, 4097, 6145, 8193, 12289, 16385, 24577};
  while (true) {
    const unsigned symbol = codes.literals.read(bits);
    if (symbol == 256) return;
    if (symbol < 256) {
      output += static_cast<char>(symbol);
    } else {
      const std::size_t row = symbol - 257u;
      if (row >= lengths.size()) throw Error("its compressed data is damaged");
      const unsigned length = lengths[row] + bits.read(row < 8 || row == 28 ? 0 : static_cast<int>(row / 4 - 1));
      const std::size_t column = codes.distances.read(bits);
      if (column >= distances.size()) throw Error("its compressed data is damaged");
      const std::size_t distance = distances[column] + bits.read(column < 4 ? 0 : static_cast<int>(column / 2 - 1));
      if (distance > output.size()) throw Error("its compressed data is damaged");
      for (unsigned i = 0; i < length; ++i) output += output[output.size() - distance];
    }
    if (output.size() > limit) throw Error("its compressed data is larger than the image");
  }
}

// Returns the data of a zlib stream (RFC 1950 and 1951), at most `limit` bytes.
inline std::string inflate(const std::string& data, std::size_t limit) {
  Bits bits(data);
  const unsigned method = bits.read(8), flags = bits.read(8);
  if ((method & 15) != 8 || (method * 256 + flags) % 31 != 0 || (flags & 32) != 0) throw Error("its data is not compressed as in PNG");
  std::string output;
  bool is_last = false;
  while (!is_last) {
    is_last = bits.next() != 0;
    const unsigned kind = bits.read(2);
    if (kind == 0) {
      bits.skip_to_byte();
      const unsigned length = bits.read(16);
      if ((length ^ bits.read(16)) != 0xffff || output.size() + length > limit) throw Error("its compressed data is damaged");
      for (unsigned i = 0; i < length; ++i) output += static_cast<char>(bits.read(8));
    } else if (kind == 3) {
      throw Error("its compressed data is damaged");
    } else {
      read_block(bits, kind == 1 ? fixed_codes() : read_codes(bits), output, limit);
    }
  }
  return output;
}

inline std::size_t big_endian(const std::string& data, std::size_t at) {
  std::size_t value = 0;
  for (std::size_t i = 0; i < 4; ++i) value = value << 8 | npz::detail::number_at(data, at + i, 1);
  return value;
}

// The byte that a filter of PNG predicts from the left, upper and upper left ones.
inline int predict(int filter, int left, int up, int corner) {
  if (filter == 1) return left;
  if (filter == 2) return up;
  if (filter == 3) return (left + up) / 2;
  if (filter == 0) return 0;
  const int estimate = left + up - corner;
  const int a = std::abs(estimate - left), b = std::abs(estimate - up), c = std::abs(estimate - corner);
  return a <= b && a <= c ? left : b <= c ? up : corner;
}

// Undoes the filters of all rows, each of which begins with the number of its filter.
inline std::vector<std::uint8_t> unfilter(const std::string& rows, std::size_t height, std::size_t row_bytes, std::size_t pixel_bytes) {
  if (rows.size() != height * (row_bytes + 1)) throw Error("it has too few pixels");
  std::vector<std::uint8_t> values(height * row_bytes);
  for (std::size_t row = 0; row < height; ++row) {
    const int filter = static_cast<unsigned char>(rows[row * (row_bytes + 1)]);
    if (filter > 4) throw Error("a filter of it is unknown");
    std::uint8_t* line = values.data() + row * row_bytes;
    const std::uint8_t* above = row == 0 ? nullptr : line - row_bytes;
    for (std::size_t i = 0; i < row_bytes; ++i) {
      const bool has_left = i >= pixel_bytes;
      const int left = has_left ? line[i - pixel_bytes] : 0, up = above ? above[i] : 0;
      const int corner = has_left && above ? above[i - pixel_bytes] : 0;
      const int byte = static_cast<unsigned char>(rows[row * (row_bytes + 1) + 1 + i]);
      line[i] = static_cast<std::uint8_t>(byte + predict(filter, left, up, corner));
    }
  }
  return values;
}

inline Pixels parse_png(const std::string& data) {
  std::string header, palette, compressed;
  for (std::size_t at = 8; at + 12 <= data.size();) {
    const std::size_t length = big_endian(data, at);
    if (length > data.size() || at + 12 + length > data.size()) throw Error("it ends too early");
    const std::string kind = data.substr(at + 4, 4), content = data.substr(at + 8, length);
    if (npz::detail::crc32(kind + content) != big_endian(data, at + 8 + length)) throw Error("it is damaged");
    if (kind == "IHDR") header = content;
    if (kind == "PLTE") palette = content;
    if (kind == "IDAT") compressed += content;
    if (kind == "IEND") break;
    at += 12 + length;
  }
  if (header.size() != 13) throw Error("it has no header");
  static constexpr std::array<std::size_t, 7> values_of_pixel = {1, 0, 3, 1, 2, 0, 4};
  const std::size_t width = big_endian(header, 0), height = big_endian(header, 4);
  const std::size_t depth = npz::detail::number_at(header, 8, 1), colour = npz::detail::number_at(header, 9, 1);
  if (depth != 8) throw Error("it has " + std::to_string(depth) + " bits for a channel: save it with 8");
  if (header[12] != 0) throw Error("it is interlaced: save it without");
  if (colour > 6 || values_of_pixel[colour] == 0) throw Error("its colours are unknown");
  const std::size_t count = values_of_pixel[colour];
  if (width == 0 || height == 0 || width > max_bytes / height / count) throw Error("it has no size, or is too large");
  const std::vector<std::uint8_t> values = unfilter(inflate(compressed, height * (width * count + 1)), height, width * count, count);
  Pixels pixels{height, width, colour == 0 || colour == 4 ? std::size_t{1} : std::size_t{3}, {}};
  pixels.values.reserve(height * width * pixels.channels);
  for (std::size_t at = 0; at < values.size(); at += count) {
    for (std::size_t channel = 0; channel < pixels.channels; ++channel) {
      const std::size_t place = values[at] * std::size_t{3} + channel;
      if (colour == 3 && place >= palette.size()) throw Error("a colour of it is not in its palette");
      pixels.values.push_back(colour == 3 ? static_cast<std::uint8_t>(palette[place]) : values[at + channel]);
    }
  }
  return pixels;
}

// Reads the next number of the header of a PGM or PPM file; lines that begin with # are comments.
inline std::size_t read_number(const std::string& data, std::size_t& at) {
  while (at < data.size() && (data[at] == '#' || data[at] == ' ' || data[at] == '\n' || data[at] == '\r' || data[at] == '\t')) {
    at = data[at] == '#' ? std::min(data.find('\n', at), data.size()) : at + 1;
  }
  std::size_t number = 0, digits = 0;
  for (; at < data.size() && data[at] >= '0' && data[at] <= '9' && digits < 9; ++at, ++digits) {
    number = number * 10 + static_cast<std::size_t>(data[at] - '0');
  }
  if (digits == 0) throw Error("its header is damaged");
  return number;
}

inline Pixels parse_pnm(const std::string& data) {
  std::size_t at = 2;
  Pixels pixels;
  pixels.width = read_number(data, at);
  pixels.height = read_number(data, at);
  pixels.channels = data[1] == '5' ? 1 : 3;
  if (read_number(data, at) != 255) throw Error("its levels are not from 0 to 255");
  const std::string values = data.substr(std::min(at + 1, data.size()));
  if (pixels.width == 0 || pixels.height == 0 || pixels.width > max_bytes / pixels.height / pixels.channels ||
      values.size() < pixels.width * pixels.height * pixels.channels) {
    throw Error("it has too few pixels");
  }
  pixels.values.assign(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(pixels.width * pixels.height * pixels.channels));
  return pixels;
}

#ifdef IMAGE_FILE_STB
inline Pixels parse_by_stb(const std::string& data) {
  if (data.size() > INT_MAX) throw Error("it is too large");
  const auto* bytes = reinterpret_cast<const stbi_uc*>(data.data());
  const int size = static_cast<int>(data.size());
  int width = 0, height = 0, count = 0;
  if (!stbi_info_from_memory(bytes, size, &width, &height, &count)) throw Error("it is no BMP, GIF, JPEG, PNG, PGM or PPM");
  const int channels = count < 3 ? 1 : 3;
  if (width <= 0 || height <= 0 || static_cast<std::size_t>(width) > max_bytes / static_cast<std::size_t>(height * std::int64_t{channels})) {
    throw Error("it has no size, or is too large");
  }
  const std::unique_ptr<stbi_uc, void (*)(void*)> values(stbi_load_from_memory(bytes, size, &width, &height, &count, channels), stbi_image_free);
  if (!values) throw Error(std::string("stb_image.h rejects it: ") + stbi_failure_reason());
  Pixels pixels{static_cast<std::size_t>(height), static_cast<std::size_t>(width), static_cast<std::size_t>(channels), {}};
  pixels.values.assign(values.get(), values.get() + pixels.height * pixels.width * pixels.channels);
  return pixels;
}
#else
inline Pixels parse_by_stb(const std::string&) {
  throw Error("it is no PNG, PGM or PPM; to read BMP, GIF and JPEG, compile with stb_image.h (Debian's libstb-dev)");
}
#endif

}  // namespace detail

// Reads the pixels of a file. Throws Error.
inline Pixels read(const std::string& path) {
  const std::string data = npz::read_file(path);
  try {
    if (data.compare(0, 8, "\x89PNG\r\n\x1a\n") == 0) return detail::parse_png(data);
    if (data.compare(0, 2, "P5") == 0 || data.compare(0, 2, "P6") == 0) return detail::parse_pnm(data);
    return detail::parse_by_stb(data);
  } catch (const Error& error) {
    throw Error(path + " cannot be read as an image: " + error.what());
  }
}

}  // namespace image_file

#endif  // IMAGE_FILE_HPP_
