// UTF-8, strictly (RFC 3629): no overlong forms, no surrogates, nothing beyond U+10FFFF.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace tessera::data {

struct CodePoint {
  uint32_t value = 0;
  uint32_t bytes = 0;  // 0: the text is not UTF-8 here
};

/// The code point that begins at `at` < text.size().
CodePoint decode_utf8(std::string_view text, size_t at);
void append_utf8(std::string& out, uint32_t code_point);
/// Offset of the first byte that is not UTF-8; npos when all of `text` is.
size_t find_invalid_utf8(std::string_view text);
/// Throws UserError, beginning with `who` and naming offset and byte, unless `text` is UTF-8.
void check_utf8(std::string_view text, std::string_view who);
/// Any bytes, as a path may have them, as UTF-8: a byte that is none becomes \xNN, a backslash two.
/// unescape_bytes gives them back, and leaves a backslash that escapes nothing as it is.
std::string escape_bytes(std::string_view bytes);
std::string unescape_bytes(std::string_view text);
/// Number of code points of valid UTF-8.
size_t count_code_points(std::string_view text);

}  // namespace tessera::data
