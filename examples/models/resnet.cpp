#include "examples/models/resnet.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>

#include "core/ops/fused.h"
#include "core/ops/views.h"
#include "examples/models/options.h"
#include "examples/models/registry.h"
#include "parallel/stage.h"

namespace tessera::models {
namespace {

using Conv = std::shared_ptr<nn::Conv2d>;
using Norm = std::shared_ptr<nn::BatchNorm2d>;

// Draws from a normal distribution with variance 2 / fan_out.
void reset_conv(nn::Conv2d& conv, const nn::InitKeys& keys) {
  nn::normal_(conv.weight, 0, std::sqrt(2.0 / double(nn::fans_of(conv.weight.shape()).out)),
              keys.key("weight"));
}

Conv conv(int64_t in, int64_t out, int64_t kernel, int64_t stride) {
  return nn::conv2d({.in = in,
                     .out = out,
                     .kernel = kernel,
                     .stride = stride,
                     .padding = kernel / 2,
                     .bias = false});
}
Norm norm(int64_t channels) { return nn::batch_norm2d({.channels = channels}); }

// Computes x + f(x), where f is two 3 x 3 convolutions, or a bottleneck: 1 x 1, 3 x 3, and 1 x 1 to
// four times as many channels. Where shapes change, x passes through a 1 x 1 convolution.
class Block final : public nn::Module {
 public:
  Block(int64_t in, int64_t width, int64_t stride, bool bottleneck) {
    const int64_t out = bottleneck ? 4 * width : width;
    if (bottleneck) {
      add(conv(in, width, 1, 1), width);
      add(conv(width, width, 3, stride), width);
      add(conv(width, out, 1, 1), out);
    } else {
      add(conv(in, width, 3, stride), width);
      add(conv(width, out, 3, 1), out);
    }
    if (stride != 1 || in != out)
      downsample_ =
          register_module("downsample", nn::sequential(conv(in, out, 1, stride), norm(out)));
    draw();
  }
  std::string type_name() const override {
    return convs_.size() == 3 ? "Bottleneck" : "BasicBlock";
  }
  void reset(const nn::InitKeys& keys) override {
    reset_children(keys);
    for (size_t i = 0; i < convs_.size(); ++i)
      reset_conv(*convs_[i], keys.child(fmt::format("conv{}", i + 1)));
    if (downsample_)
      reset_conv(static_cast<nn::Conv2d&>(*(*downsample_)[0]), keys.child("downsample").child("0"));
  }

 protected:
  Tensor forward(Tensor x) override {
    Tensor y = x;
    const size_t last = convs_.size() - 1;
    for (size_t i = 0; i < last; ++i) y = (*norms_[i])((*convs_[i])(std::move(y)), {.relu = true});
    y = (*convs_[last])(std::move(y));
    return (*norms_[last])(std::move(y),
                           {.residual = downsample_ ? (*downsample_)(x) : x, .relu = true});
  }

 private:
  void add(Conv conv, int64_t channels) {
    const size_t number = convs_.size() + 1;
    convs_.push_back(register_module(fmt::format("conv{}", number), std::move(conv)));
    norms_.push_back(register_module(fmt::format("bn{}", number), norm(channels)));
  }
  std::vector<Conv> convs_;
  std::vector<Norm> norms_;
  nn::SequentialPtr downsample_;
};

std::array<int64_t, kResNetLayers> blocks_of(int64_t depth) {
  switch (depth) {
    case 18: return {2, 2, 2, 2};
    case 34:
    case 50: return {3, 4, 6, 3};
    case 101: return {3, 4, 23, 3};
    case 152: return {3, 8, 36, 3};
    default:
      throw UserError(fmt::format("resnet: depth={}; there are 18, 34, 50, 101, 152", depth));
  }
}

}  // namespace

Fields fields_of(ResNetOptions& o) {
  return {"resnet",
          {{"depth", &o.depth},
           {"classes", &o.classes},
           {"width", &o.width},
           {"small_images", &o.small_images}}};
}

void set_option(ResNetOptions& o, std::string_view key, std::string_view value) {
  set_field(fields_of(o), key, value);
}

int64_t num_blocks(const ResNetOptions& o) {
  const auto blocks = blocks_of(o.depth);
  return std::accumulate(blocks.begin(), blocks.end(), int64_t(0));
}

ResNet::ResNet(const ResNetOptions& o, ResNetPart p) : options(o), part(p) {
  const auto blocks = blocks_of(o.depth);
  const int64_t all = num_blocks(o);
  TESSERA_CHECK(o.classes > 0 && o.width > 0, "resnet: classes={} and width={} must be positive",
                o.classes, o.width);
  TESSERA_CHECK(0 <= p.begin && p.begin < p.end && p.end <= all,
                "resnet: blocks [{}, {}) are no part of {}", p.begin, p.end, all);
  if (p.begin == 0) {
    conv1_ =
        register_module("conv1", o.small_images ? conv(3, o.width, 3, 1) : conv(3, o.width, 7, 2));
    bn1_ = register_module("bn1", norm(o.width));
  }
  int64_t channels = o.width,
          first = 0;  // channels into a block; number of a layer's first block
  for (size_t l = 0; l < blocks.size(); first += blocks[l++]) {
    const int64_t width = o.width << l, begin = std::clamp(p.begin - first, int64_t(0), blocks[l]),
                  end = std::clamp(p.end - first, int64_t(0), blocks[l]);
    auto layer = std::make_shared<nn::Sequential>(size_t(begin));
    for (int64_t b = 0; b < blocks[l]; ++b) {
      if (begin <= b && b < end)
        layer->push_back(
            std::make_shared<Block>(channels, width, l > 0 && b == 0 ? 2 : 1, o.bottleneck()));
      channels = o.bottleneck() ? 4 * width : width;
    }
    if (layer->size() > 0) layers_.push_back(register_module(fmt::format("layer{}", l + 1), layer));
  }
  if (p.end == all) fc_ = register_module("fc", nn::linear(channels, o.classes));
  draw();
}

void ResNet::reset(const nn::InitKeys& keys) {
  reset_children(keys);
  if (conv1_) reset_conv(*conv1_, keys.child("conv1"));
}

Tensor ResNet::stem(Tensor x) {
  TESSERA_CHECK_AS(ShapeError, x.ndim() == 4 && x.size(1) == 3,
                   "resnet: x is {}; expected images [B, 3, H, W]", tessera::describe(x));
  x = (*bn1_)((*conv1_)(std::move(x)), {.relu = true});
  return options.small_images ? x : max_pool2d(x, 3, {.stride = 2, .padding = 1});
}

Tensor ResNet::forward(Tensor x) {
  if (conv1_) x = stem(std::move(x));
  for (const nn::SequentialPtr& layer : layers_) x = (*layer)(std::move(x));
  return fc_ ? (*fc_)(flatten(adaptive_avg_pool2d(x, 1), 1)) : x;
}

Tensor ResNet::loss(const Tensor& x, const Tensor& targets) {
  Tensor y = (*this)(x);
  nn::Scope scope("loss");
  return cross_entropy(y, targets);
}

std::shared_ptr<ResNet> resnet(const ResNetOptions& options) {
  return std::make_shared<ResNet>(options);
}

std::shared_ptr<ResNet> resnet_stage(const ResNetOptions& options, int stage, int stages) {
  const parallel::StageRange r = parallel::stage_range(num_blocks(options), stage, stages);
  return std::make_shared<ResNet>(options, ResNetPart{r.begin, r.end});
}

// ---- how `train` and `bench` see it

parallel::ParallelPlan tensor_parallel_plan(const ResNetOptions& o) {
  namespace p = parallel;
  p::ParallelPlan plan;
  for (int layer = 1; layer <= kResNetLayers; ++layer) {
    auto add = [&](const char* name, p::StylePtr style) {
      plan.emplace_back(fmt::format("layer{}.*.{}", layer, name), std::move(style));
    };
    add("conv1", p::colwise());
    add("bn1", p::channel_parallel());
    if (o.bottleneck()) {
      add("conv2", p::rowwise({.output = Shard(1)}));
      add("bn2", p::channel_parallel());
    }
    add(o.bottleneck() ? "conv3" : "conv2", p::rowwise());
    // Only the first block of a layer changes shapes, and that of the first layer only if it
    // widens.
    if (layer == 1 && !o.bottleneck()) continue;
    add("downsample.0", p::colwise());
    add("downsample.1", p::channel_parallel(Replicate()));
  }
  plan.emplace_back("fc", p::rowwise());
  return plan;
}

std::vector<ModelSpec> resnet_models() {
  constexpr int64_t kSmall = 64;  // images up to this side get the stem without strides
  std::vector<ModelSpec> all;
  for (int64_t depth : {18, 34, 50, 101, 152}) {
    ModelSpec& spec = all.emplace_back(ModelSpec{.name = fmt::format("resnet{}", depth),
                                                 .options = ResNetOptions{.depth = depth},
                                                 .data = Data::kImages,
                                                 .make = on<ResNetOptions>(resnet)});
    spec.fsdp_groups = {"layer1.*", "layer2.*", "layer3.*", "layer4.*"};  // by blocks
    spec.tensor_parallel = {
        .plan = on<ResNetOptions>([](const ResNetOptions& o) { return tensor_parallel_plan(o); }),
        .field = "width",
        .parts = "channels",
        .inexact =
            "a convolution sums over channels that ranks share, and its kernel has no order "
            "of sums that they could keep"};
    spec.pipeline = {.stage = on<ResNetOptions>(resnet_stage),
                     .places = on<ResNetOptions>(num_blocks),
                     .parts = "residual blocks",
                     .remedy = [](int) { return std::string("a deeper --model"); }};
    spec.fit_images = [](ModelOptions& o, int64_t side) {
      o.as<ResNetOptions>().small_images = side <= kSmall;
    };
  }
  return all;
}

}  // namespace tessera::models
