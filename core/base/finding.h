// What a check of the machine found: a line, and what to do about it.
#pragma once
#include <cstdint>
#include <span>
#include <string>

namespace tessera {

struct Finding {
  enum class Level : uint8_t { kGood, kAdvice, kFix };  // kFix: something does not work without
  Level level = Level::kGood;
  std::string text;         // what was found, in one line
  std::string advice = {};  // what to do, in one line; "" where nothing is to be done
};

/// "ok    text", "hint  text" or "FIX   text" with "      -> advice" below, a line each.
std::string findings_text(std::span<const Finding> findings);

}  // namespace tessera
