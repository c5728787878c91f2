// Builds the text that precedes kernels: the functors of core/ops and prologue.h, which calls
// functions of libm by names that the compiler does not recognise.
#include <fmt/format.h>

#include <set>

#include "compile/codegen/functors.h"
#include "compile/codegen/generate.h"
#include "core/base/error.h"

namespace tessera::compiler {
namespace {

// Appends `rest` without its comments, which would cost the compiler time.
void append_code(std::string& text, std::string_view rest) {
  while (!rest.empty()) {
    std::string_view line = rest.substr(0, rest.find('\n'));
    rest.remove_prefix(std::min(rest.size(), line.size() + 1));
    size_t first = line.find_first_not_of(' ');
    if (first == line.npos || line.substr(first).starts_with("//")) continue;
    if (line == "#pragma once") continue;
    text.append(line);
    text += '\n';
  }
}

// Declares the libm functions that functors call under names that the compiler does not recognise.
// It evaluates those it recognises itself where operands are constants, correctly rounded; libm
// does not always round correctly, so the bits would differ.
std::string libm_by_name() {
  std::set<std::string> names;
  constexpr std::string_view kCall = "TESSERA_LIBM(";
  for (size_t k = 1; k < kEmbeddedCount; ++k) {
    std::string_view text = kEmbedded[k].text;
    for (size_t at = text.find(kCall); at != text.npos; at = text.find(kCall, at + 1))
      names.emplace(text.substr(at + kCall.size(), text.find(')', at) - at - kCall.size()));
  }
  std::string text = "#if !defined(__CUDACC__) && !defined(__CUDACC_RTC__)\n";
  for (const std::string& name : names) {
    const char* type = name.ends_with("f") && name != "erf" ? "float" : "double";
    const bool two = name.starts_with("fmod") || name == "pow" || name == "atan2";
    text += fmt::format(
        "extern \"C\" {} libm_{}({}{}{}) __asm__(\"{}\") "
        "__attribute__((const));\n",
        type, name, type, two ? ", " : "", two ? type : "", name);
  }
  text += "extern \"C\" double libm_lgamma_r(double, int*) __asm__(\"lgamma_r\");\n";
  return text + "#undef TESSERA_LIBM\n#define TESSERA_LIBM(name) libm_##name\n#endif\n";
}

}  // namespace

std::string prologue_cuda() {
  // A text holds what any kernel may need; what these do not need is no mistake.
  std::string text = "#pragma nv_diag_suppress 177\n";
  for (size_t k = 0; k < kEmbeddedCount; ++k) append_code(text, kEmbedded[k].text);
  return text + "using namespace tessera;\nusing namespace tessera::generated;\n\n";
}

std::string prologue_cpp() {
  std::string text;
  for (size_t k = 0; k < kEmbeddedCount; ++k) {
    if (k == 1) text += libm_by_name();  // after the prelude
    append_code(text, kEmbedded[k].text);
  }
  constexpr std::string_view kFolded = "return __builtin_lgamma_r(";
  const size_t folded = text.find(kFolded);
  TESSERA_ASSERT(folded != text.npos, "codegen: special.h has changed");
  text.replace(folded, kFolded.size(), "return TESSERA_LIBM(lgamma_r)(");
  return text + "using namespace tessera;\nusing namespace tessera::generated;\n\n";
}

}  // namespace tessera::compiler
