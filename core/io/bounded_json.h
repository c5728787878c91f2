// Parses JSON of untrusted files. The parser gets the text in small chunks, and every chunk is
// checked against limits first. Invariant: memory and time are bounded by the limits, not by the
// file.
#pragma once
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

#include "core/base/function_ref.h"

namespace tessera::io {

struct JsonLimits {
  int max_depth = 8;                          // of nested objects and arrays
  uint64_t max_string_bytes = 1 << 20;        // of one string, quotes and escapes included
  uint64_t max_text_bytes = 16 << 20;         // of all strings together
  static constexpr int kMaxScalarBytes = 64;  // of one number or literal
};

using JsonEvents = nlohmann::json_sax<nlohmann::json>;

/// Feeds the events of one JSON value to `events`. `source(to, room)` delivers the next bytes of
/// the text, 0 at its end. Throws UserError, beginning with `where`, when a limit is exceeded;
/// whatever `events` throws passes through.
void parse_bounded_json(FunctionRef<size_t(char*, size_t)> source, const JsonLimits& limits,
                        const std::string& where, JsonEvents& events);

/// A callback for nlohmann's parse(). It throws UserError, beginning with `where`, for text nested
/// deeper than `max_depth`, because nlohmann's values are copied and printed by recursion.
nlohmann::json::parser_callback_t nested_at_most(int max_depth, std::string where);

/// Why nlohmann's parser gave up, in one short line.
std::string short_reason(const nlohmann::json::exception& e);

}  // namespace tessera::io
