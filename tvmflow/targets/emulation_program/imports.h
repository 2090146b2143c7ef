// The functions that a library of kernels may call: those of TVM's runtime and of the C library.
#ifndef TVMFLOW_IMPORTS_H_
#define TVMFLOW_IMPORTS_H_

#include <string>

namespace tvmflow {

// Returns the address of a function by its name in C, or null for a function that is not listed.
const void* FindImport(const std::string& name);

}  // namespace tvmflow

#endif  // TVMFLOW_IMPORTS_H_
