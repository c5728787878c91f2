#include "parallel/tensor_parallel.h"

#include <map>

#include "core/autograd/autograd.h"
#include "core/dispatch/context.h"
#include "core/dispatch/default_device.h"
#include "core/nn/conv_layers.h"
#include "core/nn/init.h"
#include "core/nn/layers.h"
#include "core/ops/create.h"
#include "core/ops/views.h"
#include "core/tensor/wrapped.h"
#include "parallel/path_pattern.h"

namespace tessera::parallel {
namespace {

using nn::Module;

Layout on_axis(const Placement& p) { return {p}; }

// Puts the sharded parameter into every slot of `root` that held `old`. Sums over ranks of its
// gradient may be deferred until it reaches the leaf, so that they happen once, there.
void shard_parameter(Module& root, const Tensor& old, const DeviceMesh& mesh, const Placement& p) {
  if (!old.defined()) return;
  if (old.is_sharded()) {
    TESSERA_CHECK(layout_of(old) == on_axis(p),
                  "parallelize_module: two styles place one parameter, as {} and as {}; name its "
                  "module once",
                  describe(old), to_string(p));
    return;
  }
  Tensor sharded = distribute(old.detach(), mesh, on_axis(p));
  if (old.requires_grad()) {
    sharded.requires_grad_();
    Layout layout = on_axis(p);
    add_hook(sharded, [layout](const Tensor& g) {
      return layout_of(g) == layout ? Tensor() : redistribute(g, layout);
    });
  }
  root.replace(old, sharded);
}

// Returns `x` as a tensor over the mesh; a plain tensor is taken to be the same on every rank.
Tensor on_mesh(const Tensor& x, const DeviceMesh& mesh) {
  return innermost(x).is_sharded() ? x : from_local(x, mesh, on_axis(Replicate()));
}

// Redistributes x to placement `to`; its gradient gets the placement that x had, with sums reduced.
Tensor placed(const Tensor& x, const DeviceMesh& mesh, const Placement& to) {
  Tensor t = on_mesh(x, mesh);
  const Placement& now = layout_of(t)[0];
  if (!is_floating(t.dtype())) return redistribute(t, on_axis(to));
  return redistribute(t, on_axis(to), on_axis(now.is_shard() ? now : Replicate()));
}

// A module with a weight [out, in, ..] and a bias [out]: a Linear, or a convolution of one group.
struct Affine {
  Tensor *weight = nullptr, *bias = nullptr;
  bool convolves = false;
  explicit operator bool() const { return weight; }
  // The dim of x that corresponds to `in`.
  int features(const Tensor& x) const { return convolves ? 1 : x.ndim() - 1; }
};
Affine affine_of(Module& m) {
  if (auto* linear = dynamic_cast<nn::Linear*>(&m)) return {&linear->weight, &linear->bias};
  auto* conv = dynamic_cast<nn::ConvNd*>(&m);
  return conv && conv->options.groups == 1 ? Affine{&conv->weight, &conv->bias, true} : Affine{};
}
// Checks that sums over a cut dim are permitted: forward sums over `in`, backward over `out`.
void check_sums(const Affine& a, const DeviceMesh& mesh, const std::string& path) {
  TESSERA_CHECK(
      !a.convolves || !context().exact_contraction || mesh.size() == 1,
      "parallelize_module: the convolution \"{}\" sums over channels that ranks share, in "
      "an order of its kernel's, which exact contraction excludes; leave it out of the "
      "plan, or exact contraction off",
      path);
}
constexpr const char* kCutByColumnsAndRows = "a Linear, a convolution of one group or an Embedding";

[[noreturn]] void refuse(const char* style, const std::string& path, const Module& m,
                         const char* takes) {
  throw UserError(fmt::format("parallelize_module: {} of \"{}\", a {}; it takes {}", style, path,
                              m.type_name(), takes));
}

class Colwise final : public ParallelStyle {
 public:
  explicit Colwise(const ColwiseOptions& o) : o_(o) {}
  void apply(Module& root, Module& module, const std::string& path,
             const DeviceMesh& mesh) const override {
    const Affine affine = affine_of(module);
    if (affine) {
      shard_parameter(root, *affine.weight, mesh, Shard(0, o_.unit));
      shard_parameter(root, *affine.bias, mesh, Shard(0, o_.unit));
    } else if (auto* table = dynamic_cast<nn::Embedding*>(&module)) {
      shard_parameter(root, table->weight, mesh, Shard(1, o_.unit));
    } else {
      refuse("colwise", path, module, kCutByColumnsAndRows);
    }
    module.add_pre_hook([mesh, affine, path](Module&, Inputs in) {
      check_sums(affine, mesh, path);
      in[0] = placed(in[0], mesh, Replicate());
    });
    if (o_.output)
      module.add_post_hook([mesh, to = *o_.output](Module&, Inputs, Tensor& out) {
        out = redistribute(out, on_axis(to));
      });
  }

 private:
  const ColwiseOptions o_;
};

class Rowwise final : public ParallelStyle {
 public:
  explicit Rowwise(const RowwiseOptions& o) : o_(o) {}
  void apply(Module& root, Module& module, const std::string& path,
             const DeviceMesh& mesh) const override {
    const Affine affine = affine_of(module);
    if (affine) {
      shard_parameter(root, *affine.weight, mesh, Shard(1, o_.unit));
      shard_parameter(root, *affine.bias, mesh, Replicate());
      module.add_pre_hook([mesh, affine, path, unit = o_.unit](Module&, Inputs in) {
        check_sums(affine, mesh, path);
        in[0] = placed(in[0], mesh, Shard(affine.features(in[0]), unit));
      });
    } else if (auto* table = dynamic_cast<nn::Embedding*>(&module)) {
      shard_parameter(root, table->weight, mesh, Shard(0, o_.unit));
      module.add_pre_hook([mesh](Module&, Inputs in) { in[0] = on_mesh(in[0], mesh); });
    } else {
      refuse("rowwise", path, module, kCutByColumnsAndRows);
    }
    module.add_post_hook(
        [to = o_.output](Module&, Inputs, Tensor& out) { out = redistribute(out, on_axis(to)); });
    if (affine) add_bias_last(module, affine);
  }

 private:
  // Each rank computes a term of the product; the bias is added to their sum, as in serial code.
  static void add_bias_last(Module& module, const Affine& of) {
    if (!of.bias->defined()) return;
    auto kept = std::make_shared<Tensor>();
    module.add_pre_hook([of, kept](Module&, Inputs) { *kept = std::exchange(*of.bias, {}); });
    module.add_post_hook([of, kept](Module&, Inputs, Tensor& out) {
      *of.bias = std::exchange(*kept, {});
      out = std::move(out) + (of.convolves ? beside_channels(*of.bias, out) : *of.bias);
    });
    module.add_unwind_hook([of, kept](Module&) {
      if (kept->defined()) *of.bias = std::exchange(*kept, {});
    });
  }
  // Reshapes a bias [C] for adding it to [N, C, ..].
  static Tensor beside_channels(const Tensor& bias, const Tensor& y) {
    Dims extents = Dims::filled(y.ndim(), 1);
    extents[1] = bias.numel();
    return reshape(bias, extents);
  }
  const RowwiseOptions o_;
};

class SequenceParallel final : public ParallelStyle {
 public:
  explicit SequenceParallel(std::optional<Placement> output) : output_(output) {}
  void apply(Module&, Module& module, const std::string& path,
             const DeviceMesh& mesh) const override {
    module.add_pre_hook([mesh, path](Module&, Inputs in) {
      TESSERA_CHECK(!context().exact_contraction || mesh.size() == 1,
                    "sequence_parallel of \"{}\": gradients of its parameters are sums over parts "
                    "of the sequence, in an order that depends on the number of ranks, which exact "
                    "contraction excludes; make a plan without sequence parallelism",
                    path);
      in[0] = placed(in[0], mesh, Shard(1));
    });
    if (output_)
      module.add_post_hook(
          [mesh, to = *output_](Module&, Inputs, Tensor& out) { out = placed(out, mesh, to); });
  }

 private:
  const std::optional<Placement> output_;
};

class ChannelParallel final : public ParallelStyle {
 public:
  explicit ChannelParallel(std::optional<Placement> output) : output_(output) {}
  void apply(Module& root, Module& module, const std::string& path,
             const DeviceMesh& mesh) const override {
    auto* norm = dynamic_cast<nn::BatchNormNd*>(&module);
    if (!norm) refuse("channel_parallel", path, module, "a batch-norm");
    for (Tensor* of_channel : {&norm->weight, &norm->bias, &norm->running_mean, &norm->running_var})
      shard_parameter(root, *of_channel, mesh, Shard(0));
    module.add_pre_hook([mesh](Module&, Inputs in) {  // inputs are x, and maybe a residual
      for (Tensor& t : in) t = redistribute(on_mesh(t, mesh), on_axis(Shard(1)));
    });
    if (output_)
      module.add_post_hook(
          [to = *output_](Module&, Inputs, Tensor& out) { out = redistribute(out, on_axis(to)); });
  }

 private:
  const std::optional<Placement> output_;
};

class PrepareOutput final : public ParallelStyle {
 public:
  explicit PrepareOutput(const Placement& output) : output_(output) {}
  void apply(Module&, Module& module, const std::string&, const DeviceMesh& mesh) const override {
    module.add_post_hook(
        [mesh, to = output_](Module&, Inputs, Tensor& out) { out = placed(out, mesh, to); });
  }

 private:
  const Placement output_;
};

class Pairwise final : public ParallelStyle {
 public:
  void apply(Module& root, Module& module, const std::string& path,
             const DeviceMesh& mesh) const override {
    std::vector<std::pair<std::string, Module*>> linears;
    for (auto& [name, m] : module.named_modules())
      if (dynamic_cast<nn::Linear*>(m)) linears.emplace_back(path + "." + name, m);
    TESSERA_CHECK(!linears.empty() && linears.size() % 2 == 0,
                  "parallelize_module: pairwise of \"{}\", which has {} Linear layers; it takes an "
                  "even number",
                  path, linears.size());
    for (size_t i = 0; i < linears.size(); ++i)
      (i % 2 ? rowwise() : colwise())->apply(root, *linears[i].second, linears[i].first, mesh);
  }
};

}  // namespace

StylePtr colwise(const ColwiseOptions& o) { return std::make_shared<Colwise>(o); }
StylePtr rowwise(const RowwiseOptions& o) { return std::make_shared<Rowwise>(o); }
StylePtr sequence_parallel(std::optional<Placement> output) {
  return std::make_shared<SequenceParallel>(output);
}
StylePtr channel_parallel(std::optional<Placement> output) {
  return std::make_shared<ChannelParallel>(output);
}
StylePtr prepare_output(Placement output) { return std::make_shared<PrepareOutput>(output); }
StylePtr pairwise() { return std::make_shared<Pairwise>(); }

void parallelize_module(nn::Module& module, const DeviceMesh& mesh, const ParallelPlan& plan) {
  TESSERA_CHECK(mesh.defined() && mesh.ndim() == 1,
                "parallelize_module: takes a mesh of one axis, such as mesh[\"tp\"], not ({})",
                mesh.defined() ? mesh.to_string() : "none");
  auto modules = module.named_modules();
  // Inputs are put on the mesh before the module's own hooks see them.
  module.add_pre_hook([mesh](Module&, Inputs in) {
    for (Tensor& t : in)
      if (t.defined()) t = on_mesh(t, mesh);
  });
  std::map<const Module*, std::string> styled;  // by module: the pattern that matched it
  for (auto& [pattern, style] : plan) {
    bool found = false;
    for (auto& [path, m] : modules)
      if (matches(pattern, path)) {
        found = true;
        auto [first, alone] = styled.try_emplace(m, pattern);
        TESSERA_CHECK(alone,
                      "parallelize_module: \"{}\" is named by \"{}\" and by \"{}\"; a module "
                      "has one style",
                      path, first->second, pattern);
        style->apply(module, *m, path, mesh);
      }
    TESSERA_CHECK(found, "parallelize_module: no module is called \"{}\"", pattern);
  }
  for (const nn::Slot& s : module.slots())
    if (!s.tensor->is_sharded()) shard_parameter(module, *s.tensor, mesh, Replicate());
}

void materialize(nn::Module& module) {
  for (const nn::Slot& s : module.slots()) {
    const Tensor old = *s.tensor;
    if (!old.device().is_meta()) continue;
    Tensor now;
    const Shape& shape = old.is_sharded() ? shard_data(old)->local.shape() : old.shape();
    now = empty(shape, old.dtype(), default_device());
    if (s.is_buffer) nn::zeros_(now);  // init() and files of weights do not fill all of them
    if (old.is_sharded()) now = from_local(now, mesh_of(old), layout_of(old), old.shape());
    if (old.requires_grad()) {
      now.requires_grad_();
      if (old.is_sharded())
        add_hook(now, [layout = layout_of(old)](const Tensor& g) {
          return layout_of(g) == layout ? Tensor() : redistribute(g, layout);
        });
    }
    module.replace(old, now);
  }
}

}  // namespace tessera::parallel
