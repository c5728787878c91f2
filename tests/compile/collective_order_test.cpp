// Ranks that replay steps compare their collectives at the first one. If they differ, errors say
// which ranks differ and from which node on, before anything moves.
#include <gtest/gtest.h>

#include <thread>

#include "collectives/call_order.h"
#include "collectives/loopback/run_ranks.h"
#include "collectives/ops.h"
#include "compile/compile.h"
#include "core/nn/scope.h"
#include "core/ops/create.h"
#include "core/ops/pointwise.h"
#include "core/ops/reduce.h"
#include "core/ops/views.h"
#include "tests/compile/bits.h"

namespace tessera::compiler {
namespace {

using test::expect_same_bits;

// Returns each rank's error; run_ranks throws that of the first one.
std::vector<std::string> errors_of(int ranks, const RunOptions& options,
                                   const std::function<void(ProcessGroup&)>& body) {
  std::vector<std::string> errors(static_cast<size_t>(ranks));
  try {
    run_ranks(
        ranks,
        [&](ProcessGroup& g) {
          try {
            body(g);
          } catch (const std::exception& e) {
            errors[size_t(g.rank())] = e.what();
            throw;
          }
        },
        options);
  } catch (const std::exception&) {
  }
  return errors;
}

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// Three sums. Once everything is recorded, rank `odd` makes the second with other operands than it
// should, as a stale replay or a faulty pass would.
void three_sums(ProcessGroup& g, int odd, int calls) {
  Ref<ProcessGroup> group = world_group();
  bool wrong = false;
  auto reduced = [&](const Tensor& x, const char* scope) {
    nn::Scope in(scope);
    return all_reduce(x, group);
  };
  auto program = [&](const Tensor& x, int64_t variant) {
    Tensor a = reduced(x * 2.0, "first");
    Tensor b = variant ? reduced(a + 1.0, "second") : reduced(cat(std::vector{a, a}), "second");
    return a + reduced(sum(b), "third");
  };
  auto step = compile(program);
  for (int call = 0; call < calls; ++call) {
    wrong = call == calls - 1 && g.rank() == odd;
    Tensor x = full({4}, double(g.rank() + call));
    for (int64_t variant : {0, 1})
      if (call < 2) expect_same_bits(step(x, variant), program(x, variant), "recorded");
    if (call >= 2) step(x, int64_t(wrong));
  }
}

class CallOrderOfRanks : public ::testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Backends, CallOrderOfRanks, ::testing::Values("loopback", "gloo"));

TEST_P(CallOrderOfRanks, RanksThatAgreeGoOn) {
  for (int ranks : {2, 4})
    for (const std::string& e :
         errors_of(ranks, {.backend = GetParam()}, [](ProcessGroup& g) { three_sums(g, -1, 6); }))
      EXPECT_EQ(e, "");
}

// The first replay of both variants, at the same call.
TEST_P(CallOrderOfRanks, ADisagreementIsNamedOnEveryRank) {
  for (int ranks : {2, 3, 4}) {
    std::vector<std::string> errors =
        errors_of(ranks, {.backend = GetParam()}, [](ProcessGroup& g) { three_sums(g, 1, 3); });
    for (const std::string& e : errors) {
      EXPECT_TRUE(has(e, "differ from call 2 of the step on")) << e;
      EXPECT_TRUE(has(e, "rank 1")) << e;
      EXPECT_TRUE(has(e, "all_reduce(") && has(e, "second forward")) << e;
    }
  }
}

// One rank reads a value in each call, so it runs its program while the others replay.
TEST_P(CallOrderOfRanks, ARankThatRunsItsProgramTakesNoPart) {
  for (const std::string& e : errors_of(3, {.backend = GetParam()}, [](ProcessGroup& g) {
         Ref<ProcessGroup> group = world_group();
         auto program = [&](const Tensor& x) {
           Tensor a = all_reduce(x, group);
           bool positive = g.rank() != 0 || sum(a).item<double>() > 0;
           EXPECT_TRUE(positive);
           return all_reduce(a * 2.0, group);
         };
         auto step = compile(program);
         for (int call = 0; call < 6; ++call) {
           Tensor x = full({4}, double(g.rank() + call + 1));
           expect_same_bits(step(x), program(x), "call " + std::to_string(call));
         }
         EXPECT_EQ(step.report().replays, g.rank() == 0 ? 0 : 4);
       }))
    EXPECT_EQ(e, "");
}

// A rank that is not there yet is waited for until the deadline, which names it.
TEST_P(CallOrderOfRanks, ARankThatIsAbsentIsNamedAtTheDeadline) {
  std::vector<std::string> errors =
      errors_of(2, {.backend = GetParam(), .timeout = Millis(400)}, [](ProcessGroup& g) {
        Ref<ProcessGroup> group = world_group();
        auto step = compile([&](const Tensor& x) { return all_reduce(x * 2.0, group); });
        for (int call = 0; call < 3; ++call) {
          if (call == 2 && g.rank() == 1) std::this_thread::sleep_for(std::chrono::seconds(2));
          Tensor y = step(full({4}, double(call)));
          y.data<float>();
        }
      });
  EXPECT_TRUE(has(errors[0], "rank 1")) << errors[0];
}

TEST(CallOrder, DigestsTellWhereListsPart) {
  using tessera::detail::OrderDigest;
  std::vector<uint64_t> calls;
  for (uint64_t i = 0; i < 200; ++i) calls.push_back(i * i + 7);
  CallOrder mine;
  mine.calls = calls;
  for (size_t i = 0; i < calls.size(); ++i) mine.names.push_back("call " + std::to_string(i + 1));
  for (size_t at : {size_t(0), size_t(3), size_t(15), size_t(20), size_t(77), size_t(199)}) {
    std::vector<uint64_t> other = calls;
    other[at] ^= 1;
    const OrderDigest digests[] = {tessera::detail::digest_of(calls),
                                   tessera::detail::digest_of(other),
                                   tessera::detail::digest_of(calls), OrderDigest()};
    std::vector<int> blame;
    std::string text = tessera::detail::compare_orders(digests, mine, 0, "t", blame);
    EXPECT_EQ(blame, std::vector{1});
    EXPECT_TRUE(has(text, "call " + std::to_string(at + 1))) << at << text;
    // Where it begins is known to a call up to 16, then to a quarter of the last power of two.
    const auto from = size_t(std::stoi(text.substr(text.find("from call ") + 10)));
    EXPECT_LE(from, at + 1);
    EXPECT_LE(at + 1 - from, at / 4) << text;
  }
  const OrderDigest equal[] = {tessera::detail::digest_of(calls), OrderDigest(),
                               tessera::detail::digest_of(calls)};
  std::vector<int> blame;
  EXPECT_EQ(tessera::detail::compare_orders(equal, mine, 0, "t", blame), "");
  std::vector<uint64_t> fewer(calls.begin(), calls.begin() + 5);
  const OrderDigest lengths[] = {tessera::detail::digest_of(calls),
                                 tessera::detail::digest_of(fewer)};
  std::string text = tessera::detail::compare_orders(lengths, mine, 0, "t", blame);
  EXPECT_TRUE(has(text, "from call 5 of") || has(text, "from call 6 of")) << text;
}

}  // namespace
}  // namespace tessera::compiler
