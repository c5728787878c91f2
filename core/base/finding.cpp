#include "core/base/finding.h"

#include <fmt/format.h>

namespace tessera {

std::string findings_text(std::span<const Finding> findings) {
  std::string text;
  for (const Finding& f : findings) {
    const char* mark = f.level == Finding::Level::kGood     ? "ok  "
                       : f.level == Finding::Level::kAdvice ? "hint"
                                                            : "FIX ";
    text += fmt::format("{}  {}\n", mark, f.text);
    if (!f.advice.empty()) text += fmt::format("      -> {}\n", f.advice);
  }
  return text;
}

}  // namespace tessera
