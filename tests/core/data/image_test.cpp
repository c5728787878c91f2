// Decoding against Pillow, damaged files, and transforms against Pillow and their definitions.
#include "core/data/image.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>

#include "core/data/image_transforms.h"
#include "tests/support/images.h"
#include "tests/support/temp_folder.h"

namespace tessera::data {
namespace {

std::string from_hex(const std::string& hex) {
  std::string out;
  for (size_t i = 0; i < hex.size(); i += 2) out += char(std::stoi(hex.substr(i, 2), nullptr, 16));
  return out;
}
std::vector<uint8_t> pixels_of(const nlohmann::json& j) {
  const std::string bytes = from_hex(j["pixels"]);
  return {bytes.begin(), bytes.end()};
}
nlohmann::json golden() {
  const char* source = std::getenv("TESSERA_SOURCE");
  std::ifstream in(std::string(source ? source : ".") + "/tests/golden/images.json");
  return nlohmann::json::parse(in);
}
Image decode(const std::string& bytes) {
  return decode_image(std::as_bytes(std::span(bytes)), "a picture");
}

#define NEEDS_LIBRARIES() \
  if (!has_image_libraries()) GTEST_SKIP() << "built without libjpeg, libpng and libarchive"

TEST(Image, DecodesAsPillowDoes) {
  NEEDS_LIBRARIES();
  const nlohmann::json files = golden()["decoded"];
  ASSERT_GE(files.size(), 12u);
  for (const auto& f : files) {
    const Image image = decode(from_hex(f["file"]));
    EXPECT_EQ(image.height, f["height"].get<int64_t>()) << f["name"];
    EXPECT_EQ(image.width, f["width"].get<int64_t>()) << f["name"];
    EXPECT_EQ(image.pixels, pixels_of(f)) << f["name"];
  }
}

// Cut anywhere, or changed in the middle, a file is an error that names it, or gives an image; no
// cut is taken for a whole file.
TEST(Image, DamagedFilesAreErrors) {
  NEEDS_LIBRARIES();
  const nlohmann::json files = golden()["decoded"];
  ASSERT_GE(files.size(), 12u);
  for (const auto& f : files) {
    const std::string whole = from_hex(f["file"]);
    for (size_t keep = 0; keep + 2 < whole.size(); keep += whole.size() / 23 + 1)
      expect_contains(error_of([&] { decode(whole.substr(0, keep)); }), "a picture");
    for (size_t at = 0; at < whole.size(); at += 3) {
      std::string changed = whole;
      changed[at] = char(~changed[at]);
      try {
        const Image image = decode(changed);
        EXPECT_EQ(image.pixels.size(), size_t(image.height * image.width * 3));
      } catch (const UserError& e) {
        expect_contains(e.what(), "a picture");
      }
    }
  }
  expect_contains(error_of([] { decode("GIF89a"); }), "neither JPEG nor PNG");
  expect_contains(error_of([] { decode(""); }), "empty");
}

// The segment of a JPEG with the size: marker, length, bits, height, width.
size_t frame_of(const std::string& jpeg, char marker) {
  return jpeg.find(std::string{'\xFF', marker, 0});
}

// The size is refused before memory is taken for all of a progressive picture, which is kept as
// coefficients.
TEST(Image, TooManyPixelsAreAnErrorAtOnce) {
  NEEDS_LIBRARIES();
  const nlohmann::json files = golden()["decoded"];
  for (const auto& f : files) {
    if (f["name"] != "jpeg progressive") continue;
    std::string bytes = from_hex(f["file"]);
    const size_t at = frame_of(bytes, '\xC2');
    ASSERT_NE(at, bytes.npos);
    bytes.replace(at + 5, 4, "\xFF\x00\xFF\x00", 4);
    expect_contains(error_of([&] { decode(bytes); }), "65280 x 65280 pixels; there may be up to");
    return;
  }
  FAIL() << "no progressive picture";
}

// Bytes that no coder of arithmetic codes writes, after a sound header.
TEST(Image, BadArithmeticCodesAreErrors) {
  NEEDS_LIBRARIES();
  const nlohmann::json files = golden()["decoded"];
  ASSERT_EQ(files.at(0)["name"], "jpeg 4:2:0");
  std::string bytes = from_hex(files.at(0)["file"]);
  const size_t at = frame_of(bytes, '\xC0'), scan = bytes.find(std::string("\xFF\xDA\0", 3));
  ASSERT_NE(at, bytes.npos);
  ASSERT_NE(scan, bytes.npos);
  bytes[at + 1] = '\xC9';
  bytes.replace(at + 5, 4, std::string("\0\x40\0\x40", 4));
  bytes.resize(scan + 2 + uint8_t(bytes[scan + 3]));
  bytes += std::string(64 * 64, 'X') + "\xFF\xD9";
  expect_contains(error_of([&] { decode(bytes); }), "arithmetic cod");  // bad, or not built in
}

TEST(Image, GreyOf16BitsIsRounded) {
  NEEDS_LIBRARIES();
  // Pixels 0x01C0 and 0xFE00: 448 / 257 is 1.74 and 65024 / 257 is 253.01.
  const std::string file =
      "89504e470d0a1a0a0000000d494844520000000200000001100000000081d9fc150000000d494441"
      "54789c63603cf08f0100044501c02a249f780000000049454e44ae426082";
  const Image image = decode(from_hex(file));
  EXPECT_EQ(image.pixels, (std::vector<uint8_t>{2, 2, 2, 253, 253, 253}));
}

// Four pixels of 2 bits, 0 1 2 3, with four colours and with one.
TEST(Image, PixelsBeyondThePaletteAreAnError) {
  NEEDS_LIBRARIES();
  const std::string start = "89504e470d0a1a0a0000000d49484452000000040000000102030000008452e75e",
                    end = "0000000a49444154789c63900600001d001c8ef4f5210000000049454e44ae426082",
                    four = "0000000c504c54450102030405060708090a0b0cdc6337ac",
                    one = "00000003504c54450102030d8764d5";
  EXPECT_EQ(decode(from_hex(start + four + end)).pixels,
            (std::vector<uint8_t>{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}));
  expect_contains(error_of([&] { decode(from_hex(start + one + end)); }), "has no colour");
}

TEST(Image, PngOfTheTestsIsRead) {
  NEEDS_LIBRARIES();
  const Image image = picture(150, 160);  // more than one stored block
  EXPECT_EQ(decode(png_of(image)).pixels, image.pixels);
}

TEST(Image, ResizesAsPillowDoes) {
  const nlohmann::json cases = golden()["resized"];
  ASSERT_GE(cases.size(), 8u);
  for (const auto& c : cases) {
    const Image small = resize(picture(c["height"], c["width"]), c["to_height"], c["to_width"]);
    EXPECT_EQ(small.pixels, pixels_of(c)) << c["height"] << "x" << c["width"];
  }
}

TEST(Image, ShorterSide) {
  EXPECT_EQ(resize_shorter(picture(20, 31), 10).width, 15);  // 15.5 rounded down
  EXPECT_EQ(resize_shorter(picture(31, 20), 10).height, 15);
  EXPECT_EQ(resize_shorter(picture(7, 7), 7).pixels, picture(7, 7).pixels);
  EXPECT_EQ(resize_shorter(picture(100, 1), 1).height, 100);
  expect_contains(error_of([] { resize_shorter(black_image(900000, 1), 224); }),
                  "an image of 900000 x 1 whose shorter side becomes 224 would be 201600000 x 224");
}

TEST(Image, CropsWithBlackAround) {
  const Image image = picture(5, 6);
  const Image cut = crop(image, {-2, 3, 9, 5});
  for (int64_t y = 0; y < 9; ++y)
    for (int64_t x = 0; x < 5; ++x)
      for (int64_t c = 0; c < 3; ++c) {
        const int64_t fy = y - 2, fx = x + 3;
        const bool inside = fy >= 0 && fy < 5 && fx < 6;
        EXPECT_EQ(cut.row(y)[3 * x + c], inside ? image.row(fy)[3 * fx + c] : 0);
      }
  EXPECT_EQ(crop(image, {0, 0, 5, 6}).pixels, image.pixels);
  EXPECT_EQ(crop(image, {50, 50, 2, 2}).pixels, black_image(2, 2).pixels);
  // round((7 - 4) / 2) is 2 and round((6 - 5) / 2) is 0 in Python.
  EXPECT_EQ(center_box(picture(7, 7), 4), (Box{2, 2, 4, 4}));
  EXPECT_EQ(center_box(picture(6, 6), 5), (Box{0, 0, 5, 5}));
}

TEST(Image, FlipsTwiceToItself) {
  const Image image = picture(4, 5), flipped = flip_horizontally(image);
  for (int64_t x = 0; x < 5; ++x) EXPECT_EQ(flipped.row(2)[3 * x], image.row(2)[3 * (4 - x)]);
  EXPECT_EQ(flip_horizontally(flipped).pixels, image.pixels);
}

TEST(Image, RandomChoicesCoverWhatTheyMay) {
  const Image image = picture(32, 32), wide = picture(40, 90);
  int flips = 0;
  std::set<std::pair<int64_t, int64_t>> places;
  double area = 0;
  constexpr int kSamples = 4000;
  for (int s = 0; s < kSamples; ++s) {
    const AugmentDraws draws(7, s);
    flips += draws.flip();
    const Box box = draws.random_box(image, 32, 4);
    EXPECT_TRUE(box.top >= -4 && box.top <= 4 && box.left >= -4 && box.left <= 4);
    places.insert({box.top, box.left});
    const Box part = draws.random_area(wide);
    ASSERT_TRUE(part.top >= 0 && part.left >= 0 && part.height > 0 && part.width > 0);
    ASSERT_TRUE(part.top + part.height <= 40 && part.left + part.width <= 90);
    area += double(part.height * part.width) / (40 * 90);
    EXPECT_EQ(part, AugmentDraws(7, s).random_area(wide));  // no state
  }
  EXPECT_NEAR(flips, kSamples / 2, 4 * std::sqrt(kSamples / 4));
  EXPECT_EQ(places.size(), 81u);
  EXPECT_GT(area / kSamples, 0.15);  // what is large does not fit into so wide an image
  EXPECT_LT(area / kSamples, 0.40);
  // No area fits into a line, so the middle is taken.
  EXPECT_EQ(AugmentDraws(7, 1).random_area(picture(1, 300)), (Box{0, 149, 1, 1}));
}

}  // namespace
}  // namespace tessera::data
