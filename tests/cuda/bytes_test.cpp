// What the kernels of each op read and write in a step of training, beside the bytes of its
// operands and results: counted by the virtual GPU where it looks at every access (on-virtual-gpu
// --check). An op that reads an operand twice shows here, whatever the clock of a card says.
#include <dlfcn.h>

#include <algorithm>
#include <map>

#include "core/backend/cuda/ops/products.h"
#include "core/core.h"
#include "core/dispatch/context.h"
#include "examples/models/registry.h"
#include "tests/cuda/card.h"

namespace tessera::cuda {
namespace {

/// Counts kernels, whatever their names.
struct Counts {
  unsigned long long runs = 0, read = 0, written = 0;
  Counts operator-(const Counts& o) const {
    return {runs - o.runs, read - o.read, written - o.written};
  }
  void operator+=(const Counts& o) { runs += o.runs, read += o.read, written += o.written; }
};

/// How the virtual driver counts; null on a real card.
using Counter = Result (*)(const char* op, unsigned long long* counters);
Counter virtual_counter() {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  return library ? reinterpret_cast<Counter>(dlsym(library, "vgpu_counters")) : nullptr;
}

// Elements that are broadcast lie in memory once.
size_t bytes_in_memory(const Tensor& t) {
  if (t.device().is_cpu() || !t.storage()) return 0;
  size_t n = size_of(t.dtype());
  for (int d = 0; d < t.ndim(); ++d)
    if (t.strides()[d] != 0) n *= size_t(t.shape()[d]);
  return t.numel() ? n : 0;
}
template <class L>
size_t bytes_in_memory_of(const L& tensors) {
  size_t n = 0;
  for (const Tensor& t : tensors) n += bytes_in_memory(t);
  return n;
}

struct Row {
  int calls = 0;
  Counts kernels;
  size_t operands = 0, results = 0;  // bytes
};

/// Runs ops as ever, waits for each, and notes what its kernels did, without those of ops within.
class Meter final : public Backend {
 public:
  Meter(Counter counter, Stream stream)
      : counter_(counter), stream_(stream), on_({.backend = this}) {}

  Tensors run(const PrimRef& prim, Inputs in) override {
    if (prim->is_view()) return eager_backend().run(prim, in);
    const size_t operands = bytes_in_memory_of(in);
    Tensors out;
    note(prim, operands, [&] {
      out = eager_backend().run(prim, in);
      return bytes_in_memory_of(out);
    });
    return out;
  }
  void assign(std::span<const Tensor> dst, const PrimRef& prim, Inputs in) override {
    note(prim, bytes_in_memory_of(in), [&] {
      eager_backend().assign(dst, prim, in);
      return bytes_in_memory_of(dst);
    });
  }
  const std::map<std::string, Row>& rows() const { return rows_; }

 private:
  Counts now() const {
    synchronize(stream_);
    unsigned long long c[3];
    counter_(nullptr, c);
    return {c[0], c[1], c[2]};
  }
  template <class F>
  void note(const PrimRef& prim, size_t operands, F&& f) {
    const Counts outer = std::exchange(inner_, {}), before = now();
    const size_t results = f();
    const Counts all = now() - before, own = all - inner_;
    inner_ = outer;
    inner_ += all;
    if (own.runs == 0) return;  // made of other ops
    Row& row = rows_[std::string(prim->name())];
    ++row.calls, row.kernels += own, row.operands += operands, row.results += results;
  }

  const Counter counter_;
  const Stream stream_;
  std::map<std::string, Row> rows_;
  Counts inner_;
  BackendScope on_;
};

/// The most that the kernels of an op read, in bytes of its operands, and write, in bytes of its
/// results; what they write beside these, in bytes of its operands; launches of a call. Every
/// access of every thread counts: a number that all threads read, as the step of an optimizer or
/// the key of dropout, counts for each, and the smaller the model, the more of that there is.
struct Bound {
  double read = 1, written = 1, beside = 0, launches = 1;
};
// What was measured, rounded up: 1 where each operand is read once and each result written once.
const std::map<std::string, Bound, std::less<>> kBounds = {
    {"adam", {.read = 4}},
    {"add", {.read = 1.6}},  // a bias is read for each row
    // Tiles of keys read all queries and tiles of queries all keys, half of them where it is
    // causal.
    {"attention_grad", {.read = 3.6, .written = 1.1, .launches = 3}},
    {"cat", {.launches = 3}},
    {"contract", {.read = 1.2}},
    // Statistics are partial results and their join; a row of each channel is read again.
    {"batch_norm", {.read = 3.2, .written = 1.2, .launches = 3.1}},
    {"batch_norm_grad", {.read = 2.5, .written = 1.4, .launches = 3.1}},
    // Columns of patches, and sums that are long beside their results in parts.
    {"conv", {.read = 4.3, .written = 19, .launches = 2.9}},
    {"conv_grad_input", {.read = 2.6, .written = 15.7, .launches = 3}},
    {"conv_grad_weight", {.read = 13.1, .written = 3.7, .launches = 3.1}},
    {"cross_entropy", {.read = 9.2, .written = 1.2, .launches = 3}},
    {"embedding", {.read = 1.4}},
    {"embedding_grad", {.read = 2.7, .written = 1.8, .launches = 3}},  // a sort of the ids
    {"global_norm", {.read = 4.3, .beside = 0.3, .launches = 64}},     // one for each tensor
    {"layer_norm", {.read = 3}},
    // Sums of pieces of four rows, which a large operand has in pieces of more.
    {"layer_norm_grad", {.read = 1.9, .written = 1.5, .launches = 3}},
    {"max_pool", {.read = 2.1}},  // windows overlap
    {"max_pool_grad", {.read = 5.2, .written = 1.3, .launches = 2}},
    {"mul", {.read = 1.5}},
    {"sub", {.read = 1.5}},
    {"sum", {.read = 1.6, .beside = 0.6, .launches = 3}},
    {"unslice", {.written = 1.5, .launches = 2}},
};

struct Lesson {
  const char* model;
  std::vector<std::pair<const char*, int64_t>> options;
};

class CudaBytes : public OnCard, public testing::WithParamInterface<Lesson> {};

// Two steps of a small model, of which the second is counted.
TEST_P(CudaBytes, OfAStepAreThoseOfItsOperands) {
  const Counter counter = virtual_counter();
  if (!counter) GTEST_SKIP() << "a real driver does not count";
  const char* checked = std::getenv("VGPU_CHECK");
  if (!checked || std::string(checked) != "1") GTEST_SKIP() << "accesses are seen with --check";
  const Device card = device_of(0);
  DeviceScope scope(card);
  const OwnProducts own;  // what a library's products read and write is its own choice
  manual_seed(3);
  const models::ModelSpec& spec = models::find_model("test", GetParam().model);
  models::ModelOptions options = spec.options;
  for (const auto& [key, value] : GetParam().options) options.set(key, value);
  const auto model = spec.make(options);
  const models::Loss loss = models::loss_of(spec);
  optim::AdamW optimizer(model->named_parameters(), optim::AdamWOptions{});
  constexpr int64_t kBatch = 4, kTokens = 16, kSide = 32;
  Tensor x, y;
  switch (spec.data) {
    case models::Data::kImages:
      x = randn({kBatch, 3, kSide, kSide}), y = randint(0, 10, {kBatch});
      break;
    case models::Data::kValues:
      x = randn({kBatch, options.integer("in")}), y = randint(0, 10, {kBatch});
      break;
    default:
      x = randint(0, options.integer("vocab"), {kBatch, kTokens});
      y = randint(0, options.integer("vocab"), {kBatch, kTokens});
  }
  const auto step = [&] {
    loss((*model)(x), y).backward();
    const optim::Clip clip = optim::clip_grad_norm(model->parameters(), 0.5);
    optimizer.step_if_finite(clip.scale);
    optimizer.zero_grad();
  };
  step();
  Meter meter(counter, stream_);
  step();
  EXPECT_GT(meter.rows().size(), 8u);
  for (const auto& [op, row] : meter.rows()) {
    const auto found = kBounds.find(op);
    const Bound bound = found == kBounds.end() ? Bound() : found->second;
    const auto& k = row.kernels;
    std::printf(
        "%-10s %-22s %3d calls %4llu launches, read %8llu of %8zu bytes (%.2f), "
        "wrote %8llu of %8zu (%.2f)\n",
        GetParam().model, op.c_str(), row.calls, k.runs, k.read, row.operands,
        double(k.read) / double(std::max<size_t>(row.operands, 1)), k.written, row.results,
        double(k.written) / double(std::max<size_t>(row.results, 1)));
    EXPECT_LE(double(k.read), bound.read * double(row.operands)) << op;
    EXPECT_LE(double(k.written),
              bound.written * double(row.results) + bound.beside * double(row.operands))
        << op;
    EXPECT_GE(k.written, row.results) << op;
    EXPECT_LE(double(k.runs), bound.launches * row.calls) << op;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Models, CudaBytes,
    testing::Values(
        Lesson{"mlp", {{"hidden", 64}}},
        Lesson{"gpt-nano", {{"layers", 1}, {"dim", 32}, {"context", 16}}},
        Lesson{"resnet18", {{"width", 8}, {"classes", 10}}},
        Lesson{"bert-mini",
               {{"layers", 1}, {"dim", 32}, {"hidden", 64}, {"context", 16}, {"vocab", 96}}}),
    [](const auto& info) {
      std::string name = info.param.model;
      std::replace(name.begin(), name.end(), '-', '_');
      return name;
    });

}  // namespace
}  // namespace tessera::cuda
