// The decoders behind decode_image, one function a format.
#pragma once
#include <span>
#include <string>

#include "core/data/image.h"

namespace tessera::data {

Image decode_jpeg(std::span<const std::byte> bytes, const std::string& name);
Image decode_png(std::span<const std::byte> bytes, const std::string& name);

inline constexpr int64_t kMostPixels = int64_t(1) << 28;  // of an image

/// Throws UserError for sizes that no picture has.
void check_image_size(uint64_t height, uint64_t width, const std::string& name);
[[noreturn]] void refuse_without_libraries(const std::string& name);

}  // namespace tessera::data
