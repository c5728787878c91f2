// SHA-256 (FIPS 180-4) and HMAC (RFC 2104), which the store's handshake uses. They are implemented
// here because a cryptography library would be loaded into every rank for these two functions
// alone; tests check them against the vectors of FIPS 180-4 and RFC 4231.
#pragma once
#include <array>
#include <cstdint>
#include <string>
#include <string_view>

namespace tessera::detail {

using Digest = std::array<uint8_t, 32>;

Digest sha256(std::string_view bytes);
Digest hmac_sha256(std::string_view key, std::string_view message);
/// Compares two digests in a time that does not depend on where they differ.
bool equal_digests(const Digest& a, const Digest& b);
/// Returns `n` bytes from the kernel's random generator.
std::string random_bytes(size_t n);
std::string to_hex(std::string_view bytes);

}  // namespace tessera::detail
