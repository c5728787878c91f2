#include "parallel/checkpoint/reader.h"

#include <algorithm>
#include <cstring>
#include <filesystem>

namespace tessera::checkpoint {

using io::quote;

namespace detail {

// Contiguous bytes of a file and where they belong.
struct Run {
  uint64_t offset, bytes;
  std::byte* to;
};

// Compares blocks with their hashes as their bytes come by, in file order.
class BlockCheck {
 public:
  BlockCheck(const Manifest& m, const TensorEntry& t, const Chunk& c, const std::string& path)
      : m_(m), t_(t), c_(c), path_(path), chunk_bytes_(bytes_of(t, c)) {}

  void feed(uint64_t offset, const std::byte* data, uint64_t bytes) {
    uint64_t at = offset - c_.offset;
    while (bytes > 0) {
      uint64_t block = at / m_.block_bytes, begin = block * m_.block_bytes,
               end = std::min(chunk_bytes_, begin + m_.block_bytes), n = std::min(bytes, end - at);
      if (at == begin) hash_.reset(), next_ = at;
      if (at == next_) {
        hash_.update(data, n);
        next_ = at + n;
        if (next_ == end) compare(block, begin, end);
      }
      at += n, data += n, bytes -= n;
    }
  }
  uint64_t verified() const { return verified_; }

 private:
  void compare(uint64_t block, uint64_t begin, uint64_t end) {
    next_ = UINT64_MAX;
    TESSERA_CHECK(hash_.digest() == c_.blocks[block],
                  "checkpoint: {} bytes [{}, {}), tensor {}{}: they do not hash to what was "
                  "written; the file is damaged. To go on from an older step, remove the folder "
                  "of this one",
                  quote(path_), c_.offset + begin, c_.offset + end, quote(t_.name),
                  to_string(c_.box));
    verified_ += end - begin;
  }
  const Manifest& m_;
  const TensorEntry& t_;
  const Chunk& c_;
  const std::string& path_;
  uint64_t chunk_bytes_, verified_ = 0, next_ = UINT64_MAX;
  io::Xxh128 hash_;
};

}  // namespace detail

namespace {

using detail::Run;

constexpr uint64_t kGapBytes = 4096;         // a disk reads pages: smaller gaps cost nothing
constexpr uint64_t kScratchBytes = 4 << 20;  // spans with gaps are read through this much

// The runs of the common part of a chunk and a destination box, in file order.
std::vector<Run> runs_of(const Chunk& c, const Box& want, const Box& common, std::byte* to,
                         size_t element) {
  int n = common.shape.size();
  // Trailing dims that are whole on both sides merge into one run with the dim before them.
  int inner = n;
  uint64_t run = element;
  while (inner > 0) {
    --inner;
    run *= uint64_t(common.shape[inner]);
    if (common.shape[inner] != c.box.shape[inner] || common.shape[inner] != want.shape[inner])
      break;
  }
  Strides from = contiguous_strides(c.box.shape), into = contiguous_strides(want.shape);
  uint64_t count = 1;
  for (int d = 0; d < inner; ++d) count *= uint64_t(common.shape[d]);
  std::vector<Run> out;
  out.reserve(count);
  Dims index = Dims::filled(n, 0);
  for (uint64_t i = 0; i < count; ++i) {
    int64_t file_at = 0, memory_at = 0;
    for (int d = 0; d < n; ++d) {
      int64_t global = common.begin[d] + index[d];
      file_at += (global - c.box.begin[d]) * from[d];
      memory_at += (global - want.begin[d]) * into[d];
    }
    out.push_back({c.offset + uint64_t(file_at) * element, run, to + size_t(memory_at) * element});
    for (int d = inner - 1; d >= 0 && ++index[d] == common.shape[d]; --d) index[d] = 0;
  }
  return out;
}

}  // namespace

void Reader::fill(const TensorEntry& t, const Box& want, std::byte* to) {
  for (const Chunk& c : t.chunks)
    if (auto common = intersect(c.box, want)) {
      const io::File& file = open(c.file);
      detail::BlockCheck check(m_, t, c, file.path());
      std::vector<Run> runs = runs_of(c, want, *common, to, size_of(t.dtype));
      for (const Run& r : runs) cost_.wanted += r.bytes;
      read(file, t, c, runs, check);
      cost_.verified += check.verified();
    }
}

const io::File& Reader::open(uint32_t index) {
  auto at = files_.find(index);
  if (at != files_.end()) return at->second;
  if (files_.size() == 64) files_.clear();  // a few descriptors do for any number of files
  const FileEntry& entry = m_.files[index];
  const std::string path = folder_ + "/" + entry.name;
  std::error_code error;
  TESSERA_CHECK(
      std::filesystem::exists(path, error) || error,
      "checkpoint: {} is missing, file {} of {} of step {}. Put it back, or let every host "
      "see the same folder; to go on from an older step, remove the folder of this one",
      quote(path), index + 1, m_.files.size(), m_.step);
  io::File file = io::File::open(path, "checkpoint");
  TESSERA_CHECK(file.size() == entry.bytes,
                "checkpoint: {} has {} bytes, {} were written; it is damaged. To go on from an "
                "older step, remove the folder of this one",
                quote(file.path()), file.size(), entry.bytes);
  return files_.emplace(index, std::move(file)).first->second;
}

void Reader::read(const io::File& file, const TensorEntry& t, const Chunk& c,
                  std::span<const Run> runs, detail::BlockCheck& check) {
  uint64_t chunk_end = c.offset + bytes_of(t, c), done = c.offset;
  uint64_t gap = verify_all_ ? m_.block_bytes : kGapBytes;
  for (size_t i = 0; i < runs.size();) {
    uint64_t begin = runs[i].offset, end = begin + runs[i].bytes;
    size_t next = i + 1;
    auto fits = [&] {
      uint64_t after = runs[next].offset;
      return after - end <= gap && after + runs[next].bytes - begin <= kScratchBytes;
    };
    while (next < runs.size() && fits()) end = runs[next].offset + runs[next].bytes, ++next;
    if (verify_all_) {
      // Down to the beginning of a block, unless the span before has come as far; up to its end.
      begin = std::max(done, begin - (begin - c.offset) % m_.block_bytes);
      uint64_t blocks = (end - c.offset + m_.block_bytes - 1) / m_.block_bytes;
      uint64_t limit = next < runs.size() ? runs[next].offset : chunk_end;
      end = std::max(end, std::min(limit, c.offset + blocks * m_.block_bytes));
    }
    if (next == i + 1 && begin == runs[i].offset && end == begin + runs[i].bytes) {
      file.read_at(runs[i].to, runs[i].bytes, begin);
      check.feed(begin, runs[i].to, runs[i].bytes);
    } else {
      through_scratch(file, runs.subspan(i, next - i), begin, end, check);
    }
    cost_.read += end - begin;
    done = end, i = next;
  }
}

void Reader::through_scratch(const io::File& file, std::span<const Run> runs, uint64_t begin,
                             uint64_t end, detail::BlockCheck& check) {
  scratch_.resize(std::min(end - begin, kScratchBytes));
  for (uint64_t at = begin; at < end; at += scratch_.size()) {
    uint64_t n = std::min<uint64_t>(scratch_.size(), end - at);
    file.read_at(scratch_.data(), n, at);
    check.feed(at, scratch_.data(), n);
    for (const Run& r : runs) {
      uint64_t from = std::max(at, r.offset), to = std::min(at + n, r.offset + r.bytes);
      if (from < to)
        std::memcpy(r.to + (from - r.offset), scratch_.data() + (from - at), to - from);
    }
  }
}

}  // namespace tessera::checkpoint
