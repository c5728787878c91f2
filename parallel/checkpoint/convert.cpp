#include "parallel/checkpoint/convert.h"

#include <filesystem>
#include <nlohmann/json.hpp>

#include "core/io/safetensors_header.h"
#include "parallel/checkpoint/checkpointer.h"
#include "parallel/checkpoint/folder.h"
#include "parallel/checkpoint/overwrite.h"
#include "parallel/checkpoint/reader.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;
using io::quote;

struct Source {
  std::string folder;
  Manifest manifest;
  std::string prefix;
  Reader reader{folder, manifest};

  std::string name_of(const TensorEntry& t) const { return t.name.substr(prefix.size()); }
  Tensor read(const TensorEntry& t) {
    Piece p = whole(t.name, empty(t.shape, t.dtype));
    reader.fill(t, p.box(), static_cast<std::byte*>(p.values.raw()));
    return p.values;
  }
};

io::Metadata metadata_of(const Manifest& m) {
  io::Metadata out{{"format", "pt"}};
  for (const auto& [key, value] : m.extra)
    if (key.starts_with("metadata.")) out[key.substr(9)] = value;
  return out;
}

using Group = std::vector<const TensorEntry*>;

// Reads the data twice, for the hash and for the file, because the hash stands in the header before
// the data.
void write_file(Source& from, const Group& tensors, const std::string& path) {
  io::ParamsHasher hasher;
  std::vector<io::TensorInfo> infos;
  for (const TensorEntry* t : tensors) {
    Tensor values = from.read(*t);
    hasher.add(from.name_of(*t), values);
    infos.push_back({from.name_of(*t), t->dtype, t->shape, 0, values.nbytes()});
  }
  io::Metadata metadata = metadata_of(from.manifest);
  metadata[io::kHashKey] = hasher.hex();
  std::string header = io::print_header(infos, metadata);
  uint64_t length = header.size();
  TESSERA_CHECK(length <= io::kMaxHeaderBytes && infos.size() <= io::kMaxTensors,
                "convert: {}: {} tensors and a header of {} bytes are too many for one file; set "
                "a size of shards",
                quote(path), infos.size(), length);
  io::AtomicFile file(path, "convert");
  file.write(&length, 8);
  file.write(header.data(), header.size());
  for (const TensorEntry* t : tensors) {
    Tensor values = from.read(*t);
    file.write(values.raw_values(), values.nbytes());
  }
  file.commit();
}

uint64_t bytes_of(const TensorEntry& t) { return uint64_t(numel(t.shape)) * size_of(t.dtype); }

std::vector<Group> shards_of(const Source& from, uint64_t most) {
  std::vector<Group> out;
  uint64_t filled = 0;
  for (const TensorEntry& t : from.manifest.tensors) {
    if (!t.name.starts_with(from.prefix) || t.name.size() == from.prefix.size()) continue;
    if (out.empty() || (most > 0 && filled > 0 && filled + bytes_of(t) > most)) {
      out.emplace_back();
      filled = 0;
    }
    out.back().push_back(&t);
    filled += bytes_of(t);
  }
  TESSERA_CHECK(!out.empty(),
                "convert: {} has no tensor whose name begins with {}; give the prefix that its "
                "names have (tckpt --prefix; tckpt inspect lists them)",
                quote(from.folder), quote(from.prefix));
  return out;
}

void write_shards(Source& from, const std::vector<Group>& shards, const std::string& folder) {
  nlohmann::ordered_json map;
  uint64_t total = 0;
  for (size_t i = 0; i < shards.size(); ++i) {
    std::string name = fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, shards.size());
    write_file(from, shards[i], folder + "/" + name);
    for (const TensorEntry* t : shards[i]) {
      map[from.name_of(*t)] = name;
      total += bytes_of(*t);
    }
  }
  nlohmann::ordered_json index{{"metadata", {{"total_size", total}}}, {"weight_map", map}};
  io::write_file(folder + "/model.safetensors.index.json", index.dump(2) + "\n", "convert");
}

std::string parent_of(const std::string& path) {
  std::string parent = fs::path(path).lexically_normal().parent_path().string();
  return parent.empty() ? "." : parent;
}

// Fills a folder beside `to` and renames it there once it is complete.
template <class F>
void make_whole_folder(const std::string& to, F fill) {
  std::string target = fs::path(to + "/").lexically_normal().parent_path().string();
  std::error_code error;
  TESSERA_CHECK(!fs::exists(target, error), "convert: {} exists; name a folder that does not",
                quote(target));
  std::string temporary = target + ".tmp";
  make_folders(parent_of(target));
  make_folder(temporary);
  try {
    fill(temporary);
    sync_folder(temporary);
    rename_folder(temporary, target);
    sync_folder(parent_of(target));
  } catch (...) {
    remove_temporary(temporary);
    throw;
  }
}

}  // namespace

bool is_checkpoint(const std::string& path) {
  std::error_code error;
  if (!fs::is_directory(path, error)) return false;
  std::string name = fs::path(path + "/").lexically_normal().parent_path().filename().string();
  return fs::exists(path + "/" + kManifestName, error) || name.starts_with("step-") ||
         fs::exists(path + "/" + kLatestName, error) || !saved_steps(path).empty();
}

Converted export_safetensors(const std::string& from, const std::string& to,
                             const ExportOptions& o) {
  check_may_write(to, "convert");
  Newest found = resolve(from);
  Source source{found.folder, read_step(found.folder), o.prefix};
  std::vector<Group> shards = shards_of(source, o.max_shard_bytes);
  if (to.ends_with(".safetensors")) {
    TESSERA_CHECK(o.max_shard_bytes == 0,
                  "convert: {} is one file; name a folder where shards are wanted", quote(to));
    write_file(source, shards[0], to);
  } else {
    make_whole_folder(to, [&](const std::string& folder) {
      if (o.max_shard_bytes == 0)
        write_file(source, shards[0], folder + "/model.safetensors");
      else
        write_shards(source, shards, folder);
    });
  }
  Converted out{.tensors = 0, .bytes = 0, .files = shards.size()};
  for (const Group& g : shards)
    for (const TensorEntry* t : g) ++out.tensors, out.bytes += bytes_of(*t);
  return out;
}

Converted import_safetensors(const std::string& from, const std::string& to, int64_t step,
                             const std::string& prefix) {
  check_may_write(to, "convert");
  check_may_save(to, "convert");
  io::SafetensorsSet set = io::SafetensorsSet::open(from);
  State state;
  Converted out{.tensors = 0, .bytes = 0, .files = 1};
  for (const std::string& name : set.names()) {
    // Its values are read when it is copied.
    state.pieces.push_back(whole(prefix + name, set.view(name)));
    ++out.tensors;
    out.bytes += set.info(name).bytes;
  }
  for (const io::SafetensorsFile& file : set.files())
    for (const auto& [key, value] : file.metadata())
      if (key != io::kHashKey) state.extra.emplace("metadata." + key, value);
  std::error_code error;
  const bool is_new = !fs::exists(to, error);
  try {
    Checkpointer saver(to, solo_group().get(), {.async = false, .staging_bytes = 64 << 20});
    saver.save(step, state);
    try {
      set.check_unchanged();
    } catch (const io::FileChanged&) {
      remove_step(to, step);
      mend_latest(to, newest(to));
      throw;
    }
  } catch (...) {
    if (is_new) fs::remove(to, error);  // it is empty
    throw;
  }
  return out;
}

}  // namespace tessera::checkpoint
