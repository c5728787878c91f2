#include "parallel/checkpoint/reader.h"

#include <algorithm>
#include <cstring>
#include <filesystem>

#include "parallel/checkpoint/exchange.h"

namespace tessera::checkpoint {

using io::quote;

namespace detail {

// Contiguous bytes of a file, and where they go.
struct Run {
  uint64_t offset, bytes;
  std::byte* to;
  uint64_t end() const { return offset + bytes; }
};

// Compares blocks with their hashes. It is given all their bytes, in the order of the file.
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
      TESSERA_ASSERT(at == next_, "checkpoint: a block of {} is read from its byte {} on", path_,
                     at - begin);
      hash_.update(data, n);
      next_ = at + n;
      if (next_ == end) compare(block, begin, end);
      at += n, data += n, bytes -= n;
    }
  }

 private:
  void compare(uint64_t block, uint64_t begin, uint64_t end) const {
    TESSERA_CHECK(hash_.digest() == c_.blocks[block],
                  "checkpoint: {} bytes [{}, {}), tensor {}{}: they do not hash to what was "
                  "written; the file is damaged. To go on from an older step, remove the folder "
                  "of this one",
                  quote(path_), c_.offset + begin, c_.offset + end, quote(t_.name),
                  to_string(c_.box));
  }
  const Manifest& m_;
  const TensorEntry& t_;
  const Chunk& c_;
  const std::string& path_;
  uint64_t chunk_bytes_, next_ = UINT64_MAX;
  io::Xxh128 hash_;
};

}  // namespace detail

namespace {

using detail::Run;

constexpr uint64_t kScratchBytes = 4 << 20;  // for parts of which only some bytes are wanted
constexpr uint64_t kReadBytes = 64 << 20;    // read at once where all bytes are wanted

// The runs of the common part of a chunk and a destination box, in file order.
std::vector<Run> runs_of(const Chunk& c, const Box& want, const Box& common, std::byte* to,
                         size_t element) {
  int n = common.shape.size();
  // Trailing dims that are whole on both sides are merged with the dim before them.
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
      read(file, c, bytes_of(t, c), runs, check);
    }
}

const io::File& Reader::open(uint32_t index) {
  auto at = files_.find(index);
  if (at != files_.end()) return at->second;
  if (files_.size() == 64) files_.clear();  // this bounds the number of open files
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

// Reads spans of whole blocks; where a span ends in the middle of a block, the next one continues
// there.
void Reader::read(const io::File& file, const Chunk& c, uint64_t chunk_bytes,
                  std::span<const Run> runs, detail::BlockCheck& check) {
  auto block_begin = [&](uint64_t at) { return at - (at - c.offset) % m_.block_bytes; };
  auto block_end = [&](uint64_t at) {
    uint64_t blocks = (at - c.offset + m_.block_bytes - 1) / m_.block_bytes;
    return c.offset + std::min(chunk_bytes, blocks * m_.block_bytes);
  };
  uint64_t done = c.offset;
  for (size_t i = 0; i < runs.size();) {
    uint64_t begin = std::max(done, block_begin(runs[i].offset)), end = block_end(runs[i].end());
    size_t next = i + 1;
    auto goes_on = [&] {
      return block_begin(runs[next].offset) <= end && runs[next].end() - begin <= kScratchBytes;
    };
    while (next < runs.size() && goes_on()) end = block_end(runs[next++].end());
    if (next < runs.size()) end = std::min(end, runs[next].offset);
    if (begin == runs[i].offset && end == runs[i].end()) {
      for (uint64_t at = 0; at < runs[i].bytes; at += kReadBytes) {
        const uint64_t n = std::min<uint64_t>(kReadBytes, runs[i].bytes - at);
        file.read_at(runs[i].to + at, n, begin + at);
        check.feed(begin + at, runs[i].to + at, n);
        got_on();
      }
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
    got_on();
    for (const Run& r : runs) {
      uint64_t from = std::max(at, r.offset), to = std::min(at + n, r.end());
      if (from < to)
        std::memcpy(r.to + (from - r.offset), scratch_.data() + (from - at), to - from);
    }
  }
}

}  // namespace tessera::checkpoint
