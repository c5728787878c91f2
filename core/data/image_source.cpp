#include "core/data/image_source.h"

#include <algorithm>
#include <filesystem>
#include <map>

#include "core/base/error.h"
#include "core/base/log.h"
#include "core/data/image_files.h"
#include "core/io/file.h"

namespace tessera::data {
namespace {

namespace fs = std::filesystem;

class FileItems final : public ImageSource {
 public:
  struct Item {
    size_t file;
    int64_t label;
  };
  FileItems(std::shared_ptr<const ImageFiles> files, std::vector<Item> items)
      : files_(std::move(files)), items_(std::move(items)) {}
  int64_t size() const override { return int64_t(items_.size()); }
  int64_t label(int64_t item) const override { return items_[size_t(item)].label; }
  std::string name(int64_t item) const override {
    return files_->where + "/" + files_->paths[items_[size_t(item)].file];
  }
  Image read(int64_t item) const override { return files_->decode(items_[size_t(item)].file); }

 private:
  std::shared_ptr<const ImageFiles> files_;
  std::vector<Item> items_;
};

std::string parent(const std::string& path) {
  const size_t slash = path.rfind('/');
  return slash == std::string::npos ? "" : path.substr(0, slash);
}
std::string last_part(const std::string& path) { return path.substr(path.rfind('/') + 1); }

using ByClass = std::map<std::string, std::vector<size_t>>;  // class name -> files, by name

// Class folders with the same parent, which is a split or the whole.
std::map<std::string, ByClass> group(const ImageFiles& files) {
  std::map<std::string, ByClass> groups;
  for (size_t i = 0; i < files.paths.size(); ++i) {
    const std::string folder = parent(files.paths[i]);
    TESSERA_CHECK(!folder.empty(),
                  "data: {} has the image {} outside of any folder; expected class folders, or "
                  "train and test with class folders",
                  io::quote(files.where), io::quote(files.paths[i]));
    groups[parent(folder)][last_part(folder)].push_back(i);
  }
  return groups;
}

std::string names_of(const std::map<std::string, ByClass>& groups) {
  std::string out;
  for (const auto& [name, classes] : groups) out += (out.empty() ? "" : ", ") + io::quote(name);
  return out;
}

std::vector<FileItems::Item> items_of(const ByClass& classes, const std::vector<std::string>& names,
                                      const ImageFiles& files) {
  std::vector<FileItems::Item> items;
  for (const auto& [name, members] : classes) {
    const auto at = std::ranges::lower_bound(names, name);
    TESSERA_CHECK(at != names.end() && *at == name,
                  "data: {} validates with class {}, of which no image trains",
                  io::quote(files.where), io::quote(name));
    for (size_t i : members) items.push_back({i, at - names.begin()});
  }
  return items;
}

}  // namespace

bool is_image_name(std::string_view path) {
  std::string end(path.substr(path.rfind('.') + 1));
  for (char& c : end) c = char(std::tolower(c));
  return end == "jpg" || end == "jpeg" || end == "png";
}

bool is_hidden(std::string_view path) {
  for (size_t at = 0; at < path.size();) {
    const size_t slash = std::min(path.find('/', at), path.size());
    const std::string_view part = path.substr(at, slash - at);
    if (part.size() > 1 && part[0] == '.' && part != "..") return true;
    at = slash + 1;
  }
  return false;
}

ImageFiles list_folder(const std::string& path) {
  ImageFiles out;
  out.where = path;
  std::error_code error;
  fs::recursive_directory_iterator it(path, error), end;
  for (; !error && it != end; it.increment(error)) {
    const std::string name = it->path().lexically_relative(path).generic_string();
    std::error_code unknown;
    if (is_hidden(name)) {
      if (it->is_directory(unknown)) it.disable_recursion_pending();
    } else if (it->is_directory(unknown)) {
      if (fs::is_empty(it->path(), unknown)) out.empty_folders.push_back(name);
    } else if (is_image_name(name)) {
      out.paths.push_back(name);
    } else {
      ++out.others;
    }
  }
  TESSERA_CHECK(!error, "data: {}: {}", io::quote(path), error.message());
  std::ranges::sort(out.paths);
  auto paths = std::make_shared<std::vector<std::string>>(out.paths);
  out.decode = [path, paths](size_t i) {
    const std::string file = path + "/" + (*paths)[i];
    const std::string bytes = io::read_file(file, "data");
    return decode_image(std::as_bytes(std::span(bytes)), file);
  };
  return out;
}

ImageSplit split_by_folders(ImageFiles list) {
  TESSERA_CHECK(list.empty_folders.empty(),
                "data: {}: folder {} is empty; remove it, or put the images of its class there",
                io::quote(list.where), io::quote(list.empty_folders.at(0)));
  TESSERA_CHECK(!list.paths.empty(),
                "data: {} holds no JPEG or PNG files ({} of other kinds); expected class folders, "
                "or train and test with class folders",
                io::quote(list.where), list.others);
  if (list.others)
    log::info("data: {}: {} files that are no images by their names are left out", list.where,
              list.others);
  auto files = std::make_shared<const ImageFiles>(std::move(list));
  std::map<std::string, ByClass> groups = group(*files);
  ByClass train, validation;
  if (groups.size() == 1) {
    train = groups.begin()->second;
    for (auto& [name, members] : train) {
      const size_t last = members.size() / 10;
      if (last > 0) validation[name].assign(members.end() - long(last), members.end());
      members.resize(members.size() - last);
    }
  } else {
    const std::string root = parent(groups.begin()->first), prefix = root.empty() ? "" : root + "/";
    auto taken = [&](const char* split) {
      auto found = groups.extract(prefix + split);
      return found ? std::move(found.mapped()) : ByClass();
    };
    const std::string all = names_of(groups);
    train = taken("train");
    for (const char* split : {"val", "validation", "test"}) {
      ByClass part = taken(split);
      if (validation.empty()) validation = std::move(part);
    }
    TESSERA_CHECK(!train.empty() && groups.empty(),
                  "data: {} has class folders in {}; expected them in one folder, or in train and "
                  "val (or test) beside each other",
                  io::quote(files->where), all);
  }
  ImageSplit out;
  for (const auto& [name, members] : train) out.classes.push_back(name);
  out.train = std::make_shared<FileItems>(files, items_of(train, out.classes, *files));
  if (!validation.empty())
    out.validation = std::make_shared<FileItems>(files, items_of(validation, out.classes, *files));
  return out;
}

ImageSplit load_images(const std::string& kind_and_path, BadImages bad) {
  const size_t colon = kind_and_path.find(':');
  const std::string kind = kind_and_path.substr(0, colon),
                    path = colon == std::string::npos ? "" : kind_and_path.substr(colon + 1);
  TESSERA_CHECK(!path.empty() && (kind == "images" || kind == "cifar10" || kind == "idx"),
                "data: {} is not images:PATH, cifar10:DIR or idx:DIR", io::quote(kind_and_path));
  std::error_code error;
  const bool folder = fs::is_directory(path, error);
  if (kind == "images")
    return split_by_folders(folder ? list_folder(path) : list_archive(path, bad));
  TESSERA_CHECK(folder, "data: {}: {}:DIR needs a folder", io::quote(path), kind);
  return kind == "cifar10" ? load_cifar10(path) : load_idx(path);
}

}  // namespace tessera::data
