# The vendor's headers and NVRTC: of a toolkit, or of the wheels that scripts/install-packages --cuda brings. Programs load the
# libraries when they ask for them (core/backend/cuda/library.h); the build needs them for two things that it can do without:
# a test that compares our declarations with the vendor's, and packs of compiled kernels.
if(NOT TESSERA_WITH_CUDA)
  return()
endif()
file(GLOB wheels LIST_DIRECTORIES TRUE "$ENV{HOME}/.local/share/tessera/cuda/nvidia/*")
set(hints ${CUDAToolkit_ROOT} $ENV{CUDAToolkit_ROOT} $ENV{CUDA_PATH} $ENV{CUDA_HOME})
find_path(TESSERA_CUDA_INCLUDE cuda.h HINTS ${hints} PATHS /usr/local/cuda ${wheels} PATH_SUFFIXES include)
find_path(TESSERA_NVRTC_INCLUDE nvrtc.h HINTS ${hints} PATHS /usr/local/cuda ${wheels} PATH_SUFFIXES include)
find_path(TESSERA_NCCL_INCLUDE nccl.h HINTS ${hints} PATHS /usr/local/cuda ${wheels} PATH_SUFFIXES include)
find_library(TESSERA_NCCL_LIBRARY NAMES libnccl.so.2 HINTS ${hints} PATHS /usr/local/cuda ${wheels} PATH_SUFFIXES lib lib64)
find_library(TESSERA_NVRTC_LIBRARY NAMES libnvrtc.so.13 libnvrtc.so.12 nvrtc HINTS ${hints} PATHS /usr/local/cuda ${wheels}
  PATH_SUFFIXES lib lib64)
# For a test that asks the real library whether it takes our graphs (tests/scripts/cudnn_without_a_card).
find_library(TESSERA_CUDNN_LIBRARY NAMES libcudnn.so.9 HINTS ${hints} PATHS /usr/local/cuda ${wheels} PATH_SUFFIXES lib lib64)
find_file(TESSERA_CUDA_STUB NAMES libcuda.so HINTS ${hints} PATHS /usr/local/cuda PATH_SUFFIXES lib64/stubs lib/stubs)
mark_as_advanced(TESSERA_CUDA_INCLUDE TESSERA_NVRTC_INCLUDE TESSERA_NVRTC_LIBRARY TESSERA_NCCL_INCLUDE
  TESSERA_NCCL_LIBRARY TESSERA_CUDNN_LIBRARY TESSERA_CUDA_STUB)

set(how "scripts/install-packages --cuda brings it, or set CUDAToolkit_ROOT to a toolkit")
if(TESSERA_CUDA_PACKS STREQUAL "ON" AND NOT TESSERA_NVRTC_LIBRARY)
  message(FATAL_ERROR "Tessera: TESSERA_CUDA_PACKS=ON, but there is no NVRTC; ${how}")
elseif(PROJECT_IS_TOP_LEVEL AND TESSERA_NVRTC_LIBRARY AND NOT TESSERA_CUDA_PACKS STREQUAL "OFF")
  set(TESSERA_HAVE_PACKS TRUE)
endif()

# tessera_packs(architectures...): the target `packs` makes share/tessera/sm_90.pack and others in the build: all kernels of the
# CUDA backend as code for these cards, with which programs start at once, and on machines without NVRTC. It takes minutes, so
# that no other target depends on it but what is packaged; installing takes along the packs that are there. Kernels whose texts
# have not changed are taken from the packs that were there.
function(tessera_packs)
  if(NOT TESSERA_HAVE_PACKS)
    return()
  endif()
  set(folder ${CMAKE_CURRENT_BINARY_DIR}/share/tessera)
  list(TRANSFORM ARGN REPLACE "(.+)" "${folder}/\\1.pack" OUTPUT_VARIABLE packs)
  add_executable(make_packs EXCLUDE_FROM_ALL scripts/cmake/make_packs.cpp)
  target_link_libraries(make_packs PRIVATE tessera_flags tessera_core)
  cmake_path(GET TESSERA_NVRTC_LIBRARY PARENT_PATH libraries)
  add_custom_command(OUTPUT ${packs} DEPENDS make_packs VERBATIM USES_TERMINAL COMMENT "Compiling kernels for ${ARGN}"
    COMMAND ${CMAKE_COMMAND} -E env TESSERA_CUDA_LIBRARIES=${libraries} $<TARGET_FILE:make_packs> ${folder} ${ARGN})
  add_custom_target(packs DEPENDS ${packs})
  if(TESSERA_INSTALL)
    install(FILES ${packs} DESTINATION ${CMAKE_INSTALL_DATADIR}/tessera OPTIONAL)
  endif()
endfunction()
