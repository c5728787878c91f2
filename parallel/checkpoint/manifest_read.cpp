// Reads a manifest: a state machine over the fixed nesting turns JSON events into a Manifest. The
// hash at the end covers all bytes before it and is compared first.
#include <algorithm>
#include <set>

#include "core/io/bounded_json.h"
#include "parallel/checkpoint/manifest.h"

namespace tessera::checkpoint {
namespace {

using io::quote;

constexpr const char* kDamaged = "the manifest is damaged or was written wrongly";

enum class In {  // the meaning of the innermost open bracket
  kNothing,
  kRoot,
  kExtra,
  kFiles,
  kFile,
  kTensors,
  kTensor,
  kShape,
  kChunks,
  kChunk,
  kBegin,
  kExtent,
  kHashes
};

class ManifestEvents final : public io::JsonEvents {
 public:
  ManifestEvents(Manifest* out, const std::string& where) : m_(*out), where_(where) {}

  bool start_object(size_t) override {
    switch (in()) {
      case In::kNothing: return open(In::kRoot);
      case In::kRoot:
        if (key_ == "extra") return open(In::kExtra);
        break;
      case In::kFiles:
        TESSERA_CHECK(m_.files.size() < kMaxFiles, "{}: more than {} files", where_, kMaxFiles);
        m_.files.emplace_back();
        return open(In::kFile);
      case In::kTensors:
        TESSERA_CHECK(m_.tensors.size() < io::kMaxTensors, "{}: more than {} tensors", where_,
                      io::kMaxTensors);
        m_.tensors.emplace_back();
        return open(In::kTensor);
      case In::kChunks:
        TESSERA_CHECK(++chunks_ <= kMaxChunks, "{}: more than {} chunks", where_, kMaxChunks);
        m_.tensors.back().chunks.emplace_back();
        return open(In::kChunk);
      default: break;
    }
    unexpected("an object");
  }
  bool start_array(size_t) override {
    if (in() == In::kRoot && key_ == "files") return open(In::kFiles);
    if (in() == In::kRoot && key_ == "tensors") return open(In::kTensors);
    if (in() == In::kTensor && key_ == "shape") return open(In::kShape);
    if (in() == In::kTensor && key_ == "chunks") return open(In::kChunks);
    if (in() == In::kChunk && key_ == "begin") return open(In::kBegin);
    if (in() == In::kChunk && key_ == "shape") return open(In::kExtent);
    if (in() == In::kChunk && key_ == "xxh128") return open(In::kHashes);
    unexpected("an array");
  }
  bool end_object() override {
    size_t expected = in() == In::kRoot     ? 9
                      : in() == In::kFile   ? 4
                      : in() == In::kTensor ? 4
                      : in() == In::kChunk  ? 5
                                            : 0;
    if (expected != 0 && open_.back().second.size() != expected)
      throw UserError(
          fmt::format("{}: a member is missing after {}; {}", where_, quote(key_), kDamaged));
    return close();
  }
  bool end_array() override { return close(); }
  bool key(std::string& k) override {
    key_ = k;
    TESSERA_CHECK(open_.back().second.size() < kMaxExtra, "{}: more than {} extra texts", where_,
                  kMaxExtra);
    if (!open_.back().second.insert(k).second)
      throw UserError(fmt::format("{}: {} is there twice; {}", where_, quote(k), kDamaged));
    return true;
  }
  bool string(std::string& s) override {
    switch (in()) {
      case In::kRoot:
        if (key_ == "format") {
          TESSERA_CHECK(s == "tessera-checkpoint", "{}: the format is {}; is it a checkpoint?",
                        where_, quote(s));
          return true;
        }
        if (key_ == "xxh128") return digest(s, &m_.hash);
        break;
      case In::kExtra: return m_.extra[key_] = s, true;
      case In::kFile:
        if (key_ == "name") return m_.files.back().name = s, true;
        if (key_ == "xxh128") return digest(s, &m_.files.back().header);
        break;
      case In::kTensor:
        if (key_ == "name") return m_.tensors.back().name = s, true;
        if (key_ == "dtype") {
          TESSERA_CHECK(io::parse_safetensors_dtype(s, &m_.tensors.back().dtype),
                        "{}: dtype {} is not known", where_, quote(s));
          return true;
        }
        break;
      case In::kHashes: return digest(s, &chunk().blocks.emplace_back());
      default: break;
    }
    unexpected("a string");
  }
  bool number_unsigned(uint64_t x) override {
    switch (in()) {
      case In::kRoot:
        if (key_ == "version") {
          TESSERA_CHECK(x == 1, "{}: format version {}; this program reads 1, get a newer one",
                        where_, x);
          return true;
        }
        if (key_ == "step") return m_.step = int64_t(x), true;
        if (key_ == "world_size")
          return m_.world_size = int(std::min<uint64_t>(x, INT32_MAX)), true;
        if (key_ == "block_bytes") return m_.block_bytes = x, true;
        break;
      case In::kFile:
        if (key_ == "bytes") return m_.files.back().bytes = x, true;
        if (key_ == "header_bytes") return m_.files.back().header_bytes = x, true;
        break;
      case In::kChunk:
        if (key_ == "file") return chunk().file = uint32_t(std::min<uint64_t>(x, UINT32_MAX)), true;
        if (key_ == "offset") return chunk().offset = x, true;
        break;
      case In::kShape: return push(m_.tensors.back().shape, x);
      case In::kBegin: return push(chunk().box.begin, x);
      case In::kExtent: return push(chunk().box.shape, x);
      default: break;
    }
    unexpected("a number");
  }
  bool number_integer(int64_t) override { unexpected("a negative number"); }
  bool number_float(double, const std::string&) override { unexpected("a fraction"); }
  bool null() override { unexpected("null"); }
  bool boolean(bool) override { unexpected("a boolean"); }
  bool binary(binary_t&) override { unexpected("binary data"); }
  bool parse_error(size_t position, const std::string&,
                   const nlohmann::json::exception& e) override {
    throw UserError(fmt::format("{}: not JSON at offset {}: {}; {}", where_, position,
                                io::short_reason(e), kDamaged));
  }

 private:
  In in() const { return open_.empty() ? In::kNothing : open_.back().first; }
  bool open(In what) {
    open_.emplace_back(what, std::set<std::string>());
    return true;
  }
  bool close() {
    open_.pop_back();
    return true;
  }
  Chunk& chunk() { return m_.tensors.back().chunks.back(); }
  bool push(Dims& dims, uint64_t x) {
    TESSERA_CHECK(x <= uint64_t(INT64_MAX) && dims.size() < kMaxDims,
                  "{}: tensor {}: {} dims or the extent {} are too many", where_,
                  quote(m_.tensors.back().name), dims.size() + 1, x);
    dims.push_back(int64_t(x));
    return true;
  }
  bool digest(const std::string& s, Digest* d) {
    TESSERA_CHECK(io::parse_digest(s, d), "{}: {} is not a hash; {}", where_, quote(s), kDamaged);
    return true;
  }
  [[noreturn]] void unexpected(const char* what) {
    throw UserError(fmt::format("{}: {} is {}, which is not expected there; {}", where_,
                                quote(key_), what, kDamaged));
  }

  Manifest& m_;
  const std::string& where_;
  std::vector<std::pair<In, std::set<std::string>>> open_;  // with the keys seen in each
  std::string key_;
  uint64_t chunks_ = 0;
};

constexpr size_t kTailBytes = sizeof("\"xxh128\":\"\"}\n") - 1 + 32;

// Compares the hash of everything before the last line with that line.
void check_hash(const io::File& file, const std::string& where) {
  TESSERA_CHECK(file.size() > kTailBytes && file.size() <= kMaxManifestBytes,
                "{}: {} bytes cannot be a manifest; it is truncated or another file", where,
                file.size());
  io::Xxh128 hash;
  uint64_t covered = file.size() - kTailBytes;
  std::vector<char> buffer(std::min<uint64_t>(covered, 1 << 20));
  for (uint64_t at = 0; at < covered;) {
    size_t n = size_t(std::min<uint64_t>(buffer.size(), covered - at));
    file.read_at(buffer.data(), n, at);
    hash.update(buffer.data(), n);
    at += n;
  }
  std::string tail(kTailBytes, '\0');
  file.read_at(tail.data(), tail.size(), covered);
  std::string expected = fmt::format("\"xxh128\":\"{}\"}}\n", to_string(hash.digest()));
  TESSERA_CHECK(tail == expected,
                "{}: the last line should be {} by the bytes before it; the manifest is damaged or "
                "truncated",
                where, quote(expected));
}

}  // namespace

Manifest read_manifest(const std::string& folder) {
  std::string path = folder + "/" + kManifestName,
              where = fmt::format("checkpoint: {}", quote(path));
  io::File file = io::File::open(path, "checkpoint");
  check_hash(file, where);
  uint64_t position = 0;
  auto source = [&](char* to, size_t room) {
    size_t n = size_t(std::min<uint64_t>(room, file.size() - position));
    file.read_at(to, n, position);
    position += n;
    return n;
  };
  Manifest m;
  ManifestEvents events(&m, where);
  io::parse_bounded_json(source, {.max_depth = 8, .max_text_bytes = kMaxManifestBytes}, where,
                         events);
  check_manifest(m, where);
  return m;
}

}  // namespace tessera::checkpoint
