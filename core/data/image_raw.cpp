// Pictures stored as bare pixels: CIFAR-10's binary version (Krizhevsky 2009) and IDX, the
// container of MNIST (LeCun et al. 1998). The files are mapped. Invariant: a file's size is checked
// against what its format says before anything is read.
#include <algorithm>
#include <filesystem>

#include "core/base/error.h"
#include "core/data/image_files.h"
#include "core/io/file.h"

namespace tessera::data {
namespace {

namespace fs = std::filesystem;

struct RawFile {
  std::string path;
  Ref<io::Mapping> mapping;
  const uint8_t* bytes() const { return reinterpret_cast<const uint8_t*>(mapping->data()); }
  int64_t size() const { return int64_t(mapping->bytes()); }
};
RawFile open_raw(const std::string& path) { return {path, io::File::open(path, "data").map()}; }

// ---- CIFAR-10: records of a label and three planes of 32 x 32

constexpr int64_t kSide = 32, kPlane = kSide * kSide, kRecord = 1 + 3 * kPlane;

class Cifar final : public ImageSource {
 public:
  Cifar(const std::vector<std::string>& paths, int64_t classes, io::Xxh128& hash) {
    for (const std::string& path : paths) {
      RawFile file = open_raw(path);
      records_.reserve(records_.size() + size_t(file.size() / kRecord));
      file.mapping->checked([&] { return add_records(file, classes, hash); });
      files_.push_back(std::move(file));
    }
  }
  int64_t size() const override { return int64_t(records_.size()); }
  int64_t label(int64_t item) const override { return records_[size_t(item)].label; }
  std::string name(int64_t item) const override {
    const Record& r = records_[size_t(item)];
    return fmt::format("{}, image {}", files_[r.file].path, r.number);
  }
  Image read(int64_t item) const override {
    const Record& r = records_[size_t(item)];
    const RawFile& file = files_[r.file];
    return file.mapping->checked([&] {
      Image out = black_image(kSide, kSide);
      const uint8_t* planes = file.bytes() + r.number * kRecord + 1;
      for (int64_t i = 0; i < kPlane; ++i)
        for (int64_t c = 0; c < 3; ++c) out.pixels[size_t(3 * i + c)] = planes[c * kPlane + i];
      return out;
    });
  }

 private:
  struct Record {
    size_t file;
    int64_t number;  // in the file
    uint8_t label;
  };
  bool add_records(const RawFile& file, int64_t classes, io::Xxh128& hash) {
    TESSERA_CHECK(file.size() > 0 && file.size() % kRecord == 0,
                  "data: {} has {} bytes; CIFAR-10's binary version has {} for each image",
                  io::quote(file.path), file.size(), kRecord);
    for (int64_t i = 0; i < file.size() / kRecord; ++i) {
      const uint8_t label = file.bytes()[i * kRecord];
      TESSERA_CHECK(label < classes, "data: {} has label {} at image {}; there are {} classes",
                    io::quote(file.path), label, i, classes);
      records_.push_back({files_.size(), i, label});
    }
    hash.update(file.bytes(), size_t(file.size()));
    return true;
  }
  std::vector<RawFile> files_;
  std::vector<Record> records_;
};

// ---- IDX: two zeros, type, number of dims, dims (big-endian), values

struct Idx {
  RawFile file;
  std::vector<int64_t> dims;
  const uint8_t* values = nullptr;
};

Idx parse_idx(RawFile file, size_t ndim) {
  Idx out;
  const std::string path = file.path;
  out.file = std::move(file);
  const uint8_t* at = out.file.bytes();
  const int64_t header = 4 + 4 * int64_t(ndim);
  const bool known = out.file.size() >= header && at[0] == 0 && at[1] == 0 && at[2] == 8;
  TESSERA_CHECK(known && at[3] == ndim,
                "data: {} is no IDX file of bytes with {} dims by its first bytes{}",
                io::quote(path), ndim,
                out.file.size() > 1 && at[0] == 0x1F && at[1] == 0x8B
                    ? ": it is compressed; unpack it with gunzip"
                    : "");
  int64_t values = 1;
  for (size_t d = 0; d < ndim; ++d) {
    const uint8_t* b = at + 4 + 4 * d;
    const int64_t n = int64_t(b[0]) << 24 | b[1] << 16 | b[2] << 8 | b[3];
    TESSERA_CHECK(
        n > 0 && !__builtin_mul_overflow(values, n, &values) && values <= INT64_MAX - header,
        "data: {}: dim {} has {} entries", io::quote(path), d, n);
    out.dims.push_back(n);
  }
  TESSERA_CHECK(out.file.size() == header + values,
                "data: {} has {} bytes, its header says {}; is it cut off?", io::quote(path),
                out.file.size(), header + values);
  out.values = at + header;
  return out;
}

Idx open_idx(const std::string& path, size_t ndim) {
  RawFile file = open_raw(path);
  return file.mapping->checked([&] { return parse_idx(file, ndim); });
}

class IdxImages final : public ImageSource {
 public:
  IdxImages(Idx images, const Idx& labels) : images_(std::move(images)) {
    TESSERA_CHECK(images_.dims[0] == labels.dims[0], "data: {} has {} images, {} has {} labels",
                  io::quote(images_.file.path), images_.dims[0], io::quote(labels.file.path),
                  labels.dims[0]);
    labels_ = labels.file.mapping->checked(
        [&] { return std::vector<uint8_t>(labels.values, labels.values + labels.dims[0]); });
  }
  int64_t size() const override { return images_.dims[0]; }
  int64_t label(int64_t item) const override { return labels_[size_t(item)]; }
  int64_t classes() const { return 1 + *std::ranges::max_element(labels_); }
  void add_to(io::Xxh128& hash) const {
    images_.file.mapping->checked(
        [&] { return hash.update(images_.file.bytes(), size_t(images_.file.size())), true; });
    hash.update(labels_.data(), labels_.size());
  }
  int64_t height() const { return images_.dims[1]; }
  int64_t width() const { return images_.dims[2]; }
  std::string name(int64_t item) const override {
    return fmt::format("{}, image {}", images_.file.path, item);
  }
  Image read(int64_t item) const override {
    return images_.file.mapping->checked([&] {
      Image out = black_image(height(), width());
      const uint8_t* from = images_.values + item * height() * width();
      for (size_t i = 0; i < out.pixels.size(); ++i) out.pixels[i] = from[i / 3];  // grey
      return out;
    });
  }

 private:
  Idx images_;
  std::vector<uint8_t> labels_;
};

// "train-images-idx3-ubyte", or with a dot before idx3 as some copies have it; "" for neither.
std::string find_idx(const std::string& folder, const std::string& stem, const std::string& end) {
  for (const char* between : {"-", "."})
    if (fs::path p = fs::path(folder) / (stem + between + end); fs::exists(p)) return p.string();
  return "";
}

std::string idx_path(const std::string& folder, const std::string& stem, const std::string& end) {
  const std::string path = find_idx(folder, stem, end);
  TESSERA_CHECK(!path.empty(), "data: folder {} has no {}-{}", io::quote(folder), stem, end);
  return path;
}

std::shared_ptr<IdxImages> open_idx_pair(const std::string& folder, const std::string& split) {
  return std::make_shared<IdxImages>(
      open_idx(idx_path(folder, split + "-images", "idx3-ubyte"), 3),
      open_idx(idx_path(folder, split + "-labels", "idx1-ubyte"), 1));
}

}  // namespace

std::string raw_kind(const std::string& folder) {
  if (fs::exists(fs::path(folder) / "data_batch_1.bin")) return "cifar10";
  return find_idx(folder, "train-images", "idx3-ubyte").empty() ? "" : "idx";
}

ImageSplit load_cifar10(const std::string& folder) {
  ImageSplit out;
  out.classes = {"airplane", "automobile", "bird",  "cat",  "deer",
                 "dog",      "frog",       "horse", "ship", "truck"};
  out.side = kSide;
  auto path = [&](const std::string& name) { return (fs::path(folder) / name).string(); };
  std::vector<std::string> train;
  for (int i = 1; i <= 5; ++i) train.push_back(path(fmt::format("data_batch_{}.bin", i)));
  const auto classes = int64_t(out.classes.size());
  io::Xxh128 hash;
  out.train = std::make_shared<Cifar>(train, classes, hash);
  out.validation = std::make_shared<Cifar>(std::vector{path("test_batch.bin")}, classes, hash);
  out.hash = hash.digest();
  return out;
}

ImageSplit load_idx(const std::string& folder) {
  auto train = open_idx_pair(folder, "train"), validation = open_idx_pair(folder, "t10k");
  TESSERA_CHECK(train->height() == validation->height() && train->width() == validation->width(),
                "data: {}: images that train are {} x {}, those that validate {} x {}",
                io::quote(folder), train->height(), train->width(), validation->height(),
                validation->width());
  TESSERA_CHECK(validation->classes() <= train->classes(),
                "data: {} validates with label {}; labels up to {} train", io::quote(folder),
                validation->classes() - 1, train->classes() - 1);
  ImageSplit out;
  out.side = std::min(train->height(), train->width());
  for (int64_t c = 0; c < train->classes(); ++c) out.classes.push_back(std::to_string(c));
  out.train = train;
  out.validation = validation;
  io::Xxh128 hash;
  train->add_to(hash), validation->add_to(hash);
  out.hash = hash.digest();
  return out;
}

}  // namespace tessera::data
