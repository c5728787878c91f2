// Images in a tar archive, through libarchive. The archive is mapped and gone through once; of a
// tar that is not compressed libarchive hands out the bytes where they lie, so nothing is copied or
// read until an image is asked for. Invariant: whatever libarchive had to unpack is kept.
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

struct Content {
  std::span<const std::byte> mapped;  // in the file, or
  std::vector<std::byte> unpacked;
  std::span<const std::byte> bytes() const { return unpacked.empty() ? mapped : unpacked; }
};

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
Content read_content(archive* a, const io::Mapping& file) {
  Content out;
  const std::byte *begin = file.data(), *end = begin + file.bytes();
  while (true) {
    const void* block = nullptr;
    size_t size = 0;
    int64_t offset = 0;
    const int status = archive_read_data_block(a, &block, &size, &offset);
    if (status == ARCHIVE_EOF) return out;
    TESSERA_CHECK(status == ARCHIVE_OK, "{}", reason(a));
    if (size == 0) continue;
    const auto* at = static_cast<const std::byte*>(block);
    const bool lies = at >= begin && at + size <= end;
    if (lies && out.unpacked.empty() && out.mapped.empty() && offset == 0) {
      out.mapped = {at, size};
    } else if (lies && out.unpacked.empty() && at == out.mapped.data() + out.mapped.size()) {
      out.mapped = {out.mapped.data(), out.mapped.size() + size};
    } else {
      if (out.unpacked.empty()) out.unpacked.assign(out.mapped.begin(), out.mapped.end());
      out.unpacked.resize(size_t(offset));  // what a sparse file leaves out is zeros
      out.unpacked.insert(out.unpacked.end(), at, at + size);
    }
  }
}

std::string tidy(std::string path) {
  while (path.starts_with("./")) path.erase(0, 2);
  while (path.ends_with('/')) path.pop_back();
  return path;
}

// All of an archive's entries. Throws UserError where it is damaged; what came before is there.
void read_entries(archive* a, const io::Mapping& file, ImageFiles& list,
                  std::map<std::string, Content>& found, std::map<std::string, bool>& folders) {
  archive_entry* entry = nullptr;
  while (true) {
    const int status = archive_read_next_header(a, &entry);
    if (status == ARCHIVE_EOF) return;
    TESSERA_CHECK(status == ARCHIVE_OK || status == ARCHIVE_WARN, "{}", reason(a));
    const char* name = archive_entry_pathname(entry);
    const std::string path = tidy(name ? name : "");
    if (path.empty() || path == "." || is_hidden(path)) continue;
    if (size_t slash = path.rfind('/'); slash != std::string::npos)
      folders[path.substr(0, slash)] = true;
    if (archive_entry_filetype(entry) == AE_IFDIR) {
      folders.try_emplace(path, false);
      continue;
    }
    if (archive_entry_filetype(entry) != AE_IFREG || archive_entry_hardlink(entry) ||
        !is_image_name(path)) {
      ++list.others;
      continue;
    }
    try {
      found[path] = read_content(a, file);  // of a path that comes twice, the last one counts
    } catch (const UserError& e) {
      throw UserError(fmt::format("in {}: {}", io::quote(path), e.what()));
    }
  }
}

}  // namespace

ImageFiles list_archive(const std::string& path, BadImages bad) {
  Archive out;
  out.mapping = io::File::open(path, "data").map();
  ImageFiles list;
  list.where = path;
  Handle handle(archive_read_new());
  if (!handle) throw std::bad_alloc();
  archive* a = handle.get();
  archive_read_support_filter_all(a);
  archive_read_support_format_tar(a);
  TESSERA_CHECK(
      archive_read_open_memory(a, out.mapping->data(), out.mapping->bytes()) == ARCHIVE_OK,
      "data: {} is no folder, and no tar archive: {}", io::quote(path), reason(a));
  std::map<std::string, Content> found;
  std::map<std::string, bool> folders;  // whether something is in them
  try {
    read_entries(a, *out.mapping, list, found, folders);
  } catch (const UserError& e) {
    const std::string text = fmt::format("data: archive {}: {}", io::quote(path), e.what());
    if (bad == BadImages::kStop || found.empty()) throw UserError(text);
    log::warn("{}; going on with the {} images before that", text, found.size());
  }
  for (const auto& [name, used] : folders)
    if (!used) list.empty_folders.push_back(name);
  for (auto& [name, content] : found) {
    list.paths.push_back(name);
    out.contents.push_back(std::move(content));
  }
  auto shared = std::make_shared<const Archive>(std::move(out));
  auto paths = std::make_shared<const std::vector<std::string>>(list.paths);
  list.decode = [path, shared, paths](size_t i) {
    return decode_image(shared->contents[i].bytes(), path + "/" + (*paths)[i]);
  };
  return list;
}
#else
ImageFiles list_archive(const std::string& path, BadImages) { refuse_without_libraries(path); }
#endif

}  // namespace tessera::data
