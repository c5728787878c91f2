// The module tree: names, order, ties, slots, state, hooks, scopes, printing.
#include "core/nn/module.h"

#include <gtest/gtest.h>

#include <functional>
#include <sstream>

#include "core/autograd/autograd.h"
#include "core/nn/nn.h"
#include "core/ops/compose.h"
#include "core/ops/contract.h"
#include "core/ops/create.h"
#include "core/ops/pointwise.h"
#include "core/ops/reduce.h"
#include "core/ops/views.h"
#include "tests/support/temp_folder.h"

namespace tessera::nn {
namespace {

std::vector<std::string> names_of(const std::vector<NamedTensor>& list) {
  std::vector<std::string> names;
  for (const NamedTensor& t : list) names.push_back(t.name);
  return names;
}
using Names = std::vector<std::string>;

// A model with a tie, a buffer and a child that is registered before the second parameter.
struct Tied : Module {
  Tied() {
    inner = register_module("inner", linear(3, 4));
    register_parameter("head", head, inner->weight);
    register_parameter("none", none, Tensor());
    register_parameter("own", own, empty_parameter({2}));
    register_buffer("mean", mean, zeros({3}));
    register_buffer("scratch", scratch, zeros({1}), false);
    nn::zeros_(own);
  }
  LinearPtr inner;
  Tensor head, none, own, mean, scratch;

 protected:
  Tensor forward(Tensor x) override { return (*inner)(x) + tessera::linear(x, head); }
};

TEST(Module, OrderIsRegistrationOwnBeforeChildrenTiesOnce) {
  Tied m;
  EXPECT_EQ(names_of(m.named_parameters()), (Names{"head", "own", "inner.bias"}));
  EXPECT_EQ(names_of(m.named_buffers()), (Names{"mean", "scratch"}));
  EXPECT_EQ(names_of(m.state()), (Names{"head", "own", "mean", "inner.bias"}));
  EXPECT_EQ(m.parameters().size(), 3u);
  EXPECT_EQ(m.num_parameters(), 12 + 2 + 4);
  Names slots;
  for (Slot& s : m.slots()) slots.push_back(s.name);
  EXPECT_EQ(slots, (Names{"head", "own", "mean", "scratch", "inner.weight", "inner.bias"}));
}

TEST(Module, SequentialReadsLikeAScript) {
  auto model = sequential(linear(4, 8), gelu(), linear({.in = 8, .out = 2, .bias = false}));
  EXPECT_EQ(names_of(model->named_parameters()), (Names{"0.weight", "0.bias", "2.weight"}));
  EXPECT_EQ((*model)(ones({3, 4})).shape(), Shape({3, 2}));
  EXPECT_EQ((*model)(ones({3, 4})).shape(), Shape({3, 2}));
  EXPECT_EQ(model->to_string(),
            "Sequential(\n"
            "  (0): Linear(in=4, out=8, bias=true)\n"
            "  (1): GELU()\n"
            "  (2): Linear(in=8, out=2, bias=false)\n"
            ")\n");
  Names modules;
  for (auto& [name, m] : model->named_modules()) modules.push_back(name + ":" + m->type_name());
  EXPECT_EQ(modules, (Names{":Sequential", "0:Linear", "1:GELU", "2:Linear"}));
}

TEST(Module, SharedModuleIsListedOnceAndKeepsItsFirstName) {
  auto shared = linear(3, 3);
  auto model = sequential(shared, relu(), shared);
  EXPECT_EQ(names_of(model->named_parameters()), (Names{"0.weight", "0.bias"}));
  EXPECT_EQ(model->named_modules().size(), 3u);
  EXPECT_EQ(shared->path(), "0");
}

TEST(Module, ReplaceKeepsTiesAndForwardSeesTheNewTensor) {
  Tied m;
  Tensor now = ones({4, 3}).requires_grad_();
  m.replace(m.head, now);
  EXPECT_TRUE(m.inner->weight.is_same(now));
  EXPECT_TRUE(m.head.is_same(now));
  m.replace(m.inner->bias, zeros({4}));
  EXPECT_FLOAT_EQ(sum(m(ones({1, 3}))).item<float>(), 2 * 4 * 3);
  expect_contains(error_of([&] { m.replace(ones({1}), now); }), "no slot of Tied");
  m.slot("inner.weight") = zeros({4, 3});
  EXPECT_FLOAT_EQ(sum(m(ones({1, 3}))).item<float>(), 4 * 3);
}

TEST(Module, LookupsNameWhatThereIs) {
  Tied m;
  expect_contains(error_of([&] { m.slot("inner.wait"); }), "it has weight, bias");
  expect_contains(error_of([&] { m.submodule("outer"); }), "\"outer\"");
  EXPECT_EQ(&m.submodule("inner"), m.inner.get());
  EXPECT_EQ(&m.submodule(""), &m);
}

TEST(Module, BadNamesAreRefused) {
  Tied m;
  Tensor t;
  expect_contains(error_of([&] { m.register_parameter("a.b", t, {}); }), "dot");
  expect_contains(error_of([&] { m.register_parameter("", t, {}); }), "empty");
  expect_contains(error_of([&] { m.register_buffer("inner", t, {}); }), "already");
  expect_contains(error_of([&] { m.register_module("x", LinearPtr()); }), "null");
}

TEST(Module, ParametersRequireGradAndAreLeaves) {
  Tied m;
  Tensor scale, ids, product;
  m.register_parameter("scale", scale, ones({2}));
  EXPECT_TRUE(scale.requires_grad());
  m.register_parameter("ids", ids, zeros({2}, {.dtype = kI64}));
  EXPECT_FALSE(ids.requires_grad());
  expect_contains(error_of([&] { m.register_parameter("product", product, scale * scale); }),
                  "\"product\" of a Tied is the result of an op");
}

TEST(Module, TrainableParametersLeaveFrozenOnesOut) {
  Tied m;
  m.inner->requires_grad_(false);
  EXPECT_EQ(names_of(m.trainable_parameters()), (Names{"own"}));
}

TEST(Module, ParametersThatNothingDrawsAreNamed) {
  struct Undrawn : Module {
    Undrawn() {
      register_parameter("w", w, empty_parameter({4}));
      draw();
    }
    Tensor w;
  };
  expect_contains(error_of([] { Undrawn m; }), "nothing draws its parameter \"w\"");
  Tied m;  // fills its own by itself, and has no way to do so again
  expect_contains(error_of([&] { m.init(1); }), "\"head\"");
}

// A call never reaches a forward that does not override Module's: register_module and sequential
// refuse it. Compilers that warn of it are told that it is meant.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Woverloaded-virtual"
struct Hiding : Module {
  Tensor forward(const Tensor& x) { return x; }
};
struct ConstHiding : Module {
  Tensor forward(Tensor x) const { return x; }
};
struct BelowHiding : Hiding {};
struct Overriding : Module {
  Tensor forward(Tensor x) override { return x; }
};
struct Unmarked : Module {  // as programs for PyTorch spell it
  Tensor forward(Tensor x) { return x * x * x; }
};
struct Adding : Module {
  Tensor forward(Tensor x, int times) { return x * double(times); }
};
#pragma GCC diagnostic pop
static_assert(nn::detail::hides_forward<Hiding>() && nn::detail::hides_forward<ConstHiding>());
static_assert(nn::detail::hides_forward<BelowHiding>());
static_assert(!nn::detail::hides_forward<Overriding>() && !nn::detail::hides_forward<Unmarked>());
static_assert(!nn::detail::hides_forward<Adding>() && !nn::detail::hides_forward<Linear>());

// A program cannot call forward: a direct call would run without hooks.
template <class M>
constexpr bool calls_forward() {
  return requires(M & m, Tensor x) { m.forward(x); };
}
static_assert(!calls_forward<Module>() && !calls_forward<Linear>() && !calls_forward<Sequential>());

TEST(Module, AForwardOfARootRunsWithItsHooksScopeAndRecomputation) {
  std::vector<std::string> seen;
  Unmarked root;
  root.add_pre_hook([&](Module&, Inputs in) { seen.push_back("pre"), in[0] = in[0] + 1.0; });
  root.add_post_hook(
      [&](Module&, Inputs, Tensor& out) { seen.push_back("post"), out = out * 10.0; });
  EXPECT_EQ(sum(root(ones({1}))).item<float>(), 80);
  EXPECT_EQ(seen, (Names{"pre", "post"}));
  // The same below a container, where backward computes it a second time.
  auto inner = std::make_shared<Unmarked>();
  auto model = sequential(inner);
  int runs = 0;
  inner->add_pre_hook([&](Module& m, Inputs) {
    ++runs;
    EXPECT_EQ(m.path(), "0");
  });
  inner->recompute();
  Tensor x = ones({1}).requires_grad_();
  Tensor y = (*model)(x);
  EXPECT_EQ(runs, 1);
  square(y).backward();
  EXPECT_EQ(runs, 2);
  EXPECT_EQ(x.grad().item<float>(), 6);
}

TEST(Module, TrainAndEvalReachEveryone) {
  auto model = sequential(linear(2, 2), sequential(dropout(0.5)));
  model->eval();
  for (auto& [name, m] : model->named_modules()) EXPECT_FALSE(m->training()) << name;
  model->train();
  for (auto& [name, m] : model->named_modules()) EXPECT_TRUE(m->training()) << name;
}

TEST(Module, ToCastsFloatsAndKeepsTiesAndGradFlags) {
  Tied m;
  m.own.requires_grad_(false);
  Tensor ids = zeros({2}, {.dtype = kI64});
  m.register_buffer("ids", ids, ids);
  m.to(kF64);
  EXPECT_EQ(m.inner->weight.dtype(), kF64);
  EXPECT_TRUE(m.inner->weight.is_same(m.head));
  EXPECT_TRUE(m.head.requires_grad());
  EXPECT_FALSE(m.own.requires_grad());
  EXPECT_EQ(m.mean.dtype(), kF64);
  EXPECT_EQ(ids.dtype(), kI64);
  expect_contains(error_of([&] { m.to(kI32); }), "i32");
}

TEST(Module, ZeroGradAndRequiresGrad) {
  auto m = linear(2, 2);
  sum((*m)(ones({1, 2}))).backward();
  EXPECT_TRUE(m->weight.grad().defined());
  m->zero_grad();
  EXPECT_FALSE(m->weight.grad().defined());
  m->requires_grad_(false);
  EXPECT_FALSE((*m)(ones({1, 2})).requires_grad());
}

// ---- state

TEST(ModuleState, RoundTripThroughAnyNameOfATie) {
  Tied a, b;
  const IncompatibleNames left_out = b.load_state(a.state());
  EXPECT_TRUE(left_out.missing.empty() && left_out.unexpected.empty());
  EXPECT_FLOAT_EQ(sum(abs(a.head - b.head)).item<float>(), 0);
  std::vector<NamedTensor> state = a.state();
  for (NamedTensor& t : state)
    if (t.name == "head") t = {"inner.weight", ones({4, 3}, {.dtype = kF64})};
  b.load_state(state);
  EXPECT_FLOAT_EQ(sum(b.head).item<float>(), 12);
  EXPECT_EQ(b.head.dtype(), kF32);
}

TEST(ModuleState, OneErrorTellsEverythingAndNothingIsWritten) {
  Tied m;
  zeros_(m.own);
  std::vector<NamedTensor> state{
      {"own", ones({2})}, {"mean", ones({7})}, {"surprise", ones({1})}, {"scratch", ones({1})}};
  std::string text = error_of([&] { m.load_state(state); });
  expect_contains(text, "Tied");
  expect_contains(text, "2 missing:\n    head\n    inner.bias");
  expect_contains(text, "2 unexpected:\n    surprise\n    scratch");
  expect_contains(text, "mean is [3] here, [7] in the state");
  std::vector<NamedTensor> others;
  for (int i = 0; i < 40; ++i) others.push_back({fmt::format("other.{}", i), ones({1})});
  text = error_of([&] { m.load_state(others); });
  for (const NamedTensor& t : others) expect_contains(text, "\n    " + t.name);  // all of them
  EXPECT_FLOAT_EQ(sum(m.own).item<float>(), 0);
  state[1].tensor = ones({3});
  const IncompatibleNames left_out = m.load_state(state, {.strict = false});
  EXPECT_EQ(left_out.missing, (std::vector<std::string>{"head", "inner.bias"}));
  EXPECT_EQ(left_out.unexpected, (std::vector<std::string>{"surprise", "scratch"}));
  EXPECT_FLOAT_EQ(sum(m.own).item<float>(), 2);
  EXPECT_FLOAT_EQ(sum(m.scratch).item<float>(), 0);
}

// ---- hooks and scopes

TEST(ModuleHooks, SeeAndReplaceInputsAndResultsUntilRemoved) {
  auto m = linear({.in = 2, .out = 2, .bias = false});
  ones_(m->weight);
  int calls = 0;
  HookHandle pre = m->add_pre_hook([&](Module& module, Inputs in) {
    EXPECT_EQ(&module, m.get());
    in[0] = in[0] * 2.0;
    ++calls;
  });
  HookHandle post = m->add_post_hook([&](Module&, Inputs in, Tensor& out) {
    EXPECT_FLOAT_EQ(sum(in[0]).item<float>(), 4);
    out = out + 1.0;
    ++calls;
  });
  EXPECT_FLOAT_EQ(sum((*m)(ones({1, 2}))).item<float>(), 2 * (4 + 1));
  pre.remove();
  pre.remove();
  post.remove();
  EXPECT_FLOAT_EQ(sum((*m)(ones({1, 2}))).item<float>(), 4);
  EXPECT_EQ(calls, 2);
}

TEST(ModuleHooks, AHookMayRemoveItselfAndHandlesOutliveModules) {
  auto m = linear(2, 2);
  int calls = 0;
  HookHandle once;
  once = m->add_pre_hook([&](Module&, Inputs) { ++calls, once.remove(); });
  (*m)(ones({1, 2}));
  (*m)(ones({1, 2}));
  EXPECT_EQ(calls, 1);
  HookHandle late = m->add_post_hook([](Module&, Inputs, Tensor&) {});
  m.reset();
  late.remove();
}

TEST(ModuleHooks, RunForModulesWithSeveralInputs) {
  auto m = multihead_attention({.dim = 4, .heads = 2});
  size_t seen = 0;
  m->add_pre_hook([&](Module&, Inputs in) { seen = in.size(); });
  Tensor x = ones({1, 3, 4});
  (*m)(x, x, x);
  EXPECT_EQ(seen, 3u);
}

TEST(Scope, IsThePathOfTheInnermostModule) {
  std::vector<std::string> seen;
  auto probe = [&] {
    return activation("Probe", [&](Tensor x) {
      Scope part("part");
      seen.push_back(Scope::current());
      return x;
    });
  };
  auto list = module_list<Sequential>();
  list->push_back(sequential(probe()));
  struct Root : Module {
    explicit Root(std::shared_ptr<ModuleList<Sequential>> list) { h = register_module("h", list); }
    std::shared_ptr<ModuleList<Sequential>> h;
    Tensor forward(Tensor x) override {
      for (Sequential& s : *h) x = s(x);
      return x;
    }
  } root(list);
  EXPECT_EQ(Scope::current(), "");
  root(ones({1}));
  EXPECT_EQ(seen, (Names{"h.0.0.part"}));
  EXPECT_EQ(Scope::current(), "");
  EXPECT_EQ((*list)[0].path(), "h.0");
}

// Children that are members, by value.
struct ByValue : Module {
  ByValue() {
    register_module("conv", conv);
    register_module("fc", fc);
    register_module("inner", inner);
  }
  struct Inner : Module {
    Inner() { register_module("out", out); }
    Linear out{4, 2};

   protected:
    Tensor forward(Tensor x) override { return out(x); }
  };
  Conv2d conv{1, 2, 3};
  ReLU relu;
  Linear fc{8, 4, false};
  Inner inner;

 protected:
  Tensor forward(Tensor x) override {
    return inner(fc(tessera::flatten(relu(conv(std::move(x))), 1)));
  }
};

TEST(Module, MembersByValueAreChildren) {
  ByValue m;
  EXPECT_EQ(names_of(m.named_parameters()),
            (Names{"conv.weight", "conv.bias", "fc.weight", "inner.out.weight", "inner.out.bias"}));
  EXPECT_EQ(m.inner.out.path(), "inner.out");
  EXPECT_EQ(m(ones({3, 1, 4, 4})).shape(), (Shape{3, 2}));
  EXPECT_TRUE(m.parameters()[2].is_same(m.fc.weight));
  m.eval();
  EXPECT_FALSE(m.inner.out.training());
  int calls = 0;
  m.fc.add_post_hook([&](Module&, Inputs, Tensor&) { ++calls; });
  m(ones({1, 1, 4, 4}));
  EXPECT_EQ(calls, 1);
  m.init(5);
  const Tensor drawn = m.fc.weight.detach().clone();
  auto shared = std::make_shared<ByValue>();  // and where the whole is shared
  shared->init(5);
  EXPECT_TRUE(equal(shared->fc.weight.detach(), drawn));
  EXPECT_EQ(&shared->submodule("inner.out"), &shared->inner.out);
  expect_contains(error_of([&] { m.register_module("fc", m.relu); }), "\"fc\" already");
}

TEST(Module, AMemberThatIsNotRegisteredIsAnErrorOfItsFirstCall) {
  struct Forgetful : Module {
    Forgetful() { register_module("first", first); }
    Linear first{2, 3}, second{3, 4};
    LinearPtr third;
    std::function<Tensor(Tensor)> rest = [](Tensor x) { return x; };

   protected:
    Tensor forward(Tensor x) override { return rest(first(x)); }
  };
  struct Outer : Module {
    Outer() { register_module("inner", inner); }
    Forgetful inner;

   protected:
    Tensor forward(Tensor x) override { return inner(x); }
  } model;
  const Tensor x = ones({1, 2});
  model(x);
  model.inner.rest = [&](Tensor h) { return model.inner.second(h); };
  expect_contains(error_of([&] { model(x); }), "Linear: called in the forward of inner");
  expect_contains(error_of([&] { model(x); }), "trains its weight; say register_module");
  expect_contains(error_of([&] { model.inner(x); }), "of inner");
  EXPECT_NO_THROW((model.inner.second(ones({1, 3})))) << "alone";
  {
    NoGrad evaluation;
    EXPECT_NO_THROW(model(x));
  }
  model.inner.second.requires_grad_(false);
  EXPECT_NO_THROW(model(x));

  // What functional_call gives its parameters needs no registration.
  model.inner.second.requires_grad_();
  const std::vector<Tensor> given = model.inner.second.parameters();
  model.inner.rest = [&](Tensor h) {
    return functional_call(model.inner.second, given, [&] { return model.inner.second(h); });
  };
  EXPECT_NO_THROW(model(x));
  model.inner.rest = [&](Tensor h) { return model.inner.second(h); };
  EXPECT_THROW(model(x), UserError);

  // A child stays one when the first of its parents has ended.
  model.inner.third = linear(3, 4);
  {
    auto first_parent = sequential(model.inner.third);
    model.inner.register_module("third", model.inner.third);
  }
  model.inner.rest = [&](Tensor h) { return (*model.inner.third)(h); };
  EXPECT_NO_THROW(model(x));
}

TEST(Module, SeveralMembersAreRegisteredAtOnce) {
  struct Pair : Module {
    Pair() { register_modules({{"second", b}, {"first", a}}); }
    Linear a{2, 3}, b{3, 4, false};
  } pair;
  EXPECT_EQ(names_of(pair.named_parameters()),
            (Names{"second.weight", "first.weight", "first.bias"}));
  EXPECT_EQ(pair.b.path(), "second");
  expect_contains(error_of([&] {
                    pair.register_modules({{"first", pair.b}});
                  }),
                  "\"first\" already");
}

// A child that two trees share ends with the second of them, whatever the other held by value.
TEST(Module, MembersByValueEndBeforeTheirParent) {
  auto shared = linear(2, 2);
  {
    struct Both : Module {
      explicit Both(LinearPtr l) {
        register_module("shared", std::move(l));
        register_module("own", own);
      }
      Linear own{2, 2};
    } both(shared);
    EXPECT_EQ(shared->path(), "shared");
  }
  auto list = sequential(shared);  // its first parent is gone
  EXPECT_EQ(shared->path(), "0");
}

TEST(Module, SequentialTakesFunctions) {
  auto m = sequential(
      linear(2, 3), [](Tensor x) { return x * 2.0; }, tessera::relu);
  const Tensor x = ones({1, 2});
  auto& first = static_cast<Linear&>(m->submodule("0"));
  EXPECT_TRUE(equal((*m)(x).detach(), tessera::relu(first(x) * 2.0).detach()));
  EXPECT_EQ(m->size(), 3u);
}

TEST(Module, DictsFindTheirModulesByName) {
  auto heads = module_dict<Linear>();
  heads->insert("digits", linear(2, 10));
  heads->insert("letters", linear(2, 26));
  EXPECT_EQ((*heads)["letters"].weight.size(0), 26);
  EXPECT_TRUE(heads->contains("digits"));
  EXPECT_FALSE(heads->contains("words"));
  std::vector<std::string> order;
  for (auto& [name, head] : *heads) order.push_back(name);
  EXPECT_EQ(order, (Names{"digits", "letters"}));
  EXPECT_EQ(names_of(heads->named_parameters())[2], "letters.weight");
  expect_contains(error_of([&] { (*heads)["words"]; }), "no \"words\"");
  expect_contains(error_of([&] { heads->insert("digits", linear(1, 1)); }), "already");
}

TEST(Module, IsPrintedAsItsTree) {
  std::ostringstream out;
  auto m = sequential(linear(2, 3), relu());
  out << *m;
  EXPECT_EQ(out.str(), m->to_string());
}

TEST(Module, ForwardOfTheWrongKindSaysSo) {
  auto list = module_list<Linear>();
  expect_contains(error_of([&] { (*list)(ones({1})); }), "ModuleList: forward of one tensor");
}

// Weights that are stored in eight bits beside their scale are no parameters to train or to cast.
TEST(Module, StorageFormatsStayAsTheyAre) {
  struct Stored final : Module {
    Tensor codes, more, scale;
    Stored() {
      register_parameter("codes", codes, zeros({2}, {.dtype = kF8E4M3}));
      register_buffer("more", more, zeros({2}, {.dtype = kF8E5M2}));
      register_parameter("scale", scale, ones({}));
    }
  };
  auto stored = std::make_shared<Stored>();
  EXPECT_FALSE(stored->codes.requires_grad());
  stored->to(kBF16);
  EXPECT_EQ(stored->codes.dtype(), kF8E4M3);
  EXPECT_EQ(stored->more.dtype(), kF8E5M2);
  EXPECT_EQ(stored->scale.dtype(), kBF16);
  EXPECT_THROW(stored->to(kF8E4M3), UserError);
}

}  // namespace
}  // namespace tessera::nn
