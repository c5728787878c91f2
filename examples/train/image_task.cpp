// Data of image classification: folders of classes, CIFAR-10 and IDX files.
#include <cstdlib>

#include "core/data/image_dataset.h"
#include "core/data/utf8.h"
#include "examples/train/fit.h"
#include "examples/train/synthetic.h"
#include "examples/train/task.h"

namespace tessera::train {
namespace {

constexpr int64_t kSmall = 64;  // images up to this side are augmented by shifted crops

data::Augment augment_of(const Options& o, int64_t size) {
  if (o.augment == "none") return data::Augment::kNone;
  if (o.augment == "crop") return data::Augment::kCrop;
  if (o.augment == "resized-crop") return data::Augment::kResizedCrop;
  if (o.data.starts_with("idx:")) return data::Augment::kNone;  // digits have a left and a right
  return size <= kSmall ? data::Augment::kCrop : data::Augment::kResizedCrop;
}

// `size` is 0 if it was not set yet; it is then set here.
void read_images(const Options& o, const io::Metadata& saved, Task& task, int64_t& size) {
  const auto bad = o.bad_images == "skip" ? data::BadImages::kSkip : data::BadImages::kStop;
  data::ImageSplit split = data::load_images(o.data, bad);
  const int64_t classes = int64_t(split.classes.size());
  task.options.set("classes", classes);
  TESSERA_CHECK(
      classes > 1, "train: --data {} has one class, {}: nothing is to be told apart{}", o.data,
      io::quote(split.classes[0]),
      bad == data::BadImages::kSkip ? "; an archive that is cut off has lost the others" : "");
  if (size == 0) size = split.side ? split.side : 224;
  data::ImageDatasetOptions d{.size = size, .seed = o.seed, .bad = bad};
  d.augment = augment_of(o, size);
  auto train = std::make_shared<data::ImageDataset>(split.train, d);
  task.train = train;
  // Evaluation crops the centre of slightly larger images, as is usual for large ones.
  d.resize = d.augment == data::Augment::kResizedCrop ? size * 256 / 224 : 0;
  d.augment = data::Augment::kNone;
  d.training = false;
  std::shared_ptr<data::ImageDataset> validation;
  if (split.validation) validation = std::make_shared<data::ImageDataset>(split.validation, d);
  task.validation = validation;
  task.skipped = [train, validation] {
    return train->skipped() + (validation ? validation->skipped() : 0);
  };
  task.data = {fmt::format("{} images train, {} validate", split.train->size(),
                           split.validation ? split.validation->size() : 0),
               io::to_string(split.hash)};
  task.data_story = fmt::format("{}: {}, {} classes", o.data, task.data.size, classes);
  std::string names;
  for (const std::string& name : split.classes)
    names += (names.empty() ? "" : "\n") + data::escape_bytes(name);
  // This check comes before the model is made, because weights know classes only by number.
  check_meaning(o, saved, {{"classes", names}}, "--weights " + o.weights);
  task.metadata.emplace_back("classes", names);
}

}  // namespace

void add_images(const Options& o, const io::Metadata& saved, Task& task) {
  int64_t size = o.image_size;
  if (size == 0) size = std::atoll(find(saved, "image_size").c_str());  // 0 where it is not known
  if (is_synthetic(o))
    size = size ? size : 224;
  else
    read_images(o, saved, task, size);
  const int64_t classes = task.options.integer("classes");
  if (o.weights.empty() && task.spec->fit_images) task.spec->fit_images(task.options, size);
  set_fields(o, task.options);
  const int64_t chosen = task.options.integer("classes");
  TESSERA_CHECK(!task.train || chosen == classes, "train: --set classes={}, but {} has {}", chosen,
                o.data, classes);
  if (!task.train)
    task.train = std::make_shared<Synthetic>(Shape{3, size, size}, Shape{}, chosen, false, o.seed);
  task.samples = "images";
  tell_options(task);
  task.metadata.emplace_back("image_size", fmt::format("{}", size));
}

}  // namespace tessera::train
