// Images in a tar archive, by libarchive. The archive is mapped and listed once. Where a tar is not
// compressed libarchive gives pointers into the mapping, so nothing is copied or read until an
// image is asked for, and then the file must still be what it was. Invariant: what libarchive had
// to unpack is kept.
#include <algorithm>
#include <map>

#include "core/base/error.h"
#include "core/base/log.h"
#include "core/data/image_files.h"
#include "core/data/image_formats.h"
#include "core/io/file.h"

#ifdef TESSERA_HAVE_IMAGES
#include <archive.h>
#include <archive_entry.h>
#endif

namespace tessera::data {

#ifdef TESSERA_HAVE_IMAGES
namespace {

// The bytes of one file; each hard link to it has a Content of its own.
struct Content {
  std::span<const std::byte> bytes;  // in the archive, or in
  std::shared_ptr<const std::vector<std::byte>> unpacked;
};

constexpr int64_t kMostSparse = int64_t(1) << 30;

struct Archive {
  Ref<io::Mapping> mapping;
  std::vector<Content> contents;  // by path
};

struct Closer {
  void operator()(archive* a) const { archive_read_free(a); }
};
using Handle = std::unique_ptr<archive, Closer>;

std::string reason(archive* a) {
  const char* text = archive_error_string(a);
  return text ? text : "damaged";
}

// Data of the entry at hand. Throws UserError when the archive is damaged in it.
Content read_content(archive* a, archive_entry* entry, const io::Mapping& file) {
  std::span<const std::byte> mapped;
  std::vector<std::byte> unpacked;
  // A sparse file leaves out zeros, and only the archive says how many.
  auto fill_hole = [&](int64_t to) {
    TESSERA_CHECK(to <= kMostSparse, "a file with holes has {} bytes; there may be up to {}", to,
                  kMostSparse);
    if (unpacked.empty()) unpacked.assign(mapped.begin(), mapped.end());
    unpacked.resize(size_t(to));
  };
  const std::byte *begin = file.data(), *end = begin + file.bytes();
  while (true) {
    const void* block = nullptr;
    size_t size = 0;
    int64_t offset = 0;
    const int status = archive_read_data_block(a, &block, &size, &offset);
    if (status == ARCHIVE_EOF) break;
    TESSERA_CHECK(status == ARCHIVE_OK, "{}", reason(a));
    if (size == 0) continue;
    const auto* at = static_cast<const std::byte*>(block);
    const auto known = int64_t(unpacked.empty() ? mapped.size() : unpacked.size());
    TESSERA_CHECK(offset >= known, "data at {} again, after {} bytes", offset, known);
    const bool lies = at >= begin && at + size <= end && unpacked.empty() && offset == known;
    if (lies && mapped.empty()) {
      mapped = {at, size};
    } else if (lies && at == mapped.data() + mapped.size()) {
      mapped = {mapped.data(), mapped.size() + size};
    } else {
      if (offset > known) fill_hole(offset);
      if (unpacked.empty()) unpacked.assign(mapped.begin(), mapped.end());
      unpacked.insert(unpacked.end(), at, at + size);
    }
  }
  const int64_t size = archive_entry_size_is_set(entry) ? archive_entry_size(entry) : 0;
  if (size > int64_t(std::max(mapped.size(), unpacked.size()))) fill_hole(size);
  if (unpacked.empty()) return {mapped, nullptr};
  auto kept = std::make_shared<const std::vector<std::byte>>(std::move(unpacked));
  return {*kept, kept};
}

std::string tidy(std::string path) {
  while (path.starts_with("./")) path.erase(0, 2);
  while (path.ends_with('/')) path.pop_back();
  return path;
}

// Lists all of an archive's entries. Throws UserError where it is damaged or cut; the entries
// before that place are listed.
void read_entries(archive* a, const io::Mapping& file, ImageFiles& list,
                  std::map<std::string, Content>& found, std::map<std::string, bool>& folders) {
  archive_entry* entry = nullptr;
  while (true) {
    const int status = archive_read_next_header(a, &entry);
    if (status == ARCHIVE_EOF) {
      // Behind the last entry lie zeros, which libarchive has read past, unless it found none.
      TESSERA_CHECK(archive_filter_bytes(a, 0) > archive_read_header_position(a),
                    "Truncated behind a whole file: the zeros that end a tar archive are missing");
      return;
    }
    TESSERA_CHECK(status == ARCHIVE_OK || status == ARCHIVE_WARN, "{}", reason(a));
    const char* name = archive_entry_pathname(entry);
    const std::string path = tidy(name ? name : "");
    if (path.empty() || path == ".") continue;
    const bool is_folder = archive_entry_filetype(entry) == AE_IFDIR;
    const size_t hidden = hidden_part(path);
    const std::string folder = parent_folder(path.substr(0, hidden));
    if (!folder.empty()) folders[folder] = true;
    if (hidden != path.npos) {
      list.hidden += !is_folder, list.bare_folders.insert(folder);
      continue;
    }
    if (is_folder) {
      folders.try_emplace(path, false);
      continue;
    }
    const char* link = archive_entry_hardlink(entry);  // to a path that came before
    const auto target = link ? found.find(tidy(link)) : found.end();
    const bool is_link = link || archive_entry_filetype(entry) == AE_IFLNK;
    if (!is_image_name(path) || (is_link && target == found.end()) ||
        (!is_link && archive_entry_filetype(entry) != AE_IFREG)) {
      ++(is_link ? list.links : list.others), list.bare_folders.insert(folder);
      continue;
    }
    try {  // where a path comes twice, the last one counts
      const Content content = link ? target->second : read_content(a, entry, file);
      found[path] = content;
    } catch (const UserError& e) {
      throw UserError(fmt::format("in {}: {}", io::quote(path), e.what()));
    }
  }
}

}  // namespace

namespace {

ImageFiles list_mapped(const std::string& path, BadImages bad, Archive out) {
  ImageFiles list;
  list.where = path;
  Handle handle(archive_read_new());
  if (!handle) throw std::bad_alloc();
  archive* a = handle.get();
  archive_read_support_filter_all(a);
  archive_read_support_format_tar(a);
  TESSERA_CHECK(
      archive_read_open_memory(a, out.mapping->data(), out.mapping->bytes()) == ARCHIVE_OK,
      "data: {} is no folder, and no tar archive: {}; give a folder or tar archive of class "
      "folders",
      io::quote(path), reason(a));
  std::map<std::string, Content> found;
  std::map<std::string, bool> folders;  // whether something is in them
  try {
    read_entries(a, *out.mapping, list, found, folders);
  } catch (const UserError& e) {
    const std::string text = fmt::format("data: archive {}: {}", io::quote(path), e.what());
    if (found.empty()) throw UserError(text);
    if (bad == BadImages::kStop)
      throw CutArchive(fmt::format("{}; {} images come before that", text, found.size()));
    logging::warn("{}; going on with the {} images before that", text, found.size());
  }
  for (const auto& [name, used] : folders)
    if (!used) list.empty_folders.push_back(name);
  for (auto& [name, content] : found) {
    list.paths.push_back(name);
    list.bytes.push_back(content.bytes.size());
    out.contents.push_back(std::move(content));
  }
  auto shared = std::make_shared<const Archive>(std::move(out));
  auto paths = std::make_shared<const std::vector<std::string>>(list.paths);
  list.decode = [path, shared, paths](size_t i) {
    const Content& content = shared->contents[i];
    auto decode = [&] { return decode_image(content.bytes, path + "/" + (*paths)[i]); };
    return content.unpacked ? decode() : shared->mapping->checked(decode);
  };
  return list;
}

}  // namespace

ImageFiles list_archive(const std::string& path, BadImages bad) {
  const Ref<io::Mapping> mapping = io::File::open(path, "data").map();
  return mapping->checked([&] { return list_mapped(path, bad, {mapping, {}}); });
}
#else
ImageFiles list_archive(const std::string& path, BadImages) { refuse_without_libraries(path); }
#endif

}  // namespace tessera::data
