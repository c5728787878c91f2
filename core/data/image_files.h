// The files behind `images:`, in a folder or in an archive, and how their paths make classes and
// splits.
#pragma once
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "core/data/image_source.h"

namespace tessera::data {

struct ImageFiles {
  std::string where;               // the folder or archive
  std::vector<std::string> paths;  // of the images below it, sorted, with / between folders
  std::vector<uint64_t> bytes;     // of these files; 0 where not looked up
  std::vector<std::string> empty_folders;
  std::set<std::string> bare_folders;  // that hold something left out; images perhaps as well
  int64_t others = 0, hidden = 0;      // left out: files of other kinds; files and folders
  int64_t links = 0;                   // left out, of an archive
  /// Pixels of paths[i]; thread-safe.
  std::function<Image(size_t i)> decode;
};

/// True for names that end as JPEG and PNG files do.
bool is_image_name(std::string_view path);
/// Where the first part of the path that begins with a dot begins; npos without one.
size_t hidden_part(std::string_view path);
/// The folder of a path, empty for one without /.
std::string parent_folder(const std::string& path);

ImageFiles list_folder(const std::string& path);
ImageFiles list_archive(const std::string& path, BadImages bad);

/// Classes and splits from the last folders of the paths.
ImageSplit split_by_folders(ImageFiles files);

/// "cifar10" or "idx" where `folder` holds such files, which messages name; else "".
std::string raw_kind(const std::string& folder);
ImageSplit load_cifar10(const std::string& folder);
ImageSplit load_idx(const std::string& folder);

}  // namespace tessera::data
