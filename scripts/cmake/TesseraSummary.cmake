# What was configured, in a few lines.
get_property(programs GLOBAL PROPERTY TESSERA_PROGRAMS)
list(JOIN programs " " programs)
message(STATUS "Tessera ${PROJECT_VERSION}: ${CMAKE_BUILD_TYPE}, ${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}, "
  "kernels for ${TESSERA_ISAS}")
message(STATUS "  oneDNN    ${TESSERA_dnnl_dnnl}")
message(STATUS "  BLAS      ${TESSERA_blas_openblas}")
message(STATUS "  Gloo      ${TESSERA_gloo_gloo}")
message(STATUS "  Boost     ${Boost_VERSION}, fmt ${fmt_VERSION}, spdlog ${spdlog_VERSION}")
message(STATUS "  compiler cache ${CMAKE_CXX_COMPILER_LAUNCHER}")
message(STATUS "  tests ${TESSERA_BUILD_TESTS}, sanitizers \"${TESSERA_SANITIZE}\", programs ${programs}")
