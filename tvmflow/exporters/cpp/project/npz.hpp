// Reads and writes NumPy's .npz files, uncompressed ones, as numpy.savez makes them.
#ifndef NPZ_HPP_
#define NPZ_HPP_

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

namespace npz {

// An error whose what() is a message for people.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// An array in C order.
struct Array {
  std::vector<int64_t> shape;
  std::string dtype;
  std::string values;
};

inline std::string read_file(const std::string& path) {
  std::ifstream stream(path, std::ios::binary);
  if (!stream) throw Error("there is no file " + path);
  return {std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>()};
}

namespace detail {

// NumPy's type codes -> dtypes.
inline const std::map<std::string, std::string>& numpy_types() {
  static const std::map<std::string, std::string> types = {
      {"|b1", "bool"},   {"|i1", "int8"},    {"<i2", "int16"},   {"<i4", "int32"},
      {"<i8", "int64"},  {"|u1", "uint8"},   {"<u2", "uint16"},  {"<u4", "uint32"},
      {"<u8", "uint64"}, {"<f2", "float16"}, {"<f4", "float32"}, {"<f8", "float64"}};
  return types;
}

inline std::size_t number_at(const std::string& data, std::size_t at, std::size_t bytes) {
  if (at + bytes > data.size()) throw Error("the file ends too early");
  std::size_t value = 0;
  for (std::size_t i = bytes; i-- > 0;) value = value << 8 | static_cast<unsigned char>(data[at + i]);
  return value;
}

inline void append(std::string& data, uint64_t value, int bytes) {
  for (int i = 0; i < bytes; ++i) data += static_cast<char>(value >> 8 * i & 0xff);
}

inline uint32_t crc32(const std::string& data) {
  static const auto table = [] {
    std::array<uint32_t, 256> entries{};
    for (uint32_t i = 0; i < 256; ++i) {
      uint32_t value = i;
      for (int bit = 0; bit < 8; ++bit) value = value & 1 ? value >> 1 ^ 0xEDB88320u : value >> 1;
      entries[i] = value;
    }
    return entries;
  }();
  uint32_t value = 0xFFFFFFFFu;
  for (char byte : data) value = value >> 8 ^ table[(value ^ static_cast<unsigned char>(byte)) & 0xff];
  return value ^ 0xFFFFFFFFu;
}

// The text between `before` and `after` in the header of an array.
inline std::string between(const std::string& text, const std::string& before, char after) {
  std::size_t start = text.find(before);
  if (start == std::string::npos) throw Error("an array has no " + before);
  start += before.size();
  return text.substr(start, text.find(after, start) - start);
}

inline Array parse_npy(const std::string& data) {
  if (data.compare(0, 6, "\x93NUMPY") != 0) throw Error("an entry is not an array");
  const std::size_t width = number_at(data, 6, 1) == 1 ? 2 : 4;
  const std::size_t length = number_at(data, 8, width), start = 8 + width + length;
  const std::string header = data.substr(8 + width, length);
  Array array;
  const std::string code = between(header, "'descr': '", '\'');
  const auto type = numpy_types().find(code);
  if (type == numpy_types().end()) throw Error("arrays of type " + code + " are not supported");
  array.dtype = type->second;
  const std::string order = between(header, "'fortran_order': ", ',');
  std::string sizes = between(header, "'shape': (", ')');
  for (const char* at = sizes.c_str(); *at;) {
    char* end = nullptr;
    const long long size = std::strtoll(at, &end, 10);
    if (end == at) break;
    array.shape.push_back(size);
    at = *end == ',' ? end + 1 : end;
  }
  if (order != "False" && array.shape.size() > 1) {
    throw Error("an array is in Fortran order: save numpy.ascontiguousarray of it");
  }
  array.values = data.substr(start);
  std::size_t bytes = static_cast<std::size_t>(code.back() - '0');
  for (int64_t size : array.shape) bytes *= static_cast<std::size_t>(size);
  if (array.values.size() != bytes) throw Error("an array is not complete");
  return array;
}

inline std::string format_npy(const Array& array) {
  std::string code;
  for (const auto& type : numpy_types()) {
    if (type.second == array.dtype) code = type.first;
  }
  if (code.empty()) throw Error("NumPy has no type " + array.dtype);
  std::string header = "{'descr': '" + code + "', 'fortran_order': False, 'shape': (";
  for (int64_t size : array.shape) header += std::to_string(size) + ", ";
  header += "), }";
  header += std::string(63 - (10 + header.size()) % 64, ' ') + '\n';
  std::string data = "\x93NUMPY";
  append(data, 1, 2);
  append(data, header.size(), 2);
  return data + header + array.values;
}

}  // namespace detail

// Reads the arrays of a file by name. Throws Error, also for a compressed file.
inline std::map<std::string, Array> read(const std::string& path) {
  using detail::number_at;
  const std::string data = read_file(path);
  try {
    const std::size_t end = data.rfind("PK\x05\x06");
    if (end == std::string::npos) throw Error("it is not a zip");
    const std::size_t count = number_at(data, end + 10, 2);
    std::size_t at = number_at(data, end + 16, 4);
    std::map<std::string, Array> arrays;
    for (std::size_t i = 0; i < count; ++i) {
      if (number_at(data, at, 4) != 0x02014b50) throw Error("its table of contents is damaged");
      if (number_at(data, at + 10, 2) != 0) throw Error("it is compressed: write it with numpy.savez");
      const std::size_t size = number_at(data, at + 24, 4), length = number_at(data, at + 28, 2);
      const std::size_t skip = number_at(data, at + 30, 2) + number_at(data, at + 32, 2);
      const std::size_t entry = number_at(data, at + 42, 4);
      if (size == 0xffffffff || entry == 0xffffffff) throw Error("it is larger than 4 GB");
      const std::string name = data.substr(at + 46, length);
      const std::size_t content =
          entry + 30 + number_at(data, entry + 26, 2) + number_at(data, entry + 28, 2);
      if (content + size > data.size()) throw Error("it ends too early");
      const std::string bytes = data.substr(content, size);
      if (detail::crc32(bytes) != number_at(data, at + 16, 4)) throw Error(name + " is damaged");
      const bool suffixed = name.size() > 4 && name.compare(name.size() - 4, 4, ".npy") == 0;
      arrays[suffixed ? name.substr(0, name.size() - 4) : name] = detail::parse_npy(bytes);
      at += 46 + length + skip;
    }
    return arrays;
  } catch (const Error& error) {
    throw Error(path + " cannot be read as npz: " + error.what());
  }
}

// Writes arrays as numpy.load reads them.
inline void write(const std::string& path, const std::map<std::string, Array>& arrays) {
  using detail::append;
  std::string data, table;
  for (const auto& entry : arrays) {
    const std::string name = entry.first + ".npy", bytes = detail::format_npy(entry.second);
    if (bytes.size() >= 0xffffffff || data.size() >= 0xffffffff) {
      throw Error(path + " would be larger than 4 GB");
    }
    std::string common;
    append(common, 20, 2);          // required version
    append(common, 0x800, 2);       // names are UTF-8
    append(common, 0, 2);           // not compressed
    append(common, 0x00210000, 4);  // 1 January 1980
    append(common, detail::crc32(bytes), 4);
    append(common, bytes.size(), 4);
    append(common, bytes.size(), 4);
    append(common, name.size(), 2);
    append(common, 0, 2);
    append(table, 0x02014b50, 4);
    append(table, 20, 2);
    table += common;
    append(table, 0, 6);  // no comment, first disk, no internal attributes
    append(table, 0, 4);  // no external attributes
    append(table, data.size(), 4);
    table += name;
    append(data, 0x04034b50, 4);
    data += common + name + bytes;
  }
  const std::size_t start = data.size();
  data += table;
  append(data, 0x06054b50, 4);
  append(data, 0, 4);
  append(data, arrays.size(), 2);
  append(data, arrays.size(), 2);
  append(data, table.size(), 4);
  append(data, start, 4);
  append(data, 0, 2);
  std::ofstream stream(path, std::ios::binary);
  stream.write(data.data(), static_cast<std::streamsize>(data.size()));
  if (!stream.flush()) throw Error(path + " cannot be written");
}

}  // namespace npz

#endif  // NPZ_HPP_
