# Libraries that come without a usable CMake package, found as header and library, each an imported target tessera::name.
# Included by the build and, from the install tree, by TesseraConfig.cmake.

# tessera_find_library(name header library... [SUFFIXES dirs...])
function(tessera_find_library name header)
  if(TARGET tessera::${name})
    return()
  endif()
  cmake_parse_arguments(A "" "" "SUFFIXES" ${ARGN})
  find_path(TESSERA_${name}_INCLUDE ${header} PATH_SUFFIXES ${A_SUFFIXES})
  set(files)
  foreach(library IN LISTS A_UNPARSED_ARGUMENTS)
    find_library(TESSERA_${name}_${library} ${library} PATH_SUFFIXES ${A_SUFFIXES})
    list(APPEND files ${TESSERA_${name}_${library}})
    mark_as_advanced(TESSERA_${name}_${library})
  endforeach()
  mark_as_advanced(TESSERA_${name}_INCLUDE)
  if(NOT TESSERA_${name}_INCLUDE OR "${files}" MATCHES "NOTFOUND")
    message(FATAL_ERROR "Tessera: ${name} not found (header ${header}, library ${A_UNPARSED_ARGUMENTS}); "
      "on Debian and Ubuntu run scripts/install-packages, elsewhere set CMAKE_PREFIX_PATH")
  endif()
  add_library(tessera::${name} INTERFACE IMPORTED GLOBAL)
  set_target_properties(tessera::${name} PROPERTIES
    INTERFACE_INCLUDE_DIRECTORIES "${TESSERA_${name}_INCLUDE}" INTERFACE_LINK_LIBRARIES "${files}")
endfunction()

# Debian's dnnl-config.cmake asks for OpenCL, which nothing here needs.
tessera_find_library(dnnl oneapi/dnnl/dnnl.hpp dnnl)
tessera_find_library(blas cblas.h openblas lapacke SUFFIXES openblas-openmp openblas-pthread openblas)
tessera_find_library(gloo gloo/context.h gloo)
tessera_find_library(xxhash xxhash.h xxhash)
tessera_find_library(pcre2 pcre2.h pcre2-8)
tessera_find_library(utf8proc utf8proc.h utf8proc)
