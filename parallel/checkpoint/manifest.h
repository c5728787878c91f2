// The global description of one saved step, manifest.json: every tensor, which bytes of which file
// hold which box of it, and a hash of every block of every file. Invariant: a manifest that was
// read is complete and consistent: its own hash is right, boxes partition tensors, headers and
// chunks partition files, names are plain file names. Nothing was allocated for the tensors;
// reading takes memory of a few times the manifest's own size.
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
inline constexpr uint64_t kBlockBytes = 1 << 20;  // a hash each
inline constexpr uint64_t kMaxManifestBytes = 256 << 20, kMaxChunks = 1 << 21, kMaxFiles = 1 << 17,
                          kMaxExtra = 1 << 16;
inline constexpr int64_t kMaxStep = int64_t(1) << 62;  // so that who counts on has numbers

struct Chunk {
  uint32_t file = 0;           // index into Manifest::files
  uint64_t offset = 0;         // of its first byte in the file
  Box box;                     // its elements, in C order
  std::vector<Digest> blocks;  // of each block_bytes of it, the last one shorter
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
  Digest header;              // of those
};
struct Manifest {
  int64_t step = 0;
  int world_size = 1;
  uint64_t block_bytes = kBlockBytes;
  Extra extra;
  std::vector<FileEntry> files;
  std::vector<TensorEntry> tensors;  // in ascending order of names
  Digest hash;                       // of the text before it

  const TensorEntry* find(std::string_view name) const;
};

inline uint64_t bytes_of(const TensorEntry& t, const Chunk& c) {
  return uint64_t(numel(c.box.shape)) * size_of(t.dtype);
}

/// Throws UserError for texts that a manifest cannot hold: they are UTF-8, and at most kMaxExtra.
/// Who saves in hours from now asks at once.
void check_extra(const Extra& extra);
/// JSON text; sets m.hash to what its last line says.
std::string print_manifest(Manifest& m);
/// Reads and checks `folder`/manifest.json. Throws UserError naming the file and what is wrong.
Manifest read_manifest(const std::string& folder);
/// All rules but those of JSON; `where` begins every error.
void check_manifest(const Manifest& m, const std::string& where);
/// True for a name that names a file of its own folder and nothing else.
bool is_plain_file_name(std::string_view name);

}  // namespace tessera::checkpoint
