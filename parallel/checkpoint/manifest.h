// The manifest (manifest.json) describes one saved step for all ranks: every tensor, which bytes of
// which file hold which box of it, and a hash of every block of every file. Invariant: a manifest
// that was read is complete and consistent: its own hash is right, boxes partition tensors, headers
// and chunks partition files, names are plain file names. Reading allocates nothing for the
// tensors, only a few times the size of the manifest.
// Internal: not part of the public interface.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "core/io/hash.h"
#include "core/io/safetensors.h"
#include "parallel/checkpoint/piece.h"

namespace tessera::checkpoint {

using io::Digest;

inline constexpr const char* kManifestName = "manifest.json";
inline constexpr uint64_t kBlockBytes = 1 << 20;  // each block has a hash
inline constexpr uint64_t kMaxManifestBytes = 256 << 20, kMaxChunks = 1 << 21, kMaxFiles = 1 << 17,
                          kMaxExtra = 1 << 16;
inline constexpr int64_t kMaxStep = int64_t(1) << 62;  // leaves numbers for steps that follow

struct Chunk {
  uint32_t file = 0;           // index into Manifest::files
  uint64_t offset = 0;         // of the chunk's first byte in the file
  Box box;                     // its elements, in C order
  std::vector<Digest> blocks;  // hashes of its blocks of block_bytes, the last one shorter
};
struct TensorEntry {
  std::string name;
  DType dtype = kF32;
  Shape shape;
  std::vector<Chunk> chunks;  // none where the tensor has no elements
};
struct FileEntry {
  std::string name;           // plain, in the folder of the manifest
  uint64_t bytes = 0;         // of the whole file
  uint64_t header_bytes = 0;  // before the first chunk
  Digest header;              // hash of those
};
struct Manifest {
  int64_t step = 0;
  int world_size = 1;
  uint64_t block_bytes = kBlockBytes;
  Extra extra;
  std::vector<FileEntry> files;
  std::vector<TensorEntry> tensors;  // in ascending order of names
  Digest hash;                       // of the text before the line with the hash

  const TensorEntry* find(std::string_view name) const;
};

inline uint64_t bytes_of(const TensorEntry& t, const Chunk& c) {
  return uint64_t(numel(c.box.shape)) * size_of(t.dtype);
}

/// Throws UserError for texts that a manifest cannot hold: they must be UTF-8 and at most kMaxExtra
/// bytes. A program that will save only hours later calls it at once.
void check_extra(const Extra& extra);
/// Prints the JSON text and sets m.hash to the hash in its last line.
std::string print_manifest(Manifest& m);
/// Reads and checks `folder`/manifest.json. Throws UserError that names the file and what is wrong.
Manifest read_manifest(const std::string& folder);
/// Checks all rules but those of JSON; `where` begins every error text.
void check_manifest(const Manifest& m, const std::string& where);
/// True for a name of a file in the same folder.
bool is_plain_file_name(std::string_view name);

}  // namespace tessera::checkpoint
