// Labels of memory: the innermost counts, on each thread by itself, and modules and backward set
// it.
#include "core/tensor/memory_label.h"

#include <gtest/gtest.h>

#include <thread>

#include "core/autograd/autograd.h"
#include "core/nn/nn.h"
#include "core/ops/create.h"
#include "core/ops/reduce.h"
#include "core/tensor/named_tensor.h"

namespace tessera {
namespace {

std::string now() { return MemoryLabel::holder().text(); }

TEST(MemoryLabel, TheInnermostCounts) {
  EXPECT_EQ(now(), "(no label)");
  {
    MemoryLabel outer(MemoryUse::kActivations, "h.0");
    EXPECT_EQ(now(), "activations of h.0");
    {
      MemoryLabel inner(MemoryUse::kGradients);
      EXPECT_EQ(now(), "gradients");
      std::thread([] { EXPECT_EQ(now(), "(no label)"); }).join();
    }
    EXPECT_EQ(now(), "activations of h.0");
    MemoryLabel none(MemoryUse::kOther, "loss");
    EXPECT_EQ(now(), "loss");
  }
  EXPECT_EQ(now(), "(no label)");
}

TEST(MemoryLabel, AHolderIsOneObjectForEver) {
  std::string name = "h.0";
  const MemoryHolder& first = memory_holder(MemoryUse::kParameters, name);
  name = "h.1";  // at the same address
  EXPECT_EQ(first.of, "h.0");
  EXPECT_NE(&memory_holder(MemoryUse::kParameters, name), &first);
  EXPECT_EQ(&memory_holder(MemoryUse::kParameters, "h.0"), &first);
  EXPECT_NE(&memory_holder(MemoryUse::kGradients, "h.0"), &first);
}

TEST(MemoryLabel, ModuleOfAName) {
  EXPECT_EQ(module_of("h.0.attn.weight"), "h.0.attn");
  EXPECT_EQ(module_of("weight"), "");
}

/// Notes the label in its forward and in its backward.
class Notes : public nn::Module {
 public:
  std::vector<std::string> seen;

 protected:
  Tensor forward(Tensor x) override {
    seen.push_back(now());
    add_hook(x, [this](const Tensor& g) {
      seen.push_back(now());
      return g;
    });
    return x * 2.0;
  }
};

TEST(MemoryLabel, ModulesAndBackwardSetIt) {
  auto notes = std::make_shared<Notes>();
  auto model = nn::sequential(nn::linear(2, 2), notes);
  Tensor x = ones({2, 2});
  x.requires_grad_();
  sum((*notes)(x)).backward();
  EXPECT_EQ(notes->seen, (std::vector<std::string>{"activations of 1", "gradients"}));
  EXPECT_EQ(now(), "(no label)");
}

}  // namespace
}  // namespace tessera
