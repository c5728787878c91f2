// Pictures for tests: drawn, written as PNG, and as the binary files of CIFAR-10. PNG files are
// stored, not compressed, which takes no library.
#pragma once
#include <cstdint>
#include <string>

#include "core/data/image.h"

namespace tessera {

/// The picture of scripts/reference/make_golden_images.py.
inline data::Image picture(int64_t height, int64_t width) {
  data::Image out = data::black_image(height, width);
  for (int64_t y = 0; y < height; ++y)
    for (int64_t x = 0; x < width; ++x) {
      uint8_t* p = out.row(y) + 3 * x;
      p[0] = uint8_t(7 * x + 3 * y), p[1] = uint8_t(5 * x * y + 11);
      p[2] = uint8_t(40 * ((x / 3 + y / 2) % 6));
    }
  return out;
}

/// The bytes of a PNG file with these pixels.
inline std::string png_of(const data::Image& image) {
  auto big_endian = [](uint32_t v) {
    return std::string{char(v >> 24), char(v >> 16), char(v >> 8), char(v)};
  };
  auto chunk = [&](const std::string& name, const std::string& data) {
    std::string body = name + data;
    uint32_t crc = ~0u;
    for (char c : body) {
      crc ^= uint8_t(c);
      for (int k = 0; k < 8; ++k) crc = crc & 1 ? 0xEDB88320u ^ crc >> 1 : crc >> 1;
    }
    return big_endian(uint32_t(data.size())) + body + big_endian(~crc);
  };
  std::string rows;  // each after a byte that says it is not filtered
  for (int64_t y = 0; y < image.height; ++y)
    rows +=
        '\0' + std::string(reinterpret_cast<const char*>(image.row(y)), size_t(3 * image.width));
  std::string zlib = "\x78\x01";
  uint32_t a = 1, b = 0;
  for (char c : rows) a = (a + uint8_t(c)) % 65521, b = (b + a) % 65521;
  for (size_t at = 0; at < rows.size(); at += 65535) {  // stored blocks
    const size_t n = std::min<size_t>(65535, rows.size() - at);
    zlib += char(at + n == rows.size());
    zlib += std::string{char(n), char(n >> 8), char(~n), char(~n >> 8)} + rows.substr(at, n);
  }
  zlib += big_endian(b << 16 | a);
  const std::string header = big_endian(uint32_t(image.width)) +
                             big_endian(uint32_t(image.height)) + std::string("\x08\x02\0\0\0", 5);
  return "\x89PNG\r\n\x1a\n" + chunk("IHDR", header) + chunk("IDAT", zlib) + chunk("IEND", "");
}

/// Records of CIFAR-10's binary files: image i is of class i % 10, which is easy to see.
inline std::string cifar_records(int count, int first = 0) {
  std::string out;
  for (int i = first; i < first + count; ++i) {
    out += char(i % 10);
    for (int at = 0; at < 3 * 32 * 32; ++at) out += char(25 * (i % 10) + (at * (i + 7)) % 61);
  }
  return out;
}

}  // namespace tessera
