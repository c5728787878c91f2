#include "core/io/event_writer.h"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>

#include "core/base/error.h"
#include "core/io/file.h"

namespace tessera::io {
namespace {

double wall_time() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

std::string host_name() {
  std::array<char, 256> name{};
  if (gethostname(name.data(), name.size() - 1) != 0) return "localhost";
  return name.data();
}

template <class T>
void append_bytes(std::string& to, T value) {  // little-endian, as the machines we build for
  char raw[sizeof(T)];
  std::memcpy(raw, &value, sizeof(T));
  to.append(raw, sizeof(T));
}

// Protobuf's wire format: a key is field << 3 | type.
enum Wire : uint64_t { kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5 };

void append_varint(std::string& to, uint64_t v) {
  for (; v >= 0x80; v >>= 7) to += char(v | 0x80);
  to += char(v);
}
void append_key(std::string& to, int field, Wire type) {
  append_varint(to, uint64_t(field) << 3 | type);
}
void append_integer(std::string& to, int field, int64_t v) {
  append_key(to, field, kVarint), append_varint(to, uint64_t(v));
}
void append_message(std::string& to, int field, std::string_view message) {
  append_key(to, field, kBytes), append_varint(to, message.size()), to += message;
}

// message Event { double wall_time = 1; int64 step = 2; string file_version = 3;
//                 Summary summary = 5; SessionLog session_log = 7; }
std::string event(int64_t step) {
  std::string e;
  append_key(e, 1, kFixed64), append_bytes(e, wall_time());
  append_integer(e, 2, step);
  return e;
}

// TFRecord masks checksums in this way, because data may hold checksums themselves.
uint32_t masked(uint32_t crc) { return ((crc >> 15) | (crc << 17)) + 0xa282ead8u; }

}  // namespace

uint32_t crc32c(std::string_view bytes) {
  static const std::array<uint32_t, 256> table = [] {
    std::array<uint32_t, 256> t{};
    for (uint32_t i = 0; i < 256; ++i) {
      t[i] = i;
      for (int bit = 0; bit < 8; ++bit) t[i] = t[i] >> 1 ^ (t[i] & 1 ? 0x82f63b78u : 0);
    }
    return t;
  }();
  uint32_t crc = ~0u;
  for (char c : bytes) crc = crc >> 8 ^ table[(crc ^ uint8_t(c)) & 0xff];
  return ~crc;
}

EventWriter::EventWriter(const std::string& folder, EventWriterOptions o) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  TESSERA_CHECK(!error, "event file: cannot make the folder {}: {}", quote(folder),
                error.message());
  static std::atomic<int> number{0};  // writers of one process and second
  path_ = (std::filesystem::path(folder) / fmt::format("events.out.tfevents.{:010}.{}.{}.{}",
                                                       int64_t(wall_time()), host_name(), getpid(),
                                                       number++))
              .string();
  fd_ = open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_APPEND | O_CLOEXEC, 0666);
  TESSERA_CHECK(fd_ >= 0, "event file {}: {}", quote(path_), std::strerror(errno));
  std::string first = event(0);
  append_message(first, 3, "brain.Event:2");
  write(first);
  if (!o.purge_from) return;
  // message SessionLog { SessionStatus status = 1; }, START = 1
  std::string session, start = event(*o.purge_from);
  append_integer(session, 1, 1);
  append_message(start, 7, session);
  write(start);
}

EventWriter::~EventWriter() {
  if (fd_ >= 0) close(fd_);
}

void EventWriter::scalars(int64_t step, std::span<const Scalar> values) {
  // message Summary { repeated Value value = 1; }, Value { string tag = 1; float simple_value = 2;
  // }
  std::string summary, e = event(step);
  for (auto& [tag, number] : values) {
    std::string value;
    append_message(value, 1, tag);
    append_key(value, 2, kFixed32), append_bytes(value, float(number));
    append_message(summary, 1, value);
  }
  append_message(e, 5, summary);
  write(e);
}

// TFRecord: u64 length, its masked checksum, the data, their masked checksum.
void EventWriter::write(std::string_view data) {
  std::string record;
  append_bytes(record, uint64_t(data.size()));
  append_bytes(record, masked(crc32c(record)));
  record += data;
  append_bytes(record, masked(crc32c(data)));
  const ssize_t done = ::write(fd_, record.data(), record.size());
  TESSERA_CHECK(done == ssize_t(record.size()), "event file {}: {}", quote(path_),
                done < 0 ? std::strerror(errno) : "the disk is full");
}

}  // namespace tessera::io
