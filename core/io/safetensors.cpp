#include "core/io/safetensors.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <mutex>
#include <set>

#include "core/io/bounded_json.h"
#include "core/io/safetensors_header.h"

namespace tessera::io {
namespace {

constexpr const char* kSingleName = "model.safetensors";
constexpr const char* kIndexName = "model.safetensors.index.json";
constexpr uint64_t kMaxIndexBytes = 64 << 20;
constexpr uint64_t kMaxMetadataBytes =
    128 << 10;  // fits the reader's cap even if every byte is escaped (\u0000)

// {"metadata": anything, "weight_map": {name: file}}
class IndexEvents final : public JsonEvents {
 public:
  IndexEvents(std::map<std::string, std::string>* out, const std::string& where)
      : out_(*out), where_(where) {}
  bool start_object(size_t) override {
    if (level_++ == 1) in_map_ = key_ == "weight_map";
    return level_ <= 2 || nested();
  }
  bool end_object() override {
    if (--level_ == 1) in_map_ = false;
    return true;
  }
  bool key(std::string& k) override {
    if (level_ <= 2) key_ = k;
    return true;
  }
  bool string(std::string& s) override {
    if (!in_map_) return true;
    // A shard is a file of the same folder: an index from elsewhere must not read outside it.
    TESSERA_CHECK(!s.empty() && s.front() != '.' && s.find_first_of("/\\") == std::string::npos,
                  "{}: tensor {} is said to be in {}; only files of the same folder are read",
                  where_, quote(key_), quote(s));
    TESSERA_CHECK(out_.size() < kMaxTensors, "{}: more than {} tensors", where_, kMaxTensors);
    TESSERA_CHECK(out_.emplace(key_, s).second, "{}: tensor {} is listed twice; fix the index",
                  where_, quote(key_));
    return true;
  }
  bool start_array(size_t) override { return nested(); }
  bool end_array() override { return true; }
  bool null() override { return nested(); }
  bool boolean(bool) override { return nested(); }
  bool number_integer(int64_t) override { return nested(); }
  bool number_unsigned(uint64_t) override { return nested(); }
  bool number_float(double, const std::string&) override { return nested(); }
  bool binary(binary_t&) override { return nested(); }
  bool parse_error(size_t position, const std::string&,
                   const nlohmann::json::exception& e) override {
    throw UserError(fmt::format("{}: not JSON at offset {}: {}; get the file again", where_,
                                position, short_reason(e)));
  }

 private:
  bool nested() {
    TESSERA_CHECK(
        !in_map_,
        "{}: weight_map must map names to file names, {} is something else; fix the index", where_,
        quote(key_));
    return true;
  }
  std::map<std::string, std::string>& out_;
  const std::string& where_;
  std::string key_;
  int level_ = 0;
  bool in_map_ = false;
};

std::map<std::string, std::string> read_index(const std::string& path) {
  std::string where = fmt::format("safetensors: {}", quote(path));
  File file = File::open(path, "safetensors");
  TESSERA_CHECK(file.size() <= kMaxIndexBytes,
                "{}: {} bytes are too many for an index (at most {}); is it the right "
                "file?",
                where, file.size(), kMaxIndexBytes);
  uint64_t position = 0;
  auto source = [&](char* to, size_t room) {
    size_t n = size_t(std::min<uint64_t>(room, file.size() - position));
    file.read_at(to, n, position);
    position += n;
    return n;
  };
  std::map<std::string, std::string> out;
  IndexEvents events(&out, where);
  parse_bounded_json(source, {.max_string_bytes = kMaxNameBytes}, where, events);
  TESSERA_CHECK(!out.empty(), "{}: weight_map is missing or empty; fix the index", where);
  return out;
}

}  // namespace

struct SafetensorsFile::LazyMapping {
  std::mutex mutex;
  Ref<Mapping> mapping;
};

SafetensorsFile::SafetensorsFile(File file)
    : file_(std::move(file)), mapping_(std::make_shared<LazyMapping>()) {
  std::string where = fmt::format("safetensors: {}", quote(path()));
  uint64_t size = file_.size(), header_bytes = 0;
  TESSERA_CHECK(size >= 8,
                "{}: {} bytes cannot hold the 8-byte length of a header; is it a safetensors file?",
                where, size);
  file_.read_at(&header_bytes, 8, 0);
  TESSERA_CHECK(header_bytes <= kMaxHeaderBytes,
                "{}: the header claims {} bytes, the format allows {}; is it a "
                "safetensors file?",
                where, header_bytes, kMaxHeaderBytes);
  TESSERA_CHECK(header_bytes <= size - 8,
                "{}: the header claims {} bytes, but only {} follow: the file is truncated; "
                "get it again",
                where, header_bytes, size - 8);
  char first = 0;
  if (header_bytes > 0) file_.read_at(&first, 1, 8);
  TESSERA_CHECK(first == '{',
                "{}: the header at offset 8 does not begin with '{{'; is it a safetensors file?",
                where);
  uint64_t position = 8;
  auto source = [&](char* to, size_t room) {
    size_t n = size_t(std::min<uint64_t>(room, 8 + header_bytes - position));
    file_.read_at(to, n, position);
    position += n;
    return n;
  };
  Header header = parse_header(source, header_bytes, size, where);
  metadata_ = std::move(header.metadata);
  tensors_ = std::move(header.tensors);
}

SafetensorsFile SafetensorsFile::open(const std::string& path) {
  return SafetensorsFile(File::open(path, "safetensors"));
}

std::vector<std::string> SafetensorsFile::names() const {
  std::vector<std::string> out;
  for (const TensorInfo& t : tensors_) out.push_back(t.name);
  return out;
}

const TensorInfo* SafetensorsFile::find(std::string_view name) const {
  auto at = std::lower_bound(tensors_.begin(), tensors_.end(), name,
                             [](const TensorInfo& t, std::string_view n) { return t.name < n; });
  return at != tensors_.end() && at->name == name ? &*at : nullptr;
}

const TensorInfo& SafetensorsFile::info(std::string_view name) const {
  const TensorInfo* t = find(name);
  if (t) return *t;
  auto near = std::lower_bound(tensors_.begin(), tensors_.end(), name,
                               [](const TensorInfo& a, std::string_view n) { return a.name < n; });
  if (near == tensors_.end() && near != tensors_.begin()) --near;
  throw UserError(fmt::format(
      "safetensors: {} has no tensor {}; it has {}{}", quote(path()), quote(name), tensors_.size(),
      near == tensors_.end() ? " tensors"
                             : fmt::format(", the nearest by name is {}", quote(near->name))));
}

Tensor SafetensorsFile::load(std::string_view name) const {
  const TensorInfo& t = info(name);
  Tensor out = empty(t.shape, t.dtype);
  file_.read_at(out.raw(), t.bytes, t.offset);
  file_.check_unchanged();
  return out;
}

Tensor SafetensorsFile::view(std::string_view name) const {
  const TensorInfo& t = info(name);
  if (t.bytes == 0 || t.offset % size_of(t.dtype) != 0) return load(name);
  Ref<Mapping> mapping;
  {
    std::lock_guard lock(mapping_->mutex);
    if (!mapping_->mapping) mapping_->mapping = file_.map();
    mapping = mapping_->mapping;
  }
  std::byte* data = mapping->data() + t.offset;
  return Tensor(Meta::contiguous(t.shape, t.dtype, kCPU),
                make_ref<Storage>(data, t.bytes, kCPU, mapping));
}

void SafetensorsFile::check_unchanged() const {
  std::lock_guard lock(mapping_->mutex);
  if (mapping_->mapping) mapping_->mapping->check();
}

std::string SafetensorsFile::compute_hash() const {
  ParamsHasher hasher;
  for (const TensorInfo& t : tensors_) hasher.add(t.name, load(t.name));
  return hasher.hex();
}

SafetensorsSet SafetensorsSet::open(const std::string& path) {
  namespace fs = std::filesystem;
  SafetensorsSet set;
  set.path_ = path;
  std::error_code error;
  if (!fs::is_directory(path, error) || fs::exists(fs::path(path) / kSingleName, error)) {
    set.files_.push_back(SafetensorsFile::open(
        fs::is_directory(path, error) ? (fs::path(path) / kSingleName).string() : path));
    for (const TensorInfo& t : set.files_[0].tensors()) set.shard_of_.emplace(t.name, 0);
    return set;
  }
  TESSERA_CHECK(fs::exists(fs::path(path) / kIndexName, error),
                "safetensors: folder {} has neither {} nor {}; name a file or another folder",
                quote(path), kSingleName, kIndexName);
  std::string index = (fs::path(path) / kIndexName).string();
  std::map<std::string, size_t> number_of;
  for (const auto& [name, shard] : read_index(index)) {
    auto [at, fresh] = number_of.emplace(shard, set.files_.size());
    if (fresh) set.files_.push_back(SafetensorsFile::open((fs::path(path) / shard).string()));
    TESSERA_CHECK(
        set.files_[at->second].contains(name),
        "safetensors: {} says that {} holds tensor {}, but it does not; get both files again",
        quote(index), quote(shard), quote(name));
    set.shard_of_.emplace(name, at->second);
  }
  return set;
}

std::vector<std::string> SafetensorsSet::names() const {
  std::vector<std::string> out;
  for (const auto& [name, shard] : shard_of_) out.push_back(name);
  return out;
}

const SafetensorsFile& SafetensorsSet::file_of(std::string_view name) const {
  auto at = shard_of_.find(name);
  if (at == shard_of_.end() && files_.size() == 1)
    return files_[0];  // its own error names the nearest tensor
  TESSERA_CHECK(at != shard_of_.end(), "safetensors: {} has no tensor {} among {}", quote(path_),
                quote(name), shard_of_.size());
  return files_[at->second];
}

bool SafetensorsSet::contains(std::string_view name) const {
  return shard_of_.find(name) != shard_of_.end();
}
const TensorInfo& SafetensorsSet::info(std::string_view name) const {
  return file_of(name).info(name);
}
Tensor SafetensorsSet::load(std::string_view name) const { return file_of(name).load(name); }
Tensor SafetensorsSet::view(std::string_view name) const { return file_of(name).view(name); }
void SafetensorsSet::check_unchanged() const {
  for (const SafetensorsFile& file : files_) file.check_unchanged();
}

std::vector<NamedTensor> load_safetensors(const std::string& path) {
  SafetensorsSet set = SafetensorsSet::open(path);
  std::vector<NamedTensor> out;
  for (const std::string& name : set.names()) out.push_back({name, set.load(name)});
  return out;
}

void save_safetensors(const std::string& path, std::span<const NamedTensor> tensors,
                      const Metadata& metadata, const SaveOptions& options) {
  std::vector<const NamedTensor*> order;
  for (const NamedTensor& t : tensors) order.push_back(&t);
  if (options.sort_by_name)
    std::sort(order.begin(), order.end(), [](auto* a, auto* b) { return a->name < b->name; });
  for (const auto& [key, value] : metadata)
    TESSERA_CHECK(key.size() + value.size() < kMaxMetadataBytes,
                  "save_safetensors: metadata {} has {} bytes, at most {} are read back; keep it "
                  "in a file of its own",
                  quote(key), value.size(), kMaxMetadataBytes);
  std::set<std::string_view> seen;
  std::vector<TensorInfo> infos;
  for (const NamedTensor* t : order) {
    TESSERA_CHECK(t->name != "__metadata__",
                  "save_safetensors: a tensor cannot be named __metadata__; rename it");
    TESSERA_CHECK(t->name.size() <= kMaxNameBytes,
                  "save_safetensors: the name {} is longer than {} bytes; shorten it",
                  quote(t->name), kMaxNameBytes);
    TESSERA_CHECK(seen.insert(t->name).second,
                  "save_safetensors: two tensors are named {}; rename one", quote(t->name));
    TESSERA_CHECK(t->tensor.defined(),
                  "save_safetensors: tensor {} has no value; leave it out or initialise it",
                  quote(t->name));
    infos.push_back({t->name, t->tensor.dtype(), t->tensor.shape(), 0, t->tensor.nbytes()});
  }
  Metadata all = metadata;
  if (options.store_hash) all[kHashKey] = params_xxh128(tensors);
  std::string text = print_header(infos, all);
  uint64_t header_bytes = text.size(), end = 8 + header_bytes;
  for (const TensorInfo& t : infos) end += t.bytes;
  // What is written must be readable: the reader's own checks decide.
  size_t position = 0;
  auto source = [&](char* to, size_t room) {
    size_t n = text.copy(to, room, position);
    position += n;
    return n;
  };
  parse_header(source, header_bytes, end, fmt::format("save_safetensors: {}", quote(path)));
  TESSERA_CHECK(header_bytes <= kMaxHeaderBytes,
                "save_safetensors: {}: the header would have {} bytes, at most {} are "
                "allowed; shorten names or metadata",
                quote(path), header_bytes, kMaxHeaderBytes);

  AtomicFile file(path, "save_safetensors");
  file.write(&header_bytes, 8);
  file.write(text.data(), text.size());
  for (const NamedTensor* t : order) {
    Tensor dense = dense_values(t->tensor, "save_safetensors", t->name);
    file.write(dense.raw_values(), dense.nbytes());
  }
  file.commit();
}

}  // namespace tessera::io
