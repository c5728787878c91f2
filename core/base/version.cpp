#include "core/base/version.h"

#include <elf.h>
#include <link.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "core/base/error.h"
#include "core/base/isa.h"

namespace tessera {
namespace {

using Id = std::vector<uint8_t>;

// The id among the notes of a segment: each has a header, a name and a description, of whole words.
Id id_among(const std::byte* notes, size_t bytes) {
  const auto whole = [](size_t n) { return (n + 3) / 4 * 4; };
  for (size_t at = 0; at + sizeof(ElfW(Nhdr)) <= bytes;) {
    ElfW(Nhdr) note;
    std::memcpy(&note, notes + at, sizeof note);
    const std::byte* name = notes + at + sizeof note;
    const auto* id = reinterpret_cast<const uint8_t*>(name + whole(note.n_namesz));
    at += sizeof note + whole(note.n_namesz) + whole(note.n_descsz);
    if (at > bytes || note.n_type != NT_GNU_BUILD_ID) continue;
    if (note.n_namesz != sizeof "GNU" || std::memcmp(name, "GNU", sizeof "GNU") != 0) continue;
    return {id, id + note.n_descsz};
  }
  return {};
}

// Called for each object that is loaded; the program's name is empty.
int add_id(dl_phdr_info* info, size_t, void* to) {
  const std::string_view object = info->dlpi_name;
  if (!object.empty() && object.find("/libtessera_") == object.npos) return 0;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const ElfW(Phdr)& segment = info->dlpi_phdr[i];
    if (segment.p_type != PT_NOTE) continue;
    const auto* notes = reinterpret_cast<const std::byte*>(info->dlpi_addr + segment.p_vaddr);
    const Id id = id_among(notes, segment.p_memsz);
    Id& all = *static_cast<Id*>(to);
    all.resize(std::max(all.size(), id.size()));
    for (size_t k = 0; k < id.size(); ++k) all[k] ^= id[k];
  }
  return 0;
}

}  // namespace

std::string build_id() {
  Id all;
  dl_iterate_phdr(add_id, &all);
  std::string text;
  for (uint8_t byte : all) text += fmt::format("{:02x}", byte);
  return text;
}

std::string compiler_text() {
#ifdef __clang__
  return "Clang " __clang_version__ ", " TESSERA_BUILD_TYPE;
#else
  return "GCC " __VERSION__ ", " TESSERA_BUILD_TYPE;
#endif
}

std::string_view version() { return TESSERA_VERSION; }

std::string version_text(std::string_view program) {
  std::string isa;
  try {
    isa = cpu::isa_name(cpu::current_isa());
  } catch (const UserError& e) {
    isa = e.what();
  }
  const std::string id = build_id();
  return fmt::format("{} (Tessera) {}\ncompiler: {}\nbuild: {}\nkernels: {}", program, version(),
                     compiler_text(), id.empty() ? "no id" : id, isa);
}

}  // namespace tessera
