#include "parallel/checkpoint/load.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <set>

#include "core/autograd/autograd.h"
#include "core/io/file.h"
#include "core/ops/update.h"
#include "parallel/checkpoint/exchange.h"

namespace tessera::checkpoint {
namespace {

using io::quote;

constexpr uint64_t kGapBytes = 4096;         // a disk reads pages: smaller gaps cost nothing
constexpr uint64_t kScratchBytes = 4 << 20;  // spans with gaps are read through this much

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
                  "written; the file is damaged, go back to an older step",
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

class Reader {
 public:
  Reader(const std::string& folder, const Manifest& m, const LoadOptions& o, Loaded& out)
      : folder_(folder), m_(m), o_(o), out_(out) {}

  // Fills a dense destination; every chunk that meets the box gives its part.
  void fill(const TensorEntry& t, const Box& want, std::byte* to) {
    for (const Chunk& c : t.chunks)
      if (auto common = intersect(c.box, want)) {
        const io::File& file = open(c.file);
        BlockCheck check(m_, t, c, file.path());
        std::vector<Run> runs = runs_of(c, want, *common, to, size_of(t.dtype));
        for (const Run& r : runs) out_.bytes_wanted += r.bytes;
        read(file, t, c, runs, check);
        out_.bytes_verified += check.verified();
      }
  }

 private:
  const io::File& open(uint32_t index) {
    auto at = files_.find(index);
    if (at != files_.end()) return at->second;
    if (files_.size() == 64) files_.clear();  // a few descriptors do for any number of files
    const FileEntry& entry = m_.files[index];
    io::File file = io::File::open(folder_ + "/" + entry.name, "checkpoint");
    TESSERA_CHECK(file.size() == entry.bytes,
                  "checkpoint: {} has {} bytes, {} were written; it is damaged, go back to an "
                  "older step",
                  quote(file.path()), file.size(), entry.bytes);
    return files_.emplace(index, std::move(file)).first->second;
  }

  void read(const io::File& file, const TensorEntry& t, const Chunk& c, std::span<const Run> runs,
            BlockCheck& check) {
    uint64_t chunk_end = c.offset + bytes_of(t, c), done = c.offset;
    uint64_t gap = o_.verify_all ? m_.block_bytes : kGapBytes;
    for (size_t i = 0; i < runs.size();) {
      uint64_t begin = runs[i].offset, end = begin + runs[i].bytes;
      size_t next = i + 1;
      auto fits = [&] {
        uint64_t after = runs[next].offset;
        return after - end <= gap && after + runs[next].bytes - begin <= kScratchBytes;
      };
      while (next < runs.size() && fits()) end = runs[next].offset + runs[next].bytes, ++next;
      if (o_.verify_all) {
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
      out_.bytes_read += end - begin;
      done = end, i = next;
    }
  }

  void through_scratch(const io::File& file, std::span<const Run> runs, uint64_t begin,
                       uint64_t end, BlockCheck& check) {
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

  const std::string& folder_;
  const Manifest& m_;
  const LoadOptions& o_;
  Loaded& out_;
  std::map<uint32_t, io::File> files_;
  std::vector<std::byte> scratch_;
};

void check_piece(const Piece& p, const TensorEntry& t) {
  TESSERA_CHECK(p.values.dtype() == t.dtype && p.global == t.shape,
                "checkpoint: tensor {} is {}{}, but {}{} is asked for", quote(p.name),
                name_of(t.dtype), to_string(t.shape), name_of(p.values.dtype()),
                to_string(p.global));
}

void check_destination(const Piece& p) {
  TESSERA_CHECK(p.values.defined() && p.values.device().is_cpu() &&
                    !(p.values.layers() & bit(Layer::kSharding)),
                "checkpoint: the destination of {} is not a plain tensor on the cpu",
                quote(p.name));
  TESSERA_CHECK(inside(p.box(), p.global),
                "checkpoint: the destination of {}: the box at {} of shape {} is not inside {}",
                quote(p.name), to_string(p.begin), to_string(p.values.shape()),
                to_string(p.global));
}

void fill_piece(Reader& reader, const Piece& p, const TensorEntry& t) {
  if (p.values.numel() == 0) return;
  NoGrad off;
  Tensor to = p.values.detach();
  if (!to.is_contiguous()) {
    Tensor dense = empty(to.shape(), to.dtype());
    reader.fill(t, p.box(), static_cast<std::byte*>(dense.raw()));
    assign_(to, dense);
    return;
  }
  reader.fill(t, p.box(), static_cast<std::byte*>(to.raw()));
  to.storage()->bump_version();
}

std::string join(const std::set<std::string>& names) {
  Packer out;
  for (const std::string& n : names) out.put(n);
  return out.take();
}
std::set<std::string> parse_names(const std::string& text) {
  std::set<std::string> out;
  for (Unpacker in(text); !in.done();) out.insert(in.get_text());
  return out;
}

std::string some(const std::vector<std::string>& names) {
  std::string out;
  for (size_t i = 0; i < names.size() && i < 10; ++i) out += (i ? ", " : "") + quote(names[i]);
  return names.size() > 10 ? fmt::format("{} and {} more", out, names.size() - 10) : out;
}

// Missing and unexpected over all ranks: a rank may well ask for nothing of a tensor.
void compare_names(Exchange& x, const Manifest& m, std::span<const Piece> pieces,
                   const LoadOptions& o, Loaded& out) {
  std::set<std::string> mine;
  for (const Piece& p : pieces)
    if (matches(o.only, p.name)) mine.insert(p.name);
  std::set<std::string> all;
  for (const std::string& text : x.gather(join(mine))) all.merge(parse_names(text));
  all = parse_names(x.broadcast(join(all)));
  for (const std::string& name : all)
    if (!m.find(name)) out.missing.push_back(name);
  for (const TensorEntry& t : m.tensors)
    if (matches(o.only, t.name) && !all.contains(t.name)) out.unexpected.push_back(t.name);
  if (!o.strict || (out.missing.empty() && out.unexpected.empty())) return;
  std::string text = fmt::format("checkpoint: {} does not fit", quote(out.folder));
  if (!out.missing.empty()) text += "; it lacks " + some(out.missing);
  if (!out.unexpected.empty()) text += "; nobody asked for its " + some(out.unexpected);
  throw UserError(text + "; load a part of the names (only) or not strictly");
}

}  // namespace

Loaded load(const std::string& path, std::span<const Piece> pieces, ProcessGroup* group,
            const LoadOptions& o) {
  Exchange x(group && group->size() > 1 ? group : nullptr, o.timeout);
  Loaded out;
  x.together([&] {
    if (x.rank() != 0) return;
    Newest found = resolve(path);
    out.folder = found.folder, out.warning = found.warning;
  });
  out.folder = x.broadcast(out.folder);
  Manifest m;
  x.together([&] {
    m = read_manifest(out.folder);
    for (const Piece& p : pieces) check_destination(p);
  });
  out.step = m.step;
  out.extra = m.extra;
  compare_names(x, m, pieces, o, out);
  x.together([&] {
    for (const Piece& p : pieces)
      if (const TensorEntry* t = matches(o.only, p.name) ? m.find(p.name) : nullptr)
        check_piece(p, *t);
    Reader reader(out.folder, m, o, out);
    for (const Piece& p : pieces)
      if (const TensorEntry* t = matches(o.only, p.name) ? m.find(p.name) : nullptr)
        fill_piece(reader, p, *t);
  });
  return out;
}

std::optional<Newest> newest(const std::string& folder, ProcessGroup& group) {
  Exchange x(group.size() > 1 ? &group : nullptr, LoadOptions().timeout);
  std::string text;
  x.together([&] {
    auto found = x.rank() == 0 ? newest(folder) : std::nullopt;
    if (!found) return;
    Packer out;
    out.put(found->step);
    out.put(found->folder);
    out.put(found->warning);
    text = out.take();
  });
  text = x.broadcast(text);
  if (text.empty()) return std::nullopt;
  Unpacker in(text);
  auto step = in.get<int64_t>();
  std::string where = in.get_text();
  return Newest{step, where, in.get_text()};
}

}  // namespace tessera::checkpoint
