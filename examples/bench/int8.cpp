// bench int8: inference of a residual network in f32, in bf16 and on bytes, in turn; given weights
// and images, also how many images each classifies right. The f32 and bf16 models are measured
// eagerly and compiled (norms and relu in generated kernels); bytes are compared with the better of
// the two.
#include <fmt/core.h>

#include <algorithm>
#include <cstdio>
#include <map>

#include "compile/compile.h"
#include "compile/quantization/quantization.h"
#include "core/autograd/autocast.h"
#include "core/autograd/autograd.h"
#include "core/base/parallel.h"
#include "core/data/image_dataset.h"
#include "core/data/loader.h"
#include "core/dispatch/target.h"
#include "core/io/safetensors.h"
#include "core/ops/pointwise.h"
#include "core/ops/random.h"
#include "core/ops/reduce.h"
#include "core/ops/update.h"
#include "core/tensor/random.h"
#include "examples/bench/commands.h"
#include "examples/bench/contractions.h"
#include "examples/bench/recorder.h"
#include "examples/models/registry.h"

namespace tessera::bench {
namespace {

constexpr int64_t kRows = 32;  // of batches for calibration and for accuracy

struct Int8Options {
  std::string model = "resnet50", weights, data;
  std::vector<std::string> set, keep_f32;
  int64_t size = 0, batch_size = 8, calibration = 8;
  int samples = kSamples, threads = 1, cpu = -1;
  bool min_max = false, report = false;
};

using Model = std::shared_ptr<nn::Module>;

// The model, its weights, and what its file says about images.
struct Network {
  Model model;
  int64_t size;
};

Network make_network(const Int8Options& o) {
  const models::ModelSpec& spec = models::find_model("bench", o.model);
  TESSERA_CHECK(spec.data == models::Data::kImages, "bench: --model {}: int8 knows {}", o.model,
                models::model_names(models::Data::kImages));
  models::ModelOptions m = spec.options;
  int64_t size = o.size;
  std::vector<NamedTensor> state;
  if (!o.weights.empty()) {
    auto file = io::SafetensorsFile::open(o.weights);
    for (const std::string& name : file.names()) state.push_back({name, file.load(name)});
    for (auto& [key, value] : file.metadata()) {
      if (key.starts_with("option.")) m.set(key.substr(7), value);
      if (key == "image_size" && size == 0) size = std::atoll(value.c_str());
    }
  }
  for (const std::string& s : o.set) {
    const size_t eq = s.find('=');
    TESSERA_CHECK(eq != std::string::npos && eq > 0, "bench: --set \"{}\": expected key=value", s);
    m.set(s.substr(0, eq), s.substr(eq + 1));
  }
  manual_seed(1337);
  Network n{spec.make(m), size ? size : 224};
  if (!state.empty()) n.model->load_state(state);
  n.model->eval();
  return n;
}

data::DataLoader batches_of(std::shared_ptr<const data::ImageSource> source, int64_t size,
                            int64_t rows, bool shuffle) {
  auto set = std::make_shared<data::ImageDataset>(
      source, data::ImageDatasetOptions{
                  .size = size, .resize = size > 64 ? size * 256 / 224 : 0, .training = false});
  return {set, data::DistributedSampler(
                   {.dataset_size = set->size(), .micro_batch_size = rows, .shuffle = shuffle})};
}

struct Accuracy {
  int64_t images = 0, f32 = 0, bf16 = 0, int8 = 0, same = 0;
};

int64_t count(const Tensor& flags) { return sum(flags.to(kI64)).item<int64_t>(); }

Accuracy measure_accuracy(nn::Module& model, nn::Module& bytes, data::DataLoader loader) {
  Accuracy a;
  while (auto batch = loader.next()) {
    if (batch->rows() == 0) continue;
    const Tensor& y = batch->targets;
    const Tensor f32 = argmax(model(batch->inputs), 1), int8 = argmax(bytes(batch->inputs), 1);
    Tensor low;
    {
      Autocast scope(kBF16);
      low = argmax(model(batch->inputs), 1);
    }
    a.images += batch->rows(), a.f32 += count(eq(f32, y)), a.bf16 += count(eq(low, y));
    a.int8 += count(eq(int8, y)), a.same += count(eq(int8, f32));
  }
  return a;
}

Json print_accuracy(const Accuracy& a, const std::string& data) {
  auto percent = [&](int64_t n) {
    return 100.0 * double(n) / double(std::max<int64_t>(a.images, 1));
  };
  fmt::print("\ntop-1 of {} images of the held-out part of {}\n", a.images, data);
  fmt::print("  fp32 {:.2f} %   bf16 {:.2f} %   int8 {:.2f} %   int8 and fp32 agree on {:.2f} %\n",
             percent(a.f32), percent(a.bf16), percent(a.int8), percent(a.same));
  return {{"images", a.images},
          {"fp32", percent(a.f32)},
          {"bf16", percent(a.bf16)},
          {"int8", percent(a.int8)},
          {"agreement", percent(a.same)}};
}

Json bench_int8(const Int8Options& o) {
  TESSERA_CHECK(o.batch_size > 0 && o.calibration > 0 && o.samples > 0 && o.threads > 0 &&
                    o.threads <= kMostThreads,
                "bench int8: --batch-size {} --calibration {} --samples {} --threads {}: expected "
                "at least 1, threads up to {}",
                o.batch_size, o.calibration, o.samples, o.threads, kMostThreads);
  TESSERA_CHECK(o.data.empty() == o.weights.empty(),
                "bench: --weights and --data go together: accuracy is that of trained weights");
  if (o.threads == 1) bind_to_core(o.cpu);
  set_num_threads(o.threads);
  NoGrad no_history;
  Network net = make_network(o);
  auto prepared = quant::prepare(
      net.model, {.observer = o.min_max ? quant::Observer::kMinMax : quant::Observer::kHistogram,
                  .keep_f32 = o.keep_f32});
  Tensor x = randn({o.batch_size, 3, net.size, net.size}).to(MemoryFormat::kChannelsLast);
  std::optional<data::ImageSplit> split;
  if (o.data.empty()) {
    (*prepared)(x);
  } else {
    split = data::load_images(o.data, data::BadImages::kStop);
    TESSERA_CHECK(split->validation, "bench: --data {} has no part that is held out", o.data);
    data::DataLoader loader = batches_of(split->train, net.size, kRows, true);
    for (int64_t i = 0; i < o.calibration; ++i)
      if (auto batch = loader.next()) (*prepared)(batch->inputs);
    auto held_out = batches_of(split->validation, net.size, o.batch_size, true).next();
    TESSERA_CHECK(held_out && held_out->rows() == o.batch_size,
                  "bench: --batch-size {}: the held-out part of {} has {} images; give fewer",
                  o.batch_size, o.data, held_out ? held_out->rows() : 0);
    x = held_out->inputs;
  }
  auto bytes = quant::convert(prepared);

  auto eager = [&] { (*net.model)(x); };
  auto forward = [&](const Tensor& in) { return (*net.model)(in); };
  auto compiled = compile(forward, {.name = "f32"}),
       compiled_low = compile(forward, {.name = "bf16"});
  RecordingBackend recorder;
  {
    BackendScope use({.backend = &recorder});
    eager();
  }
  BareStep bare(recorder.contractions(), false);
  const std::vector<std::string> names = {"fp32",          "fp32 compiled", "bf16",
                                          "bf16 compiled", "int8",          "fp32 bare"};
  const std::vector<std::function<void()>> works = {eager,
                                                    [&] { compiled(x); },
                                                    [&] {
                                                      Autocast scope(kBF16);
                                                      eager();
                                                    },
                                                    [&] {
                                                      Autocast scope(kBF16);
                                                      compiled_low(x);
                                                    },
                                                    [&] { (*bytes)(x); },
                                                    [&] { bare.run(); }};
  for (int i = 0; i < 4; ++i)
    for (auto& work : works) work();
  const std::vector<Stats> t = time_in_turn(works, o.samples);

  fmt::print("{}, {} x {} images, batch {}, {} thread{} ({})\n", o.model, net.size, net.size,
             o.batch_size, o.threads, o.threads == 1 ? "" : "s", load_text());
  Json json{{"model", o.model}, {"image_size", net.size}, {"batch_size", o.batch_size}};
  for (size_t i = 0; i < t.size(); ++i) {
    fmt::print("  {:<14} {:>8.1f} images/s   {:>10} a batch\n", names[i],
               double(o.batch_size) / t[i].median, time_text(t[i].median));
    json["ms"][names[i]] = to_json(t[i], 1e3);
  }
  const double f32 = std::min(t[0].median, t[1].median), low = std::min(t[2].median, t[3].median);
  fmt::print(
      "  int8 is {:.2f} times as fast as the faster fp32, {:.2f} times as the faster bf16 and "
      "{:.2f} "
      "times as\n  fp32 bare, its convolutions and product alone as prepared library calls\n",
      f32 / t[4].median, low / t[4].median, t[5].median / t[4].median);
  std::fflush(stdout);
  json["over_bare_fp32"] = t[5].median / t[4].median;
  json["over_fp32"] = f32 / t[4].median, json["over_bf16"] = low / t[4].median;
  if (o.report) fmt::print("\n{}", bytes->report());
  if (split)
    json["accuracy"] = print_accuracy(
        measure_accuracy(*net.model, *bytes, batches_of(split->validation, net.size, kRows, false)),
        o.data);
  return json;
}

}  // namespace

void add_int8(CLI::App& app, Run& run) {
  auto o = std::make_shared<Int8Options>();
  Subcommand sub(
      app, "int8",
      "inference on bytes beside f32 and bf16: images/s, and accuracy of trained weights");
  sub.option("--model", o->model, models::model_names(models::Data::kImages));
  sub.option("--image-size", o->size, "0: that of the weights, else 224");
  sub.option("--batch-size", o->batch_size, "images of a batch");
  sub.option("--set", o->set, "key=value: a field of the model's options");
  sub.option("--weights", o->weights, "safetensors file of a trained model");
  sub.option("--data", o->data, "images:PATH, whose training part calibrates");
  sub.option("--calibration", o->calibration, "batches of 32 to calibrate with");
  sub.option("--keep-f32", o->keep_f32, "layers that stay f32");
  sub.flag("--min-max", o->min_max, "scales from the least and largest value, not histograms");
  sub.flag("--report", o->report, "print each layer's kernel and scales");
  sub.option("--samples", o->samples, "batches that are timed");
  sub.option("--threads", o->threads, "one is bound to a core");
  sub.option("--cpu", o->cpu, "core to bind one thread to; -1: the last");
  sub.clock_option();
  sub.runs(run, [o] { return bench_int8(*o); });
}

}  // namespace tessera::bench
