// Which Tessera this is. The number stands in one place, the project() line of CMakeLists.txt.
#pragma once
#include <string>
#include <string_view>

namespace tessera {

/// "0.1.0"
std::string_view version();

/// What tells this program from others that were built of other text, or with other flags: the id
/// that the linker computed from its contents (the note NT_GNU_BUILD_ID, in hexadecimal). Empty
/// where the linker was told to leave it out.
std::string build_id();

/// What `program --version` prints: number, compiler, build type, build id, instruction set in use.
/// A bad TESSERA_ISA is part of the text, not an error.
std::string version_text(std::string_view program);

}  // namespace tessera
