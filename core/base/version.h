// Which Tessera this is. The number stands in one place, the project() line of CMakeLists.txt.
#pragma once
#include <string>
#include <string_view>

namespace tessera {

/// "0.1.0"
std::string_view version();

/// "GCC 12.2.0, Release".
std::string compiler_text();

/// The linker's hash of this program (its note NT_GNU_BUILD_ID, in hexadecimal); it differs between
/// builds from other source or with other flags. Where Tessera is shared libraries it is the
/// exclusive or of their hashes and the program's. Empty where the linker left it out.
std::string build_id();

/// What `program --version` prints: number, compiler, build type, build id, instruction set in use.
/// A bad TESSERA_ISA is part of the text, not an error.
std::string version_text(std::string_view program);

}  // namespace tessera
