#include "core/base/version.h"

#include <elf.h>
#include <link.h>

#include <cstring>

#include "core/base/error.h"
#include "core/base/isa.h"

namespace tessera {
namespace {

// The id among the notes of a segment: each has a header, a name and a description, of whole words.
std::string id_among(const std::byte* notes, size_t bytes) {
  const auto whole = [](size_t n) { return (n + 3) / 4 * 4; };
  for (size_t at = 0; at + sizeof(ElfW(Nhdr)) <= bytes;) {
    ElfW(Nhdr) note;
    std::memcpy(&note, notes + at, sizeof note);
    const std::byte* name = notes + at + sizeof note;
    const std::byte* id = name + whole(note.n_namesz);
    at += sizeof note + whole(note.n_namesz) + whole(note.n_descsz);
    if (at > bytes || note.n_type != NT_GNU_BUILD_ID) continue;
    if (note.n_namesz != sizeof "GNU" || std::memcmp(name, "GNU", sizeof "GNU") != 0) continue;
    std::string text;
    for (size_t i = 0; i < note.n_descsz; ++i) text += fmt::format("{:02x}", unsigned(id[i]));
    return text;
  }
  return {};
}

// Called for the program first; what it returns ends the walk over the libraries.
int id_of_program(dl_phdr_info* info, size_t, void* to) {
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const ElfW(Phdr)& segment = info->dlpi_phdr[i];
    if (segment.p_type != PT_NOTE) continue;
    const auto* notes = reinterpret_cast<const std::byte*>(info->dlpi_addr + segment.p_vaddr);
    std::string id = id_among(notes, segment.p_memsz);
    if (!id.empty()) *static_cast<std::string*>(to) = std::move(id);
  }
  return 1;
}

}  // namespace

std::string build_id() {
  std::string id;
  dl_iterate_phdr(id_of_program, &id);
  return id;
}

std::string_view version() { return TESSERA_VERSION; }

std::string version_text(std::string_view program) {
  std::string isa;
  try {
    isa = cpu::isa_name(cpu::current_isa());
  } catch (const UserError& e) {
    isa = e.what();
  }
#ifdef __clang__
  constexpr const char* kCompiler = "Clang " __clang_version__;
#else
  constexpr const char* kCompiler = "GCC " __VERSION__;
#endif
  std::string id = build_id();
  return fmt::format("{} (Tessera) {}\ncompiler: {}, {}\nbuild: {}\nkernels: {}", program,
                     version(), kCompiler, TESSERA_BUILD_TYPE, id.empty() ? "no id" : id, isa);
}

}  // namespace tessera
