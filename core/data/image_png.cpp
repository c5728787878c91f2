// PNG by libpng. The library reports errors by longjmp, so every object with a destructor lives in
// the function that calls those with setjmp.
#include <png.h>

#include <csetjmp>
#include <cstring>

#include "core/base/error.h"
#include "core/data/image_formats.h"

namespace tessera::data {
namespace {

// A picture that is being read; its destructor frees the library's memory.
struct Reader {
  ~Reader() { png_destroy_read_struct(&png, &info, nullptr); }
  png_structp png = nullptr;
  png_infop info = nullptr;
  std::span<const std::byte> rest;
  char text[200] = "";
};

[[noreturn]] void on_error(png_structp png, png_const_charp text) {
  auto* r = static_cast<Reader*>(png_get_error_ptr(png));
  std::strncpy(r->text, text, sizeof r->text - 1);
  png_longjmp(png, 1);
}
void on_warning(png_structp, png_const_charp) {}  // of chunks that no pixel depends on

void take(png_structp png, png_bytep to, size_t count) {
  auto* r = static_cast<Reader*>(png_get_io_ptr(png));
  if (count > r->rest.size()) png_error(png, "the file ends too early");
  std::memcpy(to, r->rest.data(), count);
  r->rest = r->rest.subspan(count);
}

// Both return false with the reason in r.text.
bool start(Reader& r) {
  r.png = png_create_read_struct(PNG_LIBPNG_VER_STRING, &r, on_error, on_warning);
  if (r.png) r.info = png_create_info_struct(r.png);
  if (!r.info) throw std::bad_alloc();
  if (setjmp(png_jmpbuf(r.png))) return false;
  png_set_read_fn(r.png, &r, take);
  png_read_info(r.png, r.info);
  png_set_interlace_handling(r.png);
  if (png_get_color_type(r.png, r.info) == PNG_COLOR_TYPE_PALETTE) {
    // Indices stay as they are, one a byte: the library paints those beyond the palette black.
    png_set_packing(r.png);
    png_read_update_info(r.png, r.info);
    return true;
  }
  png_set_expand(r.png);
  // Pillow takes the high byte, but of grey alone the value clipped at 255, which is white mostly.
  if (png_get_color_type(r.png, r.info) == PNG_COLOR_TYPE_GRAY)
    png_set_scale_16(r.png);
  else
    png_set_strip_16(r.png);
  png_set_gray_to_rgb(r.png);
  png_set_strip_alpha(r.png);
  png_read_update_info(r.png, r.info);
  return true;
}
bool read_rows(Reader& r, png_bytepp rows) {
  if (setjmp(png_jmpbuf(r.png))) return false;
  png_read_image(r.png, rows);
  png_read_end(r.png, nullptr);
  return true;
}

// A row of indices, which lie in its last third, as the colours that they stand for; false where
// one is beyond the palette.
bool paint(const Reader& r, uint8_t* row, int64_t width) {
  png_colorp palette = nullptr;
  int count = 0;
  png_get_PLTE(r.png, r.info, &palette, &count);
  for (int64_t x = 0; x < width; ++x) {
    const uint8_t index = row[2 * width + x];
    if (index >= count) return false;
    const png_color c = palette[index];
    row[3 * x] = c.red, row[3 * x + 1] = c.green, row[3 * x + 2] = c.blue;
  }
  return true;
}

}  // namespace

Image decode_png(std::span<const std::byte> bytes, const std::string& name) {
  Reader r;
  r.rest = bytes;
  TESSERA_CHECK(start(r), "data: '{}': PNG: {}", name, r.text);
  const int64_t height = png_get_image_height(r.png, r.info),
                width = png_get_image_width(r.png, r.info);
  check_image_size(uint64_t(height), uint64_t(width), name);
  const bool indexed = png_get_color_type(r.png, r.info) == PNG_COLOR_TYPE_PALETTE;
  TESSERA_CHECK(png_get_rowbytes(r.png, r.info) == size_t(width * (indexed ? 1 : 3)),
                "data: '{}': PNG: rows of {} pixels have {} bytes", name, width,
                png_get_rowbytes(r.png, r.info));
  Image out = black_image(height, width);
  std::vector<png_bytep> rows;
  for (int64_t y = 0; y < height; ++y) rows.push_back(out.row(y) + (indexed ? 2 * width : 0));
  TESSERA_CHECK(read_rows(r, rows.data()), "data: '{}': PNG: {}", name, r.text);
  for (int64_t y = 0; indexed && y < height; ++y)
    TESSERA_CHECK(paint(r, out.row(y), width), "data: '{}': PNG: a pixel of row {} has no colour",
                  name, y);
  return out;
}

}  // namespace tessera::data
