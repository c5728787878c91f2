#include "launcher/agents/peer_frames.h"

#include "core/base/error.h"

namespace tessera::launcher::frames {
namespace {

constexpr size_t kKeptBytes = 1 << 18;  // of memory, between frames

std::string as_bytes(const detail::Digest& digest) { return {digest.begin(), digest.end()}; }

void append_number(std::string& out, uint64_t number, int bytes) {
  for (int i = 0; i < bytes; ++i) out.push_back(char(number >> (8 * i)));
}

detail::Digest code(const std::string& key, Direction direction, uint64_t number,
                    std::string_view body) {
  std::string text(1, char(direction));
  append_number(text, number, 8);
  return detail::hmac_sha256(key, text.append(body));
}

// Compares what the frame holds with the first half of `right`, in a time that does not depend on
// where they differ.
bool has_code(const char* held, const detail::Digest& right) {
  uint8_t difference = 0;
  for (size_t i = 0; i < kCodeBytes; ++i) difference |= uint8_t(uint8_t(held[i]) ^ right[i]);
  return difference == 0;
}

}  // namespace

std::string proof(std::string_view role, std::string_view secret, std::string_view client,
                  std::string_view server) {
  return as_bytes(wire::proof(role, secret, client, server));
}

std::string session_key(std::string_view secret, std::string_view client, std::string_view server) {
  return proof("session", secret, client, server);
}

bool equal_proofs(std::string_view a, std::string_view b) {
  detail::Digest left{}, right{};
  if (a.size() != left.size() || b.size() != right.size()) return false;
  a.copy(reinterpret_cast<char*>(left.data()), left.size());
  b.copy(reinterpret_cast<char*>(right.data()), right.size());
  return detail::equal_digests(left, right);
}

void Sealer::seal(std::string_view body, std::string& out) {
  TESSERA_ASSERT(body.size() <= kMaxBodyBytes, "a message to an agent has {} bytes, more than {}",
                 body.size(), kMaxBodyBytes);
  append_number(out, body.size(), kLengthBytes);
  out.append(body);
  const detail::Digest full = code(key_, direction_, number_++, body);
  out.append(reinterpret_cast<const char*>(full.data()), kCodeBytes);
}

void Opener::take(std::string_view bytes) {
  bytes_.erase(0, begin_);
  begin_ = 0;
  if (bytes_.empty() && bytes_.capacity() > kKeptBytes) bytes_.shrink_to_fit();
  bytes_.append(bytes);
}

Opener::Found Opener::next(std::string_view& body) {
  const std::string_view rest = std::string_view(bytes_).substr(begin_);
  if (rest.size() < kLengthBytes) return Found::kPart;
  const size_t n = wire::number_in(rest.data());
  if (n > kMaxBodyBytes) return Found::kBroken;
  if (rest.size() < kLengthBytes + n + kCodeBytes) return Found::kPart;
  const std::string_view claimed = rest.substr(kLengthBytes, n);
  const detail::Digest right = code(key_, direction_, number_, claimed);
  if (!has_code(rest.data() + kLengthBytes + n, right)) return Found::kBroken;
  body = claimed;
  ++number_;
  begin_ += kLengthBytes + n + kCodeBytes;
  return Found::kBody;
}

}  // namespace tessera::launcher::frames
