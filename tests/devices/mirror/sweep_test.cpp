// Every op of the registry on the device against the CPU, bit by bit.
#include <cstring>
#include <map>

#include "core/core.h"
#include "core/dispatch/dispatch.h"
#include "core/dispatch/kernel.h"
#include "core/primitive/attributes.h"
#include "core/primitive/registry.h"
#include "testing.h"

using namespace tessera;

namespace {

// The attributes of an op; one that names the CPU, where a creation puts its result, names
// `device`.
class Moved final : public AttributeVisitor, public AttributeReader {
 public:
  explicit Moved(Device device) : device_(to_string(device)) {}
  void integer(std::string_view n, int64_t x) override { integers_[std::string(n)] = x; }
  void real(std::string_view n, double x) override { reals_[std::string(n)] = x; }
  void text(std::string_view n, std::string_view x) override { texts_[std::string(n)] = x; }
  void dims(std::string_view n, std::span<const int64_t> x) override {
    dims_[std::string(n)].assign(x.begin(), x.end());
  }

  bool has(std::string_view n) const override {
    const std::string name(n);
    return integers_.contains(name) || reals_.contains(name) || texts_.contains(name) ||
           dims_.contains(name);
  }
  bool is_integer(std::string_view n) const override { return integers_.contains(std::string(n)); }
  int64_t integer(std::string_view n) override { return integers_.at(std::string(n)); }
  double real(std::string_view n) override { return reals_.at(std::string(n)); }
  std::string text(std::string_view n) override {
    return n == "device" ? device_ : texts_.at(std::string(n));
  }
  std::vector<int64_t> dims(std::string_view n) override { return dims_.at(std::string(n)); }

 private:
  const std::string device_;
  std::map<std::string, int64_t> integers_;
  std::map<std::string, double> reals_;
  std::map<std::string, std::string> texts_;
  std::map<std::string, std::vector<int64_t>> dims_;
};

// Copies, since a kernel may overwrite operands that nobody else holds; dense, or of other strides.
Tensors on(Device device, const std::vector<Tensor>& tensors, bool dense = true) {
  Tensors out;
  for (const Tensor& t : tensors) {
    const Tensor copy = device.is_cpu() ? t.clone() : t.to(device);
    out.push_back(dense || t.ndim() < 2 ? copy
                                        : copy.transpose(0, -1).contiguous().transpose(0, -1));
  }
  return out;
}

// The results for dense operands and for others, those of the decomposition, and the gradients of
// operands, where the op has these.
std::vector<Tensor> run_on(Device device, const Sample& s) {
  Moved attributes(device);
  s.prim->attributes(attributes);
  const PrimRef prim = s.prim->with_attributes(attributes);
  std::vector<Tensor> out;
  auto add = [&](const Tensors& results) { out.insert(out.end(), results.begin(), results.end()); };
  for (bool dense : {true, false}) {
    Tensors temporaries = on(device, s.in, dense);
    add(dispatch(prim, temporaries));
  }
  if (prim->decomposable()) add(prim->decompose(on(device, s.in)));

  Tensors leaves = on(device, s.in), in = leaves;
  for (Tensor& leaf : leaves)
    if (is_differentiable(leaf.dtype())) leaf.requires_grad_();
  const Tensor y = dispatch(prim, in)[0];
  if (!y.requires_grad()) return out;
  try {
    sum(square(y.to(kF64))).backward();
  } catch (const UserError& e) {  // no derivative; on one device only: a result is missing there
    EXPECT_EQ(std::string(e.what()).find("mirror"), std::string::npos) << e.what();
    return out;
  }
  for (const Tensor& leaf : leaves)
    if (leaf.grad().defined()) out.push_back(leaf.grad());
  return out;
}

// Ops of a program, made after the device was registered: one whose CPU kernel is in the table, and
// one that brings its kernel for the CPU alone.
class Times final : public Primitive {
 public:
  static inline const OpInfo kInTable{"times_three", {OpKind::kOther, Precision::kAsGiven, 1}},
      kOwn{"times_five", {OpKind::kOther, Precision::kAsGiven, 1}};
  explicit Times(const OpInfo& op) : Primitive(op) {}
  Metas infer(MetaSpan in) const override {
    return {Meta::contiguous(in[0]->shape, in[0]->dtype, in[0]->device)};
  }
  const Kernel* own_kernel(DeviceKind device) const override {
    static const Kernel kernel{plan, run<5>};
    return device == DeviceKind::kCPU && name() == kOwn.name ? &kernel : nullptr;
  }
  static void plan(const Primitive&, std::span<const Tensor>, std::span<Meta>, Plan& plan) {
    plan.all_dense = true;
  }
  template <int kBy>
  static void run(const Primitive&, std::span<const Tensor> in, std::span<const Tensor> out,
                  Workspace, const Stream&) {
    for (int64_t i = 0; i < in[0].numel(); ++i)
      out[0].data<float>()[i] = in[0].values<float>()[i] * kBy;
  }
};

TEST(Mirror, OpsOfAProgramRunByTheirCpuKernels) {
  const Device device = mirror::device();
  add_kernels([](KernelTable& table) {
    table.add(DeviceKind::kCPU, Times::kInTable.name, {Times::plan, Times::run<3>});
  });
  const Tensor x = arange(0, 6, 1, {kF32, kCPU}).reshape({2, 3});
  for (const OpInfo* op : {&Times::kInTable, &Times::kOwn}) {
    const PrimRef prim(new Times(*op));
    const Tensor y = dispatch1(prim, operands(x.to(device).transpose(0, 1)));
    EXPECT_EQ(y.device(), device);
    EXPECT_TRUE(mirror::same_bits(y, dispatch1(prim, operands(x.transpose(0, 1)))));
    EXPECT_EQ(y.cpu().values<float>()[5], op == &Times::kOwn ? 25 : 15);
  }
}

TEST(Mirror, EveryOpAndItsGradientHaveTheBitsOfTheCpu) {
  for (const OpEntry& op : op_registry().entries()) {
    const std::vector<Sample> samples = op.samples();
    for (size_t i = 0; i < samples.size(); ++i) {
      SCOPED_TRACE(fmt::format("{} sample {}: {}", op.name, i, to_string(*samples[i].prim)));
      try {
        const std::vector<Tensor> want = run_on(kCPU, samples[i]);
        mirror::for_each_seed([&] {
          const std::vector<Tensor> got = run_on(mirror::device(), samples[i]);
          ASSERT_EQ(got.size(), want.size());
          for (size_t k = 0; k < got.size(); ++k) {
            EXPECT_EQ(got[k].device(), mirror::device());
            EXPECT_TRUE(mirror::same_bits(got[k], want[k])) << got[k] << "\n" << want[k];
          }
        });
      } catch (const std::exception& e) {
        ADD_FAILURE() << e.what();
      }
    }
  }
}

}  // namespace
