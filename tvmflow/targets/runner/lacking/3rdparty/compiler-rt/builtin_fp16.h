// Half precision as 16 bits, converted by the compiler, under the names that TVM's runtime has for it.
#ifndef COMPILER_RT_BUILTIN_FP16_H_
#define COMPILER_RT_BUILTIN_FP16_H_

#include <cstdint>
#include <cstring>

template <typename From, typename, int, typename, typename, int>
inline uint16_t __truncXfYf2__(From value) {
  const _Float16 half = static_cast<_Float16>(value);
  uint16_t bits;
  std::memcpy(&bits, &half, sizeof(bits));
  return bits;
}

template <typename, typename, int, typename To, typename, int>
inline To __extendXfYf2__(uint16_t bits) {
  _Float16 half;
  std::memcpy(&half, &bits, sizeof(half));
  return static_cast<To>(half);
}

#endif  // COMPILER_RT_BUILTIN_FP16_H_
