// Half precision as 16 bits, under the names in TVM's runtime. With integer arithmetic alone: a compiler
// translates a conversion into a call of the functions that are defined with these.
#ifndef COMPILER_RT_BUILTIN_FP16_H_
#define COMPILER_RT_BUILTIN_FP16_H_

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

// Rounds to the nearest half, ties to even.
template <typename From, typename Bits, int kFraction, typename, typename, int>
inline uint16_t __truncXfYf2__(From value) {
  constexpr int kBits = 8 * sizeof(Bits), kExponentBits = kBits - 1 - kFraction;
  constexpr int kTop = (1 << kExponentBits) - 1, kBias = kTop / 2;
  Bits bits;
  std::memcpy(&bits, &value, sizeof(bits));
  const uint16_t sign = (bits >> (kBits - 16)) & 0x8000;
  const int exponent = static_cast<int>(bits >> kFraction) & kTop;
  Bits fraction = bits & ((Bits{1} << kFraction) - 1);
  if (exponent == kTop) return sign | 0x7C00 | (fraction != 0 ? 0x0200 : 0);
  int half = exponent - kBias + 15;
  int dropped = kFraction - 10;
  if (half >= 31) return sign | 0x7C00;
  if (half < -10) return sign;
  if (half <= 0) {
    // A subnormal number: it has no implicit leading one.
    fraction |= Bits{1} << kFraction;
    dropped += 1 - half;
    half = 0;
  }
  const Bits kept = fraction >> dropped, tie = Bits{1} << (dropped - 1);
  const Bits rest = fraction & ((Bits{1} << dropped) - 1);
  const bool up = rest > tie || (rest == tie && (kept & 1) != 0);
  // The carry continues into the exponent, and from the largest number to infinity.
  return sign | static_cast<uint16_t>((half << 10) + static_cast<int>(kept) + (up ? 1 : 0));
}

template <typename, typename, int, typename To, typename, int>
inline To __extendXfYf2__(uint16_t bits) {
  const int exponent = (bits >> 10) & 31, fraction = bits & 0x03FF;
  To size;
  if (exponent == 31) {
    size = fraction != 0 ? std::numeric_limits<To>::quiet_NaN() : std::numeric_limits<To>::infinity();
  } else {
    size = exponent == 0 ? std::ldexp(To(fraction), -24) : std::ldexp(To(fraction | 0x0400), exponent - 25);
  }
  return std::copysign(size, (bits & 0x8000) != 0 ? To(-1) : To(1));
}

#endif  // COMPILER_RT_BUILTIN_FP16_H_
