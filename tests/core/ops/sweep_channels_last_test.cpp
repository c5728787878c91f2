// Every op on operands in channels-last memory. The format is no part of the value and sums go by
// position, not by memory, so results and gradients have the bits of contiguous operands.
#include <algorithm>

#include "core/autograd/autograd.h"
#include "core/ops/pointwise.h"
#include "core/ops/reduce.h"
#include "tests/core/ops/sweep.h"
#include "tests/support/channels_last.h"

namespace tessera::sweep {
namespace {

using test::channels_last;
using test::with_channels;

// Gradients of a weighted sum of the results by the float operands; of the first result alone where
// the others have none. Undefined where there is none. `format`: of the cotangents.
List gradients(const Sample& s, const List& in, MemoryFormat format) {
  List leaves, wanted, result(in.size());
  for (const Tensor& t : in) {
    leaves.push_back(t.detach());
    if (is_float(t)) wanted.push_back(leaves.back().requires_grad_());
  }
  List out = run(s.prim, leaves), roots, cotangents;
  for (size_t k = 0; k < out.size(); ++k) {
    if (!out[k].requires_grad()) continue;
    roots.push_back(out[k]);
    const Tensor w = weights_like(out[k], k);
    cotangents.push_back(test::has_channels(w) ? contiguous(w, format) : w);
  }
  Tensors g;
  for (size_t count : {roots.size(), size_t(1)}) {
    if (roots.empty()) return result;
    try {
      g = grad(std::span(roots).first(count), wanted, std::span(cotangents).first(count),
               {.retain_graph = true});
      break;
    } catch (const UserError&) {
      if (count == 1) throw;
    }
  }
  for (size_t i = 0, k = 0; i < in.size(); ++i)
    if (is_float(in[i])) result[i] = g[k++];
  return result;
}

List defined_only(const List& l) {
  List out;
  for (const Tensor& t : l)
    if (t.defined()) out.push_back(t);
  return out;
}

struct Form {
  List in;
  std::string what;
};
// All operands in channels-last memory, then each of them alone.
void for_each_sample_with_forms(
    const std::function<void(const Sample&, const std::vector<Form>&)>& f) {
  int samples = 0;
  for_each_sample([&](const Sample& sample) {
    const std::optional<Sample> s = with_channels(sample);
    if (!s) return;
    ++samples;
    std::vector<Form> forms{{channels_last(s->in), "all operands channels-last"}};
    for (size_t i = 0; s->in.size() > 1 && i < s->in.size(); ++i)
      if (test::has_channels(s->in[i]))
        forms.push_back({channels_last(s->in, int(i)), fmt::format("operand {} channels-last", i)});
    f(*s, forms);
  });
  EXPECT_GT(samples, 150);
}

TEST(SweepChannelsLast, ResultsAreThoseOfContiguousOperands) {
  for_each_sample_with_forms([](const Sample& s, const std::vector<Form>& forms) {
    const List want = run(s.prim, s.in);
    for (const Form& form : forms) expect_close(run(s.prim, form.in), want, 0, form.what);
  });
}

TEST(SweepChannelsLast, InEveryFloat) {
  for (DType t : {kF32, kBF16, kF16}) {
    int compared = 0;
    for_each_sample_with_forms([&](const Sample& s, const std::vector<Form>& forms) {
      List want;
      try {
        want = run(s.prim, with_dtype(s.in, t, false));
      } catch (const UserError&) {
        return;  // takes no such floats
      }
      ++compared;
      expect_close(run(s.prim, with_dtype(forms[0].in, t, false)), want, 0,
                   std::string(name_of(t)));
    });
    EXPECT_GT(compared, 100) << name_of(t);
  }
}

TEST(SweepChannelsLast, GradientsAreThoseOfContiguousOperands) {
  int compared = 0;
  for_each_sample_with_forms([&](const Sample& s, const std::vector<Form>& forms) {
    if (!s.prim->differentiable()) return;
    List want;
    try {
      want = defined_only(gradients(s, s.in, MemoryFormat::kContiguous));
    } catch (const UserError&) {
      return;  // it has none, and says so
    }
    compared += !want.empty();
    for (const Form& form : forms)
      expect_close(defined_only(gradients(s, form.in, MemoryFormat::kChannelsLast)), want, 0,
                   "gradient, " + form.what);
    expect_close(defined_only(gradients(s, forms[0].in, MemoryFormat::kContiguous)), want, 0,
                 "gradient of a contiguous cotangent");
  });
  EXPECT_GT(compared, 100);
}

// What follows a convolution need not be laid out anew. A copy is asked for to be contiguous, and
// indices are read in one order.
TEST(SweepChannelsLast, PointwiseOpsKeepTheFormat) {
  for_each_sample_with_forms([](const Sample& s, const std::vector<Form>& forms) {
    if (!test::is_pointwise(s) || s.prim->name() == "copy" || s.prim->name() == "wrap_index")
      return;
    const List& in = forms[0].in;
    if (!std::ranges::all_of(in, test::has_channels)) return;
    EXPECT_TRUE(run(s.prim, in)[0].is_contiguous(MemoryFormat::kChannelsLast));
  });
}

}  // namespace
}  // namespace tessera::sweep
