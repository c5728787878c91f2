// bench kernels --device: each family of kernels beside the bandwidth of the device's memory, or
// beside the fastest product of the dtype, as measured in the same run. Bytes are the least
// traffic: operands read once, results written once.
#include <fmt/core.h>

#include <algorithm>

#include "core/autograd/autograd.h"
#include "core/base/error.h"
#include "core/dispatch/default_device.h"
#include "core/ops/contract.h"
#include "core/ops/conv.h"
#include "core/ops/create.h"
#include "core/ops/fused.h"
#include "core/ops/indexing.h"
#include "core/ops/pointwise.h"
#include "core/ops/random.h"
#include "core/ops/reduce.h"
#include "core/ops/scan.h"
#include "core/ops/views.h"
#include "core/optim/optim.h"
#include "examples/bench/device.h"

namespace tessera::bench {
namespace {

// ---- how a case is made

template <class F>
Batch repeat(F once) {
  return [once](int64_t n) {
    for (int64_t i = 0; i < n; ++i) once();
  };
}

// The backward alone of what `forward` computes from `inputs`, again and again.
template <class F>
Batch backward_of(F forward, std::vector<Tensor> inputs) {
  for (Tensor& t : inputs) t.requires_grad_();
  Tensor y = forward(inputs), seed = ones(y.shape(), {y.dtype()});
  return repeat([=] {
    keep(grad({&y, 1}, inputs, {&seed, 1}, {.retain_graph = true})[0].defined());
  });
}

class Cases {
 public:
  explicit Cases(const DeviceOptions& o) : o_(o) {}

  void add(const char* family, DType t, std::string name, double bytes, double flops,
           std::function<Batch()> prepare) {
    all.push_back({family, t, {std::move(name), std::move(prepare), bytes, flops}});
  }
  void elementwise(DType t);
  void rows(DType t, int64_t columns);
  void losses(DType t);
  void lookups(DType t);
  void products(DType t);
  void update();
  std::vector<KernelCase> all;

 private:
  double operand_bytes() const { return double(o_.kib) * 1024; }
  int64_t rows_of(DType t, int64_t columns) const {
    return std::max<int64_t>(1, o_.kib * 1024 / (columns * int64_t(size_of(t))));
  }
  static std::string named(const char* op, DType t, const Shape& shape) {
    return fmt::format("{} {}{}", op, name_of(t), to_string(shape));
  }
  const DeviceOptions& o_;
};

// ---- the families

void Cases::elementwise(DType t) {
  const Shape shape{rows_of(t, 1024), 1024};
  const double n = operand_bytes();
  const auto drawn = [=] { return rand(shape, {t}); };
  const auto unary = [&](const char* op, auto f) {
    add("pointwise", t, named(op, t, shape), 2 * n, 0, [=] {
      Tensor x = drawn();
      return repeat([=] { keep(f(x).defined()); });
    });
  };
  add("pointwise", t, named("add", t, shape), 3 * n, 0, [=] {
    Tensor x = drawn(), y = drawn();
    return repeat([=] { keep((x + y).defined()); });
  });
  unary("relu", [](const Tensor& x) { return relu(x); });
  unary("gelu", [](const Tensor& x) { return gelu(x); });
  unary("exp", [](const Tensor& x) { return exp(x); });
  const DType to = t == kF32 ? kBF16 : kF32;
  add("pointwise", t, named("cast", t, shape), n + double(numel(shape)) * double(size_of(to)), 0,
      [=] {
        Tensor x = drawn();
        return repeat([=] { keep(x.to(to).defined()); });
      });
  add("copy", t, named("dense copy of transpose", t, shape), 2 * n, 0, [=] {
    Tensor x = transpose(drawn(), 0, 1);
    return repeat([=] { keep(x.contiguous().defined()); });
  });
  add("random", t, named("rand", t, shape), n, 0,
      [=] { return repeat([=] { keep(rand(shape, {t}).defined()); }); });
  add("random", t, named("randn", t, shape), n, 0,
      [=] { return repeat([=] { keep(randn(shape, {t}).defined()); }); });
  add("random", t, named("dropout", t, shape), 2 * n, 0, [=] {
    Tensor x = drawn();
    return repeat([=] { keep(dropout(x, 0.1).defined()); });
  });
  add("reduce", t, named("sum of all", t, shape), n, 0, [=] {
    Tensor x = drawn();
    return repeat([=] { keep(sum(x).defined()); });
  });
  add("reduce", t, named("sum of rows", t, shape), n, 0, [=] {
    Tensor x = drawn();
    return repeat([=] { keep(sum(x, {-1}).defined()); });
  });
  add("reduce", t, named("sum of columns", t, shape), n, 0, [=] {
    Tensor x = drawn();
    return repeat([=] { keep(sum(x, {0}).defined()); });
  });
  add("scan", t, named("cumsum of rows", t, shape), 2 * n, 0, [=] {
    Tensor x = drawn();
    return repeat([=] { keep(cumsum(x, 1).defined()); });
  });
}

void Cases::rows(DType t, int64_t columns) {
  const Shape shape{rows_of(t, columns), columns};
  const double n = double(numel(shape)) * double(size_of(t));
  const auto drawn = [=] { return randn(shape, {t}); };
  const auto weight = [=] { return ones({columns}, {t}); };
  add("softmax", t, named("softmax", t, shape), 2 * n, 0, [=] {
    Tensor x = drawn();
    return repeat([=] { keep(softmax(x).defined()); });
  });
  add("softmax", t, named("softmax backward", t, shape), 3 * n, 0, [=] {
    return backward_of([](const std::vector<Tensor>& in) { return softmax(in[0]); }, {drawn()});
  });
  add("layer norm", t, named("layer_norm", t, shape), 2 * n, 0, [=] {
    Tensor x = drawn(), w = weight(), b = weight();
    return repeat([=] { keep(layer_norm(x, w, b).defined()); });
  });
  add("layer norm", t, named("layer_norm backward", t, shape), 3 * n, 0, [=] {
    const auto forward = [](const std::vector<Tensor>& in) {
      return layer_norm(in[0], in[1], in[2]);
    };
    return backward_of(forward, {drawn(), weight(), weight()});
  });
}

void Cases::losses(DType t) {
  const int64_t classes = std::min<int64_t>(50304, o_.kib * 256);
  const Shape shape{rows_of(t, classes), classes};
  const double n = double(numel(shape)) * double(size_of(t));
  const auto targets = [=] { return randint(0, classes, {shape[0]}); };
  add("cross-entropy", t, named("cross_entropy", t, shape), n, 0, [=] {
    Tensor x = randn(shape, {t}), y = targets();
    return repeat([=] { keep(cross_entropy(x, y).defined()); });
  });
  add("cross-entropy", t, named("cross_entropy backward", t, shape), 2 * n, 0, [=] {
    Tensor y = targets();
    return backward_of([y](const std::vector<Tensor>& in) { return cross_entropy(in[0], y); },
                       {randn(shape, {t})});
  });
}

void Cases::lookups(DType t) {
  constexpr int64_t kWidth = 768;
  const int64_t ids = rows_of(t, kWidth), vocabulary = std::min<int64_t>(50304, 4 * ids);
  const double n = double(ids * kWidth) * double(size_of(t));
  const Shape shape{ids, kWidth};
  add("embedding", t, named("embedding", t, shape), 2 * n, 0, [=] {
    Tensor table = randn({vocabulary, kWidth}, {t}), at = randint(0, vocabulary, {ids});
    return repeat([=] { keep(embedding(at, table).defined()); });
  });
  add("embedding", t, named("embedding backward", t, shape),
      n + double(vocabulary * kWidth) * double(size_of(t)), 0, [=] {
        Tensor at = randint(0, vocabulary, {ids});
        return backward_of([at](const std::vector<Tensor>& in) { return embedding(at, in[0]); },
                           {randn({vocabulary, kWidth}, {t})});
      });
  add("gather", t, named("index_select", t, shape), 2 * n, 0, [=] {
    Tensor x = randn(shape, {t}), at = randint(0, ids, {ids});
    return repeat([=] { keep(index_select(x, 0, at).defined()); });
  });
}

void Cases::products(DType t) {
  for (Case& c : square_products(o_.edge, t)) all.push_back({"matmul", t, std::move(c)});
  const int64_t heads = std::clamp<int64_t>(o_.edge / 64, 1, 64), width = 64,
                positions = std::clamp<int64_t>(o_.edge / 2, 16, 2048);
  const Shape shape{1, heads, positions, width};
  const double product = 2.0 * double(heads * positions * positions * width);
  const auto operands = [=] {
    return std::vector<Tensor>{randn(shape, {t}), randn(shape, {t}), randn(shape, {t})};
  };
  const auto attend = [](const std::vector<Tensor>& in) {
    return scaled_dot_product_attention(in[0], in[1], in[2], {.causal = true});
  };
  const double bytes = 4 * double(numel(shape)) * double(size_of(t));
  add("attention", t, named("attention, causal", t, shape), bytes, 2 * product, [=] {
    std::vector<Tensor> in = operands();
    return repeat([=] { keep(attend(in).defined()); });
  });
  add("attention", t, named("attention, causal, backward", t, shape), 2 * bytes, 4 * product,
      [=] { return backward_of(attend, operands()); });
  const int64_t channels = std::clamp<int64_t>(o_.edge / 32, 4, 128),
                side = std::clamp<int64_t>(o_.edge / 64, 6, 56), images = side >= 56 ? 32 : 1;
  const Shape image{images, channels, side, side};
  const double conv = 2.0 * double(numel(image)) * double(channels) * 9;
  add("convolution", t, named("conv2d 3x3", t, image),
      (2 * double(numel(image)) + double(channels * channels) * 9) * double(size_of(t)), conv, [=] {
        Tensor x = randn(image, {t}), w = randn({channels, channels, 3, 3}, {t});
        return repeat([=] { keep(conv2d(x, w, {}, {.padding = 1}).defined()); });
      });
  add("convolution", t, named("conv2d 3x3 backward", t, image),
      2 * (2 * double(numel(image)) + double(channels * channels) * 9) * double(size_of(t)),
      2 * conv, [=] {
        return backward_of(
            [](const std::vector<Tensor>& in) { return conv2d(in[0], in[1], {}, {.padding = 1}); },
            {randn(image, {t}), randn({channels, channels, 3, 3}, {t})});
      });
}

void Cases::update() {
  const int64_t values = o_.kib * 256;
  // Parameter, gradient and two moments are read; all but the gradient are written.
  add("AdamW", kF32, fmt::format("AdamW step, {:.3g} M values", double(values) * 1e-6),
      7 * operand_bytes(), 0, [=] {
        Tensor p = randn({values});
        p.requires_grad_();
        p.set_grad(randn({values}));
        auto optimizer = std::make_shared<optim::AdamW>(
            std::vector<Tensor>{p}, optim::AdamWOptions{.lr = 1e-4, .weight_decay = 0.1});
        return repeat([optimizer] { optimizer->step(); });
      });
}

}  // namespace

std::vector<KernelCase> kernel_cases(const DeviceOptions& o) {
  Cases cases(o);
  for (DType t : {kF32, kBF16}) {
    cases.elementwise(t);
    for (int64_t columns : {128, 1024, 4096}) cases.rows(t, columns);
    cases.losses(t), cases.lookups(t), cases.products(t);
  }
  cases.update();
  return std::move(cases.all);
}

Json device_kernels(const DeviceOptions& o, const std::string& only, int samples) {
  TESSERA_CHECK(samples >= 1, "bench kernels: --samples {}: expected at least 1", samples);
  const Device device = device_for("kernels", o);
  DeviceScope on_device(device);
  const std::vector<KernelCase> cases = kernel_cases(o);
  std::vector<std::string> names;
  for (const KernelCase& c : cases) names.push_back(fmt::format("{}: {}", c.family, c.work.name));
  check_only("kernels", only, names);
  const DeviceTimer timer(device);
  fmt::print("{}", device_text(device));
  const Ceilings ceilings = measure_ceilings(timer, o, samples);
  fmt::print("memory {:.1f} GB/s", ceilings.memory * 1e-9);
  for (const auto& [t, rate] : ceilings.products)
    fmt::print(", products {} {:.1f} TFLOP/s", name_of(t), rate * 1e-12);
  fmt::print("; best of {} samples by the {}'s clock\n{:<14} {:<60} {:>12} {:>10} {:>9} {:>9}\n",
             samples, timer.has_clock() ? "device" : "host", "", "", "time", "GB/s", "TFLOP/s",
             "share");
  Json rows = Json::array();
  for (size_t i = 0; i < cases.size(); ++i) {
    const auto& [family, dtype, work] = cases[i];
    if (names[i].find(only) == std::string::npos) continue;
    const double seconds = timer.cost(work.prepare(), samples).device.min;
    runtime_of(device).release_cached_memory(device.index);
    const double bandwidth = work.bytes / seconds, arithmetic = work.flops / seconds;
    const double bound = work.flops > 0 ? ceilings.product(dtype) : ceilings.memory;
    const double share = (work.flops > 0 ? arithmetic : bandwidth) / bound;
    fmt::print("{:<14} {:<60} {:>12} {:>10.1f} {:>9} {:>8.0f}%\n", family, work.name,
               time_text(seconds), bandwidth * 1e-9,
               work.flops > 0 ? fmt::format("{:.1f}", arithmetic * 1e-12) : "", share * 100);
    Json row{{"family", family},    {"what", work.name},  {"dtype", name_of(dtype)},
             {"bytes", work.bytes}, {"seconds", seconds}, {"gbytes_per_s", bandwidth * 1e-9}};
    if (work.flops > 0) row["flops"] = work.flops, row["tflops"] = arithmetic * 1e-12;
    row[work.flops > 0 ? "share_of_product" : "share_of_memory"] = share;
    rows.push_back(row);
  }
  fmt::print("share: of the fastest product of the dtype, or of the memory's bandwidth\n");
  Json j = device_json(device);
  j["clock"] = timer.has_clock() ? "device" : "host";
  j["ceilings"] = ceilings_json(ceilings);
  j["rows"] = rows;
  return j;
}

}  // namespace tessera::bench
