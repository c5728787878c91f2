// Logging to stderr, one line per message: `[level rank] text`. TESSERA_LOG sets the level
// (debug, info, warn, error, off).
#pragma once
#include <fmt/core.h>

#include <string>

namespace tessera::logging {

enum class Level : int { kDebug, kInfo, kWarn, kError };

bool enabled(Level level);
void write(Level level, const std::string& text);

template <class... A>
void debug(fmt::format_string<A...> text, A&&... args) {
  if (enabled(Level::kDebug))
    write(Level::kDebug, fmt::vformat(text, fmt::make_format_args(args...)));
}
template <class... A>
void info(fmt::format_string<A...> text, A&&... args) {
  if (enabled(Level::kInfo))
    write(Level::kInfo, fmt::vformat(text, fmt::make_format_args(args...)));
}
template <class... A>
void warn(fmt::format_string<A...> text, A&&... args) {
  if (enabled(Level::kWarn))
    write(Level::kWarn, fmt::vformat(text, fmt::make_format_args(args...)));
}
template <class... A>
void error(fmt::format_string<A...> text, A&&... args) {
  if (enabled(Level::kError))
    write(Level::kError, fmt::vformat(text, fmt::make_format_args(args...)));
}

}  // namespace tessera::logging
