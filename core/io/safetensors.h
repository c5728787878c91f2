// Safetensors files (Hugging Face's format): u64 header length, a JSON header {name: {dtype, shape,
// data_offsets}}, then the elements of all tensors in C order. Invariant: a file that opens is
// sound. Everything the header claims is checked against the file's size before anything is
// allocated for it: dtypes, products of shapes, no overlap, no hole, no name twice; a hostile
// header costs bounded memory and time.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/io/file.h"
#include "core/io/hash.h"
#include "core/tensor/tensor.h"

namespace tessera::io {

/// The format's cap on the header's length.
inline constexpr uint64_t kMaxHeaderBytes = 100'000'000;
/// Our caps on what a header holds, so that reading one stays below 64 MiB and a second.
inline constexpr uint64_t kMaxTensors = 1 << 17, kMaxNameBytes = 4096,
                          kMaxHeaderTextBytes = 16 << 20;
/// Metadata key under which save_safetensors stores params_xxh128 of the file's tensors.
inline constexpr const char* kHashKey = "params_xxh128";

using Metadata = std::map<std::string, std::string>;

/// What the header says of one tensor.
struct TensorInfo {
  std::string name;
  DType dtype = kF32;
  Shape shape;
  uint64_t offset = 0;  // of the first byte, in the file
  uint64_t bytes = 0;
};

/// One open file. Reading is thread-safe.
class SafetensorsFile {
 public:
  /// Reads and checks the header. Throws UserError naming file, tensor and offsets for anything
  /// unsound.
  static SafetensorsFile open(const std::string& path);

  const std::string& path() const { return file_.path(); }
  uint64_t file_bytes() const { return file_.size(); }
  const Metadata& metadata() const { return metadata_; }
  /// All tensors, in ascending order of their names.
  std::span<const TensorInfo> tensors() const { return tensors_; }
  std::vector<std::string> names() const;
  bool contains(std::string_view name) const { return find(name) != nullptr; }
  /// Throws UserError naming the closest name when there is no `name`.
  const TensorInfo& info(std::string_view name) const;
  /// A copy in fresh memory, on the CPU. Throws FileChanged where the file is not what was opened.
  Tensor load(std::string_view name) const;
  /// Zero-copy: pages are read when touched and stay private to this process, so writing to the
  /// tensor is safe and never reaches the file. Falls back to load() where the data are not aligned
  /// to the dtype. The tensor keeps the mapping alive. Where others change the file, the values
  /// change too; check_unchanged() finds that out.
  Tensor view(std::string_view name) const;
  /// Throws FileChanged when what was read of views so far may not be what the file held when it
  /// was opened.
  void check_unchanged() const;
  /// params_xxh128 over all tensors; reads every byte, one tensor at a time.
  std::string compute_hash() const;

 private:
  struct LazyMapping;
  explicit SafetensorsFile(File file);
  const TensorInfo* find(std::string_view name) const;
  File file_;
  Metadata metadata_;
  std::vector<TensorInfo> tensors_;
  std::shared_ptr<LazyMapping> mapping_;
};

/// A model's weights as one set of names: a file, or a folder with `model.safetensors` or with
/// shards listed in `model.safetensors.index.json` {"weight_map": {name: file}}. Names that the
/// index does not list are not part of it.
class SafetensorsSet {
 public:
  /// Opens and checks every shard. Throws UserError for an unsound shard or index, and for a listed
  /// tensor that its shard lacks.
  static SafetensorsSet open(const std::string& path);

  std::vector<std::string> names() const;  // ascending
  bool contains(std::string_view name) const;
  const TensorInfo& info(std::string_view name) const;
  Tensor load(std::string_view name) const;
  Tensor view(std::string_view name) const;
  void check_unchanged() const;
  std::span<const SafetensorsFile> files() const { return files_; }

 private:
  const SafetensorsFile& file_of(std::string_view name) const;
  std::string path_;
  std::vector<SafetensorsFile> files_;
  std::map<std::string, size_t, std::less<>> shard_of_;
};

/// Every tensor of a file or folder, copied, in ascending order of names.
std::vector<NamedTensor> load_safetensors(const std::string& path);

struct SaveOptions {
  bool sort_by_name = true;  // order of the data; false: as given
  bool store_hash = true;    // params_xxh128 into the metadata, for `tckpt verify`
};

/// Writes dense copies of `tensors` (CPU, whole, any strides) through an AtomicFile: after an
/// error, a crash or power loss the path holds the old file or the new one. Throws UserError for a
/// name twice, for what open() would refuse, and for failing writes (path, bytes, reason).
void save_safetensors(const std::string& path, std::span<const NamedTensor> tensors,
                      const Metadata& metadata = {}, const SaveOptions& options = {});

/// The format's name of a dtype ("BF16"), and back; false when it is not one of ours.
std::string_view safetensors_dtype(DType t);
bool parse_safetensors_dtype(std::string_view text, DType* t);

}  // namespace tessera::io
