// Loads shared libraries into a static executable, which has no dlopen.
#ifndef TVMFLOW_ELF_LIBRARY_H_
#define TVMFLOW_ELF_LIBRARY_H_

#include <tvm/ffi/extra/module.h>

#include <string>

namespace tvmflow {

// The library at `path` as TVM's runtime sees one that dlopen has loaded: its very bytes are
// mapped and relocated. It may call what imports.cc lists. Throws std::runtime_error.
tvm::ffi::Module LoadElfLibrary(const std::string& path);

}  // namespace tvmflow

#endif  // TVMFLOW_ELF_LIBRARY_H_
