// Numbers out of what a program printed, for tests of messages that name a measured time.
#pragma once
#include <cstdlib>
#include <string>

namespace tessera {

/// The number right after the first `words` in `text`; -1 where `words` do not occur.
inline double number_after(const std::string& words, const std::string& text) {
  size_t at = text.find(words);
  return at == std::string::npos ? -1 : std::atof(text.c_str() + at + words.size());
}

}  // namespace tessera
