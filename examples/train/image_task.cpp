#include "examples/train/image_task.h"

#include <cstdlib>

#include "core/data/image_dataset.h"
#include "core/data/utf8.h"
#include "core/ops/fused.h"
#include "examples/models/resnet.h"
#include "examples/train/fit.h"
#include "examples/train/synthetic.h"

namespace tessera::train {
namespace {

constexpr int64_t kSmall =
    64;  // images up to this take the stem without strides, and shifted crops

data::Augment augment_of(const Options& o, int64_t size) {
  if (o.augment == "none") return data::Augment::kNone;
  if (o.augment == "crop") return data::Augment::kCrop;
  if (o.augment == "resized-crop") return data::Augment::kResizedCrop;
  if (o.data.starts_with("idx:")) return data::Augment::kNone;  // digits have a left and a right
  return size <= kSmall ? data::Augment::kCrop : data::Augment::kResizedCrop;
}

void add_images(const Options& o, const io::Metadata& saved, Task& task, models::ResNetOptions& m,
                int64_t& size) {
  const auto bad = o.bad_images == "skip" ? data::BadImages::kSkip : data::BadImages::kStop;
  data::ImageSplit split = data::load_images(o.data, bad);
  m.classes = int64_t(split.classes.size());
  TESSERA_CHECK(
      m.classes > 1, "train: --data {} has one class, {}: nothing is to be told apart{}", o.data,
      io::quote(split.classes[0]),
      bad == data::BadImages::kSkip ? "; an archive that is cut off has lost the others" : "");
  if (size == 0) size = split.side ? split.side : 224;
  data::ImageDatasetOptions d{.size = size, .seed = o.seed, .bad = bad};
  d.augment = augment_of(o, size);
  auto train = std::make_shared<data::ImageDataset>(split.train, d);
  task.train = train;
  // Evaluation of large images cuts the middle out of slightly larger ones, as it is usually done.
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
  task.data_story = fmt::format("{}: {}, {} classes", o.data, task.data.size, m.classes);
  std::string names;
  for (const std::string& name : split.classes)
    names += (names.empty() ? "" : "\n") + data::escape_bytes(name);
  // Before the model is made: weights know their classes by number.
  check_meaning(o, saved, {{"classes", names}}, "--weights " + o.weights);
  task.metadata.emplace_back("classes", names);
}

}  // namespace

Task make_image_task(const Options& o) {
  Task task;
  models::ResNetOptions m;
  models::set_option(m, "depth", std::string_view(o.model).substr(6));
  const io::Metadata saved = saved_metadata(o.weights);
  for (auto& [key, value] : saved)
    if (key.starts_with("option.")) models::set_option(m, key.substr(7), value);
  int64_t size = o.image_size;
  if (size == 0) size = std::atoll(find(saved, "image_size").c_str());  // 0 where it is not known
  if (o.data.empty() || o.data.starts_with("synthetic"))
    size = size ? size : 224;
  else
    add_images(o, saved, task, m, size);
  const int64_t classes = m.classes;
  if (o.weights.empty()) m.small_images = size <= kSmall;
  for (auto& [key, value] : o.set) models::set_option(m, key, value);
  if (task.train)
    TESSERA_CHECK(m.classes == classes, "train: --set classes={}, but {} has {}", m.classes, o.data,
                  classes);
  else
    task.train =
        std::make_shared<Synthetic>(Shape{3, size, size}, Shape{}, m.classes, false, o.seed);
  nn::SkipInit later;
  auto net = models::resnet(m);
  task.fill = [net, seed = o.seed] { net->init(seed); };
  task.model = net;
  task.samples = "images";
  task.classifies = true;
  task.validation_loss = [](const Tensor& logits, const Tensor& targets) {
    return cross_entropy(logits, targets);
  };
  task.loss = [smoothing = o.label_smoothing](const Tensor& logits, const Tensor& targets) {
    nn::Scope scope("loss");
    return cross_entropy(logits, targets, {.label_smoothing = smoothing});
  };
  auto field = [&](const char* name, auto value) {
    task.metadata.emplace_back(fmt::format("option.{}", name), fmt::format("{}", value));
  };
  field("depth", m.depth), field("classes", m.classes), field("width", m.width);
  field("small_images", m.small_images);
  task.metadata.emplace_back("image_size", fmt::format("{}", size));
  return task;
}

}  // namespace tessera::train
