#include "parallel/checkpoint/verify.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>

#include "parallel/checkpoint/exchange.h"
#include "parallel/checkpoint/folder.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;

struct Place {
  const TensorEntry* tensor;
  const Chunk* chunk;
  uint64_t end() const { return chunk->offset + bytes_of(*tensor, *chunk); }
  std::string text() const { return io::quote(tensor->name) + checkpoint::to_string(chunk->box); }
};

std::vector<Place> places(const Manifest& m, size_t file) {
  std::vector<Place> out;
  for (const TensorEntry& t : m.tensors)
    for (const Chunk& c : t.chunks)
      if (c.file == file) out.push_back({&t, &c});
  std::ranges::sort(out, {}, [](const Place& p) { return p.chunk->offset; });
  return out;
}

// Drops a file's pages from the page cache: cached pages prove nothing about the disk, and pages
// that were read would only displace what training needs. It is a hint, and dirty pages stay. It is
// for file systems that cannot bypass the cache.
void forget_cached(const std::string& path) {
  int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return;
  posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
  ::close(fd);
}

// Reads a file from front to back, in windows of aligned memory, and compares ranges of it.
class FileCheck {
 public:
  FileCheck(const std::string& path, Pages& window, Verified& out)
      : file_(io::File::open(path, "checkpoint")), window_(window), out_(out) {
    file_.bypass_cache();
  }
  uint64_t size() const { return file_.size(); }
  void range(uint64_t begin, uint64_t end, const Digest& expected, const std::string& tensor) {
    hash_.reset();
    for (uint64_t at = begin; at < end;) {
      if (at < begin_ || at >= end_) read_window(at);
      size_t n = size_t(std::min(end, end_) - at);
      hash_.update(window_.data() + (at - begin_), n);
      at += n;
    }
    out_.bytes += end - begin;
    Digest actual = hash_.digest();
    if (actual == expected) return;
    out_.findings.push_back({file_.path(), begin, end, tensor,
                             fmt::format("the bytes hash to {}, {} was written; they are damaged",
                                         to_string(actual), to_string(expected))});
  }

 private:
  void read_window(uint64_t at) {
    begin_ = at / io::kDirectAlign * io::kDirectAlign;
    end_ = begin_ + file_.read_up_to(window_.data(), window_.bytes(), begin_);
    got_on();
    TESSERA_CHECK(at < end_, "checkpoint: {} ends at offset {}; it was truncated meanwhile",
                  io::quote(file_.path()), end_);
  }
  io::File file_;
  Pages& window_;
  Verified& out_;
  io::Xxh128 hash_;
  uint64_t begin_ = 0, end_ = 0;  // range of the file that is in the window
};

void verify_step(const std::string& folder, Pages& window, Verified& out) {
  try {
    Manifest m = read_manifest(folder);
    out.steps.push_back(m.step);
    if (auto why = misplaced(folder, m))
      out.findings.push_back({folder + "/" + kManifestName, 0, 0, "", *why});
    for (size_t f = 0; f < m.files.size(); ++f) verify_file(folder, m, f, window, out);
  } catch (const UserError& e) {
    std::error_code error;
    uint64_t bytes = fs::file_size(folder + "/" + kManifestName, error);
    out.findings.push_back({folder + "/" + kManifestName, 0, error ? 0 : bytes, "", e.what()});
  }
}

}  // namespace

std::string to_string(const Finding& f) {
  std::string out = io::quote(f.file);
  if (f.what.find(out) != std::string::npos) return f.what;  // the error names the file already
  if (f.end > f.begin) out += fmt::format(" bytes [{}, {})", f.begin, f.end);
  if (!f.tensor.empty()) out += ", tensor " + f.tensor;
  return out + ": " + f.what;
}

void verify_file(const std::string& folder, const Manifest& m, size_t index, Pages& window,
                 Verified& out) {
  const FileEntry& entry = m.files[index];
  std::string path = folder + "/" + entry.name;
  forget_cached(path);
  try {
    FileCheck check(path, window, out);
    std::vector<Place> all = places(m, index);
    if (check.size() != entry.bytes) {
      uint64_t begin = std::min(check.size(), entry.bytes),
               end = std::max(check.size(), entry.bytes);
      auto hit = std::ranges::find_if(all, [&](const Place& p) { return p.end() > begin; });
      out.findings.push_back(
          {path, begin, end, hit == all.end() ? "" : hit->text(),
           fmt::format("it has {} bytes, {} were written; {}", check.size(), entry.bytes,
                       check.size() < entry.bytes ? "it is truncated" : "something was appended")});
      return;
    }
    check.range(0, entry.header_bytes, entry.header, "");
    for (const Place& p : all)
      for (size_t b = 0; b < p.chunk->blocks.size(); ++b) {
        uint64_t begin = p.chunk->offset + b * m.block_bytes;
        check.range(begin, std::min(p.end(), begin + m.block_bytes), p.chunk->blocks[b], p.text());
      }
  } catch (const UserError& e) {
    out.findings.push_back({path, 0, entry.bytes, "", e.what()});
  }
  forget_cached(path);
}

Verified verify(const std::string& path) {
  Verified out;
  Pages window(kWindowBytes);
  std::error_code error;
  TESSERA_CHECK(fs::is_directory(path, error), "checkpoint: {} is no folder; check the path",
                io::quote(path));
  std::vector<int64_t> steps = saved_steps(path);
  if (steps.empty() && !fs::exists(path + "/" + kLatestName, error)) {
    std::string name = fs::path(path + "/").lexically_normal().parent_path().filename().string();
    TESSERA_CHECK(fs::exists(path + "/" + kManifestName, error) || name.starts_with("step-"),
                  "checkpoint: {} holds no saved step and no {}; check the path", io::quote(path),
                  kManifestName);
    verify_step(path, window, out);
    return out;
  }
  std::string pointer = path + "/" + kLatestName;
  try {
    int64_t named = read_latest(path).step;
    if (!std::ranges::binary_search(steps, named))
      out.findings.push_back(
          {pointer, 0, 0, "", fmt::format("it names {}, which is missing", step_name(named))});
  } catch (const UserError& e) {
    uint64_t bytes = fs::file_size(pointer, error);
    out.findings.push_back({pointer, 0, error ? 0 : bytes, "", e.what()});
  }
  for (int64_t step : steps) verify_step(path + "/" + step_name(step), window, out);
  return out;
}

}  // namespace tessera::checkpoint
