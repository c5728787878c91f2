#include "parallel/checkpoint/overwrite.h"

#include <climits>
#include <cstdlib>
#include <deque>
#include <filesystem>
#include <fstream>

#include "core/io/file.h"
#include "parallel/checkpoint/folder.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;
using io::quote;

// The path that writing to `path` ends at, after all links. Unlike weakly_canonical it follows
// links to files that do not exist yet, as creating a file does.
fs::path place_of(const std::string& path) {
  constexpr int kMostLinks = 40;  // the limit of Linux
  std::error_code error;
  const fs::path whole = fs::absolute(path, error);
  std::deque<fs::path> parts(whole.begin(), whole.end());
  fs::path at;
  for (int links = 0; !parts.empty();) {
    const fs::path part = parts.front(), next = at / part;
    parts.pop_front();
    if (part == "..") {
      at = at.parent_path();
    } else if (links < kMostLinks && fs::is_symlink(next, error)) {
      const fs::path target = fs::read_symlink(next, error);
      if (target.is_absolute()) at.clear();
      parts.insert(parts.begin(), target.begin(), target.end());
      ++links;
    } else if (!part.empty() && part != ".") {  // "a/" ends in an empty part
      at = next;
    }
  }
  return at;
}

bool names_a_step(const std::string& name) {
  return name.starts_with("step-") && step_name(std::atoll(name.c_str() + 5)) == name;
}

// Whether the folder holds files of ranks; it may have lost its manifest.
bool holds_rank_files(const fs::path& folder) {
  std::error_code error;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename().string();
    if (name.starts_with("rank-") && name.ends_with(".safetensors")) return true;
  }
  return false;
}

// Recognises a saved step by its name and contents or, where it was renamed, by its manifest.
bool is_saved_step(const fs::path& folder) {
  std::error_code error;
  if (!fs::is_directory(folder, error)) return false;
  if (names_a_step(folder.filename().string()) &&
      (fs::exists(folder / kManifestName, error) || holds_rank_files(folder)))
    return true;
  constexpr std::string_view kBegin = "{\"format\":\"tessera-checkpoint\"";
  std::string begin(kBegin.size(), '\0');
  const fs::path manifest = folder / kManifestName;
  return fs::is_regular_file(manifest, error) &&
         std::ifstream(manifest, std::ios::binary).read(begin.data(), long(begin.size())) &&
         begin == kBegin;
}

bool has_sound_latest(const fs::path& folder) {
  try {
    read_latest(folder.string());
    return true;
  } catch (const UserError&) {
    return false;
  }
}

bool is_saved_into(const fs::path& folder) {
  std::error_code error;
  return fs::is_directory(folder, error) &&
         (has_sound_latest(folder) || !saved_steps(folder.string()).empty());
}

void check_outside_of_steps(const fs::path& place, const std::string& path,
                            const std::string& who) {
  for (fs::path at = place; at.has_relative_path(); at = at.parent_path())
    TESSERA_CHECK(!is_saved_step(at),
                  "{}: {} is in the saved step {}, which stays as it was saved; name another path",
                  who, quote(path), quote(at.string()));
}

}  // namespace

void check_may_write(const std::string& path, const std::string& who, const std::string& own) {
  const fs::path place = place_of(path), folder = place.parent_path();
  check_outside_of_steps(place, path, who);
  const std::string name = place.filename().string();
  if (name != kLatestName && !names_a_step(name)) return;
  TESSERA_CHECK((own.empty() || folder != place_of(own)) && !is_saved_into(folder),
                "{}: {} is a name that the checkpoints in {} use; name another path", who,
                quote(path), quote(folder.string()));
}

void check_may_save(const std::string& folder, const std::string& who) {
  const fs::path place = place_of(folder);
  check_outside_of_steps(place, folder, who);
  std::error_code error;
  TESSERA_CHECK(!fs::exists(fs::symlink_status(place / kLatestName, error)) ||
                    has_sound_latest(place) || !saved_steps(place.string()).empty(),
                "{}: the file {} in {} was written by no save, and the first one would replace it; "
                "remove it, or name another folder",
                who, quote(kLatestName), quote(folder));
  constexpr size_t kLongest =
      sizeof "/.step-1234567890123456789.old.tmp/rank-1234567890-of-1234567890.safetensors";
  TESSERA_CHECK(folder.size() + kLongest < PATH_MAX,
                "{}: a path of {} bytes leaves no room for the names of what is saved there, a "
                "path has at most {}; name a folder with a shorter one",
                who, folder.size(), PATH_MAX - 1);
}

}  // namespace tessera::checkpoint
