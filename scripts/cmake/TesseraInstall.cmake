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
install(FILES scripts/cmake/tessera.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/tessera)
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
add_custom_target(tessera_installed DEPENDS ${libraries} ${programs})  # what is built for it
if(TARGET packs)
  add_dependencies(tessera_installed packs)
endif()

# A Debian package of the same files, which scripts/package makes. What the programs link is found by dpkg-shlibdeps; what
# TesseraConfig.cmake looks for is stated.
if(PROJECT_IS_TOP_LEVEL)
  set(found_by_config libdnnl-dev libopenblas-dev liblapacke-dev libgloo-dev libfmt-dev libspdlog-dev libxxhash-dev libpcre2-dev
    libutf8proc-dev)
  if(TESSERA_HAVE_IMAGES)
    list(APPEND found_by_config libjpeg-dev libpng-dev libarchive-dev)
  endif()
  list(JOIN found_by_config ", " CPACK_DEBIAN_PACKAGE_DEPENDS)
  set(CPACK_GENERATOR DEB)
  set(CPACK_PACKAGE_NAME tessera)
  set(CPACK_PACKAGE_CONTACT "The authors of Tessera")
  set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
  set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
  set(CPACK_DEBIAN_PACKAGE_SECTION science)
  set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
  set(CPACK_DEBIAN_PACKAGE_RECOMMENDS "g++, cmake")  # train --compile; programs of one's own
  set(CPACK_VERBATIM_VARIABLES ON)
  include(CPack)
endif()
