// Writes the file of one rank: a safetensors file whose blocks are all hashed on their way from
// memory, so that what a disk returns later can be compared with what was meant. Large files bypass
// the page cache (O_DIRECT): copying every byte there would take the training thread's core for
// longer than all the rest of a save. Invariant: after finish() all of the file is on disk and
// every byte has a hash.
#pragma once
#include <string>
#include <vector>

#include "parallel/checkpoint/manifest.h"

namespace tessera::checkpoint {

/// What finish() returns.
struct WrittenFile {
  FileEntry entry;
  std::vector<uint64_t> offsets;            // of each tensor in the file
  std::vector<std::vector<Digest>> blocks;  // of each tensor
  std::string note;  // if not empty: why the file went through the page cache
};

class RankFile {
 public:
  /// Creates `path`, which must not exist, and writes the header for `tensors` in this order. This
  /// and the functions below throw UserError with path, bytes and reason.
  RankFile(std::string path, std::vector<io::TensorInfo> tensors, const io::Metadata& metadata,
           uint64_t block_bytes);
  RankFile(const RankFile&) = delete;
  RankFile& operator=(const RankFile&) = delete;
  ~RankFile();

  /// Writes the next bytes of the tensors' data. They bypass the page cache only from memory that
  /// is aligned to io::kDirectAlign, and in multiples of it.
  void write(const std::byte* data, size_t bytes);
  /// Syncs and closes the file, which must be complete.
  WrittenFile finish();

 private:
  void write_all(const void* data, size_t bytes);
  [[noreturn]] void fail(const char* what, int error);
  void hash(const std::byte* data, size_t bytes);
  void end_block();
  void go_direct();
  void leave_direct(int error);
  std::string path_;
  std::vector<io::TensorInfo> tensors_;
  uint64_t block_bytes_, written_ = 0, flushed_ = 0;
  size_t tensor_ = 0;       // index of the tensor being written
  uint64_t in_tensor_ = 0;  // its bytes so far
  io::Xxh128 block_;
  WrittenFile out_;
  int fd_ = -1;
  bool direct_ = false;
};

/// Writes a small file that must not exist, and syncs it.
void write_new_file(const std::string& path, std::string_view text);

}  // namespace tessera::checkpoint
