// What a library of kernels may call: TVM's runtime and the C library.
#ifndef TVMFLOW_IMPORTS_H_
#define TVMFLOW_IMPORTS_H_

#include <string>

namespace tvmflow {

// The address of a function by its name in C; null for one that is not listed.
const void* FindImport(const std::string& name);

}  // namespace tvmflow

#endif  // TVMFLOW_IMPORTS_H_
