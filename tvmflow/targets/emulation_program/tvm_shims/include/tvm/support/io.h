// Streams as the sources of TVM's runtime use them; its wheel lacks this header.
#ifndef TVM_SUPPORT_IO_H_
#define TVM_SUPPORT_IO_H_

#include <tvm/ffi/endian.h>

#include <cstddef>
#include <cstdint>

namespace tvm {
namespace support {

static_assert(TVM_FFI_IO_NO_ENDIAN_SWAP, "what TVM writes is little-endian, and so is what reads here");

// The serialization of a value: see serializer.h.
template <typename T, typename = void>
struct Serializer;

class Stream {
 public:
  virtual ~Stream() = default;

  // Read or write up to `size` bytes, and return how many.
  virtual size_t Read(void* data, size_t size) = 0;
  virtual size_t Write(const void* data, size_t size) = 0;

  template <typename T>
  void Write(const T& value) {
    Serializer<T>::Write(this, value);
  }
  template <typename T>
  bool Read(T* value) {
    return Serializer<T>::Read(this, value);
  }

  template <typename T>
  void WriteArray(const T* values, size_t count) {
    for (size_t i = 0; i < count; ++i) Write(values[i]);
  }
  template <typename T>
  bool ReadArray(T* values, size_t count) {
    for (size_t i = 0; i < count; ++i) {
      if (!Read(values + i)) return false;
    }
    return true;
  }
};

}  // namespace support
}  // namespace tvm

#endif  // TVM_SUPPORT_IO_H_
