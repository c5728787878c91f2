#include "core/io/tuned_choices.h"

#include <filesystem>
#include <utility>

#include "core/base/log.h"
#include "core/io/hash.h"

namespace tessera::io {

TunedChoices::TunedChoices(std::string suffix, std::string who, std::string what)
    : suffix_(std::move(suffix)), who_(std::move(who)), what_(std::move(what)) {}

std::string TunedChoices::key_of(std::string_view text) {
  return to_string(xxh128(text.data(), text.size()));
}

std::optional<std::string> TunedChoices::find(const std::string& key) const {
  try {
    if (const auto entry = disk().find(key)) return std::string(entry->object());
  } catch (const CacheError& e) {
    logging::info("{}; {} are chosen again", e.what(), what_);
  }
  return {};
}

std::string TunedChoices::keep(const std::string& key, const std::string& mine) const {
  try {
    bool made = false;
    const auto make = [&](const std::string&) { return mine; };
    return std::string(disk().find_or_make(key, make, &made).object());
  } catch (const CacheError& e) {
    logging::info("{}; {} are chosen again", e.what(), what_);
    return mine;
  }
}

void TunedChoices::replace(const std::string& key, const std::string& choice) const {
  try {
    if (const auto entry = disk().find(key); entry && entry->object() != choice) {
      std::error_code gone_already;
      std::filesystem::remove(entry->path, gone_already);
    }
  } catch (const CacheError&) {  // keep() says so
  }
  keep(key, choice);
}

}  // namespace tessera::io
