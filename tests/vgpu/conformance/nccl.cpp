// Statements about NCCL. Those of `Nccl` need neither card nor driver, so the vendor's library
// answers them anywhere; those of `NcclOnCards` need two cards, and ranks are threads.
#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <numeric>
#include <thread>

#include "tests/vgpu/conformance/fixture.h"

namespace vgpu_test {
namespace {

using tessera::cuda::kCaptureRelaxed;
using tessera::nccl::Comm;
using tessera::nccl::Config;
using tessera::nccl::DataType;
using tessera::nccl::RedOp;
using tessera::nccl::ScalarResidence;
using tessera::nccl::UniqueId;
using Outcome = tessera::nccl::Result;

TEST(Nccl, VersionIs2) {
  int version = 0;
  EXPECT_EQ(nccl().get_version(&version), Outcome::kSuccess);
  EXPECT_EQ(version / 10000, 2);
  EXPECT_GE(version, 22800) << "the structs of api.h are those of 2.28";
  EXPECT_EQ(nccl().get_version(nullptr), Outcome::kInvalidArgument);
}

TEST(Nccl, ErrorsHaveTexts) {
  const std::vector<std::string> texts = {"no error",
                                          "unhandled cuda error",
                                          "unhandled system error",
                                          "internal error",
                                          "invalid argument",
                                          "invalid usage",
                                          "remote process exited",
                                          "NCCL operation in progress",
                                          "unknown result code"};
  for (size_t i = 0; i < texts.size(); ++i)
    EXPECT_EQ(std::string(nccl().error_string(Outcome{static_cast<int>(i)})).find(texts[i]), 0u)
        << nccl().error_string(Outcome{static_cast<int>(i)});
}

TEST(Nccl, AnIdIsMadeWithoutACardAndIsUnique) {
  UniqueId a{}, b{};
  EXPECT_EQ(nccl().get_unique_id(&a), Outcome::kSuccess);
  EXPECT_EQ(nccl().get_unique_id(&b), Outcome::kSuccess);
  EXPECT_NE(std::memcmp(&a, &b, sizeof a), 0);
  EXPECT_EQ(nccl().get_unique_id(nullptr), Outcome::kInvalidArgument);
}

TEST(Nccl, GroupsEndWhereTheyBegan) {
  EXPECT_EQ(nccl().group_end(), Outcome::kInvalidUsage);
  EXPECT_EQ(nccl().group_start(), Outcome::kSuccess);
  EXPECT_EQ(nccl().group_start(), Outcome::kSuccess);
  EXPECT_EQ(nccl().group_end(), Outcome::kSuccess);
  EXPECT_EQ(nccl().group_end(), Outcome::kSuccess);
  EXPECT_EQ(nccl().group_end(), Outcome::kInvalidUsage);
}

TEST(Nccl, NoCommunicatorIsRefusedButEndedInPeace) {
  Outcome error{};
  EXPECT_EQ(nccl().comm_async_error(nullptr, &error), Outcome::kInvalidArgument);
  EXPECT_EQ(
      nccl().all_reduce(nullptr, nullptr, 1, DataType::kFloat32, RedOp::kSum, nullptr, nullptr),
      Outcome::kInvalidArgument);
  EXPECT_EQ(nccl().op_destroy(RedOp{5}, nullptr), Outcome::kInvalidArgument);
  EXPECT_EQ(nccl().comm_destroy(nullptr), Outcome::kSuccess);
  EXPECT_EQ(nccl().comm_abort(nullptr), Outcome::kSuccess);
}

/// One rank, which is a thread with a device of its own.
struct Rank {
  int rank;
  Comm comm = nullptr;
  StreamHandle stream = nullptr;

  void sync() const { EXPECT_EQ(cuda().stream_synchronize(stream), Result::kSuccess); }
  DevicePtr floats(std::vector<float> values) const { return upload(values, stream); }
  std::vector<float> values(DevicePtr p, size_t n) const { return download<float>(p, n, stream); }
  /// Until what was called is no longer in progress.
  Outcome settle() const {
    Outcome error = Outcome::kInProgress;
    while (error == Outcome::kInProgress) {
      EXPECT_EQ(nccl().comm_async_error(comm, &error), Outcome::kSuccess);
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    return error;
  }
};
void* at(DevicePtr p, size_t offset = 0) { return reinterpret_cast<void*>(p + offset); }

class NcclOnCards : public OnDevice {
 protected:
  void SetUp() override {
    OnDevice::SetUp();
    if (device_count() < 2) GTEST_SKIP() << "two cards are needed";
  }
  /// Runs `body` on two ranks, whose devices are `devices`.
  static void on_ranks(const std::function<void(Rank&)>& body, int blocking = 1,
                       std::vector<int> devices = {0, 1}, Outcome expected = Outcome::kSuccess) {
    UniqueId id{};
    ASSERT_EQ(nccl().get_unique_id(&id), Outcome::kSuccess);
    for (int d : devices) context_of(d);
    std::vector<std::thread> threads;
    for (int r = 0; r < 2; ++r)
      threads.emplace_back([&, r] {
        check(cuda().set_current(context_of(devices[static_cast<size_t>(r)])), "set current");
        Rank rank{r, nullptr, new_stream()};
        Config config;
        config.blocking = blocking;
        Outcome outcome = nccl().comm_init(&rank.comm, 2, id, r, &config);
        if (outcome == Outcome::kInProgress) outcome = rank.settle();
        EXPECT_EQ(outcome, expected);
        if (outcome == Outcome::kSuccess) {
          body(rank);
          EXPECT_EQ(nccl().comm_destroy(rank.comm), Outcome::kSuccess);
        } else {
          EXPECT_EQ(nccl().comm_abort(rank.comm), Outcome::kSuccess);
        }
        EXPECT_EQ(cuda().stream_synchronize(rank.stream), Result::kSuccess);
        EXPECT_EQ(cuda().stream_destroy(rank.stream), Result::kSuccess);
      });
    for (std::thread& t : threads) t.join();
  }
};

// What one card can say: a rank alone copies, and its calls are captured as others are.
class NcclOnOneCard : public OnDevice {
 protected:
  void SetUp() override {
    OnDevice::SetUp();
    if (const std::string why = why_no_nccl(); !why.empty()) GTEST_SKIP() << why;
  }
};

TEST_F(NcclOnOneCard, ACallOfOneRankIsCaptured) {
  UniqueId id{};
  ASSERT_EQ(nccl().get_unique_id(&id), Outcome::kSuccess);
  Rank r{0, nullptr, stream};
  Config config;
  config.blocking = 0;
  const Outcome met = nccl().comm_init(&r.comm, 1, id, 0, &config);
  ASSERT_TRUE(met == Outcome::kSuccess || met == Outcome::kInProgress);
  ASSERT_EQ(r.settle(), Outcome::kSuccess);
  const DevicePtr x = r.floats({3}), y = r.floats({0});
  tessera::cuda::GraphHandle graph = nullptr;
  tessera::cuda::GraphExecHandle exec = nullptr;
  ASSERT_EQ(cuda().begin_capture(stream, tessera::cuda::kCaptureRelaxed), Result::kSuccess);
  nccl().all_reduce(at(x), at(y), 1, DataType::kFloat32, RedOp::kSum, r.comm, stream);
  EXPECT_EQ(r.settle(), Outcome::kSuccess);
  ASSERT_EQ(cuda().end_capture(stream, &graph), Result::kSuccess);
  ASSERT_EQ(cuda().graph_instantiate(&exec, graph, 0), Result::kSuccess);
  EXPECT_EQ(cuda().graph_destroy(graph), Result::kSuccess);
  EXPECT_EQ(r.values(y, 1), (std::vector<float>{0}));
  EXPECT_EQ(cuda().graph_launch(exec, stream), Result::kSuccess);
  EXPECT_EQ(r.values(y, 1), (std::vector<float>{3}));
  EXPECT_EQ(cuda().graph_exec_destroy(exec), Result::kSuccess);
  EXPECT_EQ(nccl().comm_destroy(r.comm), Outcome::kSuccess);
}

TEST_F(NcclOnCards, ReducesAndGathers) {
  on_ranks([](Rank& r) {
    const float mine = static_cast<float>(r.rank + 1);
    const DevicePtr x = r.floats({mine, 10 * mine}), wide = r.floats({0, 0, 0, 0});
    EXPECT_EQ(nccl().all_reduce(at(x), at(x), 2, DataType::kFloat32, RedOp::kSum, r.comm, r.stream),
              Outcome::kSuccess);
    EXPECT_EQ(nccl().all_gather(at(x), at(wide), 2, DataType::kFloat32, r.comm, r.stream),
              Outcome::kSuccess);
    EXPECT_EQ(r.values(wide, 4), (std::vector<float>{3, 30, 3, 30}));
    EXPECT_EQ(nccl().reduce_scatter(at(wide), at(x), 2, DataType::kFloat32, RedOp::kAvg, r.comm,
                                    r.stream),
              Outcome::kSuccess);
    EXPECT_EQ(r.values(x, 2), (std::vector<float>{3, 30}));
    EXPECT_EQ(nccl().reduce(at(x), at(x), 2, DataType::kFloat32, RedOp::kProd, 1, r.comm, r.stream),
              Outcome::kSuccess);
    EXPECT_EQ(r.values(x, 2),
              r.rank == 1 ? (std::vector<float>{9, 900}) : (std::vector<float>{3, 30}));
    EXPECT_EQ(nccl().broadcast(at(x), at(x), 2, DataType::kFloat32, 1, r.comm, r.stream),
              Outcome::kSuccess);
    EXPECT_EQ(r.values(x, 2), (std::vector<float>{9, 900}));
  });
}

TEST_F(NcclOnCards, MovesPieces) {
  on_ranks([](Rank& r) {
    const float mine = static_cast<float>(10 * (r.rank + 1));
    const DevicePtr in = r.floats({mine, mine + 1}), out = r.floats({0, 0});
    EXPECT_EQ(nccl().all_to_all(at(in), at(out), 1, DataType::kFloat32, r.comm, r.stream),
              Outcome::kSuccess);
    EXPECT_EQ(r.values(out, 2),
              r.rank ? (std::vector<float>{11, 21}) : (std::vector<float>{10, 20}));
    EXPECT_EQ(nccl().gather(at(in), at(out), 1, DataType::kFloat32, 0, r.comm, r.stream),
              Outcome::kSuccess);
    EXPECT_EQ(r.values(out, 2),
              r.rank ? (std::vector<float>{11, 21}) : (std::vector<float>{10, 20}));
    EXPECT_EQ(nccl().scatter(at(in), at(out), 1, DataType::kFloat32, 1, r.comm, r.stream),
              Outcome::kSuccess);
    EXPECT_EQ(r.values(out, 1), (std::vector<float>{r.rank ? 21.f : 20.f}));
  });
}

TEST_F(NcclOnCards, MessagesOfAGroupProceedTogether) {
  on_ranks([](Rank& r) {
    constexpr size_t kMany = 1 << 20;
    const DevicePtr out = r.floats(std::vector<float>(kMany, static_cast<float>(r.rank)));
    const DevicePtr in = r.floats(std::vector<float>(kMany, -1));
    EXPECT_EQ(nccl().group_start(), Outcome::kSuccess);
    EXPECT_EQ(nccl().send(at(out), kMany, DataType::kFloat32, 1 - r.rank, r.comm, r.stream),
              Outcome::kSuccess);
    EXPECT_EQ(nccl().recv(at(in), kMany, DataType::kFloat32, 1 - r.rank, r.comm, r.stream),
              Outcome::kSuccess);
    EXPECT_EQ(nccl().group_end(), Outcome::kSuccess);
    EXPECT_EQ(r.values(in, kMany), std::vector<float>(kMany, static_cast<float>(1 - r.rank)));
  });
}

TEST_F(NcclOnCards, WorkWaitsForItsStreamAndHoldsUpNoOther) {
  on_ranks([](Rank& r) {
    const StreamHandle other = new_stream();
    const DevicePtr x = r.floats({1}), y = r.floats({2});
    Gate gate(r.stream);
    EXPECT_EQ(nccl().all_reduce(at(x), at(x), 1, DataType::kFloat32, RedOp::kSum, r.comm, r.stream),
              Outcome::kSuccess);
    EXPECT_EQ(download<float>(y, 1, other), (std::vector<float>{2}));
    EXPECT_EQ(cuda().stream_query(r.stream), Result::kNotReady);
    gate.open();
    EXPECT_EQ(r.values(x, 1), (std::vector<float>{2}));
    EXPECT_EQ(cuda().stream_destroy(other), Result::kSuccess);
  });
}

TEST_F(NcclOnCards, NothingIsStartedForNoElements) {
  on_ranks([](Rank& r) {
    if (r.rank == 0) {
      EXPECT_EQ(
          nccl().all_reduce(nullptr, nullptr, 0, DataType::kFloat32, RedOp::kSum, r.comm, r.stream),
          Outcome::kSuccess);
    }
    r.sync();
  });
}

TEST_F(NcclOnCards, CallsThatDoNotBlockAreAskedAfter) {
  on_ranks(
      [](Rank& r) {
        const DevicePtr x = r.floats({1});
        Outcome outcome =
            nccl().all_reduce(at(x), at(x), 1, DataType::kFloat32, RedOp::kSum, r.comm, r.stream);
        EXPECT_TRUE(outcome == Outcome::kInProgress || outcome == Outcome::kSuccess);
        EXPECT_EQ(r.settle(), Outcome::kSuccess);
        EXPECT_EQ(r.values(x, 1), (std::vector<float>{2}));
      },
      /*blocking=*/0);
}

TEST_F(NcclOnCards, SplitsByColorAndOrdersByKey) {
  on_ranks([](Rank& r) {
    Comm turned = nullptr, none = nullptr;
    EXPECT_EQ(nccl().comm_split(r.comm, 7, -r.rank, &turned, nullptr), Outcome::kSuccess);
    int rank = -1, count = 0;
    EXPECT_EQ(nccl().comm_rank(turned, &rank), Outcome::kSuccess);
    EXPECT_EQ(nccl().comm_count(turned, &count), Outcome::kSuccess);
    EXPECT_EQ(rank, 1 - r.rank);
    EXPECT_EQ(count, 2);
    EXPECT_EQ(nccl().comm_split(r.comm, r.rank ? tessera::nccl::kNoColor : 0, 0, &none, nullptr),
              Outcome::kSuccess);
    EXPECT_EQ(none == nullptr, r.rank == 1);
    const DevicePtr x = r.floats({static_cast<float>(r.rank)});
    EXPECT_EQ(nccl().broadcast(at(x), at(x), 1, DataType::kFloat32, 0, turned, r.stream),
              Outcome::kSuccess);
    EXPECT_EQ(r.values(x, 1), (std::vector<float>{1}));
    EXPECT_EQ(nccl().comm_destroy(turned), Outcome::kSuccess);
    EXPECT_EQ(nccl().comm_destroy(none), Outcome::kSuccess);
  });
}

TEST_F(NcclOnCards, TwoRanksOnOneDeviceAreRefused) {
  on_ranks([](Rank&) { FAIL() << "no communicator was expected"; }, /*blocking=*/0, {0, 0},
           Outcome::kInvalidUsage);
}

TEST_F(NcclOnCards, AbortEndsWorkThatWaitsForAPeer) {
  on_ranks([](Rank& r) {
    Comm second = nullptr;
    EXPECT_EQ(nccl().comm_split(r.comm, 0, r.rank, &second, nullptr), Outcome::kSuccess);
    const DevicePtr x = r.floats({1});
    if (r.rank == 0) {
      EXPECT_EQ(
          nccl().all_reduce(at(x), at(x), 1, DataType::kFloat32, RedOp::kSum, second, r.stream),
          Outcome::kSuccess);
      EXPECT_EQ(cuda().stream_query(r.stream), Result::kNotReady);
    }
    EXPECT_EQ(nccl().comm_abort(second), Outcome::kSuccess);
    r.sync();
  });
}

// Captures a sum of `x`, one float, on the rank's stream.
tessera::cuda::GraphExecHandle captured_sum(const Rank& r, Comm comm, DevicePtr x) {
  tessera::cuda::GraphHandle graph = nullptr;
  tessera::cuda::GraphExecHandle exec = nullptr;
  EXPECT_EQ(cuda().begin_capture(r.stream, kCaptureRelaxed), Result::kSuccess);
  EXPECT_EQ(nccl().all_reduce(at(x), at(x), 1, DataType::kFloat32, RedOp::kSum, comm, r.stream),
            Outcome::kSuccess);
  EXPECT_EQ(cuda().end_capture(r.stream, &graph), Result::kSuccess);
  EXPECT_EQ(cuda().graph_instantiate(&exec, graph, 0), Result::kSuccess);
  EXPECT_EQ(cuda().graph_destroy(graph), Result::kSuccess);
  return exec;
}

TEST_F(NcclOnCards, EachLaunchOfAGraphMakesItsCallsAgain) {
  on_ranks([](Rank& r) {
    const DevicePtr x = r.floats({1});
    // Rank 1 makes the same calls, the second without a graph.
    const auto exec = captured_sum(r, r.comm, x);
    EXPECT_EQ(r.values(x, 1), (std::vector<float>{1}));
    EXPECT_EQ(cuda().graph_launch(exec, r.stream), Result::kSuccess);
    if (r.rank == 0) {
      EXPECT_EQ(cuda().graph_launch(exec, r.stream), Result::kSuccess);
    } else {
      EXPECT_EQ(
          nccl().all_reduce(at(x), at(x), 1, DataType::kFloat32, RedOp::kSum, r.comm, r.stream),
          Outcome::kSuccess);
    }
    EXPECT_EQ(cuda().graph_launch(exec, r.stream), Result::kSuccess);
    EXPECT_EQ(r.values(x, 1), (std::vector<float>{8}));
    EXPECT_EQ(cuda().graph_exec_destroy(exec), Result::kSuccess);
  });
}

TEST_F(NcclOnCards, ACommunicatorEndsAfterTheGraphsThatHaveItsCalls) {
  on_ranks([](Rank& r) {
    Comm second = nullptr;
    EXPECT_EQ(nccl().comm_split(r.comm, 0, r.rank, &second, nullptr), Outcome::kSuccess);
    const auto exec = captured_sum(r, second, r.floats({1}));
    std::atomic<bool> ended = false;
    std::thread aborts([&, context = context_of(r.rank)] {
      check(cuda().set_current(context), "set current");
      EXPECT_EQ(nccl().comm_abort(second), Outcome::kSuccess);
      ended = true;
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    EXPECT_FALSE(ended);
    EXPECT_EQ(cuda().graph_exec_destroy(exec), Result::kSuccess);
    aborts.join();
  });
}

TEST_F(NcclOnCards, OperatorsThatScale) {
  on_ranks([](Rank& r) {
    float half = 0.5f;
    RedOp op{};
    EXPECT_EQ(nccl().op_create_pre_mul_sum(&op, &half, DataType::kFloat32,
                                           ScalarResidence::kHostImmediate, r.comm),
              Outcome::kSuccess);
    const DevicePtr x = r.floats({static_cast<float>(2 * r.rank)});
    EXPECT_EQ(nccl().all_reduce(at(x), at(x), 1, DataType::kFloat32, op, r.comm, r.stream),
              Outcome::kSuccess);
    EXPECT_EQ(nccl().op_destroy(op, r.comm), Outcome::kSuccess);
    EXPECT_EQ(r.values(x, 1), (std::vector<float>{1}));
  });
}

TEST_F(NcclOnCards, MemoryOfItsOwnIsRegisteredAndReduced) {
  on_ranks([](Rank& r) {
    void* memory = nullptr;
    void* handle = nullptr;
    EXPECT_EQ(nccl().mem_alloc(&memory, 8192), Outcome::kSuccess);
    EXPECT_EQ(nccl().comm_register(r.comm, memory, 8192, &handle), Outcome::kSuccess);
    const std::vector<float> ones(2048, 1);
    const auto p = reinterpret_cast<DevicePtr>(memory);
    check(cuda().copy_to_device(p, ones.data(), 8192, r.stream), "copy");
    EXPECT_EQ(
        nccl().all_reduce(memory, memory, 2048, DataType::kFloat32, RedOp::kMax, r.comm, r.stream),
        Outcome::kSuccess);
    EXPECT_EQ(r.values(p, 2048), ones);
    EXPECT_EQ(nccl().comm_deregister(r.comm, handle), Outcome::kSuccess);
    EXPECT_EQ(nccl().mem_free(memory), Outcome::kSuccess);
  });
}

}  // namespace
}  // namespace vgpu_test
