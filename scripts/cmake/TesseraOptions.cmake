# Flags and the functions with which every target of Tessera is declared. Nothing here touches global flags, so a
# project that adds Tessera by add_subdirectory keeps its own.

if(CMAKE_CXX_COMPILER_ID STREQUAL "Clang" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 16)
  message(FATAL_ERROR "Tessera: Clang ${CMAKE_CXX_COMPILER_VERSION} has no std::source_location; "
    "give -DCMAKE_CXX_COMPILER=g++ (12 or later) or clang++ (16 or later)")
endif()
# Files call themselves by their paths in the tree, so that checkouts in several folders give the same program and the same
# build id. The second prefix is for ccache, which gives the compiler paths relative to the build folder.
set(source_prefixes -fmacro-prefix-map=${PROJECT_SOURCE_DIR}/=)
file(RELATIVE_PATH core_from_build ${CMAKE_BINARY_DIR} ${PROJECT_SOURCE_DIR}/core)
if(core_from_build MATCHES "^(.+/)core$")
  list(APPEND source_prefixes -fmacro-prefix-map=${CMAKE_MATCH_1}=)
endif()
add_library(tessera_flags INTERFACE)
target_compile_features(tessera_flags INTERFACE cxx_std_20)
# Files that are compiled together warn of other things than each does alone, as GCC 12 of its own inlining at -O1, and of a class
# with members from an unnamed namespace, as if another file could see it: there a warning is none.
set(werror $<$<AND:$<BOOL:${PROJECT_IS_TOP_LEVEL}>,$<NOT:$<BOOL:${CMAKE_UNITY_BUILD}>>>:-Werror>)
set(unity_warnings $<$<AND:$<CXX_COMPILER_ID:GNU>,$<BOOL:${CMAKE_UNITY_BUILD}>>:-Wno-subobject-linkage$<SEMICOLON>-Wno-maybe-uninitialized>)
target_compile_options(tessera_flags INTERFACE -Wall -Wextra ${werror} ${unity_warnings} -ffp-contract=off -fno-math-errno
  -fvisibility-inlines-hidden
  ${source_prefixes}
  -falign-functions=64  # a cache line: by default, what is linked before moves the time of an op's dispatch by 7 %
  $<$<CXX_COMPILER_ID:Clang>:-Wno-unknown-pragmas$<SEMICOLON>-Wno-unknown-attributes>  # GCC's ivdep and optimize
  $<$<CXX_COMPILER_ID:GNU>:-Wno-restrict>)  # GCC 12 warns of its own std::string (bug 105651)
target_link_options(tessera_flags INTERFACE -Wl,--build-id=sha1)  # core/base/version.h
foreach(sanitizer IN LISTS TESSERA_SANITIZE)
  target_compile_options(tessera_flags INTERFACE -fsanitize=${sanitizer})
  target_link_options(tessera_flags INTERFACE -fsanitize=${sanitizer})
endforeach()
if(TESSERA_SANITIZE)
  # -O1 is last on the command line and holds for kernels too: -O3 takes two to four times as long to compile, and instrumented
  # loops are not vector code anyway. The library's own bounds checks find what stays inside one allocation.
  # GCC's own headers (regex) warn of uninitialised values once they are instrumented: GCC bug 105562.
  target_compile_options(tessera_flags INTERFACE -O1 -fno-omit-frame-pointer -g1 -Wno-maybe-uninitialized)
  target_compile_definitions(tessera_flags INTERFACE _GLIBCXX_ASSERTIONS)
endif()

find_program(CCACHE_PROGRAM ccache)
if(CCACHE_PROGRAM AND PROJECT_IS_TOP_LEVEL AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  # Paths relative to the tree, so that every checkout of it finds what another one has compiled. What is sloppy is what
  # precompiled headers need: they use neither __DATE__ nor __TIME__, nor macros of a command line.
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env CCACHE_BASEDIR=${PROJECT_SOURCE_DIR} CCACHE_NOHASHDIR=1
    CCACHE_SLOPPINESS=pch_defines,time_macros ${CCACHE_PROGRAM})
endif()
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}/bin)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
if(BUILD_SHARED_LIBS AND NOT DEFINED CMAKE_INSTALL_RPATH)
  file(RELATIVE_PATH bin_to_lib ${CMAKE_INSTALL_FULL_BINDIR} ${CMAKE_INSTALL_FULL_LIBDIR})
  set(CMAKE_INSTALL_RPATH $ORIGIN $ORIGIN/${bin_to_lib})
endif()

# Expands files and folders (folders recursively) to a list of files that end in .`extension`.
function(tessera_sources out extension)
  set(files)
  foreach(path IN LISTS ARGN)
    if(path MATCHES "\\.${extension}$")
      list(APPEND files ${PROJECT_SOURCE_DIR}/${path})
    else()
      file(GLOB_RECURSE found CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/${path}/*.${extension})
      list(APPEND files ${found})
    endif()
  endforeach()
  list(REMOVE_DUPLICATES files)
  set(${out} ${files} PARENT_SCOPE)
endfunction()

# Links `target` to Tessera targets by short name (core) and to others by their own.
function(tessera_link target visibility)
  foreach(name IN LISTS ARGN)
    if(TARGET tessera_${name} AND NOT TARGET ${name})
      target_link_libraries(${target} ${visibility} tessera_${name})
    else()
      target_link_libraries(${target} ${visibility} ${name})
    endif()
  endforeach()
endfunction()

# tessera_precompile(target PRIVATE headers... | REUSE_FROM target): headers of other libraries that most files of a program
# include are read once for the program. Files include what they use all the same: scripts/sanitize builds without
# (CMAKE_DISABLE_PRECOMPILE_HEADERS). CLI11 is none of them: its constants are objects of every file that sees them, whose code
# takes four seconds to generate.
set(TESSERA_STANDARD_HEADERS <algorithm> <array> <atomic> <charconv> <chrono> <cmath> <cstring> <functional> <map> <memory>
  <mutex> <optional> <span> <string> <string_view> <unordered_map> <utility> <vector> <fmt/format.h>)
function(tessera_precompile target)
  target_precompile_headers(${target} ${ARGN})
  # GCC 12 warns of its own std::string (bug 105651), more often where it comes from there.
  if(NOT CMAKE_DISABLE_PRECOMPILE_HEADERS)
    target_compile_options(${target} PRIVATE $<$<CXX_COMPILER_ID:GNU>:-Wno-stringop-overflow -Wno-array-bounds>)
  endif()
endfunction()

# tessera_units(target files...): with CMAKE_UNITY_BUILD, up to twelve files of a folder are compiled as one unit, which reads
# headers once and takes a quarter of the time. Files whose unnamed namespaces define the same name go to different units.
# Without CMAKE_UNITY_BUILD nothing changes.
function(tessera_units target)
  if(NOT CMAKE_UNITY_BUILD)
    return()
  endif()
  set_target_properties(${target} PROPERTIES UNITY_BUILD_MODE GROUP)
  string(ASCII 1 begin)
  string(ASCII 2 end)
  set(word "[A-Za-z0-9_]+")
  set(type "\n[A-Za-z][A-Za-z0-9_:<>,&* ]*[ *&]")
  foreach(file IN LISTS ARGN)
    file(READ ${file} text)
    string(REPLACE "\nnamespace {\n" "${begin}" text "${text}")
    string(REPLACE "\n}  // namespace\n" "${end}" text "${text}")
    string(REGEX MATCHALL "${begin}[^${end}]*" text "${text}")
    string(REGEX MATCHALL "\n(struct|class|enum class|enum|union) ${word}|${type}${word}[(={]|${type}k${word}" names "${text}")
    list(TRANSFORM names REPLACE "^.*[ *&](${word})[(={]?$" "\\1")
    list(REMOVE_DUPLICATES names)
    cmake_path(GET file PARENT_PATH folder)
    cmake_path(RELATIVE_PATH folder BASE_DIRECTORY ${PROJECT_SOURCE_DIR})
    string(REPLACE "/" "_" folder ${folder})
    foreach(unit RANGE 1000)
      set(together ${names} ${names_${folder}_${unit}})
      list(LENGTH together all)
      list(REMOVE_DUPLICATES together)
      list(LENGTH together different)
      list(LENGTH files_${folder}_${unit} size)
      if(all EQUAL different AND size LESS 12)
        set(names_${folder}_${unit} ${together})
        list(APPEND files_${folder}_${unit} ${file})
        set_property(SOURCE ${file} PROPERTY UNITY_GROUP ${folder}_${unit})
        break()
      endif()
    endforeach()
  endforeach()
endfunction()

# What is installed follows from what headers include.
tessera_headers(${PROJECT_SOURCE_DIR} headers)
set(TESSERA_INSTALLED_HEADERS ${headers_PUBLIC} ${headers_INTERNAL})
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS scripts/cmake/public_headers.txt ${TESSERA_INSTALLED_HEADERS})

# tessera_library(name SOURCES dirs... [EXCLUDE regex] [DEPENDS ...] [PRIVATE_DEPENDS ...] [BUILD_DEPENDS ...]): target
# tessera_name, alias tessera::name. DEPENDS: seen in its headers; PRIVATE_DEPENDS: linked; BUILD_DEPENDS: headers only.
function(tessera_library name)
  cmake_parse_arguments(A "" "EXCLUDE" "SOURCES;DEPENDS;PRIVATE_DEPENDS;BUILD_DEPENDS" ${ARGN})
  tessera_sources(files cpp ${A_SOURCES})
  list(JOIN A_SOURCES "|" sources)
  set(headers ${TESSERA_INSTALLED_HEADERS})
  list(FILTER headers INCLUDE REGEX "^(${sources})(/|$)")
  list(TRANSFORM headers PREPEND ${PROJECT_SOURCE_DIR}/)
  list(FILTER files EXCLUDE REGEX "/(cpu|collectives)/kernels/")
  if(A_EXCLUDE)
    list(FILTER files EXCLUDE REGEX ${A_EXCLUDE})
    list(FILTER headers EXCLUDE REGEX ${A_EXCLUDE})
  endif()
  if(NOT files)
    set(files ${PROJECT_SOURCE_DIR}/scripts/cmake/empty.cpp)
  endif()
  add_library(tessera_${name} ${files})
  add_library(tessera::${name} ALIAS tessera_${name})
  tessera_units(tessera_${name} ${files})
  target_sources(tessera_${name} PUBLIC FILE_SET HEADERS BASE_DIRS ${PROJECT_SOURCE_DIR} FILES ${headers})
  target_compile_features(tessera_${name} PUBLIC cxx_std_20)
  target_link_libraries(tessera_${name} PRIVATE $<BUILD_INTERFACE:tessera_flags>)
  foreach(target IN LISTS A_BUILD_DEPENDS)
    target_link_libraries(tessera_${name} PRIVATE $<BUILD_INTERFACE:${target}>)
  endforeach()
  set_target_properties(tessera_${name} PROPERTIES EXPORT_NAME ${name}
    VERSION ${PROJECT_VERSION} SOVERSION ${PROJECT_VERSION_MAJOR})
  tessera_link(tessera_${name} PUBLIC ${A_DEPENDS})
  tessera_link(tessera_${name} PRIVATE ${A_PRIVATE_DEPENDS})
  set_property(GLOBAL APPEND PROPERTY TESSERA_LIBRARIES tessera_${name})
endfunction()

# What TESSERA_KERNELS=native means on this machine: base, v3 or v4, as core/base/isa.cpp chooses. Linux leaves out of /proc/cpuinfo
# what it does not save when it changes threads.
function(tessera_native_isa out)
  file(READ /proc/cpuinfo processor)
  set(isa base)
  set(wants_v3 avx avx2 bmi1 bmi2 f16c fma abm movbe)
  set(wants_v4 avx512f avx512bw avx512cd avx512dq avx512vl)
  foreach(set v3 v4)
    foreach(flag IN LISTS wants_${set})
      if(NOT processor MATCHES "[ \t]${flag}[ \n]")
        set(${out} ${isa} PARENT_SCOPE)
        return()
      endif()
    endforeach()
    set(isa ${set})
  endforeach()
  set(${out} ${isa} PARENT_SCOPE)
endfunction()

# Compiles the kernels of a folder once per instruction set, with TESSERA_ISA naming the namespace they live in; which
# set runs is chosen once at start.
function(tessera_isa_kernels name dir)
  file(GLOB files CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/${dir}/*.cpp)
  set(flags_base "")
  set(flags_v3 -march=x86-64-v3)
  set(flags_v4 -march=x86-64-v4 -mprefer-vector-width=512)
  set(sets base)
  if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
    set(sets base v3 v4)
  endif()
  if(TESSERA_KERNELS STREQUAL "native")
    tessera_native_isa(sets)
    target_compile_definitions(tessera_flags INTERFACE TESSERA_ONLY_ISA=${sets})
  endif()
  # The frames with which the address sanitizer detects use after return are less aligned than GCC 12 believes: it stores
  # to them with 64-byte aligned instructions, which fault.
  set(no_fake_frames $<$<AND:$<CXX_COMPILER_ID:GNU>,$<IN_LIST:address,${TESSERA_SANITIZE}>>:--param=asan-use-after-return=0>)
  list(JOIN sets " " names)
  set(TESSERA_ISAS ${names} PARENT_SCOPE)
  set(objects)
  foreach(isa IN LISTS sets)
    list(APPEND objects $<TARGET_OBJECTS:tessera_${name}_kernels_${isa}>)
    add_library(tessera_${name}_kernels_${isa} OBJECT ${files})
    set_target_properties(tessera_${name}_kernels_${isa} PROPERTIES UNITY_BUILD OFF)
    target_include_directories(tessera_${name}_kernels_${isa} PRIVATE ${PROJECT_SOURCE_DIR})
    target_compile_definitions(tessera_${name}_kernels_${isa} PRIVATE TESSERA_ISA=${isa})
    target_compile_options(tessera_${name}_kernels_${isa} PRIVATE -O3 -fno-trapping-math -fwrapv ${flags_${isa}}
      ${no_fake_frames})
    target_link_libraries(tessera_${name}_kernels_${isa} PRIVATE tessera_flags)
    target_sources(tessera_${name} PRIVATE $<TARGET_OBJECTS:tessera_${name}_kernels_${isa}>)
  endforeach()
  set(TESSERA_KERNEL_OBJECTS ${TESSERA_KERNEL_OBJECTS} ${objects} PARENT_SCOPE)  # the tests look at their symbols
endfunction()

# tessera_embed_texts(name HEADER header ARRAY namespace type array count FILES files... INCLUDED files...): compiles paths and
# texts of the first files into tessera_`name`, as an array that the header declares. They include the others, whose texts are
# put in place of the directives.
function(tessera_embed_texts name)
  cmake_parse_arguments(A "" "HEADER" "ARRAY;FILES;INCLUDED" ${ARGN})
  list(JOIN A_FILES "|" files)
  list(TRANSFORM A_FILES PREPEND ${PROJECT_SOURCE_DIR}/ OUTPUT_VARIABLE paths)
  list(TRANSFORM A_INCLUDED PREPEND ${PROJECT_SOURCE_DIR}/ OUTPUT_VARIABLE included)
  list(GET A_ARRAY 0 namespace)
  list(GET A_ARRAY 1 type)
  list(GET A_ARRAY 2 array)
  list(GET A_ARRAY 3 count)
  set(output ${CMAKE_CURRENT_BINARY_DIR}/embedded/${name}_texts.cpp)
  set(script ${PROJECT_SOURCE_DIR}/scripts/cmake/embed_texts.cmake)
  add_custom_command(OUTPUT ${output} DEPENDS ${paths} ${included} ${script} VERBATIM
    COMMAND ${CMAKE_COMMAND} -DROOT=${PROJECT_SOURCE_DIR} -DOUTPUT=${output} -DHEADER=${A_HEADER} -DNAMESPACE=${namespace}
      -DTYPE=${type} -DNAME=${array} -DCOUNT=${count} "-DINCLUDES=${A_INCLUDED}" "-DFILES=${files}" -P ${script})
  target_sources(tessera_${name} PRIVATE ${output})
  target_include_directories(tessera_${name} PRIVATE ${PROJECT_SOURCE_DIR})
endfunction()

# tessera_program(name SOURCES files... [EXCLUDE regex] DEPENDS targets... [NO_INSTALL]): a program in bin/.
function(tessera_program name)
  cmake_parse_arguments(A "NO_INSTALL" "EXCLUDE" "SOURCES;DEPENDS" ${ARGN})
  tessera_sources(files cpp ${A_SOURCES})
  if(A_EXCLUDE)
    list(FILTER files EXCLUDE REGEX ${A_EXCLUDE})
  endif()
  foreach(file IN LISTS files)
    if(NOT EXISTS ${file})
      message(STATUS "${name}: no ${file}, not built")
      return()
    endif()
  endforeach()
  if(NOT files)
    return()
  endif()
  add_executable(${name} ${files})
  target_link_libraries(${name} PRIVATE tessera_flags)
  tessera_link(${name} PRIVATE ${A_DEPENDS})
  tessera_units(${name} ${files})
  list(LENGTH files count)
  if(count GREATER 5 AND NOT CMAKE_UNITY_BUILD)  # to read them takes as long as four files without
    tessera_precompile(${name} PRIVATE ${TESSERA_STANDARD_HEADERS})
  endif()
  if(NOT A_NO_INSTALL)
    set_property(GLOBAL APPEND PROPERTY TESSERA_PROGRAMS ${name})
  endif()
endfunction()
