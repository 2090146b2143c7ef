# The model @TITLE@ for @TRIPLE@: the target @TITLE@::@TITLE@ has its headers and libraries.
if(TARGET @TITLE@::@TITLE@)
  return()
endif()
set(THREADS_PREFER_PTHREAD_FLAG ON)
find_package(Threads REQUIRED)

get_filename_component(_@PREFIX@_root "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)
function(_@PREFIX@_add_library name kind file import_library)
  add_library(@TITLE@::${name} ${kind} IMPORTED GLOBAL)
  set_target_properties(@TITLE@::${name} PROPERTIES
    IMPORTED_LOCATION "${_@PREFIX@_root}/lib/${file}"
    INTERFACE_COMPILE_FEATURES cxx_std_17
    INTERFACE_INCLUDE_DIRECTORIES "${_@PREFIX@_root}/include"
    INTERFACE_LINK_LIBRARIES "Threads::Threads;$<$<BOOL:${UNIX}>:m>")
  if(import_library)
    set_target_properties(@TITLE@::${name} PROPERTIES IMPORTED_IMPLIB "${_@PREFIX@_root}/lib/${import_library}")
  endif()
endfunction()

@CMAKE_LIBRARIES@

add_library(@TITLE@::@TITLE@ INTERFACE IMPORTED GLOBAL)
set_target_properties(@TITLE@::@TITLE@ PROPERTIES INTERFACE_LINK_LIBRARIES "@CMAKE_LINKED@")
