// What an observer is told: each kind of event, before the thing happens; the same through backends
// in front of its own; and nothing of ops that run in an EagerScope.
#include "core/dispatch/observer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <optional>

#include "core/autograd/autograd.h"
#include "core/autograd/recompute.h"
#include "core/autograd/transforms.h"
#include "core/dispatch/context.h"
#include "core/dispatch/tracked_setting.h"
#include "core/nn/nn.h"
#include "core/ops/compose.h"
#include "core/ops/create.h"
#include "core/ops/pointwise.h"
#include "core/ops/reduce.h"

namespace tessera {
namespace {

using Lines = std::vector<std::string>;

// Runs ops at once and writes events down, as a recorder would.
class Listener final : public Backend, public Observer {
 public:
  Listener() : on_({.backend = this, .observer = this, .records = true}) {}
  Tensors run(const PrimRef& prim, Inputs in) override {
    EagerScope inside;
    return eager_backend().run(prim, in);
  }
  void assign(std::span<const Tensor> dst, const PrimRef& prim, Inputs in) override {
    EagerScope inside;
    eager_backend().assign(dst, prim, in);
  }
  void notice(const HostEvent& event) override {
    std::visit([this](const auto& e) { hear(e); }, event);
  }

  /// What was heard since the last call, handles aside.
  Lines take() {
    handles_.clear();
    return std::exchange(lines_, {});
  }
  /// Whether an event since the last take() told of this handle.
  bool told_of(const Tensor& t) const {
    return std::ranges::any_of(handles_, [&](const Tensor& h) { return h.is_same(t); });
  }
  size_t num_handles() const { return handles_.size(); }

 private:
  void hear(const events::LeavesOps& e) { lines_.push_back("leaves: " + e.what()); }
  void hear(const events::ValueRead& e) {
    const std::string_view file = e.where.file_name();
    lines_.push_back(
        fmt::format("item at {}:{}", file.substr(file.rfind('/') + 1), e.where.line()));
  }
  void hear(const events::SlotRead& e) {
    lines_.push_back(e.slot.defined() ? "reads a gradient" : "reads an empty slot");
  }
  void hear(const events::SlotChange& e) {
    lines_.push_back(fmt::format("slot: {} to {}", e.slot.defined(), e.now.defined()));
  }
  void hear(const events::SettingRead& e) { lines_.push_back(fmt::format("reads {}", e.value)); }
  void hear(const events::SettingChange& e) {
    lines_.push_back(fmt::format("changes {}", e.value));
  }
  void hear(const events::CustomFunctionRuns& e) {
    lines_.push_back(fmt::format("{} {}", e.name, e.begins ? "begins" : "ends"));
  }
  void hear(const events::HandlesRead& e) {
    for (const Tensor& t : e.handles) handles_.push_back(t);
  }

  Lines lines_;
  std::vector<Tensor> handles_;
  BackendScope on_;
};

std::string item_at(int line) { return fmt::format("item at observer_test.cpp:{}", line); }

TEST(Observer, HearsEachKindBeforeItHappens) {
  Tensor w = ones({2}).requires_grad_(), g = ones({2}), number = full({}, 3.0);
  TrackedSetting setting(4);
  TrackedChanges changes;
  Listener listener;
  EXPECT_TRUE(context().records);

  EXPECT_EQ(setting.read(), 4);
  setting.write(5);
  EXPECT_EQ(listener.take(), (Lines{"reads 4", "changes 4"}));
  changes.note_use();
  changes.note_change();
  changes.note_use();
  EXPECT_EQ(listener.take(), (Lines{"reads 0", "reads 0", "changes 0", "reads 1"}));

  EXPECT_FALSE(w.grad().defined());
  w.set_grad(g);
  EXPECT_TRUE(w.grad().is_same(g));
  w.set_grad({});
  EXPECT_EQ(listener.take(), (Lines{"reads an empty slot", "slot: false to true",
                                    "reads a gradient", "slot: true to false"}));

  EXPECT_EQ(number.item<double>(), 3.0);
  EXPECT_EQ(listener.take(), Lines{item_at(__LINE__ - 1)});

  remove_hook(w, add_hook(w, [](const Tensor& t) { return t; }));
  const std::string hook = "leaves: a hook of a gradient is added or removed";
  EXPECT_EQ(listener.take(), (Lines{hook, hook}));

  EXPECT_FALSE(listener.told_of(w));
  EXPECT_TRUE(w.requires_grad());
  EXPECT_TRUE(listener.told_of(w));
  listener.take();
  Tensor product = g * w;
  EXPECT_TRUE(listener.told_of(g));
  EXPECT_TRUE(listener.told_of(w));
}

TEST(Observer, HearsOfModules) {
  auto model = nn::linear(2, 2);
  Tensor x = ones({1, 2});
  Listener listener;
  (*model)(x);
  // Hooks and slots, as often as they changed, and how a Linear multiplies.
  EXPECT_EQ(listener.take(), (Lines{"reads 0", "reads 0"}));
  model->eval();
  EXPECT_EQ(listener.take(), Lines{"changes 1"}) << "whether it trains";
  EXPECT_FALSE(model->training());
  EXPECT_EQ(listener.take(), Lines{"reads 0"});
  model->add_pre_hook([](nn::Module&, Inputs) {});
  EXPECT_EQ(listener.take(), (Lines{"leaves: a hook of Linear changed", "reads 0", "changes 0"}));
}

// Twice x, which looks at it.
class Twice final : public CustomFunction {
 public:
  std::string_view name() const override { return "twice"; }
  Tensors forward(std::span<const Tensor> in) override {
    return {full({}, in[0].item<float>() * 2)};
  }
  Tensors vjp(std::span<const Tensor>, std::span<const Tensor> cot) override {
    if (cot[0].item<float>() != 1) throw UserError("twice: no other");
    return {cot[0] * 2.0};
  }
};

TEST(Observer, HearsWhichCustomFunctionRuns) {
  Tensor x = full({}, 3.0).requires_grad_();
  Listener listener;
  Tensor y = apply_function(make_ref<Twice>(), {x})[0];
  Lines heard = listener.take();
  ASSERT_EQ(heard.size(), 3u);
  EXPECT_EQ(heard[0], "twice begins");
  EXPECT_EQ(heard[1].rfind("item at observer_test.cpp:", 0), 0u) << heard[1];
  EXPECT_EQ(heard[2], "twice ends");
  Tensor inputs[] = {x}, cot = full({}, 5.0);
  EXPECT_THROW(grad({&y, 1}, inputs, {&cot, 1}), UserError);
  heard = listener.take();
  ASSERT_GE(heard.size(), 2u);
  EXPECT_EQ(std::ranges::count(heard, "twice begins"), 1);
  EXPECT_EQ(std::ranges::count(heard, "twice ends"), 1) << "an error ends it too";
}

TEST(Observer, NothingIsHeardOfWhatRunsApart) {
  TrackedSetting setting(4);
  Tensor number = full({}, 3.0);
  std::optional<Listener> listener(std::in_place);
  {
    EagerScope apart;
    EXPECT_FALSE(context().records);
    setting.write(7);
    EXPECT_EQ((number * 2.0).item<double>(), 6.0);
  }
  EXPECT_EQ(listener->take(), Lines{});
  EXPECT_EQ(listener->num_handles(), 0u);
  setting.read();
  EXPECT_EQ(listener->take(), Lines{"reads 7"});
  listener.reset();
  EXPECT_EQ(context().backend, nullptr);
  EXPECT_EQ(context().observer, nullptr);
  EXPECT_FALSE(context().records);
}

// Two backends stand between the program and the one that listens.
TEST(Observer, HearsThroughARecomputationAndATransform) {
  Tensor x = ones({3}), w = ones({2}).requires_grad_(), g = ones({2}), number = full({}, 3.0);
  TrackedSetting setting(4);
  Listener listener;
  Lines heard, of_the_level;
  int line = 0, runs = 0;
  bool records = false, told = false;
  auto inner = [&](const Tensor& t) {
    ++runs;
    EXPECT_NE(context().backend, &listener);
    EXPECT_NE(context().observer, &listener);
    records = context().records;
    listener.take();
    setting.read();
    setting.write(5);
    w.set_grad(g);
    w.grad();
    number.item<double>(), line = __LINE__;
    remove_hook(w, add_hook(w, [](const Tensor& t) { return t; }));
    w.requires_grad();
    told = listener.told_of(w);
    heard = listener.take();

    // A leaf of the level, and its gradient, end with it.
    Tensor leaf = t.detach().requires_grad_();
    leaf.set_grad(t.detach());
    leaf.grad();
    leaf.requires_grad();
    told &= listener.num_handles() == 0;
    of_the_level = listener.take();
    return sum(t * t);
  };
  Tensor dx = recompute([&](const Tensor& t) { return grad(inner)(t); }, x);
  EXPECT_EQ(runs, 1);
  EXPECT_TRUE(records);
  EXPECT_TRUE(told);
  const std::string hook = "leaves: a hook of a gradient is added or removed";
  EXPECT_EQ(heard, (Lines{"reads 4", "changes 4", "slot: false to true", "reads a gradient",
                          item_at(line), hook, hook}));
  EXPECT_EQ(of_the_level, Lines{});
  EXPECT_EQ(context().observer, &listener);
  EXPECT_TRUE(equal(dx, full({3}, 2.0)));
}

}  // namespace
}  // namespace tessera
