// The folder of checkpoints in the file system:
//
//   DIR/latest                 "step-000000123 <hash of its manifest>"
//   DIR/step-000000123/        immutable once it has this name:
//     manifest.json, rank-0000-of-0008.safetensors, ...
//   DIR/.step-000000124.tmp/   a save in progress, or what a crash left of one
//
// Invariant: a folder is named step-N only when all of it is on disk, and `latest` names only such
// folders; both change by one rename.
// Internal: not part of the public interface.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "parallel/checkpoint/manifest.h"

namespace tessera::checkpoint {

inline constexpr const char* kLatestName = "latest";

/// "step-000000123", ".step-000000123.tmp", "rank-0003-of-0008.safetensors".
std::string step_name(int64_t step);
std::string temporary_name(int64_t step);
std::string rank_file_name(int rank, int world_size);

/// The steps that are saved in `folder`, ascending; none when there is no such folder.
std::vector<int64_t> saved_steps(const std::string& folder);

struct Latest {
  int64_t step = 0;
  Digest manifest;
};
/// Reads `latest`. Throws UserError when it is missing or damaged.
Latest read_latest(const std::string& folder);
/// Replaces `latest` by a rename, durably.
void write_latest(const std::string& folder, const Latest& latest);

/// The step from which to resume.
struct Newest {
  int64_t step = 0;
  std::string folder;   // of that step
  std::string warning;  // if not empty: why `latest` could not be used, and what was taken instead
};
/// Returns the step that `latest` names. Where it is missing or damaged or names a folder that does
/// not exist, returns the newest step whose manifest is sound; nothing when no step is saved in
/// `folder`. Throws UserError when steps are saved but none is sound.
std::optional<Newest> newest(const std::string& folder);
/// Where `latest` could not be used, makes it name the step that was taken instead, or removes it.
/// Otherwise a later save with the name of a lost step would be checked against the lost step's
/// hash.
void mend_latest(const std::string& folder, const std::optional<Newest>& found);
/// Returns `path` itself when it holds a manifest, else the newest step in it. Throws UserError
/// when there is none.
Newest resolve(const std::string& path);

/// Returns why the manifest in a step's folder does not belong there: it is another step's, or
/// `latest` beside the folder names the step with another hash. Returns nothing where it does
/// belong, and where `latest` is missing, damaged or about another step.
std::optional<std::string> misplaced(const std::string& folder, const Manifest& manifest);
/// Returns read_manifest(folder); throws UserError where it is misplaced.
Manifest read_step(const std::string& folder);

/// Creates `folder` and its parents where they do not exist, durably.
void make_folders(const std::string& folder);
/// Creates one folder; throws UserError when it exists.
void make_folder(const std::string& folder);
/// Waits until the entries of `folder` are on disk.
void sync_folder(const std::string& folder);
void rename_folder(const std::string& from, const std::string& to);
/// Removes what crashed saves left in `folder`, and nothing else.
void remove_leftovers(const std::string& folder);
/// Renames the folder of step `step` to a temporary name and removes it. A crash in between leaves
/// a leftover.
void remove_step(const std::string& folder, int64_t step);
/// Removes a temporary folder; returns why it could not, or nothing.
std::string remove_temporary(const std::string& folder);

/// The lock that the one job which saves into a folder holds; the kernel releases it however the
/// job ends.
class FolderLock {
 public:
  /// Throws UserError when another job holds it.
  explicit FolderLock(const std::string& folder);
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;
  ~FolderLock();

 private:
  int fd_ = -1;
};

}  // namespace tessera::checkpoint
