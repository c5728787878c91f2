// A pack: the cubins of many texts for one architecture in one file, so that a machine without a
// run-time compiler starts at once. Format, integers little-endian:
//   "TESPACK2", u32 architecture (90), u32 CUDA version of the compiler (13000), u64 number of
//   entries n, 128-bit hash of the entries;
//   n entries in ascending order of their keys: 128-bit key, u64 offset, u64 bytes, 128-bit hash of
//   the cubin; then the cubins.
// Invariant: a cubin that is returned has the hash that was written with it.
#pragma once
#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::cuda {

/// The hash of a kernel's text, architecture and options, and of emulation() where a virtual GPU
/// is.
using CubinKey = std::array<uint64_t, 2>;  // high, low
CubinKey cubin_key(std::string_view text, std::string_view architecture);
/// 32 lower-case hex digits.
std::string to_string(const CubinKey& key);

struct PackEntry {
  CubinKey key;
  std::string cubin;
};
/// Writes `entries`, with keys that differ, for `architecture` ("sm_90"), compiled by NVRTC of CUDA
/// `version` (13000 for 13.0); a file that was there is replaced as a whole. Throws UserError where
/// it cannot be written.
void write_pack(const std::string& path, std::string_view architecture, int version,
                std::vector<PackEntry> entries);

class Pack {
 public:
  /// A row of the index.
  struct Entry {
    CubinKey key;
    uint64_t offset, bytes;
    CubinKey hash;
  };
  /// Opens the pack at `path` and reads its index; nothing where there is no such file. Throws
  /// UserError where the file is no pack for `architecture`, or damaged.
  static std::optional<Pack> open(const std::string& path, std::string_view architecture);
  Pack(Pack&& other) noexcept;
  Pack& operator=(Pack&&) = delete;
  ~Pack();

  /// The cubin of `key`, if it is in the pack. Throws UserError where it is damaged. Thread-safe.
  std::optional<std::string> find(const CubinKey& key) const;
  size_t size() const { return entries_.size(); }
  /// The CUDA version of the compiler that made the pack. A driver loads code of its own major
  /// version and of earlier ones.
  int version() const { return version_; }
  const std::string& path() const { return path_; }

 private:
  Pack(std::string path, int fd) : path_(std::move(path)), fd_(fd) {}
  void read_index(uint32_t architecture);
  void read(void* to, size_t bytes, uint64_t offset) const;
  [[noreturn]] void damaged(const std::string& why) const;

  std::string path_;
  int fd_;
  int version_ = 0;
  std::vector<Entry> entries_;
};

}  // namespace tessera::cuda
