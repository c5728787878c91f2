# What `cmake --install` puts down: libraries, headers under include/tessera in the layout of this repository, the
# programs, and the package that find_package(Tessera) reads.
if(NOT TESSERA_INSTALL)
  return()
endif()
include(CMakePackageConfigHelpers)
get_property(libraries GLOBAL PROPERTY TESSERA_LIBRARIES)
get_property(programs GLOBAL PROPERTY TESSERA_PROGRAMS)
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/Tessera)

install(TARGETS ${libraries} EXPORT TesseraTargets FILE_SET HEADERS DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/tessera)
install(EXPORT TesseraTargets NAMESPACE tessera:: DESTINATION ${package_dir})
if(programs)
  install(TARGETS ${programs})
endif()

set(config ${CMAKE_CURRENT_BINARY_DIR}/TesseraConfig.cmake)
set(config_version ${CMAKE_CURRENT_BINARY_DIR}/TesseraConfigVersion.cmake)
configure_package_config_file(scripts/cmake/TesseraConfig.cmake.in ${config} INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(${config_version} COMPATIBILITY SameMajorVersion)
install(FILES ${config} ${config_version} scripts/cmake/TesseraLibraries.cmake DESTINATION ${package_dir})
install(FILES LICENSE README.md DESTINATION ${CMAKE_INSTALL_DOCDIR})
