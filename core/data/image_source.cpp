#include "core/data/image_source.h"

#include <algorithm>
#include <cctype>
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

std::string last_part(const std::string& path) { return path.substr(path.rfind('/') + 1); }

constexpr std::string_view kSplits[] = {"train", "val", "validation", "test"};

using ByClass = std::map<std::string, std::vector<size_t>>;  // class name -> files, by name

// Class folders with the same parent, which is a split or the whole.
std::map<std::string, ByClass> group(const ImageFiles& files) {
  std::map<std::string, ByClass> groups;
  for (size_t i = 0; i < files.paths.size(); ++i) {
    const std::string folder = parent_folder(files.paths[i]);
    TESSERA_CHECK(!folder.empty(),
                  "data: {} has the image {} outside of any folder; expected class folders, or "
                  "train and test with class folders",
                  io::quote(files.where), io::quote(files.paths[i]));
    groups[parent_folder(folder)][last_part(folder)].push_back(i);
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

// Lists what is below `folder`, whose path from the root is `prefix` with a / behind. `around` are
// the folders from the root to it, as they are without links: one that is there again is a loop.
void list_below(const fs::path& folder, const std::string& prefix, std::vector<fs::path>& around,
                ImageFiles& out) {
  const fs::path real = fs::canonical(folder);
  TESSERA_CHECK(std::ranges::find(around, real) == around.end(),
                "data: the link {} leads to a folder around it; remove it",
                io::quote(folder.string()));
  around.push_back(real);
  const std::string here = prefix.substr(0, prefix.size() - !prefix.empty());
  bool empty = true;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder)) {
    const std::string part = entry.path().filename().string(), name = prefix + part;
    empty = false;
    if (hidden_part(part) != part.npos) {
      ++out.hidden, out.bare_folders.insert(here);
    } else if (entry.is_directory()) {
      list_below(entry.path(), name + "/", around, out);
    } else if (is_image_name(name)) {
      out.paths.push_back(name);
    } else {
      TESSERA_CHECK(entry.exists(), "data: the link {} leads to nothing; remove it",
                    io::quote(entry.path().string()));
      ++out.others, out.bare_folders.insert(here);
    }
  }
  if (empty && !prefix.empty()) out.empty_folders.push_back(here);
  around.pop_back();
}

// To ask for the size of every file would take minutes where there are millions, so only some are
// asked for.
void add_sizes(ImageFiles& files) {
  constexpr size_t kMost = 100'000;
  const size_t stride = files.paths.size() / kMost + 1;
  files.bytes.resize(files.paths.size());
  for (size_t i = 0; i < files.paths.size(); i += stride) {
    std::error_code error;  // of a link to nothing: told when it is read
    const uintmax_t bytes = fs::file_size(files.where + "/" + files.paths[i], error);
    files.bytes[i] = error ? 0 : uint64_t(bytes);
  }
}

io::Digest hash_of(const ImageFiles& files) {
  io::Xxh128 hash;
  for (size_t i = 0; i < files.paths.size(); ++i) {
    const uint64_t numbers[] = {files.paths[i].size(), files.bytes[i]};
    hash.update(numbers, sizeof numbers);
    hash.update(files.paths[i].data(), files.paths[i].size());
  }
  return hash.digest();
}

// What is left out, for messages.
std::string left_out(const ImageFiles& files) {
  std::string out;
  auto add = [&](int64_t count, const char* what) {
    if (count) out += fmt::format("{}{} {}", out.empty() ? "" : ", ", count, what);
  };
  add(files.others, "of other kinds"), add(files.hidden, "hidden"), add(files.links, "links");
  return out.empty() ? "0 others" : out;
}

// A class or split without any image is a mistake, which would go unnoticed if it were left out.
// Other folders beside the splits, with notes or lists, do no harm.
void check_bare_folders(const ImageFiles& files, const std::map<std::string, ByClass>& groups) {
  auto has_images = [&](const std::string& folder) {
    const auto first = std::ranges::lower_bound(files.paths, folder + "/");
    return first != files.paths.end() && first->starts_with(folder + "/");
  };
  auto is_class_or_split = [&](const std::string& folder) {
    const std::string above = parent_folder(folder);
    return groups.contains(above) ||
           (std::ranges::find(kSplits, last_part(folder)) != std::end(kSplits) &&
            std::ranges::any_of(groups, [&](const auto& g) {
              return !g.first.empty() && parent_folder(g.first) == above;
            }));
  };
  for (std::string folder : files.bare_folders)
    for (; !folder.empty(); folder = parent_folder(folder))
      TESSERA_CHECK(!is_class_or_split(folder) || has_images(folder),
                    "data: {}: folder {} holds no JPEG or PNG files ({}); remove it, or put the "
                    "images of its class there",
                    io::quote(files.where), io::quote(folder), left_out(files));
}

}  // namespace

bool is_image_name(std::string_view path) {
  std::string end(path.substr(path.rfind('.') + 1));
  for (char& c : end) c = char(std::tolower(static_cast<unsigned char>(c)));
  return end == "jpg" || end == "jpeg" || end == "png";
}

size_t hidden_part(std::string_view path) {
  for (size_t at = 0; at < path.size();) {
    const size_t slash = std::min(path.find('/', at), path.size());
    const std::string_view part = path.substr(at, slash - at);
    if (part.size() > 1 && part[0] == '.' && part != "..") return at;
    at = slash + 1;
  }
  return path.npos;
}

std::string parent_folder(const std::string& path) {
  const size_t slash = path.rfind('/');
  return slash == std::string::npos ? "" : path.substr(0, slash);
}

ImageFiles list_folder(const std::string& path) {
  ImageFiles out;
  out.where = path;
  try {
    std::vector<fs::path> around;
    list_below(path, "", around, out);
  } catch (const fs::filesystem_error& e) {
    throw UserError(fmt::format("data: {}: {}", io::quote(e.path1().string()), e.code().message()));
  }
  std::ranges::sort(out.paths);
  add_sizes(out);
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
  if (list.paths.empty())
    for (const std::string& folder : list.bare_folders) {
      const std::string path = folder.empty() ? list.where : list.where + "/" + folder;
      const std::string kind = raw_kind(path);
      TESSERA_CHECK(kind.empty(), "data: {} holds no JPEG or PNG files; give {}:{} for those there",
                    io::quote(list.where), kind, path);
    }
  TESSERA_CHECK(!list.paths.empty(),
                "data: {} holds no JPEG or PNG files ({}); expected class folders, or train and "
                "test with class folders",
                io::quote(list.where), left_out(list));
  auto files = std::make_shared<const ImageFiles>(std::move(list));
  std::map<std::string, ByClass> groups = group(*files);
  check_bare_folders(*files, groups);
  if (files->others + files->hidden + files->links)
    logging::warn("data: {}: left out {}", files->where, left_out(*files));
  ByClass train, validation;
  if (groups.size() == 1) {
    train = groups.begin()->second;
    for (auto& [name, members] : train) {
      const size_t last = members.size() / 10;
      if (last > 0) validation[name].assign(members.end() - long(last), members.end());
      members.resize(members.size() - last);
    }
  } else {
    const std::string root = parent_folder(groups.begin()->first),
                      prefix = root.empty() ? "" : root + "/";
    auto taken = [&](std::string_view split) {
      auto found = groups.extract(prefix + std::string(split));
      return found ? std::move(found.mapped()) : ByClass();
    };
    const std::string all = names_of(groups);
    train = taken(kSplits[0]);
    for (std::string_view split : std::span(kSplits).subspan(1)) {
      ByClass part = taken(split);
      if (validation.empty()) validation = std::move(part);
    }
    TESSERA_CHECK(!train.empty() && groups.empty(),
                  "data: {} has class folders in {}; expected them in one folder, or in train and "
                  "val (or test) beside each other",
                  io::quote(files->where), all);
  }
  ImageSplit out;
  out.hash = hash_of(*files);
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
