// Compiled steps of two ranks of which one does something else for once: it cannot capture, has no
// memory, is called with another size, on another stream, or with memory elsewhere. No rank waits
// for a vote or a graph that the other knows nothing of: they go on together, or fall back
// together.
#include <gtest/gtest.h>

#include <mutex>

#include "collectives/ops.h"
#include "compile/compile.h"
#include "core/backend/cuda/capture.h"
#include "core/core.h"
#include "core/dispatch/default_device.h"
#include "tests/compile/op_on_card.h"
#include "tests/support/ranks_on_cards.h"

namespace tessera {
namespace {

using test::op_between_graphs;
using test::op_on_card;
using test::OpOnCard;

class RanksApartOnCard : public test::RanksWithCards {
 protected:
  void SetUp() override {
    RanksWithCards::SetUp();
    if (!IsSkipped()) OpOnCard::add();
  }
  void TearDown() override { OpOnCard::when_run() = nullptr; }

  using Body = std::function<void(int rank, const Ref<ProcessGroup>& world)>;
  // Runs `body` on two ranks; returns what they said.
  std::string on_two(const Body& body) { return on_ranks(2, body); }
  std::string on_ranks(int ranks, const Body& body) {
    testing::internal::CaptureStderr();
    std::string error;
    try {
      run_on_cards(ranks, [&](ProcessGroup& group) { body(group.rank(), world_group()); },
                   {.timeout = Millis(30000)});
    } catch (const std::exception& e) {
      error = e.what();
    }
    const std::string said = testing::internal::GetCapturedStderr();
    EXPECT_EQ(error, "") << said;
    return said;
  }
  static int count(const std::string& text, const std::string& part) {
    int n = 0;
    for (size_t at = 0; (at = text.find(part, at)) != text.npos; at += part.size()) ++n;
    return n;
  }
  static Tensor of(double value, int64_t rows = 40) {
    return full({rows}, value, {kF32, default_device()});
  }
  // What both ranks have computed, given the operands of both.
  static void expect_values(const Tensor& got, double want) {
    const Tensor host = got.cpu();
    for (int64_t i = 0; i < host.numel(); ++i)
      ASSERT_NEAR(host.data<float>()[i], want, 1e-5 * std::max(1.0, std::abs(want)));
  }
};

constexpr const char* kOneByOne = "a step launches its kernels one by one";
constexpr const char* kApart = "run it in different ways at the same time";

// Takes all memory of a card, whose limit is small.
std::vector<Ref<Storage>> all_memory(Device card) {
  std::vector<Ref<Storage>> all;
  for (size_t bytes = size_t(1) << 24; bytes >= 256; bytes /= 2) try {
      while (true) all.push_back(make_ref<Storage>(bytes, card, allocator_of(card)));
    } catch (const Error&) {
    }
  return all;
}

// An input that is elsewhere at each call gets memory of its own behind the first run.
TEST_F(RanksApartOnCard, NoMemoryForAPlaceOfItsOwn) {
  if (!std::getenv("TESSERA_CUDA_MEMORY")) GTEST_SKIP() << "memory is to be taken up";
  int graphs[2] = {-1, -1};
  const std::string said = on_two([&](int rank, const Ref<ProcessGroup>& world) {
    std::vector<Ref<Storage>> taken;
    int runs = 0;
    if (rank == 1)
      OpOnCard::when_run() = [&](const Stream& stream) {
        if (stream.device.index == 1 && ++runs == 2) taken = all_memory(stream.device);
      };
    world->barrier();
    auto f = compile([&](const Tensor& x) { return exp(all_reduce(op_on_card(x), world)) * 2.0; });
    for (int k = 0; k < 7; ++k) {
      const Tensor got = f(of(0.1 * k));
      taken.clear();
      expect_values(got, std::exp(0.2 * k) * 2);
    }
    graphs[rank] = f.report().device_graphs;
  });
  EXPECT_EQ(graphs[0], 0);
  EXPECT_EQ(graphs[1], 0);
  EXPECT_EQ(count(said, kOneByOne), 1) << said;
  EXPECT_EQ(count(said, "out of memory"), 1) << said;
}

// A step of two graphs, of which the second has no collective.
TEST_F(RanksApartOnCard, ARankCannotCaptureAGraphWithoutCollectives) {
  OpOnCard::when_run() = [](const Stream& stream) {
    TESSERA_CHECK(stream.device.index == 0 || !cuda::is_capturing(), "it cannot be captured");
  };
  int graphs[2] = {-1, -1};
  const std::string said = on_two([&](int rank, const Ref<ProcessGroup>& world) {
    auto f = compile([&](const Tensor& x) {
      const Tensor sum = exp(all_reduce(sin(x), world));
      return exp(op_on_card(op_between_graphs(sum)));
    });
    for (int k = 0; k < 7; ++k)
      expect_values(f(of(0.1 * k)), std::exp(std::exp(2 * std::sin(0.1 * k))));
    graphs[rank] = f.report().device_graphs;
  });
  EXPECT_EQ(graphs[0], 0);
  EXPECT_EQ(graphs[1], 0);
  EXPECT_EQ(count(said, kOneByOne), 1) << said;
}

// The other rank's step has collectives in both graphs, and both are tried.
TEST_F(RanksApartOnCard, ARankCannotCaptureTheFirstOfTwoGraphs) {
  OpOnCard::when_run() = [](const Stream& stream) {
    TESSERA_CHECK(stream.device.index == 0 || !cuda::is_capturing(), "it cannot be captured");
  };
  const std::string said = on_two([&](int, const Ref<ProcessGroup>& world) {
    auto f = compile([&](const Tensor& x) {
      const Tensor sum = exp(all_reduce(op_on_card(sin(x)), world));
      return exp(all_reduce(sin(op_between_graphs(sum)), world));
    });
    for (int k = 0; k < 7; ++k)
      expect_values(f(of(0.1 * k)), std::exp(2 * std::sin(std::exp(2 * std::sin(0.1 * k)))));
    EXPECT_EQ(f.report().device_graphs, 0);
  });
  EXPECT_EQ(count(said, kOneByOne), 1) << said;
}

// A graph belongs to a stream: on another one a rank begins anew.
TEST_F(RanksApartOnCard, AnotherStreamForOnce) {
  const std::string said = on_two([&](int rank, const Ref<ProcessGroup>& world) {
    auto f = compile([&](const Tensor& x) { return exp(all_reduce(sin(x), world)) * 2.0; });
    for (int k = 0; k < 12; ++k) {
      std::optional<StreamScope> beside;
      if (k == 5 && rank == 1) beside.emplace(runtime_of(card_).copy_stream(rank, 0));
      const Tensor got = f(of(0.1 * k));
      EXPECT_EQ(f.report().device_graphs > 0, k > 1 && k < 5) << k;
      beside.reset();
      expect_values(got, std::exp(2 * std::sin(0.1 * k)) * 2);
    }
  });
  EXPECT_EQ(count(said, kApart), 1) << said;
}

TEST_F(RanksApartOnCard, AllOnAnotherStreamCaptureAnew) {
  const std::string said = on_two([&](int rank, const Ref<ProcessGroup>& world) {
    auto f = compile([&](const Tensor& x) { return exp(all_reduce(sin(x), world)) * 2.0; });
    for (int k = 0; k < 10; ++k) {
      std::optional<StreamScope> beside;
      if (k >= 5) beside.emplace(runtime_of(card_).copy_stream(rank, 0));
      const Tensor got = f(of(0.1 * k));
      EXPECT_EQ(f.report().device_graphs, k > 1 && k != 5) << k;
      beside.reset();
      expect_values(got, std::exp(2 * std::sin(0.1 * k)) * 2);
    }
  });
  EXPECT_EQ(count(said, kApart), 0) << said;
}

// What a step writes has no other place. Where it is elsewhere on one rank, all capture again, as
// NCCL demands; where that is so at each call, none does any more.
TEST_F(RanksApartOnCard, WrittenMemoryIsElsewhereOnOneRank) {
  const std::string said = on_two([&](int rank, const Ref<ProcessGroup>& world) {
    auto f = compile([&](const Tensor& x) {
      const Tensor sum = all_reduce(sin(x), world);
      assign_(x, sum);
      return exp(sum) * 2.0;
    });
    const Tensor places[2] = {of(0), of(0)};
    for (int k = 0; k < 30; ++k) {
      const Tensor x = places[rank == 1 && (k == 6 || k > 10) ? k % 2 : 1];
      assign_(x, of(0.1 * (k % 8)));
      const Tensor got = f(x);
      expect_values(got, std::exp(2 * std::sin(0.1 * (k % 8))) * 2);
      expect_values(x, 2 * std::sin(0.1 * (k % 8)));
      if (k > 1 && k < 16) {
        EXPECT_EQ(f.report().device_graphs, 1) << k;
      }
    }
    EXPECT_EQ(f.report().device_graphs, 0);
  });
  EXPECT_EQ(count(said, kApart), 0) << said;
}

// The last batch of an epoch, say.
TEST_F(RanksApartOnCard, AnotherSizeForOnce) {
  const std::string said = on_two([&](int rank, const Ref<ProcessGroup>& world) {
    auto f = compile([&](const Tensor& x) { return exp(all_reduce(sum(sin(x)), world)) * 2.0; });
    for (int k = 0; k < 12; ++k) {
      const auto rows = [&](int r) { return r == 1 && k == 6 ? 30 : 40; };
      const double value = 0.01 * k;
      const Tensor got = f(of(value, rows(rank)));
      expect_values(got, std::exp((rows(0) + rows(1)) * std::sin(value)) * 2);
      if (k > 1 && k < 6) {
        EXPECT_EQ(f.report().device_graphs, 1) << k;
      }
    }
  });
  EXPECT_EQ(count(said, kApart), 1) << said;
}

TEST_F(RanksApartOnCard, OtherSizesFromTheFirstCallOn) {
  for (const bool dynamic : {true, false}) {
    const std::string said = on_two([&](int rank, const Ref<ProcessGroup>& world) {
      auto f = compile([&](const Tensor& x) { return exp(all_reduce(sum(sin(x)), world)) * 2.0; },
                       {.dynamic = dynamic});
      for (int k = 0; k < 12; ++k) {
        const auto rows = [&](int r) { return r == 0 ? 40 : 40 + 2 * (k % 5); };
        const double value = 0.01 * k;
        const Tensor got = f(of(value, rows(rank)));
        expect_values(got, std::exp((rows(0) + rows(1)) * std::sin(value)) * 2);
      }
    });
    EXPECT_EQ(count(said, kApart), 1) << said;
  }
}

// Sizes of their own that stay make graphs with equal collectives.
TEST_F(RanksApartOnCard, SizesThatDifferBetweenRanksAndStay) {
  const std::string said = on_two([&](int rank, const Ref<ProcessGroup>& world) {
    auto f = compile([&](const Tensor& x) { return exp(all_reduce(sum(sin(x)), world)) * 2.0; });
    for (int k = 0; k < 6; ++k) {
      const double value = 0.01 * k;
      expect_values(f(of(value, 30 + 10 * rank)), std::exp(70 * std::sin(value)) * 2);
    }
    EXPECT_EQ(f.report().device_graphs, 1);
  });
  EXPECT_EQ(count(said, kApart), 0) << said;
}

// One rank reduces an argument, the other a value that dies there: only this one has room for it.
TEST_F(RanksApartOnCard, AnOperandThatIsAnInputOnOneRank) {
  on_two([&](int rank, const Ref<ProcessGroup>& world) {
    auto f = compile([&](const Tensor& x) {
      if (rank == 0) {
        all_reduce_(x, world);
        return exp(x) * 2.0;
      }
      const Tensor y = x * 1.0;
      all_reduce_(y, world);
      return exp(y) * 2.0;
    });
    for (int k = 0; k < 8; ++k) expect_values(f(of(0.1 * k)), std::exp(0.2 * k) * 2);
    EXPECT_EQ(f.report().device_graphs, 1);
  });
}

// A rank alone does something between two collectives that cannot be captured, so that its step is
// two graphs and the other's one.
TEST_F(RanksApartOnCard, ARankCutsItsStepBetweenCollectives) {
  for (const bool between : {true, false}) {
    const std::string said = on_two([&](int rank, const Ref<ProcessGroup>& world) {
      auto f = compile([&](const Tensor& x) {
        const Tensor sum = all_reduce(sin(x), world);
        const Tensor y = between && rank == 1 ? op_between_graphs(sum) : sum * 1.0;
        return exp(all_reduce(sin(y), world)) * 2.0;
      });
      for (int k = 0; k < 7; ++k)
        expect_values(f(of(0.1 * k)), std::exp(2 * std::sin(2 * std::sin(0.1 * k))) * 2);
      EXPECT_EQ(f.report().device_graphs, !between);
    });
    EXPECT_EQ(count(said, kApart), between) << said;
  }
}

// A rank alone reads a value between the collectives of two groups, so that it runs two graphs and
// the other ranks one. It votes for the first graph in both groups all the same.
TEST_F(RanksApartOnCard, ARankReadsBetweenTheCollectivesOfTwoGroups) {
  for (const bool reads : {true, false}) {
    const std::string said = on_two([&](int rank, const Ref<ProcessGroup>& world) {
      const Ref<ProcessGroup> other = world->split(0);
      auto f = compile([&](const Tensor& x) {
        const Tensor sum = all_reduce(sin(x), world);
        const double read = reads && rank == 1 ? sum.cpu().data<float>()[0] : 0;
        return exp(all_reduce(sin(sum), other)) * 2.0 + read * 0.0;
      });
      for (int k = 0; k < 7; ++k)
        expect_values(f(of(0.1 * k)), std::exp(2 * std::sin(2 * std::sin(0.1 * k))) * 2);
      EXPECT_EQ(f.report().device_graphs, !reads);
    });
    EXPECT_EQ(count(said, kApart), reads) << said;
  }
}

// The same of one rank of a grid, which is in a row and in a column: all four ranks are told.
TEST_F(RanksApartOnCard, ARankOfAGridReadsBetweenTheCollectivesOfRowAndColumn) {
  if (cards() < 4) GTEST_SKIP() << "4 cards are needed";
  const std::string said = on_ranks(4, [&](int rank, const Ref<ProcessGroup>& world) {
    const Ref<ProcessGroup> row = world->split(rank / 2), column = world->split(rank % 2);
    auto f = compile([&](const Tensor& x) {
      const Tensor sum = all_reduce(sin(x), row);
      const double read = rank == 1 ? sum.cpu().data<float>()[0] : 0;
      return exp(all_reduce(sin(sum), column)) * 2.0 + read * 0.0;
    });
    for (int k = 0; k < 7; ++k)
      expect_values(f(of(0.1 * k)), std::exp(2 * std::sin(2 * std::sin(0.1 * k))) * 2);
    EXPECT_EQ(f.report().device_graphs, 0);
  });
  EXPECT_GE(count(said, kApart), 1) << said;
}

// Two sizes make a graph for many sizes; the first one's own graph is launched again behind them.
TEST_F(RanksApartOnCard, ManySizesAndOneSizeAgain) {
  const std::string said = on_two([&](int, const Ref<ProcessGroup>& world) {
    auto f = compile([&](const Tensor& x) { return exp(all_reduce(sum(sin(x)), world)) * 2.0; });
    const int64_t rows[] = {40, 40, 40, 40, 30, 30, 36, 34, 36, 40, 40, 32, 40, 40};
    for (size_t k = 0; k < std::size(rows); ++k) {
      const double value = 0.001 * double(k);
      expect_values(f(of(value, rows[k])), std::exp(2 * double(rows[k]) * std::sin(value)) * 2);
    }
    EXPECT_GT(f.report().sizes, 0);
    EXPECT_EQ(f.report().device_graphs, 1);
  });
  EXPECT_EQ(count(said, kApart), 0) << said;
}

// A call without collectives that one rank makes alone is no run of which the others know.
TEST_F(RanksApartOnCard, ALoneCallBeforeTheFirstRun) {
  const std::string said = on_two([&](int rank, const Ref<ProcessGroup>& world) {
    auto f = compile([&](const Tensor& x, bool together) {
      return together ? exp(all_reduce(sin(x), world)) * 2.0 : exp(sin(x));
    });
    for (int k = 0; k < 9; ++k) {
      if (rank == 1 && (k == 0 || k == 4))
        expect_values(f(of(0.1 * k), false), std::exp(std::sin(0.1 * k)));
      expect_values(f(of(0.1 * k), true), std::exp(2 * std::sin(0.1 * k)) * 2);
    }
    EXPECT_EQ(f.report().device_graphs, 1);
  });
  EXPECT_EQ(count(said, kApart), 0) << said;
}

// What ranks decide on the host is called where the function was compiled.
TEST_F(RanksApartOnCard, ErrorsNameTheLineThatCompiles) {
  std::string errors[2];
  const CallSite here = CallSite::current();
  const auto body = [&](ProcessGroup& world) {
    auto f = compile([&](const Tensor& x) { return exp(all_reduce(sin(x), world_group())) * 2.0; });
    for (int k = 0; k < 5; ++k) f(of(0.1 * k)).cpu();
    try {
      world.rank() == 0 ? void(f(of(1))) : world.barrier();
    } catch (const CommError& e) {
      errors[world.rank()] = e.what();
    }
  };
  EXPECT_THROW(run_on_cards(2, body), CommError);
  const std::string line = "ranks_apart_test.cpp:" + std::to_string(here.line() + 2);
  for (const std::string& e : errors) EXPECT_NE(e.find(line), e.npos) << e;
}

}  // namespace
}  // namespace tessera
