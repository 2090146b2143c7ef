// TVM's serialization of values: numbers as in memory; values with a length after its 64 bits.
#ifndef TVM_SUPPORT_SERIALIZER_H_
#define TVM_SUPPORT_SERIALIZER_H_

#include <dlpack/dlpack.h>
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/string.h>
#include <tvm/support/io.h>

#include <string>
#include <type_traits>
#include <vector>

namespace tvm {
namespace support {

// Numbers, enumerations, and the structures of DLPack, which have no padding.
template <typename T>
inline constexpr bool is_plain = std::is_arithmetic_v<T> || std::is_enum_v<T> ||
                                 std::is_same_v<T, DLDataType> || std::is_same_v<T, DLDevice>;

template <typename T>
struct Serializer<T, std::enable_if_t<is_plain<T>>> {
  static void Write(Stream* stream, const T& value) { stream->Write(&value, sizeof(T)); }
  static bool Read(Stream* stream, T* value) {
    return stream->Read(static_cast<void*>(value), sizeof(T)) == sizeof(T);
  }
};

template <>
struct Serializer<std::string> {
  static void Write(Stream* stream, const std::string& text) {
    stream->Write(static_cast<uint64_t>(text.size()));
    stream->Write(text.data(), text.size());
  }
  static bool Read(Stream* stream, std::string* text) {
    uint64_t size;
    if (!stream->Read(&size)) return false;
    text->resize(size);
    return stream->Read(static_cast<void*>(text->data()), size) == size;
  }
};

template <>
struct Serializer<ffi::String> {
  static void Write(Stream* stream, const ffi::String& text) { stream->Write(std::string(text)); }
  static bool Read(Stream* stream, ffi::String* text) {
    std::string plain;
    if (!stream->Read(&plain)) return false;
    *text = plain;
    return true;
  }
};

template <typename T>
struct Serializer<std::vector<T>> {
  static void Write(Stream* stream, const std::vector<T>& values) {
    stream->Write(static_cast<uint64_t>(values.size()));
    stream->WriteArray(values.data(), values.size());
  }
  static bool Read(Stream* stream, std::vector<T>* values) {
    uint64_t size;
    if (!stream->Read(&size)) return false;
    values->resize(size);
    return stream->ReadArray(values->data(), size);
  }
};

template <typename T>
struct Serializer<ffi::Array<T>> {
  static void Write(Stream* stream, const ffi::Array<T>& values) {
    stream->Write(std::vector<T>(values.begin(), values.end()));
  }
  static bool Read(Stream* stream, ffi::Array<T>* values) {
    std::vector<T> plain;
    if (!stream->Read(&plain)) return false;
    *values = ffi::Array<T>(plain.begin(), plain.end());
    return true;
  }
};

}  // namespace support
}  // namespace tvm

#endif  // TVM_SUPPORT_SERIALIZER_H_
