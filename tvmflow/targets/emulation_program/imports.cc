#include "imports.h"

#include <cstdint>
#include <unordered_map>

// Only functions that are present wherever TVM's runtime is: a library that needs others must fail
// here as it would fail there.
#define TVM_RUNTIME(X)                                                                      \
  X(TVMFFIEnvModLookupFromImports) X(TVMFFIErrorMoveFromRaised) X(TVMFFIErrorSetRaised)     \
  X(TVMFFIErrorSetRaisedFromCStr) X(TVMFFIErrorSetRaisedFromCStrParts) X(TVMFFIFunctionCall) \
  X(TVMFFIFunctionGetGlobal) X(TVMFFIHandleInitOnce) X(TVMFFIHandleDeinitOnce)              \
  X(TVMFFIObjectDecRef) X(TVMFFIObjectIncRef) X(TVMBackendAllocWorkspace)                   \
  X(TVMBackendFreeWorkspace) X(TVMBackendParallelBarrier) X(TVMBackendParallelLaunch)       \
  X(TVMBackendAnyListMoveFromPackedReturn) X(TVMBackendAnyListResetItem)                    \
  X(TVMBackendAnyListSetPackedArg) X(__gnu_f2h_ieee) X(__gnu_h2f_ieee) X(__truncdfhf2)
#define MEMORY(X) X(memcpy) X(memmove) X(memset) X(memcmp) X(abort)
#define MATH(X)                                                                              \
  X(acos) X(acosh) X(asin) X(asinh) X(atan) X(atan2) X(atanh) X(cbrt) X(ceil) X(copysign)    \
  X(cos) X(cosh) X(erf) X(erfc) X(exp) X(exp2) X(expm1) X(fabs) X(floor) X(fma) X(fmax)      \
  X(fmin) X(fmod) X(hypot) X(ldexp) X(lgamma) X(llrint) X(log) X(log10) X(log1p) X(log2)     \
  X(lrint) X(nearbyint) X(nextafter) X(pow) X(rint) X(round) X(sin) X(sinh) X(sqrt) X(tan)   \
  X(tanh) X(tgamma) X(trunc)
#define MATH_FLOAT(X)                                                                          \
  X(acosf) X(acoshf) X(asinf) X(asinhf) X(atanf) X(atan2f) X(atanhf) X(cbrtf) X(ceilf)         \
  X(copysignf) X(cosf) X(coshf) X(erff) X(erfcf) X(expf) X(exp2f) X(expm1f) X(fabsf) X(floorf) \
  X(fmaf) X(fmaxf) X(fminf) X(fmodf) X(hypotf) X(ldexpf) X(lgammaf) X(llrintf) X(logf)         \
  X(log10f) X(log1pf) X(log2f) X(lrintf) X(nearbyintf) X(nextafterf) X(powf) X(rintf)          \
  X(roundf) X(sinf) X(sinhf) X(sqrtf) X(tanf) X(tanhf) X(tgammaf) X(truncf)
#ifdef __arm__
// 32-bit Arm has no instructions for some of C's operators: these functions are in its C library and
// in libgcc_s, which every Linux has.
#define ARM(X)                                                                     \
  X(__aeabi_memcpy) X(__aeabi_memcpy4) X(__aeabi_memcpy8) X(__aeabi_memmove)              \
  X(__aeabi_memmove4) X(__aeabi_memmove8) X(__aeabi_memset) X(__aeabi_memset4)            \
  X(__aeabi_memset8) X(__aeabi_memclr) X(__aeabi_memclr4) X(__aeabi_memclr8)              \
  X(__aeabi_idiv) X(__aeabi_uidiv) X(__aeabi_idivmod) X(__aeabi_uidivmod)                 \
  X(__aeabi_ldivmod) X(__aeabi_uldivmod) X(__aeabi_l2f) X(__aeabi_l2d) X(__aeabi_ul2f)    \
  X(__aeabi_ul2d) X(__aeabi_f2lz) X(__aeabi_f2ulz) X(__aeabi_d2lz) X(__aeabi_d2ulz)       \
  X(__aeabi_llsl) X(__aeabi_llsr) X(__aeabi_lasr)
#else
#define ARM(X)
#endif
#define ALL(X) TVM_RUNTIME(X) MEMORY(X) MATH(X) MATH_FLOAT(X) ARM(X)

// Declared as data: only the addresses matter, and C++ overloads some of these names.
#define DECLARE(name) extern "C" const char import_##name[] __asm__(#name);
ALL(DECLARE)
#undef DECLARE

namespace tvmflow {
namespace {

#ifdef __arm__
// LLVM calls these functions of libgcc_s to divide where it does not recognize the triple as EABI.
template <typename T>
T Quotient(T a, T b) {
  return a / b;
}
template <typename T>
T Remainder(T a, T b) {
  return a % b;
}
template <typename T>
const void* Address(T (*function)(T, T)) {
  return reinterpret_cast<const void*>(function);
}
#endif

}  // namespace

const void* FindImport(const std::string& name) {
#define ENTRY(name) {#name, import_##name},
  static const std::unordered_map<std::string, const void*> imports = {
#ifdef __arm__
      {"__divsi3", Address(Quotient<int32_t>)},    {"__udivsi3", Address(Quotient<uint32_t>)},
      {"__modsi3", Address(Remainder<int32_t>)},   {"__umodsi3", Address(Remainder<uint32_t>)},
      {"__divdi3", Address(Quotient<int64_t>)},    {"__udivdi3", Address(Quotient<uint64_t>)},
      {"__moddi3", Address(Remainder<int64_t>)},   {"__umoddi3", Address(Remainder<uint64_t>)},
#endif
      ALL(ENTRY)};
#undef ENTRY
  const auto entry = imports.find(name);
  return entry == imports.end() ? nullptr : entry->second;
}

}  // namespace tvmflow
