// The folder of checkpoints as a file system sees it:
//
//   DIR/step-000000123/{rank-0000-of-0008.safetensors, ..., manifest.json}    immutable once named
//   so DIR/latest                      "step-000000123 <hash of its manifest>"
//   DIR/.step-000000124.tmp/        a save under way, or what a crash left of one
//
// Invariant: a folder is named step-N only when all of it is on disk, and `latest` names only such
// folders; both change by one rename.
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

/// Steps that are saved in `folder`, ascending; none when there is no such folder.
std::vector<int64_t> saved_steps(const std::string& folder);

struct Latest {
  int64_t step = 0;
  Digest manifest;
};
/// What `latest` says. Throws UserError when it is missing or damaged.
Latest read_latest(const std::string& folder);
/// Swaps it by a rename, durably.
void write_latest(const std::string& folder, const Latest& latest);

/// Where to resume.
struct Newest {
  int64_t step = 0;
  std::string folder;   // of that step
  std::string warning;  // not empty: `latest` was of no use, why, and what was taken instead
};
/// The step that `latest` names. Where it is missing or damaged or names a folder that is gone, the
/// newest step whose manifest is sound. Nothing when no step is saved in `folder`. Throws UserError
/// when steps are saved but none is sound.
std::optional<Newest> newest(const std::string& folder);
/// Where `latest` was of no use, makes it name what was taken instead, or removes it: a step that
/// is saved under the name of one that is gone must not be held against that one's hash.
void mend_latest(const std::string& folder, const std::optional<Newest>& found);
/// `path` itself when it holds a manifest, else the newest step in it. Throws UserError when there
/// is none.
Newest resolve(const std::string& path);

/// Why the manifest of one step's folder is not what it should be there: it is another step's, or
/// `latest` beside the folder names the step with another hash. Nothing where it is, and where
/// `latest` is missing, damaged or about another step.
std::optional<std::string> misplaced(const std::string& folder, const Manifest& manifest);
/// read_manifest(folder), of one that is not misplaced; else throws UserError.
Manifest read_step(const std::string& folder);

/// Creates `folder` and its parents where missing, durably.
void make_folders(const std::string& folder);
/// Creates one folder; throws UserError when it exists.
void make_folder(const std::string& folder);
/// Waits until the entries of `folder` are on disk.
void sync_folder(const std::string& folder);
void rename_folder(const std::string& from, const std::string& to);
/// Removes what crashed saves left in `folder`, and nothing else.
void remove_leftovers(const std::string& folder);
/// Takes the name of step `step` away and removes what it named. A crash between leaves a leftover.
void remove_step(const std::string& folder, int64_t step);
/// Removes a temporary folder; returns why it could not, or nothing.
std::string remove_temporary(const std::string& folder);

/// Held by the one job that saves into a folder; the kernel releases it however the job ends.
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
