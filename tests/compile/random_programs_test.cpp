// Random programs through compile(), from their first call on, compared with the same programs run
// eagerly. A failure prints its seed; tests/support/fuzz.h says how to run others.
#include <gtest/gtest.h>

#include "compile/compile.h"
#include "core/dispatch/default_device.h"
#include "tests/compile/passes/close.h"
#include "tests/compile/passes/fuzz.h"
#include "tests/support/fuzz.h"
#include "tests/support/on_card.h"

namespace tessera::compiler {
namespace {

using test::RandomStep;
constexpr test::Tolerance kRounding{2e-5, 2e-5, 2e-2, 1e-1};

std::vector<Tensor> run_on(RandomStep& step, const std::vector<Tensor>& arguments) {
  step.inputs = arguments;
  Tensors out = step.run();
  step.inputs = {};
  return {out.begin(), out.end()};
}

// Arguments with other values at each call. Dense, or every second element of a last dim.
std::vector<Tensor> arguments_of(const std::vector<Tensor>& like, int call, bool spread) {
  std::vector<Tensor> list;
  for (const Tensor& t : like) {
    Tensor a = sin(t * double(call + 1) * 1.7);
    if (spread && t.ndim()) {
      Tensor twice[] = {a, a};
      a = slice(cat(twice, -1), -1, 0, 2 * a.size(-1), 2);
    }
    list.push_back(a);
  }
  return list;
}

// Results of earlier calls are compared again at the end.
CompileReport run_seed(uint64_t seed, const std::string& skip, const test::Tolerance& tolerance,
                       Device device = kCPU, int calls = 4) {
  RandomStep ours(seed), eager(seed);
  ours.whole_program = eager.whole_program = true;
  for (RandomStep* s : {&ours, &eager})
    for (std::vector<Tensor>* list : {&s->inputs, &s->state})
      for (Tensor& t : *list) t = t.to(device);
  const std::vector<Tensor> like = ours.inputs;
  auto step =
      compile([&](const std::vector<Tensor>& in) { return run_on(ours, in); }, {.skip = skip});
  std::vector<Tensor> got, want;
  auto keep = [](std::vector<Tensor>& list, const std::vector<Tensor>& more) {
    list.insert(list.end(), more.begin(), more.end());
  };
  for (int call = 0; call < calls; ++call) {
    std::string what = test::run_again(seed) + "call " + std::to_string(call) + " ";
    auto in = arguments_of(like, call, seed % 3 == 0),
         same = arguments_of(like, call, seed % 3 == 0);
    try {
      keep(got, step(in)), keep(want, run_on(eager, same));
    } catch (const Error& e) {
      ADD_FAILURE() << what << e.what();
      return {};
    }
    keep(got, in), keep(want, same);
    test::expect_close(got, want, tolerance, what);
    test::expect_close(ours.state, eager.state, tolerance, what + "state ");
    if (testing::Test::HasFailure()) return {};
  }
  return step.report();
}

void fuzz(uint64_t count, const std::string& skip, const test::Tolerance& tolerance) {
  const test::FuzzSeeds seeds = test::fuzz_seeds(count);
  int64_t replays = 0;
  for (uint64_t seed = seeds.first; seed < seeds.end() && !testing::Test::HasFailure(); ++seed)
    replays += run_seed(seed, skip, tolerance).replays;
  EXPECT_TRUE(!seeds.many() || replays > int64_t(seeds.count) / 4) << replays;
}

TEST(RandomPrograms, ComputeTheSameBits) { fuzz(3000, "decompose,accumulate,fuse", {}); }

using ProgramsOnCard = test::OnCard;

// Calls after the third are launches of graphs. Programs of even seeds are not rewritten, so that
// they have the bits of eager runs.
TEST_F(ProgramsOnCard, AgreeWithEagerRuns) {
  const test::FuzzSeeds seeds = test::fuzz_seeds(60);
  const DeviceScope scope(card_);
  int64_t graphs = 0;
  for (uint64_t seed = seeds.first; seed < seeds.end() && !HasFailure(); ++seed)
    graphs += seed % 2 ? run_seed(seed, "", kRounding, card_, 6).device_graphs
                       : run_seed(seed, "decompose,accumulate,fuse", {}, card_, 6).device_graphs;
  EXPECT_TRUE(!seeds.many() || graphs > int64_t(seeds.count) / 4) << graphs;
}

}  // namespace
}  // namespace tessera::compiler
