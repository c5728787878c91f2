// The protocol between two agents, without sockets. Its handshake has parts of fixed sizes:
//   client: magic, client nonce;  server: magic, server nonce, proof;  client: proof
// where a proof is HMAC-SHA256(secret, role, client nonce, server nonce). Frames follow: a
// little-endian u32 length of 0 to 1 MiB, a body, and a code, which is the first half of
//   HMAC-SHA256(session key, direction as one byte, number as little-endian u64, body).
// Frames are numbered from 0 in each direction, and the session key is a proof of the role
// "session". Invariant: Opener gives only bodies whose code is right, in their order, and never
// holds more than one frame and what came with its end.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>

#include "collectives/store/sha256.h"
#include "collectives/store/wire.h"

namespace tessera::launcher::frames {

inline constexpr std::string_view kMagic = "TSAgent1";  // the last character is the version
inline constexpr std::string_view kServer = "agent-server", kClient = "agent-client";
inline constexpr size_t kHelloBytes = 8 + wire::kNonceBytes;
inline constexpr size_t kAnswerBytes = kHelloBytes + wire::kProofBytes;
inline constexpr size_t kLengthBytes = 4, kCodeBytes = 16;
inline constexpr size_t kMaxBodyBytes = 1 << 20;

enum class Direction : uint8_t { kToServer, kToClient };

/// HMAC-SHA256(secret, role, client, server) as bytes; `client` and `server` are the nonces.
std::string proof(std::string_view role, std::string_view secret, std::string_view client,
                  std::string_view server);
/// The key of the codes of one connection.
std::string session_key(std::string_view secret, std::string_view client, std::string_view server);
/// Compares two strings of 32 bytes in a time that does not depend on where they differ.
bool equal_proofs(std::string_view a, std::string_view b);

/// Makes the frames of one direction.
class Sealer {
 public:
  Sealer(std::string key, Direction direction) : key_(std::move(key)), direction_(direction) {}
  /// Appends the next frame to `out`. `body` has at most kMaxBodyBytes.
  void seal(std::string_view body, std::string& out);

 private:
  std::string key_;
  Direction direction_;
  uint64_t number_ = 0;
};

/// Takes the frames of one direction apart, from bytes as they come.
class Opener {
 public:
  enum class Found {
    kBody,
    kPart,   // the bytes end within a frame, or before one
    kBroken  // the length or the code is wrong, and stays so
  };

  Opener(std::string key, Direction direction) : key_(std::move(key)), direction_(direction) {}
  void take(std::string_view bytes);
  /// Moves on to the next frame. `body` is valid until the next call of next() or take().
  Found next(std::string_view& body);
  /// Whether part of a frame is held.
  bool within_frame() const { return begin_ < bytes_.size(); }
  /// Bytes of memory that are held.
  size_t held_bytes() const { return bytes_.capacity(); }

 private:
  std::string key_;
  Direction direction_;
  uint64_t number_ = 0;
  std::string bytes_;
  size_t begin_ = 0;  // of the next frame
};

}  // namespace tessera::launcher::frames
