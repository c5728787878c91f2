// Decodes pictures: JPEG by libjpeg-turbo, PNG by libpng, told apart by their first bytes.
// Invariant: an image has three channels of 8 bits, whatever the file has; a file that is cut off,
// or damaged where the format shows it, is an error, never a picture with a grey rest. PNG has a
// checksum and shows all damage; JPEG has none, so damage may go unnoticed.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace tessera::data {

struct Image {
  int64_t height = 0, width = 0;
  std::vector<uint8_t> pixels;  // [height, width, 3], red first
  const uint8_t* row(int64_t y) const { return pixels.data() + y * width * 3; }
  uint8_t* row(int64_t y) { return pixels.data() + y * width * 3; }
};

/// An image of `height` x `width` zeros.
Image black_image(int64_t height, int64_t width);

/// The pixels of a JPEG or PNG file, as Pillow's convert("RGB") gives them: grey values three
/// times, palettes looked up, CMYK combined, transparency dropped, the high byte of 16 bits. Grey
/// of 16 bits is scaled to 8 and rounded, where Pillow clips it at 255. `name` is what errors call
/// it. Throws UserError with name and reason for what is no JPEG or PNG, is damaged or cut off, or
/// has more than 2^28 pixels. Thread-safe.
Image decode_image(std::span<const std::byte> bytes, const std::string& name);

/// False in a build without libjpeg, libpng and libarchive: decode_image and archives then throw.
bool has_image_libraries();

}  // namespace tessera::data
