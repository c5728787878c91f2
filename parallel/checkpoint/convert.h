// Converts between checkpoints and Hugging Face's layout: model.safetensors, or shards with
// model.safetensors.index.json. It holds one tensor in memory at a time, whatever the size of the
// model. Invariant: a target appears as a whole or not at all, and an existing one is never half
// replaced.
#pragma once
#include <cstdint>
#include <string>

namespace tessera::checkpoint {

struct ExportOptions {
  std::string prefix = "model.";  // which tensors, and what their names lose; "": all of them
  // The most bytes of tensors in one file; 0: all are in one file. A larger tensor gets its own.
  uint64_t max_shard_bytes = 0;
};
struct Converted {
  uint64_t tensors = 0, bytes = 0, files = 0;
};

/// Writes the newest step of `from` (or the step that it names) to `to`: a file ending in
/// .safetensors, or a folder that is created. Texts "metadata.<key>" of the checkpoint become
/// metadata of the files. All blocks are verified. Throws UserError.
Converted export_safetensors(const std::string& from, const std::string& to,
                             const ExportOptions& options = {});
/// Saves a safetensors file, or a folder with model.safetensors or shards and their index, as step
/// `step` in the folder `to`. Throws UserError.
Converted import_safetensors(const std::string& from, const std::string& to, int64_t step = 0,
                             const std::string& prefix = "model.");

/// True when `path` is a folder of saved steps, or one of them.
bool is_checkpoint(const std::string& path);

}  // namespace tessera::checkpoint
