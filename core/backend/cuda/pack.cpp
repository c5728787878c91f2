#include "core/backend/cuda/pack.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <utility>

#include "core/backend/cuda/cubins.h"
#include "core/backend/cuda/library.h"
#include "core/base/error.h"

namespace tessera::cuda {
namespace {

constexpr char kMagic[8] = {'T', 'E', 'S', 'P', 'A', 'C', 'K', '2'};

struct Header {
  char magic[8];
  uint32_t architecture, version;
  uint64_t entries;
  CubinKey hash;
};
static_assert(sizeof(Header) == 40);

CubinKey hash_of(const void* data, size_t bytes) {
  const XXH128_hash_t h = XXH3_128bits(data, bytes);
  return {h.high64, h.low64};
}

/// 90 of "sm_90"; "sm_90a" and "sm_90" share a number, and a pack holds texts of both.
uint32_t number_of(std::string_view architecture) {
  uint32_t number = 0;
  TESSERA_ASSERT(architecture.starts_with("sm_"), "cuda: architecture \"{}\"", architecture);
  std::from_chars(architecture.data() + 3, architecture.data() + architecture.size(), number);
  return number;
}

/// A file that is removed unless it was renamed.
class Temporary {
 public:
  explicit Temporary(const std::string& path)
      : path_(fmt::format("{}.tmp.{}", path, ::getpid())), file_(std::fopen(path_.c_str(), "wb")) {}
  ~Temporary() {
    if (file_) std::fclose(file_);
    if (!path_.empty()) ::unlink(path_.c_str());
  }
  bool write(const void* data, size_t bytes) {
    return file_ && (bytes == 0 || std::fwrite(data, 1, bytes, file_) == bytes);
  }
  bool rename_to(const std::string& path) {
    if (std::fclose(std::exchange(file_, nullptr)) != 0) return false;
    if (std::rename(path_.c_str(), path.c_str()) != 0) return false;
    path_.clear();
    return true;
  }

 private:
  std::string path_;
  std::FILE* file_;
};

}  // namespace

CubinKey cubin_key(std::string_view text, std::string_view architecture) {
  std::string all = emulation();
  for (const std::string& option : compiler_options(architecture)) all += option + '\n';
  all += text;
  return hash_of(all.data(), all.size());
}

std::string to_string(const CubinKey& key) { return fmt::format("{:016x}{:016x}", key[0], key[1]); }

void write_pack(const std::string& path, std::string_view architecture, int version,
                std::vector<PackEntry> entries) {
  std::sort(entries.begin(), entries.end(),
            [](const PackEntry& a, const PackEntry& b) { return a.key < b.key; });
  std::vector<Pack::Entry> index;
  uint64_t offset = sizeof(Header) + entries.size() * sizeof(Pack::Entry);
  for (const PackEntry& e : entries) {
    TESSERA_ASSERT(index.empty() || index.back().key != e.key, "cuda: key {} is twice in a pack",
                   to_string(e.key));
    index.push_back({e.key, offset, e.cubin.size(), hash_of(e.cubin.data(), e.cubin.size())});
    offset += e.cubin.size();
  }
  Header header{};
  std::memcpy(header.magic, kMagic, sizeof kMagic);
  header.architecture = number_of(architecture);
  header.version = uint32_t(version);
  header.entries = index.size();
  header.hash = hash_of(index.data(), index.size() * sizeof(Pack::Entry));
  Temporary file(path);
  bool good = file.write(&header, sizeof header) &&
              file.write(index.data(), index.size() * sizeof(Pack::Entry));
  for (const PackEntry& e : entries) good = good && file.write(e.cubin.data(), e.cubin.size());
  TESSERA_CHECK(good && file.rename_to(path), "cuda: the pack {} cannot be written: {}", path,
                std::strerror(errno));
}

Pack::Pack(Pack&& other) noexcept
    : path_(std::move(other.path_)),
      fd_(std::exchange(other.fd_, -1)),
      version_(other.version_),
      entries_(std::move(other.entries_)) {}
Pack::~Pack() {
  if (fd_ >= 0) ::close(fd_);
}

void Pack::damaged(const std::string& why) const {
  throw UserError(
      fmt::format("cuda: {} {}; install Tessera again, or remove the file", path_, why));
}

void Pack::read(void* to, size_t bytes, uint64_t offset) const {
  auto* at = static_cast<char*>(to);
  while (bytes) {
    const ssize_t n = ::pread(fd_, at, bytes, off_t(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) damaged(fmt::format("cannot be read: {}", std::strerror(errno)));
    if (n == 0) damaged("is cut off");
    at += n, bytes -= size_t(n), offset += uint64_t(n);
  }
}

std::optional<Pack> Pack::open(const std::string& path, std::string_view architecture) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0 && (errno == ENOENT || errno == ENOTDIR)) return {};
  Pack pack(path, fd);
  if (fd < 0) pack.damaged(fmt::format("cannot be opened: {}", std::strerror(errno)));
  pack.read_index(number_of(architecture));
  return pack;
}

void Pack::read_index(uint32_t architecture) {
  struct stat state {};
  if (::fstat(fd_, &state) != 0 || !S_ISREG(state.st_mode)) damaged("is not a file");
  const auto file_bytes = uint64_t(state.st_size);
  Header header{};
  if (file_bytes < sizeof header) damaged("is cut off");
  read(&header, sizeof header, 0);
  if (std::memcmp(header.magic, kMagic, sizeof kMagic) != 0) damaged("is not a pack of cubins");
  if (header.architecture != architecture)
    damaged(fmt::format("is for sm_{}, not for sm_{}", header.architecture, architecture));
  if (header.entries > (file_bytes - sizeof header) / sizeof(Entry)) damaged("is cut off");
  version_ = int(header.version);
  entries_.resize(header.entries);
  read(entries_.data(), entries_.size() * sizeof(Entry), sizeof header);
  if (hash_of(entries_.data(), entries_.size() * sizeof(Entry)) != header.hash)
    damaged("has a damaged index");
  for (const Entry& e : entries_)
    if (e.offset > file_bytes || e.bytes > file_bytes - e.offset) damaged("is cut off");
}

std::optional<std::string> Pack::find(const CubinKey& key) const {
  const auto found = std::lower_bound(entries_.begin(), entries_.end(), key,
                                      [](const Entry& e, const CubinKey& k) { return e.key < k; });
  if (found == entries_.end() || found->key != key) return {};
  std::string cubin(found->bytes, '\0');
  read(cubin.data(), cubin.size(), found->offset);
  if (hash_of(cubin.data(), cubin.size()) != found->hash)
    damaged(fmt::format("holds a damaged cubin, {}", to_string(key)));
  return cubin;
}

}  // namespace tessera::cuda
