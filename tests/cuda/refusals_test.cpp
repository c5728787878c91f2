// Ops that refuse an operand: the host does not wait for them, nothing outside of an operand is
// touched, and the error comes to whoever waits next.
#include "core/backend/cuda/refusals.h"

#include <cstdlib>
#include <functional>
#include <thread>

#include "core/backend/cuda/pinned.h"
#include "core/ops/create.h"
#include "core/ops/fused.h"
#include "core/ops/indexing.h"
#include "core/ops/pointwise.h"
#include "core/ops/random.h"
#include "core/ops/sparse.h"
#include "core/ops/views.h"
#include "tests/cuda/card.h"

namespace tessera::cuda {
namespace {

class CudaRefusals : public OnCard {
 protected:
  void TearDown() override {
    if (device_count() > 0) error_of([&] { cuda::synchronize(stream_); });
  }
  Tensor integers(std::initializer_list<int64_t> values) const {
    return from_values<int64_t>(values, {int64_t(values.size())}).to(card_);
  }
  const Device card_{register_cuda(), 0};
};

struct Case {
  const char* what;                 // what the error says
  std::function<Tensor()> refused;  // enqueues it, on operands that are there
};

TEST_F(CudaRefusals, NobodyWaitsForThemAndTheNextWaitThrows) {
  const Tensor table = arange(0, 12, 1, {kF32, card_}).reshape({4, 3}),
               logits = arange(0, 12, 1, {kF32, card_}).reshape({4, 3}),
               bad = integers({0, 3, 7, 2}), targets = integers({0, 2, -5, 1}),
               wide = bad.reshape({4, 1}).expand({4, 3}).contiguous(),
               huge = integers({0, 1, int64_t(1) << 40, 0}), nothing = zeros({2, 0}, {kF32, card_}),
               firsts = integers({0, 0});
  const std::vector<Case> cases = {
      {"gather: the index 7 at element 6 is outside dim 0 of extent 4",
       [&] { return gather(table, 0, wide); }},
      {"scatter: the index 7 at element 6 is outside dim 0 of extent 4",
       [&] { return scatter(table, 0, wide, table); }},
      {"embedding: the id 7 at position 2 is outside the table of 4 rows",
       [&] { return embedding(bad, table); }},
      {"embedding: the id 2147483647 or more at position 2 is outside the table of 4 rows",
       [&] { return embedding(huge, table); }},
      {"cross_entropy: the target -5 at row 2 is not a class; expected 0 to 2 or ignore_index -100",
       [&] { return cross_entropy(logits, targets); }},
      {"cross_entropy: the target 0 at row 0 is not a class",
       [&] { return cross_entropy(nothing, firsts); }},
      {"floor_divide: integer division by zero at element 0",
       [&] { return floor_divide(bad, bad); }},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.what);
    cuda::synchronize(stream_);
    const int64_t waits = host_waits();
    const Tensor result = c.refused();
    const Tensor more = result + 1;
    EXPECT_EQ(host_waits(), waits);
    const std::string error = error_of([&] { more.cpu().raw_values(); });
    EXPECT_NE(error.find(c.what), std::string::npos) << error;
    EXPECT_NE(error.find("the op ran earlier"), std::string::npos) << error;
    EXPECT_EQ(error_of([&] { more.cpu().raw_values(); }), "no error");  // once
  }
}

TEST_F(CudaRefusals, TheOpItselfThrowsWhenItIsCalledAgain) {
  const Tensor table = arange(0, 12, 1, {kF32, card_}).reshape({4, 3}), bad = integers({9});
  embedding(bad, table);
  const StreamEvent ran(stream_);
  while (!ran.done()) std::this_thread::yield();
  const int64_t waits = host_waits();
  EXPECT_NE(error_of([&] { embedding(integers({1}), table); }).find("the id 9"), std::string::npos);
  EXPECT_LE(host_waits(), waits + 1);  // the copy of `{1}`
  EXPECT_EQ(error_of([&] { embedding(integers({1}), table).cpu().raw_values(); }), "no error");
}

TEST_F(CudaRefusals, RefusedPlacesAreZerosAndOthersAreRight) {
  const Tensor table = arange(1, 13, 1, {kF32, card_}).reshape({4, 3});
  const Tensor rows = embedding(integers({-1, 1, 4, int64_t(1) << 40}), table).cpu();
  EXPECT_NE(error_of([&] { rows.raw_values(); }), "no error");
  const std::vector<float> want{0, 0, 0, 4, 5, 6, 0, 0, 0, 0, 0, 0};
  for (int64_t i = 0; i < 12; ++i) EXPECT_EQ(rows.values<float>()[i], want[size_t(i)]) << i;
}

// The first of several is named, which made the others.
TEST_F(CudaRefusals, TheFirstIsNamed) {
  const Tensor table = arange(0, 12, 1, {kF32, card_}).reshape({4, 3});
  const Tensor rows = embedding(integers({5}), table);
  const Tensor divided = floor_divide(rows.to(kI64), rows.to(kI64));
  const std::string error = error_of([&] { divided.cpu().raw_values(); });
  EXPECT_NE(error.find("the id 5"), std::string::npos) << error;
  EXPECT_NE(error.find("(1 ops after it refused operands too)"), std::string::npos) << error;
}

// A thread that saves or sends what was computed hears of it, and so does the thread that computed.
TEST_F(CudaRefusals, EveryThreadThatWaitsThrowsUntilTheOwnHas) {
  const Tensor table = arange(0, 12, 1, {kF32, card_}).reshape({4, 3});
  const Tensor rows = embedding(integers({4}), table).cpu();
  std::string error;
  std::thread([&] { error = error_of([&] { rows.storage()->ready()->wait(); }); }).join();
  EXPECT_NE(error.find("the id 4"), std::string::npos) << error;
  EXPECT_NE(error_of([&] { rows.raw_values(); }).find("the id 4"), std::string::npos);
  EXPECT_EQ(error_of([&] { cuda::synchronize(stream_); }), "no error");
}

// A thread that writes what was computed must not take it for sound because the own thread has been
// told before.
TEST_F(CudaRefusals, WhatWasEnqueuedBeforeTheErrorIsNotSound) {
  const Tensor table = arange(0, 12, 1, {kF32, card_}).reshape({4, 3});
  const Tensor rows = embedding(integers({4}), table), copied = (rows + 1).cpu();
  const Ref<Event> arrives = copied.storage()->ready();
  ASSERT_TRUE(arrives);
  EXPECT_NE(error_of([&] { rows.cpu().raw_values(); }).find("the id 4"), std::string::npos);
  std::string error;
  std::thread([&] { error = error_of([&] { arrives->wait(); }); }).join();
  EXPECT_NE(error.find("the id 4"), std::string::npos) << error;
  const StreamEvent after(stream_);
  std::thread([&] { error = error_of([&] { const_cast<StreamEvent&>(after).wait(); }); }).join();
  EXPECT_EQ(error, "no error");
}

// What ran behind the wait that threw is told of together with it.
TEST_F(CudaRefusals, NoneComesTwice) {
  const Tensor table = arange(0, 12, 1, {kF32, card_}).reshape({4, 3});
  const Tensor first = embedding(integers({4}), table).cpu();
  const Tensor second = floor_divide(integers({1}), integers({0})).cpu();
  EXPECT_NE(error_of([&] { first.raw_values(); }).find("the id 4"), std::string::npos);
  EXPECT_EQ(error_of([&] { second.raw_values(); }), "no error");
  EXPECT_EQ(error_of([&] { cuda::synchronize(stream_); }), "no error");
}

// Streams go from thread to thread; errors do not, and none is lost.
TEST_F(CudaRefusals, AThreadOnStreamsOfOthersHasErrorsOfItsOwn) {
  const Tensor table = arange(0, 12, 1, {kF32, card_}).reshape({4, 3});
  for (int round = 0; round < 4; ++round) {
    std::string error;
    std::thread([&] {
      copy_stream(0, 0);  // taken first, so that it is given back last
      const Tensor rows = embedding(integers({round}), table).cpu();
      error = error_of([&] { rows.raw_values(); });
      embedding(integers({7}), table);  // nobody waits for it
    }).join();
    EXPECT_EQ(error, "no error") << round;
    std::thread([&] {
      const Tensor rows = embedding(integers({9}), table).cpu();
      error = error_of([&] { rows.raw_values(); });
    }).join();
    EXPECT_NE(error.find("the id 9"), std::string::npos) << error;
  }
}

// More ops that refuse than a program has; their words are used again.
TEST_F(CudaRefusals, EverNewSizesTakeNoEverNewWords) {
  for (int64_t rows = 1; rows <= 600; ++rows) {
    const Tensor table = zeros({rows, 1}, {kF32, card_});
    embedding(integers({rows == 599 ? rows : 0}), table);
  }
  EXPECT_NE(error_of([&] { cuda::synchronize(stream_); }).find("the id 599"), std::string::npos);
}

TEST_F(CudaRefusals, MemoryThatIsFreedSwallowsNone) {
  const Tensor table = arange(0, 12, 1, {kF32, card_}).reshape({4, 3});
  { const Tensor rows = embedding(integers({4}), table).cpu(); }
  pinned_allocator().release_cached();  // waits for the copy
  EXPECT_NE(error_of([&] { cuda::synchronize(stream_); }).find("the id 4"), std::string::npos);
}

// A kernel relies on offsets that it does not look at, so the call itself waits and throws.
TEST_F(CudaRefusals, OffsetsAreCheckedBeforeTheyAreUsed) {
  const Tensor values = arange(0, 12, 1, {kF32, card_}).reshape({4, 3});
  for (auto wrong : {integers({0, 3, 2, 4}), integers({0, 100000, 4}), integers({0, -70000, 4})}) {
    const std::string error = error_of([&] { segment_reduce(values, wrong, ScatterReduce::kSum); });
    EXPECT_NE(error.find("not in order"), std::string::npos) << error;
  }
  EXPECT_EQ(error_of([&] { cuda::synchronize(stream_); }), "no error");
}

TEST_F(CudaRefusals, SynchronouslyTheOpThatIsWrongThrows) {
  ::testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_EXIT(
      {
        setenv("TESSERA_CUDA_SYNCHRONOUS", "1", 1);
        const Tensor table = arange(0, 12, 1, {kF32, card_}).reshape({4, 3});
        const std::string error = error_of([&] { embedding(integers({9}), table); });
        std::fprintf(stderr, "%s\n", error.c_str());
        std::exit(error.ends_with("the id 9 at position 0 is outside the table of 4 rows") ? 0 : 1);
      },
      ::testing::ExitedWithCode(0), "the id 9");
}

}  // namespace
}  // namespace tessera::cuda
