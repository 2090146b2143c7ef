// TVM writes tensors in JSON as base64. The emulation program reads and writes no JSON: a call of this throws.
#ifndef TVM_SUPPORT_BASE64_H_
#define TVM_SUPPORT_BASE64_H_

#include <tvm/support/io.h>

#include <stdexcept>

namespace tvm {
namespace support {

class NoBase64 : public Stream {
 public:
  using Stream::Read;
  using Stream::Write;

  explicit NoBase64(Stream*) {}
  size_t Read(void*, size_t) override { return Fail(); }
  size_t Write(const void*, size_t) override { return Fail(); }
  void InitPosition() {}
  void Finish() {}

 private:
  static size_t Fail() { throw std::logic_error("this runtime has no base64"); }
};

using Base64InStream = NoBase64;
using Base64OutStream = NoBase64;

}  // namespace support
}  // namespace tvm

#endif  // TVM_SUPPORT_BASE64_H_
