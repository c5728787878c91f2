// Event files, decoded by a reader of their own: framing, checksums and every field; and what
// errors name. Constants of the checksum are from RFC 3720 B.4.
#include "core/io/event_writer.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <map>
#include <vector>

#include "core/base/error.h"
#include "core/io/file.h"
#include "tests/support/temp_folder.h"

namespace tessera::io {
namespace {

// CRC-32C bit by bit.
uint32_t slow_crc(std::string_view bytes) {
  uint32_t crc = ~0u;
  for (char c : bytes) {
    crc ^= uint8_t(c);
    for (int bit = 0; bit < 8; ++bit) crc = crc & 1 ? crc >> 1 ^ 0x82f63b78u : crc >> 1;
  }
  return ~crc;
}
uint32_t unmask(uint32_t masked) {
  uint32_t rotated = masked - 0xa282ead8u;
  return rotated >> 17 | rotated << 15;
}

template <class T>
T take(std::string_view& from) {
  T value{};
  if (from.size() < sizeof(T)) throw std::runtime_error("torn");
  std::memcpy(&value, from.data(), sizeof(T));
  from.remove_prefix(sizeof(T));
  return value;
}

std::vector<std::string> records(const std::string& path) {
  std::string file = read_file(path, "test");
  std::string_view rest = file;
  std::vector<std::string> out;
  while (!rest.empty()) {
    std::string_view head = rest.substr(0, 8);
    auto size = take<uint64_t>(rest);
    EXPECT_EQ(unmask(take<uint32_t>(rest)), slow_crc(head));
    out.emplace_back(rest.substr(0, size));
    rest.remove_prefix(size);
    EXPECT_EQ(unmask(take<uint32_t>(rest)), slow_crc(out.back()));
  }
  return out;
}

// Fields of one message: the number, and its bytes or the bits of its value.
struct Field {
  int number;
  uint64_t value = 0;
  std::string bytes = {};
};
uint64_t varint(std::string_view& from) {
  uint64_t v = 0;
  for (int shift = 0;; shift += 7) {
    auto byte = take<uint8_t>(from);
    v |= uint64_t(byte & 0x7f) << shift;
    if (byte < 0x80) return v;
  }
}
std::vector<Field> fields(std::string_view message) {
  std::vector<Field> out;
  while (!message.empty()) {
    uint64_t key = varint(message);
    Field f{int(key >> 3)};
    switch (key & 7) {
      case 0: f.value = varint(message); break;
      case 1: f.value = take<uint64_t>(message); break;
      case 5: f.value = take<uint32_t>(message); break;
      default: {
        size_t n = varint(message);
        f.bytes = message.substr(0, n);
        message.remove_prefix(n);
      }
    }
    out.push_back(f);
  }
  return out;
}

std::map<std::string, float> values_of(const std::string& summary) {
  std::map<std::string, float> out;
  for (const Field& value : fields(summary)) {
    EXPECT_EQ(value.number, 1);
    std::vector<Field> f = fields(value.bytes);
    float number = 0;
    uint32_t bits = uint32_t(f.at(1).value);
    std::memcpy(&number, &bits, sizeof(number));
    EXPECT_EQ(f[0].number, 1);
    EXPECT_EQ(f[1].number, 2);
    out[f[0].bytes] = number;
  }
  return out;
}

TEST(Crc32c, KnownValues) {
  EXPECT_EQ(crc32c(std::string(32, '\0')), 0x8a9136aau);
  EXPECT_EQ(crc32c(std::string(32, '\xff')), 0x62a8ab43u);
  EXPECT_EQ(crc32c("123456789"), 0xe3069283u);
  EXPECT_EQ(crc32c(""), 0u);
}

TEST(EventWriter, FilesDecodeToWhatWasWritten) {
  TempFolder folder;
  const double before = double(std::time(nullptr));
  EventWriter writer(folder / "runs/a");
  const EventWriter::Scalar first[] = {{"train/loss", 2.5}, {"train/lr", 1e-3}};
  writer.scalars(1, first);
  writer.scalar(int64_t(1) << 40, "validation/loss", std::nan(""));
  EXPECT_NE(writer.path().find("runs/a/events.out.tfevents."), std::string::npos);

  std::vector<std::string> all = records(writer.path());
  ASSERT_EQ(all.size(), 3u);
  for (const std::string& e : all) {
    Field time = fields(e).at(0);
    double seconds = 0;
    std::memcpy(&seconds, &time.value, sizeof(seconds));
    EXPECT_EQ(time.number, 1);
    EXPECT_GE(seconds, before);
    EXPECT_LT(seconds, before + 60);
  }
  EXPECT_EQ(fields(all[0]).at(2).number, 3);
  EXPECT_EQ(fields(all[0]).at(2).bytes, "brain.Event:2");
  std::vector<Field> step = fields(all[1]);
  EXPECT_EQ(step.at(1).number, 2);
  EXPECT_EQ(step.at(1).value, 1u);
  EXPECT_EQ(step.at(2).number, 5);
  EXPECT_EQ(values_of(step[2].bytes),
            (std::map<std::string, float>{{"train/loss", 2.5f}, {"train/lr", 1e-3f}}));
  EXPECT_EQ(fields(all[2]).at(1).value, uint64_t(1) << 40);
  EXPECT_TRUE(std::isnan(values_of(fields(all[2]).at(2).bytes).at("validation/loss")));
}

TEST(EventWriter, ARunThatGoesOnHidesWhatItWritesAgain) {
  TempFolder folder;
  EventWriter one(folder.str()), two(folder.str(), {.purge_from = 7});
  EXPECT_NE(one.path(), two.path());
  EXPECT_EQ(records(one.path()).size(), 1u);
  std::vector<Field> start = fields(records(two.path()).at(1));
  EXPECT_EQ(start.at(1).value, 7u);
  EXPECT_EQ(start.at(2).number, 7);
  Field status = fields(start[2].bytes).at(0);
  EXPECT_EQ(status.number, 1);
  EXPECT_EQ(status.value, 1u);
}

TEST(EventWriter, RefusesPlacesThatCannotBeWritten) {
  TempFolder folder;
  std::string file = folder.write("file", "x");
  try {
    EventWriter writer(file + "/runs");
    FAIL() << "nothing thrown";
  } catch (const UserError& e) {
    EXPECT_NE(std::string(e.what()).find("/file/runs"), std::string::npos) << e.what();
  }
}

}  // namespace
}  // namespace tessera::io
