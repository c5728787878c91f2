// Sources of images: class folders, archives, CIFAR-10's and MNIST's files; errors of wrong layouts
// and damaged files.
#include "core/data/image_source.h"

#include <gtest/gtest.h>

#include <map>
#include <set>

#include "core/data/image_dataset.h"
#include "core/data/image_transforms.h"
#include "core/data/loader.h"
#include "tests/support/images.h"
#include "tests/support/temp_folder.h"

namespace tessera::data {
namespace {

constexpr const char* kNone = "built without libjpeg, libpng and libarchive";

// A folder of class folders; image k of a class has side 8 and begins with the value `first` + k.
void add_class(const TempFolder& to, const std::string& folder, int count, int first = 0) {
  for (int k = 0; k < count; ++k) {
    Image image = picture(8, 8);
    image.pixels[0] = uint8_t(first + k);
    to.write(folder + "/" + std::to_string(100 + k) + ".png", png_of(image));
  }
}
std::vector<int> first_values(const ImageSource& source) {
  std::vector<int> out;
  for (int64_t i = 0; i < source.size(); ++i) out.push_back(source.read(i).pixels[0]);
  return out;
}
std::vector<int64_t> labels_of(const ImageSource& source) {
  std::vector<int64_t> out;
  for (int64_t i = 0; i < source.size(); ++i) out.push_back(source.label(i));
  return out;
}
/// An archive, in `to`, of all that is in `from`.
std::string tar(const TempFolder& from, const TempFolder& to, const std::string& flags = "") {
  const std::string path = to / ("archive" + flags + ".tar");
  const std::string command =
      "tar -C " + from.str() + " " + flags + " --sort=name -cf " + path + " .";
  EXPECT_EQ(std::system(command.c_str()), 0) << command;
  return path;
}

TEST(ImageSource, ClassFoldersWithSplits) {
  if (!has_image_libraries()) GTEST_SKIP() << kNone;
  TempFolder dir;
  add_class(dir, "x/train/cat", 3, 10), add_class(dir, "x/train/ant", 2, 20);
  add_class(dir, "x/val/cat", 1, 30), add_class(dir, "x/test/ant", 1, 40);
  dir.write("x/train/ant/.hidden.png", "?"), dir.write("x/train/ant/notes.txt", "?");
  dir.write("x/.git/train/dog/a.png", "?");
  TempFolder out;
  const std::string plain = tar(dir, out), packed = tar(dir, out, "-z");
  for (const std::string& where : {dir.str(), dir / "x", plain, packed}) {
    const ImageSplit split = load_images("images:" + where);
    EXPECT_EQ(split.classes, (std::vector<std::string>{"ant", "cat"})) << where;
    EXPECT_EQ(first_values(*split.train), (std::vector{20, 21, 10, 11, 12})) << where;
    EXPECT_EQ(labels_of(*split.train), (std::vector<int64_t>{0, 0, 1, 1, 1}));
    EXPECT_EQ(first_values(*split.validation), (std::vector{30}));  // val goes before test
    EXPECT_EQ(labels_of(*split.validation), (std::vector<int64_t>{1}));
    expect_contains(split.train->name(0), "train/ant/100.png");
  }
}

TEST(ImageSource, ClassFoldersAloneAreSplit) {
  if (!has_image_libraries()) GTEST_SKIP() << kNone;
  TempFolder dir;
  add_class(dir, "a", 21), add_class(dir, "b", 9, 50);
  const ImageSplit split = load_images("images:" + dir.str());
  EXPECT_EQ(split.train->size(), 19 + 9);
  EXPECT_EQ(first_values(*split.validation),
            (std::vector{19, 20}));  // the last tenth of each class
  TempFolder few;
  add_class(few, "a", 3);
  EXPECT_EQ(load_images("images:" + few.str()).validation, nullptr);
}

TEST(ImageSource, WrongLayoutsAreErrors) {
  auto loading = [](const std::string& path) {
    return error_of([&] { load_images("images:" + path); });
  };
  TempFolder dir;
  expect_contains(loading(dir.str()), "holds no JPEG or PNG files");
  expect_contains(loading(dir / "nothing"), "nothing': No such file");
  expect_contains(loading(""), "is not images:PATH");
  dir.write("a/1.png", "?");
  std::filesystem::create_directories(dir / "b");
  expect_contains(loading(dir.str()), "folder 'b' is empty");
  std::filesystem::remove(dir / "b");
  dir.write("top.png", "?");
  expect_contains(loading(dir.str()), "has the image 'top.png' outside of any folder");
  std::filesystem::remove(dir / "top.png");
  dir.write("deep/b/1.png", "?");
  expect_contains(loading(dir.str()), "class folders in '', 'deep'; expected them in one folder");
  TempFolder more;
  more.write("train/a/1.png", "?"), more.write("test/b/1.png", "?");
  expect_contains(loading(more.str()), "validates with class 'b', of which no image trains");
  if (!has_image_libraries()) return;
  dir.write("no.tar", "this is no archive, although it is long enough to be looked at");
  expect_contains(loading(dir / "no.tar"), "no.tar' is no folder, and no tar archive");
  expect_contains(loading(dir / "no.tar"), "; give a folder or tar archive of class folders");
  TempFolder empty;
  std::filesystem::create_directories(empty / "train/a");
  expect_contains(loading(tar(empty, dir)), "folder 'train/a' is empty");
}

TEST(ImageSource, LinksToFoldersAreFollowed) {
  if (!has_image_libraries()) GTEST_SKIP() << kNone;
  namespace fs = std::filesystem;
  TempFolder store, dir;
  add_class(store, "far", 3, 10), add_class(dir, "near", 2, 20);
  fs::create_directory_symlink(store / "far", dir / "ant");
  fs::create_directory_symlink(store / "far", dir / "bee");  // twice is no loop
  fs::create_symlink(store / "far/102.png", dir / "near/105.png");
  const ImageSplit split = load_images("images:" + dir.str());
  EXPECT_EQ(split.classes, (std::vector<std::string>{"ant", "bee", "near"}));
  EXPECT_EQ(first_values(*split.train), (std::vector{10, 11, 12, 10, 11, 12, 20, 21, 12}));
  auto loading = [&] { return error_of([&] { load_images("images:" + dir.str()); }); };
  fs::create_directory_symlink(dir.str(), dir / "near/around");
  expect_contains(loading(), "near/around' leads to a folder around it");
  fs::remove(dir / "near/around");
  fs::create_directory_symlink(store / "gone", dir / "cow");
  expect_contains(loading(), "cow' leads to nothing");
}

// If such a class were left out without a word, the labels after it would be others.
TEST(ImageSource, ClassesWithoutImagesAreErrors) {
  TempFolder dir, out;
  auto loading = [&](const std::string& text) {
    expect_contains(error_of([&] { load_images("images:" + dir.str()); }), text);
    if (!has_image_libraries()) return;
    expect_contains(error_of([&] { load_images("images:" + tar(dir, out)); }), text);
  };
  dir.write("train/b/.1.png", "?");
  loading("holds no JPEG or PNG files (1 hidden)");
  dir.write("train/a/1.png", "?");
  loading("folder 'train/b' holds no JPEG or PNG files (1 hidden); remove it");
  dir.write("train/b/1.webp", "?"), dir.write("train/b/deep/2.webp", "?");
  loading("folder 'train/b' holds no JPEG or PNG files (2 of other kinds, 1 hidden)");
  dir.write("train/b/1.png", "?"), dir.write("val/a/1.png", "?");
  dir.write("val/b/1.webp", "?");
  loading("folder 'val/b' holds no JPEG");
  std::filesystem::remove_all(dir / "train");
  dir.write("val/b/1.png", "?"), dir.write("train/a/1.webp", "?");
  loading("folder 'train' holds no JPEG");  // else val would train
  dir.write("train/a/1.png", "?"), dir.write("train/b/1.png", "?");
  dir.write("lists/all.txt", "?");  // beside the splits
  EXPECT_EQ(load_images("images:" + dir.str()).classes.size(), 2u);
}

TEST(ImageSource, ArchiveWithLinks) {
  if (!has_image_libraries()) GTEST_SKIP() << kNone;
  namespace fs = std::filesystem;
  TempFolder dir, out;
  add_class(dir, "a", 3, 10);
  fs::create_directories(dir / "b");
  fs::create_hard_link(dir / "a/101.png", dir / "b/100.png");
  fs::create_symlink("../a/102.png", dir / "a/103.png");
  for (const char* flags : {"", "-z"}) {
    const std::string path = tar(dir, out, flags);
    testing::internal::CaptureStderr();
    const ImageSplit split = load_images("images:" + path);
    expect_contains(testing::internal::GetCapturedStderr(), "left out 1 links");
    EXPECT_EQ(split.classes, (std::vector<std::string>{"a", "b"}));
    EXPECT_EQ(first_values(*split.train), (std::vector{10, 11, 12, 11}));
  }
}

// Zeros that the archive does not hold: between data, and at the end.
TEST(ImageSource, ArchiveWithHoles) {
  if (!has_image_libraries()) GTEST_SKIP() << kNone;
  TempFolder dense, dir, out;
  Image image = black_image(300, 300);
  image.pixels.front() = 1, image.pixels[100000] = 2, image.pixels.back() = 3;
  const std::string whole = dense.write("1.png", png_of(image)), hole = dir.write("a/2.png", "");
  const std::string make_holes =
      "cp --sparse=always " + whole + " " + (dir / "a/1.png") + " && truncate -s 65536 " + hole;
  ASSERT_EQ(std::system(make_holes.c_str()), 0) << make_holes;
  const std::string path = tar(dir, out, "-S");
  ASSERT_LT(std::filesystem::file_size(path), 100000u) << "tar saw no holes";
  const ImageSplit split = load_images("images:" + path);
  EXPECT_EQ(split.train->read(0).pixels, image.pixels);
  expect_contains(error_of([&] { split.train->read(1); }), "2.png' is neither JPEG nor PNG");
}

TEST(ImageSource, ArchiveThatIsCutOff) {
  if (!has_image_libraries()) GTEST_SKIP() << kNone;
  TempFolder dir, out;
  for (int k = 0; k < 12; ++k) {
    Image image = black_image(128, 128);  // with noise, which does not pack
    for (size_t i = 0, x = size_t(k); i < image.pixels.size(); ++i)
      image.pixels[i] = uint8_t((x = x * 6364136223846793005u + 1442695040888963407u) >> 56);
    image.pixels[0] = uint8_t(k);
    dir.write("a/" + std::to_string(100 + k) + ".png", png_of(image));
  }
  for (const char* flags : {"", "-z"}) {
    std::ifstream whole(tar(dir, out, flags), std::ios::binary);
    const std::string bytes(std::istreambuf_iterator<char>(whole), {});
    const std::string path = out.write("cut.tar", bytes.substr(0, bytes.size() * 2 / 5));
    const std::string text = error_of([&] { load_images("images:" + path); });
    expect_contains(text, "archive '" + path + "'");
    expect_contains(text, "runcated");  // libarchive's reason
    expect_contains(text, " images come before that");
    const ImageSplit split = load_images("images:" + path, BadImages::kSkip);
    EXPECT_GE(split.train->size(), 2);
    EXPECT_LT(split.train->size(), 11);
    std::vector<int> values = first_values(*split.train);
    for (size_t i = 0; i < values.size(); ++i) EXPECT_EQ(values[i], int(i));
  }
}

TEST(ImageSource, ArchiveThatIsCutOffBetweenFiles) {
  if (!has_image_libraries()) GTEST_SKIP() << kNone;
  TempFolder dir, out;
  for (int k = 0; k < 12; ++k)
    dir.write("a/" + std::to_string(100 + k) + ".png", png_of(black_image(4, 4)));
  dir.write("note.txt", std::string(1000, 'x'));
  // Files, then just the two blocks of zeros of a tar's end.
  std::ifstream file(tar(dir, out, "--record-size=512"), std::ios::binary);
  const std::string whole(std::istreambuf_iterator<char>(file), {});
  auto load = [&](size_t bytes_less, BadImages bad) {
    return load_images("images:" + out.write("cut.tar", whole.substr(0, whole.size() - bytes_less)),
                       bad);
  };
  for (size_t less : {0, 512})
    EXPECT_EQ(load(less, BadImages::kStop).train->size(), 11) << less << " bytes less";
  expect_contains(error_of([&] { load(1024, BadImages::kStop); }),
                  "cut.tar': Truncated behind a whole file: the zeros that end a tar archive are "
                  "missing; 12 images come before that");
  EXPECT_EQ(load(1024, BadImages::kSkip).train->size(), 11);
}

TEST(ImageSource, Cifar10) {
  TempFolder dir;
  for (int b = 1; b <= 5; ++b)
    dir.write("data_batch_" + std::to_string(b) + ".bin", cifar_records(4, 4 * (b - 1)));
  expect_contains(error_of([&] { load_images("cifar10:" + dir.str()); }), "test_batch.bin");
  dir.write("test_batch.bin", cifar_records(3, 20));
  const ImageSplit split = load_images("cifar10:" + dir.str());
  EXPECT_EQ(split.train->size(), 20);
  EXPECT_EQ(split.validation->size(), 3);
  EXPECT_EQ(split.classes[3], "cat");
  EXPECT_EQ(split.side, 32);
  const std::string record = cifar_records(1, 17);
  const Image image = split.train->read(17);
  EXPECT_EQ(split.train->label(17), 7);
  for (int y : {0, 31})
    for (int x : {0, 5})
      for (int c = 0; c < 3; ++c)  // planes become pixels
        EXPECT_EQ(image.row(y)[3 * x + c], uint8_t(record[size_t(1 + 1024 * c + 32 * y + x)]));
  expect_contains(error_of([&] { load_images("images:" + dir.str()); }),
                  "holds no JPEG or PNG files; give cifar10:" + dir.str() + " for those there");
  TempFolder above;
  above.write("in/data_batch_1.bin", "");
  expect_contains(error_of([&] { load_images("images:" + above.str()); }),
                  "; give cifar10:" + (above / "in") + " for those there");
  for (const size_t bytes : {0, 5000}) {
    dir.write("data_batch_3.bin", cifar_records(4).substr(0, bytes));
    expect_contains(error_of([&] { load_images("cifar10:" + dir.str()); }),
                    "data_batch_3.bin' has " + std::to_string(bytes) + " bytes; CIFAR-10's");
  }
  dir.write("data_batch_3.bin", "\x0A" + cifar_records(1).substr(1));
  expect_contains(error_of([&] { load_images("cifar10:" + dir.str()); }),
                  "has label 10 at image 0");
  expect_contains(error_of([&] { load_images("cifar10:" + (dir / "none")); }), "needs a folder");
}

std::string idx(const std::vector<int>& dims, const std::string& values) {
  std::string out{0, 0, 8, char(dims.size())};
  for (int n : dims) out += std::string{0, 0, char(n >> 8), char(n)};
  return out + values;
}

TEST(ImageSource, Idx) {
  TempFolder dir;
  dir.write("train-images-idx3-ubyte", idx({3, 2, 4}, std::string("abcdefghABCDEFGH01234567")));
  dir.write("train-labels-idx1-ubyte", idx({3}, std::string("\1\0\2", 3)));
  dir.write("t10k-images.idx3-ubyte", idx({1, 2, 4}, "zzzzzzzz"));
  dir.write("t10k-labels.idx1-ubyte", idx({1}, "\1"));
  const ImageSplit split = load_images("idx:" + dir.str());
  EXPECT_EQ(split.classes, (std::vector<std::string>{"0", "1", "2"}));
  EXPECT_EQ(split.train->size(), 3);
  EXPECT_EQ(split.train->label(2), 2);
  const Image image = split.train->read(1);
  EXPECT_EQ(image.height, 2);
  EXPECT_EQ(image.width, 4);
  for (int c = 0; c < 3; ++c) EXPECT_EQ(image.row(1)[3 * 2 + c], 'G');  // grey
  expect_contains(error_of([&] { load_images("images:" + dir.str()); }),
                  "holds no JPEG or PNG files; give idx:" + dir.str() + " for those there");
  auto loading = [&] { return error_of([&] { load_images("idx:" + dir.str()); }); };
  dir.write("t10k-labels.idx1-ubyte", idx({1}, "\3"));
  expect_contains(loading(), "validates with label 3; labels up to 2 train");
  dir.write("t10k-labels.idx1-ubyte", idx({2}, "\1\1"));
  expect_contains(loading(), "has 1 images");
  dir.write("train-images-idx3-ubyte", idx({3, 2, 4}, "too short"));
  expect_contains(loading(), "has 25 bytes, its header says 40; is it cut off?");
  // The product of the dims is beyond 2^64 by as many bytes as there are.
  const std::string header("\0\0\x08\3\x80\0\0\1\xFF\xFF\xFF\xFF\0\0\0\2", 16);
  dir.write("train-images-idx3-ubyte", header);
  std::filesystem::resize_file(dir / "train-images-idx3-ubyte", 16 + (uint64_t(1) << 32) - 2);
  expect_contains(loading(), "dim 1 has 4294967295 entries");
  dir.write("train-images-idx3-ubyte", "\x1F\x8B compressed by gzip");
  expect_contains(loading(), "unpack it with gunzip");
  std::filesystem::remove(dir / "train-images-idx3-ubyte");
  expect_contains(loading(), "has no train-images-idx3-ubyte");
}

// ---- as rows of batches

std::shared_ptr<ImageDataset> dataset_of(const ImageSource* source, ImageDatasetOptions o) {
  return std::make_shared<ImageDataset>(
      std::shared_ptr<const ImageSource>(std::shared_ptr<void>(), source), o);
}

// Pictures made by number; those that `bad` holds cannot be read.
class Drawn final : public ImageSource {
 public:
  explicit Drawn(int64_t size, std::set<int64_t> bad = {}, int64_t side = 8)
      : size_(size), side_(side), bad_(std::move(bad)) {}
  int64_t size() const override { return size_; }
  int64_t label(int64_t item) const override { return item; }
  std::string name(int64_t item) const override { return "picture " + std::to_string(item); }
  Image read(int64_t item) const override {
    TESSERA_CHECK(!bad_.contains(item), "data: '{}' is torn", name(item));
    Image image = picture(side_, side_);
    for (uint8_t& p : image.pixels) p = uint8_t(p + 30 * item);
    return image;
  }

 private:
  int64_t size_, side_;
  std::set<int64_t> bad_;
};

TEST(ImageDataset, RowsAreNormalisedAndChannelsLast) {
  Drawn source(3);
  auto dataset =
      dataset_of(&source, {.size = 8, .mean = {0.5f, 0.25f, 0}, .deviation = {2, 1, 0.5f}});
  Batch b = dataset->allocate(2);
  EXPECT_EQ(b.inputs.shape(), (Shape{2, 3, 8, 8}));
  EXPECT_EQ(b.inputs.strides(), channels_last_strides({2, 3, 8, 8}));
  dataset->read({5, 2}, 1, b);
  EXPECT_EQ(b.targets.data<int64_t>()[1], 2);
  const Image image = source.read(2);
  const float* row = b.inputs.data<float>() + 8 * 8 * 3;
  for (int64_t i = 0; i < 64; ++i) {
    const uint8_t* p = image.pixels.data() + 3 * i;
    EXPECT_EQ(row[3 * i], (float(p[0]) / 255 - 0.5f) / 2);
    EXPECT_EQ(row[3 * i + 1], float(p[1]) / 255 - 0.25f);
    EXPECT_EQ(row[3 * i + 2], float(p[2]) / 255 / 0.5f);
  }
}

// What each sample number gives, under any dealing of samples to ranks and any number of workers.
TEST(ImageDataset, SamplesDependOnTheirNumberAlone) {
  Drawn source(7, {}, 12);
  for (Augment augment : {Augment::kCrop, Augment::kResizedCrop}) {
    auto dataset = dataset_of(&source, {.size = 8, .augment = augment, .seed = 3});
    auto samples = [&](int ranks, int workers, int64_t from) {
      std::map<int64_t, std::vector<float>> out;
      for (int rank = 0; rank < ranks; ++rank) {
        DistributedSampler sampler({.dataset_size = 7,
                                    .micro_batches = 4,
                                    .micro_batch_size = 3,
                                    .rank = rank,
                                    .world_size = ranks,
                                    .seed = 5,
                                    .repeat = true});
        sampler.seek(from);
        DataLoader loader(dataset, sampler, {.workers = workers});
        for (int k = 0; k < 5 * 4 / ranks; ++k) {
          const Batch b = *loader.next();
          for (int64_t r = 0; r < b.rows(); ++r) {
            const float* at = b.inputs.data<float>() + r * 192;
            out[b.sample_numbers.data<int64_t>()[r]].assign(at, at + 192);
          }
        }
      }
      return out;
    };
    const auto all = samples(1, 1, 0);
    ASSERT_EQ(all.size(), 60u);
    EXPECT_EQ(samples(2, 3, 0), all);
    EXPECT_EQ(samples(4, 2, 0), all);
    auto later = samples(2, 1, 24);  // two steps on, with other ranks: none repeated, none left out
    for (int64_t s = 24; s < 60; ++s) EXPECT_EQ(later.at(s), all.at(s)) << s;
    std::set<std::vector<float>> distinct;
    for (const auto& [number, values] : all) distinct.insert(values);
    EXPECT_GT(distinct.size(), 40u);  // of 7 images
  }
}

TEST(ImageDataset, BadImagesStopOrAreSkipped) {
  Drawn source(6, {2, 3});
  auto stop = dataset_of(&source, {.size = 8});
  Batch b = stop->allocate(1);
  expect_contains(error_of([&] { stop->read({0, 3}, 0, b); }), "'picture 3' is torn");
  auto skip = dataset_of(&source, {.size = 8, .bad = BadImages::kSkip});
  skip->read({0, 2}, 0, b);  // the next that can be read
  EXPECT_EQ(*b.targets.data<int64_t>(), 4);
  skip->read({1, 5}, 0, b);
  EXPECT_EQ(*b.targets.data<int64_t>(), 5);
  EXPECT_EQ(skip->skipped(), 1);
  auto evaluate = dataset_of(&source, {.size = 8, .bad = BadImages::kSkip, .training = false});
  evaluate->read({0, 2}, 0, b);
  EXPECT_EQ(*b.targets.data<int64_t>(), ImageDataset::kNoTarget);
  EXPECT_EQ(b.inputs.data<float>()[100], 0);
  EXPECT_EQ(evaluate->skipped(), 1);
  Drawn none(3, {0, 1, 2});
  auto hopeless = dataset_of(&none, {.size = 8, .bad = BadImages::kSkip});
  expect_contains(error_of([&] {
                    hopeless->read({0, 1}, 0, b);
                  }),
                  "3 images in a row cannot be read, from 'picture 1' on");
}

// An image is bad as well where it is a line and no memory would hold it resized.
TEST(ImageDataset, EndlessImagesAreBadImages) {
  class Lines final : public ImageSource {
    int64_t size() const override { return 2; }
    int64_t label(int64_t item) const override { return item; }
    std::string name(int64_t item) const override { return "line " + std::to_string(item); }
    Image read(int64_t item) const override { return black_image(item == 0 ? 900000 : 20, 1); }
  } source;
  auto stop = dataset_of(&source, {.size = 224});
  Batch b = stop->allocate(1);
  EXPECT_THROW(stop->read({0, 0}, 0, b), BadImage);
  expect_contains(error_of([&] {
                    stop->read({0, 0}, 0, b);
                  }),
                  "data: 'line 0': an image of 900000 x 1 whose shorter side");
  auto skip = dataset_of(&source, {.size = 224, .bad = BadImages::kSkip});
  skip->read({0, 0}, 0, b);
  EXPECT_EQ(*b.targets.data<int64_t>(), 1);
  EXPECT_EQ(skip->skipped(), 1);
}

TEST(ImageDataset, LargeImagesAreFitted) {
  Drawn source(1, {}, 20);
  auto plain = dataset_of(&source, {.size = 8});
  auto margin = dataset_of(&source, {.size = 8, .resize = 10});
  Batch a = plain->allocate(1), b = margin->allocate(1);
  plain->read({0, 0}, 0, a), margin->read({0, 0}, 0, b);
  const Image whole = resize(source.read(0), 8, 8),
              middle = crop(resize(source.read(0), 10, 10), {1, 1, 8, 8});
  for (size_t i = 0; i < 64; ++i) {
    EXPECT_EQ(a.inputs.data<float>()[3 * i + 1],
              (float(whole.pixels[3 * i + 1]) / 255.0f - 0.456f) / 0.224f);
    EXPECT_EQ(b.inputs.data<float>()[3 * i + 1],
              (float(middle.pixels[3 * i + 1]) / 255.0f - 0.456f) / 0.224f);
  }
  expect_contains(error_of([&] { dataset_of(&source, {.size = 0}); }), "image size 0");
  expect_contains(error_of([&] { dataset_of(&source, {.size = 8, .resize = 7}); }),
                  "cannot be cut");
}

// 12,000 photographs, where they are there.
TEST(ImageSource, ArchiveOfPhotographs) {
  const char* data = std::getenv("TESSERA_TEST_DATA");
  const std::string path = std::string(data ? data : ".") + "/cifar10-jpeg-12k.tar";
  if (!std::filesystem::exists(path))
    GTEST_SKIP() << "no cifar10-jpeg-12k.tar in TESSERA_TEST_DATA";
  if (!has_image_libraries()) GTEST_SKIP() << kNone;
  const ImageSplit split = load_images("images:" + path);
  EXPECT_EQ(split.train->size(), 10000);
  EXPECT_EQ(split.validation->size(), 2000);
  EXPECT_EQ(split.classes.size(), 10u);
  EXPECT_EQ(split.classes[9], "truck");
  for (int64_t i = 0; i < 10000; i += 50) {
    const Image image = split.train->read(i);
    ASSERT_EQ(image.height * 100 + image.width, 3232);
    ASSERT_EQ(split.train->label(i), i / 1000);
  }
}

}  // namespace
}  // namespace tessera::data
