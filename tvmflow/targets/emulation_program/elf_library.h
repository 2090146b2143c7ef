// Loads shared libraries into a static executable, which has no dlopen.
#ifndef TVMFLOW_ELF_LIBRARY_H_
#define TVMFLOW_ELF_LIBRARY_H_

#include <tvm/ffi/extra/module.h>

#include <string>

namespace tvmflow {

// Loads the library at `path` as dlopen does: its bytes are mapped and relocated. It may call the
// functions that imports.cc lists. Throws std::runtime_error.
tvm::ffi::Module LoadElfLibrary(const std::string& path);

}  // namespace tvmflow

#endif  // TVMFLOW_ELF_LIBRARY_H_
