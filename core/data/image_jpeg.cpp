// JPEG by libjpeg-turbo, with the exact inverse transform and smooth upsampling, as in Pillow. The
// library reports errors by longjmp, so every object with a destructor lives in the function that
// calls those with setjmp.
#include <algorithm>
#include <csetjmp>
#include <cstdio>

#include "core/base/error.h"
#include "core/data/image_formats.h"

// jpeglib.h needs cstdio; the codes of jerror.h depend on what jpeglib.h says.
// clang-format off
#include <jpeglib.h>
#include <jerror.h>
// clang-format on

namespace tessera::data {
namespace {

struct Errors {
  jpeg_error_mgr manager;
  std::jmp_buf leave;
  char text[JMSG_LENGTH_MAX];
};

[[noreturn]] void on_error(j_common_ptr common) {
  auto* errors = reinterpret_cast<Errors*>(common->err);
  common->err->format_message(common, errors->text);
  std::longjmp(errors->leave, 1);
}

// Warnings after which pixels are made up. Others (bytes between markers, odd headers) are common
// and harmless.
void on_message(j_common_ptr common, int level) {
  if (level >= 0) return;  // a trace
  switch (common->err->msg_code) {
    case JWRN_JPEG_EOF:
    case JWRN_HIT_MARKER:
    case JWRN_HUFF_BAD_CODE:
    case JWRN_ARITH_BAD_CODE:
    case JWRN_MUST_RESYNC: on_error(common);
    default: return;
  }
}

// A picture that is being read; its destructor frees the library's memory.
struct Reader {
  Reader() {
    info.err = jpeg_std_error(&errors.manager);
    errors.manager.error_exit = on_error;
    errors.manager.emit_message = on_message;
  }
  ~Reader() { jpeg_destroy_decompress(&info); }
  jpeg_decompress_struct info = {};
  Errors errors = {};
};

// All return false with the reason in errors.text.
bool read_header(Reader& r, std::span<const std::byte> bytes) {
  if (setjmp(r.errors.leave)) return false;
  jpeg_create_decompress(&r.info);
  jpeg_mem_src(&r.info, reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size());
  jpeg_read_header(&r.info, TRUE);
  return true;
}
bool start(Reader& r) {
  if (setjmp(r.errors.leave)) return false;
  // What the library converts to RGB by itself; it has no way from CMYK.
  const bool inks = r.info.jpeg_color_space == JCS_CMYK || r.info.jpeg_color_space == JCS_YCCK;
  r.info.out_color_space = inks ? JCS_CMYK : JCS_RGB;
  r.info.dct_method = JDCT_ISLOW;
  jpeg_start_decompress(&r.info);
  return true;
}
bool read_rows(Reader& r, uint8_t* to, size_t row_bytes) {
  if (setjmp(r.errors.leave)) return false;
  while (r.info.output_scanline < r.info.output_height) {
    JSAMPROW row = to + r.info.output_scanline * row_bytes;
    jpeg_read_scanlines(&r.info, &row, 1);
  }
  jpeg_finish_decompress(&r.info);
  return true;
}

// Inks stored inverted, 255 being none, as Adobe's programs do and Pillow takes every file to be,
// with Adobe's marker and without.
void combine_inks(const uint8_t* cmyk, size_t pixels, uint8_t* rgb) {
  for (size_t i = 0; i < pixels; ++i, cmyk += 4, rgb += 3) {
    const int light = cmyk[3];
    for (int c = 0; c < 3; ++c) {
      const int product = (255 - cmyk[c]) * light + 128;
      rgb[c] = uint8_t(std::max(0, light - ((product + (product >> 8)) >> 8)));
    }
  }
}

}  // namespace

Image decode_jpeg(std::span<const std::byte> bytes, const std::string& name) {
  Reader r;
  TESSERA_CHECK(read_header(r, bytes), "data: '{}': {}", name, r.errors.text);
  // The size is checked before the start, which takes memory for all of a progressive picture.
  check_image_size(r.info.image_height, r.info.image_width, name);
  TESSERA_CHECK(start(r), "data: '{}': {}", name, r.errors.text);
  Image out = black_image(r.info.output_height, r.info.output_width);
  const size_t channels = size_t(r.info.output_components), width = r.info.output_width;
  std::vector<uint8_t> inks(channels == 4 ? out.pixels.size() / 3 * 4 : 0);
  uint8_t* to = channels == 4 ? inks.data() : out.pixels.data();
  TESSERA_CHECK(read_rows(r, to, width * channels), "data: '{}': {}", name, r.errors.text);
  if (channels == 4) combine_inks(inks.data(), inks.size() / 4, out.pixels.data());
  return out;
}

}  // namespace tessera::data
