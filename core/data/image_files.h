// The files behind `images:`, in a folder or in an archive, and how their paths make classes and
// splits.
#pragma once
#include <functional>
#include <string>
#include <vector>

#include "core/data/image_source.h"

namespace tessera::data {

struct ImageFiles {
  std::string where;               // the folder or archive
  std::vector<std::string> paths;  // of the images below it, sorted, with / between folders
  std::vector<std::string> empty_folders;
  int64_t others = 0;  // files of other kinds
  /// Pixels of paths[i]; thread-safe.
  std::function<Image(size_t i)> decode;
};

/// True for names that end as JPEG and PNG files do.
bool is_image_name(std::string_view path);
/// True where any part of the path begins with a dot.
bool is_hidden(std::string_view path);

ImageFiles list_folder(const std::string& path);
ImageFiles list_archive(const std::string& path, BadImages bad);

/// Classes and splits from the last folders of the paths.
ImageSplit split_by_folders(ImageFiles files);

ImageSplit load_cifar10(const std::string& folder);
ImageSplit load_idx(const std::string& folder);

}  // namespace tessera::data
