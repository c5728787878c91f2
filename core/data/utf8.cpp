#include "core/data/utf8.h"

#include <algorithm>
#include <charconv>
#include <cstring>

#include "core/base/error.h"

namespace tessera::data {

CodePoint decode_utf8(std::string_view text, size_t at) {
  auto byte = [&](size_t i) { return uint32_t(static_cast<unsigned char>(text[at + i])); };
  uint32_t first = byte(0);
  if (first < 0x80) return {first, 1};
  uint32_t length = first >= 0xF0 ? 4 : first >= 0xE0 ? 3 : 2;
  if (first < 0xC2 || first > 0xF4 || at + length > text.size()) return {};
  uint32_t value = first & (0x7Fu >> length);
  for (uint32_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xC0) != 0x80) return {};
    value = value << 6 | (byte(i) & 0x3F);
  }
  constexpr uint32_t kSmallest[] = {0, 0, 0x80, 0x800, 0x10000};
  if (value < kSmallest[length] || value > 0x10FFFF || (value >= 0xD800 && value < 0xE000))
    return {};
  return {value, length};
}

void append_utf8(std::string& out, uint32_t c) {
  if (c < 0x80) {
    out += char(c);
  } else if (c < 0x800) {
    out += {char(0xC0 | c >> 6), char(0x80 | (c & 0x3F))};
  } else if (c < 0x10000) {
    out += {char(0xE0 | c >> 12), char(0x80 | (c >> 6 & 0x3F)), char(0x80 | (c & 0x3F))};
  } else {
    out += {char(0xF0 | c >> 18), char(0x80 | (c >> 12 & 0x3F)), char(0x80 | (c >> 6 & 0x3F)),
            char(0x80 | (c & 0x3F))};
  }
}

size_t find_invalid_utf8(std::string_view text) {
  size_t at = 0;
  while (at < text.size()) {
    uint64_t eight;
    if (at + 8 <= text.size() &&
        (std::memcpy(&eight, text.data() + at, 8), (eight & 0x8080808080808080u) == 0)) {
      at += 8;  // eight bytes of ASCII at once
      continue;
    }
    CodePoint c = decode_utf8(text, at);
    if (c.bytes == 0) return at;
    at += c.bytes;
  }
  return std::string_view::npos;
}

void check_utf8(std::string_view text, std::string_view who) {
  size_t at = find_invalid_utf8(text);
  TESSERA_CHECK(
      at == std::string_view::npos,
      "{}: the text is not UTF-8 at offset {} (byte 0x{:02x}); convert it, or use --tokenizer byte",
      who, at, static_cast<unsigned char>(text[at]));
}

std::string escape_bytes(std::string_view bytes) {
  std::string out;
  for (size_t at = 0; at < bytes.size();) {
    const uint32_t n = decode_utf8(bytes, at).bytes;
    if (n == 0)
      out += fmt::format("\\x{:02x}", uint8_t(bytes[at]));
    else
      out += bytes[at] == '\\' ? std::string_view("\\\\") : bytes.substr(at, n);
    at += std::max<uint32_t>(n, 1);
  }
  return out;
}

std::string unescape_bytes(std::string_view text) {
  std::string out;
  for (size_t at = 0; at < text.size();) {
    unsigned byte = 0;
    const std::string_view rest = text.substr(at);
    if (rest.starts_with("\\\\")) {
      out += '\\', at += 2;
    } else if (rest.size() >= 4 && rest.starts_with("\\x") &&
               std::from_chars(rest.data() + 2, rest.data() + 4, byte, 16).ptr == rest.data() + 4) {
      out += char(byte), at += 4;
    } else {
      out += text[at++];
    }
  }
  return out;
}

size_t count_code_points(std::string_view text) {
  return size_t(std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xC0) != 0x80; }));
}

}  // namespace tessera::data
