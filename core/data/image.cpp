#include "core/data/image.h"

#include "core/base/error.h"
#include "core/data/image_formats.h"

namespace tessera::data {

Image black_image(int64_t height, int64_t width) {
  return {height, width, std::vector<uint8_t>(size_t(height * width * 3))};
}

bool has_image_libraries() {
#ifdef TESSERA_HAVE_IMAGES
  return true;
#else
  return false;
#endif
}

void refuse_without_libraries(const std::string& name) {
  throw UserError(fmt::format(
      "data: '{}': this build reads neither JPEG, PNG nor archives; install the packages of "
      "scripts/install-packages and configure with TESSERA_WITH_IMAGES=ON",
      name));
}

void check_image_size(uint64_t height, uint64_t width, const std::string& name) {
  TESSERA_CHECK(height > 0 && width > 0 && height <= uint64_t(kMostPixels) / width,
                "data: '{}': {} x {} pixels; there may be up to {}", name, height, width,
                kMostPixels);
}

Image decode_image(std::span<const std::byte> bytes, const std::string& name) {
  auto starts = [&](std::initializer_list<int> with) {
    if (bytes.size() < with.size()) return false;
    size_t i = 0;
    for (int b : with)
      if (std::to_integer<int>(bytes[i++]) != b) return false;
    return true;
  };
  TESSERA_CHECK(!bytes.empty(), "data: '{}' is empty", name);
  if (starts({0xFF, 0xD8})) return decode_jpeg(bytes, name);
  if (starts({0x89, 'P', 'N', 'G'})) return decode_png(bytes, name);
  throw UserError(fmt::format("data: '{}' is neither JPEG nor PNG by its first bytes", name));
}

#ifndef TESSERA_HAVE_IMAGES
Image decode_jpeg(std::span<const std::byte>, const std::string& name) {
  refuse_without_libraries(name);
}
Image decode_png(std::span<const std::byte>, const std::string& name) {
  refuse_without_libraries(name);
}
#endif

}  // namespace tessera::data
