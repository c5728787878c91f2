// The protocol between TcpStore and TcpStoreServer. Its handshake has parts of fixed sizes:
//   client: magic, client nonce;  server: magic, server nonce, proof;  client: proof
// where a proof is HMAC-SHA256(key, role, client nonce, server nonce). Frames follow: a
// little-endian u32 length of 1 to 1 MiB, and a body. A request is an operation and its fields, an
// answer a status and its fields. Invariant: Reader never reads outside its frame; it throws
// BadFrame instead, and the server then closes only that connection.
#pragma once
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "collectives/store/sha256.h"

namespace tessera::wire {

inline constexpr std::string_view kMagic = "TSStore1";  // the last character is the version
inline constexpr size_t kNonceBytes = 16;
inline constexpr size_t kHelloBytes = 8 + kNonceBytes;
inline constexpr size_t kProofBytes = 32;
inline constexpr uint32_t kMaxFrameBytes = 1 << 20;

enum class Op : uint8_t {
  kSet,
  kGet,
  kWait,
  kAdd,
  kAppend,
  kCompareSet,
  kCheck,
  kDelete,
  kNumKeys
};
enum class Status : uint8_t {
  kOk,
  kTimeout,   // followed by the absent keys
  kTooLarge,  // the answer exceeds a frame: ask for fewer keys
  kRefused,   // followed by the text of a UserError
};

class BadFrame : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

inline detail::Digest proof(std::string_view role, std::string_view key, std::string_view client,
                            std::string_view server) {
  std::string message(role);
  return detail::hmac_sha256(key, message.append(client).append(server));
}

/// Builds one frame; the length comes first and is filled in by frame().
class Writer {
 public:
  template <class Code>
  explicit Writer(Code code) : bytes_(4, '\0') {
    bytes_.push_back(char(code));
  }
  Writer& integer(int64_t v) {
    for (int i = 0; i < 8; ++i) bytes_.push_back(char(uint64_t(v) >> (8 * i)));
    return *this;
  }
  Writer& count(size_t n) {
    for (int i = 0; i < 4; ++i) bytes_.push_back(char(uint32_t(n) >> (8 * i)));
    return *this;
  }
  Writer& text(std::string_view s) {
    count(s.size());
    bytes_.append(s);
    return *this;
  }
  template <class List>
  Writer& list(const List& items) {
    count(items.size());
    for (const auto& item : items) text(item);
    return *this;
  }
  bool fits() const { return bytes_.size() - 4 <= kMaxFrameBytes; }
  /// The frame without its length.
  std::string body() const { return bytes_.substr(4); }
  const std::string& frame() {
    uint32_t n = uint32_t(bytes_.size() - 4);
    for (int i = 0; i < 4; ++i) bytes_[i] = char(n >> (8 * i));
    return bytes_;
  }

 private:
  std::string bytes_;
};

/// Reads the fields of one frame's body.
class Reader {
 public:
  explicit Reader(std::string_view body) : rest_(body) {}

  uint8_t code() { return uint8_t(take(1)[0]); }
  int64_t integer() { return int64_t(number(8)); }
  size_t count() { return size_t(number(4)); }
  std::string text() { return std::string(take(count())); }
  std::vector<std::string> list() {
    size_t n = count();
    expect(n, 4);
    std::vector<std::string> items;
    items.reserve(n);
    for (size_t i = 0; i < n; ++i) items.push_back(text());
    return items;
  }
  /// Throws where `n` items of at least `least` bytes cannot follow.
  void expect(size_t n, size_t least) const {
    if (n > rest_.size() / least) throw BadFrame("list longer than its frame");
  }
  void finish() const {
    if (!rest_.empty()) throw BadFrame("bytes after the last field");
  }

 private:
  std::string_view take(size_t n) {
    if (n > rest_.size()) throw BadFrame("field longer than its frame");
    std::string_view part = rest_.substr(0, n);
    rest_.remove_prefix(n);
    return part;
  }
  uint64_t number(size_t bytes) {
    std::string_view part = take(bytes);
    uint64_t v = 0;
    for (size_t i = 0; i < bytes; ++i) v |= uint64_t(uint8_t(part[i])) << (8 * i);
    return v;
  }

  std::string_view rest_;
};

/// The number in four little-endian bytes.
inline uint32_t number_in(const char* bytes) {
  uint32_t n = 0;
  for (int i = 0; i < 4; ++i) n |= uint32_t(uint8_t(bytes[i])) << (8 * i);
  return n;
}

/// The length in the four bytes before a body; 0 when it is outside 1 to kMaxFrameBytes.
inline uint32_t body_bytes(const char* header) {
  const uint32_t n = number_in(header);
  return n <= kMaxFrameBytes ? n : 0;
}

}  // namespace tessera::wire
