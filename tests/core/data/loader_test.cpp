// The loader: the same batches however far ahead it reads; errors, stalls and shutdown.
#include "core/data/loader.h"

#include <atomic>
#include <chrono>
#include <functional>
#include <latch>
#include <ranges>
#include <thread>

#include "core/data/token_dataset.h"
#include "tests/support/temp_folder.h"

namespace tessera::data {
namespace {

// Rows hold the sample's index; sample number `bad` throws, every read takes `delay_ms`.
class Probe final : public Dataset {
 public:
  explicit Probe(int64_t size, int64_t bad = -1, int delay_ms = 0)
      : size_(size), bad_(bad), delay_ms_(delay_ms) {}
  int64_t size() const override { return size_; }
  Batch allocate(int64_t rows) const override {
    return {empty({rows, 1}, kI64), empty({rows, 1}, kI64)};
  }
  void read(const Sample& s, int64_t row, const Batch& to) const override {
    std::this_thread::sleep_for(std::chrono::milliseconds(delay_ms_));
    TESSERA_CHECK(s.number != bad_, "probe: sample {} is bad", s.number);
    to.inputs.data<int64_t>()[row] = s.index;
    to.targets.data<int64_t>()[row] = s.index + 1;
  }

 private:
  int64_t size_, bad_;
  int delay_ms_;
};

std::vector<int64_t> numbers(const Batch& b) {
  const int64_t* p = b.sample_numbers.data<int64_t>();
  return {p, p + b.rows()};
}

TEST(Loader, SameSequenceForAnyPrefetch) {
  SamplerOptions o{
      .dataset_size = 17, .micro_batches = 2, .micro_batch_size = 3, .seed = 4, .repeat = true};
  std::vector<int64_t> want, cursors;
  for (int prefetch : {0, 1, 2, 7}) {
    DataLoader loader(std::make_shared<Probe>(17), DistributedSampler(o), {.prefetch = prefetch});
    std::vector<int64_t> got, at;
    for (int i = 0; i < 20; ++i) {
      Batch b = *loader.next();
      EXPECT_EQ(b.inputs.shape(), (Shape{3, 1}));
      for (int64_t r = 0; r < 3; ++r) got.push_back(b.inputs.data<int64_t>()[r]);
      EXPECT_EQ(numbers(b)[0], i * 3);
      EXPECT_EQ(b.cursor, loader.cursor());
      at.push_back(b.cursor);
    }
    if (prefetch == 0) want = got, cursors = at;
    EXPECT_EQ(got, want);
    EXPECT_EQ(at, cursors);
  }
  EXPECT_EQ(cursors[0], 0);  // in the middle of the first step
  EXPECT_EQ(cursors[1], 6);
}

TEST(Loader, ResumesFromItsCursor) {
  SamplerOptions o{.dataset_size = 17, .micro_batch_size = 3, .repeat = true};
  DataLoader a(std::make_shared<Probe>(17), DistributedSampler(o), {.prefetch = 4});
  for (int i = 0; i < 5; ++i) a.next();
  DistributedSampler s(o);
  s.seek(a.cursor());
  DataLoader b(std::make_shared<Probe>(17), s, {.prefetch = 1});
  auto next = numbers(*a.next());
  EXPECT_EQ(numbers(*b.next()), next);
  a.seek(15);
  EXPECT_EQ(numbers(*a.next()), next);
}

TEST(Loader, SameSequenceForAnyNumberOfWorkers) {
  SamplerOptions o{.dataset_size = 31, .micro_batch_size = 13, .seed = 4, .repeat = true};
  auto rows = [&](int workers, int prefetch) {
    DataLoader loader(std::make_shared<Probe>(31, -1, 1), DistributedSampler(o),
                      {.prefetch = prefetch, .workers = workers});
    std::vector<int64_t> got;
    for (int i = 0; i < 6; ++i) {
      Batch b = *loader.next();
      for (int64_t r = 0; r < 13; ++r) got.push_back(b.inputs.data<int64_t>()[r]);
    }
    return got;
  };
  const std::vector<int64_t> want = rows(1, 0);
  for (int workers : {2, 3, 8})
    for (int prefetch : {1, 4}) EXPECT_EQ(rows(workers, prefetch), want) << workers;
}

// Several workers find several bad rows; the error is that of the first, whichever worker was
// quicker.
TEST(Loader, FirstBadRowCounts) {
  class Bad final : public Dataset {
   public:
    int64_t size() const override { return 0; }
    Batch allocate(int64_t rows) const override {
      return {empty({rows}, kI64), empty({rows}, kI64)};
    }
    void read(const Sample& s, int64_t, const Batch&) const override {
      if (s.number < 40) return;
      if (s.number == 43) std::this_thread::sleep_for(std::chrono::milliseconds(20));
      TESSERA_CHECK(s.number < 43, "bad: sample {}", s.number);
    }
  };
  for (int repeat = 0; repeat < 5; ++repeat) {
    DataLoader loader(std::make_shared<Bad>(),
                      DistributedSampler({.micro_batch_size = 32, .repeat = true}),
                      {.prefetch = 3, .workers = 4});
    EXPECT_TRUE(loader.next());
    expect_contains(error_of([&] { loader.next(); }), "bad: sample 43");
    expect_contains(error_of([&] { loader.next(); }), "bad: sample 43");  // it stays
  }
}

// However many workers there are, they read no further than `prefetch` batches ahead.
TEST(Loader, WorkersDoNotRunAhead) {
  class Counting final : public Dataset {
   public:
    explicit Counting(std::atomic<int64_t>& highest) : highest_(highest) {}
    int64_t size() const override { return 0; }
    Batch allocate(int64_t rows) const override {
      return {empty({rows}, kI64), empty({rows}, kI64)};
    }
    void read(const Sample& s, int64_t, const Batch&) const override {
      int64_t seen = highest_;
      while (seen < s.number && !highest_.compare_exchange_weak(seen, s.number)) {
      }
    }

   private:
    std::atomic<int64_t>& highest_;
  };
  std::atomic<int64_t> highest{-1};
  DataLoader loader(std::make_shared<Counting>(highest),
                    DistributedSampler({.micro_batch_size = 4, .repeat = true}),
                    {.prefetch = 3, .workers = 5});
  for (int64_t batch = 0; batch < 10; ++batch) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    EXPECT_LT(highest, (batch + 3) * 4);
    loader.next();
  }
}

TEST(Loader, OnePassEnds) {
  for (int prefetch : {0, 3}) {
    DataLoader loader(std::make_shared<Probe>(7),
                      DistributedSampler({.dataset_size = 7, .micro_batch_size = 3}),
                      {.prefetch = prefetch});
    int64_t rows = 0, batches = 0;
    while (auto b = loader.next()) rows += b->rows(), ++batches;
    EXPECT_EQ(rows, 7);
    EXPECT_EQ(batches, 3);
    EXPECT_FALSE(loader.next());
    EXPECT_EQ(loader.cursor(), 7);  // where the next pass begins
    loader.seek(loader.cursor());
    EXPECT_EQ(numbers(*loader.next()), (std::vector<int64_t>{7, 8, 9}));
  }
}

// The items of each pass of a range-for, in their order.
std::vector<std::vector<int64_t>> passes(DataLoader& loader, int count) {
  std::vector<std::vector<int64_t>> out(static_cast<size_t>(count));
  for (auto& pass : out)
    for (Batch& b : loader)
      for (int64_t r = 0; r < b.rows(); ++r) pass.push_back(b.inputs.data<int64_t>()[r]);
  return out;
}

TEST(Loader, ARangeForIsOnePassAndTheNextOneAnother) {
  for (int prefetch : {0, 3}) {
    DataLoader ordered(std::make_shared<Probe>(5), {.batch_size = 2, .prefetch = prefetch});
    const std::vector<int64_t> all{0, 1, 2, 3, 4};
    EXPECT_EQ(passes(ordered, 3), (std::vector<std::vector<int64_t>>(3, all)));
    EXPECT_EQ(ordered.cursor(), 15);

    DataLoader shuffled(std::make_shared<Probe>(50),
                        {.batch_size = 7, .shuffle = true, .seed = 3, .prefetch = prefetch});
    auto seen = passes(shuffled, 2);
    EXPECT_NE(seen[0], seen[1]);
    for (auto& pass : seen) {
      std::ranges::sort(pass);
      ASSERT_EQ(pass.size(), 50u);
      for (int64_t i = 0; i < 50; ++i) EXPECT_EQ(pass[size_t(i)], i);
    }
  }
}

TEST(Loader, APassThatWasLeftIsNotGoneOnWith) {
  DataLoader loader(std::make_shared<Probe>(6), {.batch_size = 2});
  for (Batch& b : loader)
    if (numbers(b)[0] == 2) break;
  std::vector<int64_t> first;
  for (Batch& b : loader) first.push_back(numbers(b)[0]);
  EXPECT_EQ(first, (std::vector<int64_t>{6, 8, 10}));
  // But one that seek() resumed is.
  loader.seek(14);
  first.clear();
  for (Batch& b : loader) first.push_back(numbers(b)[0]);
  EXPECT_EQ(first, (std::vector<int64_t>{14, 16}));
}

// A loop takes no batch that it does not use, so a run that resumes from the cursor neither skips
// nor repeats one, however the loop ended and wherever in the pass.
TEST(Loader, ALoopThatWasLeftIsResumedBehindItsLastBatch) {
  using Loop = std::function<void(DataLoader&, int64_t, std::vector<int64_t>&)>;
  const Loop loops[] = {[](DataLoader& loader, int64_t steps, std::vector<int64_t>& first) {
                          for (Batch& b : loader) {
                            first.push_back(numbers(b)[0]);
                            if (int64_t(first.size()) == steps) break;
                          }
                        },
                        [](DataLoader& loader, int64_t steps, std::vector<int64_t>& first) {
                          int64_t step = 0;
                          for (auto it = loader.begin(); step < steps && it != loader.end();
                               ++it, ++step)
                            first.push_back(it->sample_numbers.data<int64_t>()[0]);
                        },
                        [](DataLoader& loader, int64_t steps, std::vector<int64_t>& first) {
                          for (Batch& b : loader | std::views::take(steps))
                            first.push_back(numbers(b)[0]);
                        }};
  for (const Loop& loop : loops)
    for (int prefetch : {0, 1, 3})
      for (int64_t steps : {1, 3, 4}) {  // of the 4 of a pass
        const DataLoaderOptions options{.batch_size = 2, .prefetch = prefetch};
        DataLoader loader(std::make_shared<Probe>(8), options);
        std::vector<int64_t> seen;
        loop(loader, steps, seen);
        EXPECT_EQ(loader.cursor(), 2 * steps);
        DataLoader resumed(std::make_shared<Probe>(8), options);
        resumed.seek(loader.cursor());
        for (int pass = 0; pass < 2; ++pass)
          for (Batch& b : resumed) seen.push_back(numbers(b)[0]);
        const int64_t all = steps == 4 ? 12 : 8;  // three passes, or two
        ASSERT_EQ(int64_t(seen.size()), all) << prefetch << ' ' << steps;
        for (int64_t i = 0; i < all; ++i) EXPECT_EQ(seen[size_t(i)], 2 * i);
      }
}

TEST(Loader, ABatchThatALoopPassesOverIsTaken) {
  DataLoader loader(std::make_shared<Probe>(6), {.batch_size = 2});
  auto it = loader.begin();
  EXPECT_EQ(loader.cursor(), 0);
  ++it;
  EXPECT_EQ(loader.cursor(), 2);
  EXPECT_EQ(numbers(*it)[0], 2);
  EXPECT_EQ(numbers(*it)[1], 3);
  it++;
  EXPECT_TRUE(it != loader.end());
  ++it;
  EXPECT_TRUE(it == loader.end());
  EXPECT_EQ(loader.cursor(), 6);
}

TEST(Loader, DropsAShortLastBatchAndRepeatsWhereAskedTo) {
  DataLoader whole(std::make_shared<Probe>(7), {.batch_size = 3, .drop_last = true});
  EXPECT_EQ(passes(whole, 2), (std::vector<std::vector<int64_t>>(2, {0, 1, 2, 3, 4, 5})));
  DataLoader one(std::make_shared<Probe>(3), {.batch_size = 3, .drop_last = true});
  EXPECT_EQ(passes(one, 2), (std::vector<std::vector<int64_t>>(2, {0, 1, 2})));
  // A loop over passes would not end where they are empty.
  expect_contains(error_of([] {
                    DataLoader(std::make_shared<Probe>(2), {.batch_size = 3, .drop_last = true});
                  }),
                  "no step of a pass over 2 samples: one takes 3");
  // A rest that is too short for a step does not keep a resumed loader in the pass.
  DataLoader resumed(std::make_shared<Probe>(10), {.batch_size = 4, .drop_last = true});
  resumed.seek(8);
  EXPECT_FALSE(resumed.next());
  resumed.seek(resumed.cursor());
  EXPECT_EQ(resumed.next()->cursor, 14);
  EXPECT_THROW(DataLoader(nullptr, {.batch_size = 3}), UserError);
  DataLoader endless(std::make_shared<Probe>(3), {.batch_size = 2, .repeat = true});
  std::vector<int64_t> items;
  for (Batch& b : endless) {
    for (int64_t r = 0; r < 2; ++r) items.push_back(b.inputs.data<int64_t>()[r]);
    if (items.size() == 8) break;
  }
  EXPECT_EQ(items, (std::vector<int64_t>{0, 1, 2, 0, 1, 2, 0, 1}));
  for (Batch& b : endless) {  // it goes on
    EXPECT_EQ(numbers(b), (std::vector<int64_t>{8, 9}));
    break;
  }
  expect_contains(error_of([] { DataLoader l(std::make_shared<Probe>(0), {.batch_size = 2}); }),
                  ".repeat = true");
}

TEST(Loader, ErrorsArriveWithTheirBatchAndStay) {
  for (int prefetch : {0, 1, 4}) {
    DataLoader loader(std::make_shared<Probe>(0, 5),
                      DistributedSampler({.micro_batch_size = 2, .repeat = true}),
                      {.prefetch = prefetch});
    loader.next();
    loader.next();
    expect_contains(error_of([&] { loader.next(); }), "sample 5 is bad");
    expect_contains(error_of([&] { loader.next(); }), "sample 5 is bad");
    expect_contains(error_of([&] {
                      for (Batch& b : loader) b.rows();
                    }),
                    "sample 5 is bad");
    loader.seek(6);
    EXPECT_EQ(numbers(*loader.next())[0], 6);
  }
}

// Storage that answers no read until the test releases it.
class Stalled final : public Dataset {
 public:
  int64_t size() const override { return 0; }
  Batch allocate(int64_t rows) const override {
    return {empty({rows, 1}, kI64), empty({rows, 1}, kI64)};
  }
  void read(const Sample& s, int64_t row, const Batch& to) const override {
    ++reads, ++at_work;
    if (!began.try_wait()) began.count_down();
    go.wait();
    std::this_thread::sleep_for(std::chrono::milliseconds(slow_ms));
    to.inputs.data<int64_t>()[row] = s.index;
    --at_work;
    if (!ended.try_wait()) ended.count_down();
  }
  int slow_ms = 0;  // once it is let go
  mutable std::atomic<int> reads{0}, at_work{0};
  mutable std::latch began{1}, go{1}, ended{1};
};

TEST(Loader, WaitsNoLongerThanItsTimeout) {
  auto storage = std::make_shared<Stalled>();
  {
    DataLoader loader(storage, DistributedSampler({.micro_batch_size = 1, .repeat = true}),
                      {.prefetch = 1, .timeout_ms = 40});
    testing::internal::CaptureStderr();
    expect_contains(error_of([&] { loader.next(); }), "sample 0 on was not read within 40 ms");
    expect_contains(testing::internal::GetCapturedStderr(), "for the batch from sample 0 on");
  }
  EXPECT_FALSE(storage->ended.try_wait());  // the loader has ended before its reader
  storage->go.count_down();
  storage->ended.wait();
}

// The end waits again for readers that turned out to be slow.
TEST(Loader, StorageThatRecoversIsReadOn) {
  auto storage = std::make_shared<Stalled>();
  {
    DataLoader loader(storage, DistributedSampler({.micro_batch_size = 1, .repeat = true}),
                      {.prefetch = 1, .timeout_ms = 2000});
    storage->slow_ms = 200;
    expect_contains(error_of([&] { loader.next(); }), "was not read within 2000 ms");
    storage->go.count_down();
    EXPECT_TRUE(loader.next());
    while (storage->reads < 2) std::this_thread::yield();  // the next batch
  }
  EXPECT_EQ(storage->at_work, 0);
}

TEST(Loader, LeavesAReaderBehindThatIsStuckWhenItEnds) {
  auto storage = std::make_shared<Stalled>();
  {
    DataLoader loader(storage, DistributedSampler({.micro_batch_size = 1, .repeat = true}),
                      {.timeout_ms = 20});
    storage->began.wait();
  }
  EXPECT_FALSE(storage->ended.try_wait());
  storage->go.count_down();
  storage->ended.wait();
}

TEST(Loader, StopsAtOnceWithBatchesUnread) {
  auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < 20; ++i) {
    DataLoader loader(std::make_shared<Probe>(0, -1, 1),
                      DistributedSampler({.micro_batch_size = 1000, .repeat = true}),
                      {.prefetch = 8});
    if (i % 2) std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(5));
}

TEST(Loader, MovesAndRefuses) {
  DataLoader a(std::make_shared<Probe>(4), DistributedSampler({.dataset_size = 4}));
  DataLoader b = std::move(a);
  EXPECT_TRUE(b.next());
  expect_contains(error_of([] {
                    DataLoader l(std::make_shared<Probe>(4), DistributedSampler({.repeat = true}));
                  }),
                  "deals 0 items, the dataset has 4");
  expect_contains(error_of([] {
                    DataLoader l(std::make_shared<Probe>(0), DistributedSampler({.repeat = true}),
                                 {.prefetch = -1});
                  }),
                  "prefetch -1");
}

TEST(Loader, TextEndToEnd) {
  TempFolder dir;
  std::string text;
  for (int i = 0; i < 400; ++i) text += "to be or not to be, that is the question\n";
  TokenSplit split = load_tokens("text:" + dir.write("t", text), "char");
  auto windows = std::make_shared<RandomWindows>(split.train, 16, 7, split.vocab_size);
  DataLoader loader(windows,
                    DistributedSampler({.micro_batch_size = 4, .seed = 7, .repeat = true}));
  Batch b = *loader.next();
  EXPECT_EQ(b.inputs.shape(), (Shape{4, 16}));
  EXPECT_EQ(b.targets.dtype(), kI64);
  std::vector<TokenId> in, out;
  for (int t = 0; t < 16; ++t) {
    in.push_back(TokenId(b.inputs.data<int64_t>()[t]));
    out.push_back(TokenId(b.targets.data<int64_t>()[t]));
  }
  EXPECT_EQ(split.tokenizer->decode(in).substr(1), split.tokenizer->decode(out).substr(0, 15));
  EXPECT_NE(text.find(split.tokenizer->decode(in)), std::string::npos);
}

}  // namespace
}  // namespace tessera::data
