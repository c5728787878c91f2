// Tensors that two threads, two cards and copies use: each wait of the library is needed by one of
// these, and leaves no event to luck where every access is looked at (on-virtual-gpu --check).
#include <thread>

#include "core/base/error.h"
#include "core/core.h"
#include "core/dispatch/copy.h"
#include "tests/cuda/card.h"

namespace tessera::cuda {
namespace {

class CudaWaits : public OnCard {
 protected:
  void SetUp() override {
    OnCard::SetUp();
    if (!IsSkipped()) card_ = device_of(0);
  }
  /// As many as a kernel needs a while for, so that one that is not waited for is seen.
  Tensor counted() const { return arange(0, kN, 1, {kF32}); }
  Tensor there() const { return counted().to(card_); }

  static constexpr int64_t kN = 5000;
  Device card_;
};

/// Lets a thread with a stream of its own enqueue what `f` does.
void elsewhere(const std::function<void()>& f) { std::thread(f).join(); }

void expect_same(const Tensor& got, const Tensor& want) { EXPECT_TRUE(equal(got.cpu(), want)); }

TEST_F(CudaWaits, AReaderWaitsForAnotherThreadsWriter) {
  const Tensor x = there();
  elsewhere([&] { x.add_(1.0); });
  expect_same(x * 2.0, (counted() + 1.0) * 2.0);
  const Tensor y = there();
  Tensor out;
  elsewhere([&] { out = y + 1.0; });  // the home stream of x and y is this thread's
  expect_same(out, counted() + 1.0);
}

TEST_F(CudaWaits, AWriterWaitsForTheReadersOfTwoThreads) {
  const Tensor shared = there();
  Tensor sums[2];
  const auto read = [&](int mine) {
    sums[mine] = zeros({kN}, {kF32, card_});
    for (int i = 0; i < 5; ++i) sums[mine].add_(shared);
  };
  std::thread one(read, 0), other(read, 1);
  one.join(), other.join();
  shared.zero_();
  for (const Tensor& s : sums) expect_same(s, counted() * 5.0);
}

TEST_F(CudaWaits, AWriterWaitsForAnotherThreadsWriter) {
  const Tensor x = there();
  elsewhere([&] { x.add_(1.0); });
  x.fill_(7.0);
  expect_same(x, full({kN}, 7.0));
}

TEST_F(CudaWaits, MemoryIsReusedAfterTheOpsOfOtherStreams) {
  Tensor read = there(), written = there(), taken = there(), out;
  elsewhere([&] { out = read * 2.0; });
  read = {};
  const Tensor a = full({kN}, 7.0, {kF32, card_});  // where `read` was
  expect_same(a, full({kN}, 7.0));
  expect_same(out, counted() * 2.0);

  elsewhere([&] { written.add_(1.0); });
  written = {};
  const Tensor b = full({kN}, 8.0, {kF32, card_});
  expect_same(b, full({kN}, 8.0));

  elsewhere([&] { out = taken * 2.0; });
  const Tensor c = square(std::move(taken));  // in the memory of its operand
  expect_same(out, counted() * 2.0);
  expect_same(c, square(counted()));
}

TEST_F(CudaWaits, CopiesWaitForOtherStreamsAndTheyForCopies) {
  const Tensor from = there(), to = zeros({kN}, {kF32, card_}), sent = there();
  elsewhere([&] { from.add_(1.0), to.fill_(5.0), sent.add_(1.0); });
  copy_values(to, from);
  expect_same(on_host(sent), counted() + 1.0);
  expect_same(to, counted() + 1.0);

  Tensor source, target;
  elsewhere([&] { source = there(), target = zeros({kN}, {kF32, card_}); });
  copy_values(target, source);  // not on their home stream
  elsewhere([&] {
    source.zero_();
    expect_same(target * 1.0, counted());
  });
  expect_same(target, counted());
}

TEST_F(CudaWaits, ACopyHasTheValuesOfItsTime) {
  const Tensor x = there(), back = x.cpu();
  x.fill_(3.0);
  Tensor dropped = x.cpu();
  dropped = {};  // its memory is not reused before the copy has ended
  const Tensor again = x.cpu();
  EXPECT_TRUE(equal(back, counted()));
  EXPECT_TRUE(equal(again, full({kN}, 3.0)));

  // From pinned memory, which the host may change when the copy has ended.
  const Tensor pinned = transferred(x, kCPU);
  pinned.fill_(1.0);
  const Tensor up = pinned.to(card_);
  pinned.fill_(2.0);
  expect_same(up, full({kN}, 1.0));
}

/// Brings memory to a storage when somebody waits for that.
class Promise final : public Event {
 public:
  explicit Promise(Tensor memory) : memory_(std::move(memory)) {}
  bool done() const override { return kept_; }
  void wait() override {
    if (!std::exchange(kept_, true)) storage->provide(memory_.storage());
  }
  Storage* storage = nullptr;

 private:
  const Tensor memory_;
  bool kept_ = false;
};

TEST_F(CudaWaits, PromisedMemoryBringsItsWritersAndReaders) {
  const Tensor memory = there(), read = there();
  Tensor out;
  elsewhere([&] { memory.add_(1.0), out = read * 2.0; });
  const auto promised = [](const Tensor& m) {
    const auto promise = make_ref<Promise>(m);
    const auto storage = make_ref<Storage>(m.nbytes(), m.device(), promise);
    promise->storage = storage.get();
    return Tensor(m.meta(), storage);
  };
  expect_same(promised(memory) * 2.0, (counted() + 1.0) * 2.0);
  promised(read).fill_(7.0);
  expect_same(out, counted() * 2.0);
}

TEST_F(CudaWaits, OpsWaitOnTheStreamOfTheirOwnCard) {
  if (device_count() < 2) GTEST_SKIP() << "one card";
  const Device far = device_of(1);
  const Tensor x = there(), y = (x + 1.0).to(far);
  x.zero_();
  const Tensor z = (y * 2.0).to(card_);
  y.zero_();
  expect_same(z - 1.0, (counted() + 1.0) * 2.0 - 1.0);
}

// The host writes the tables of the second update while those of the first are perhaps not copied.
TEST_F(CudaWaits, AnUpdateLeavesTheTablesOfAnotherAlone) {
  const Tensor rate = full({}, 0.5, {kF64, card_}), one = full({}, 1.0, {kF64, card_});
  std::vector<Tensor> params, gradient{there()};
  for (int i = 0; i < 8; ++i) params.push_back(there());
  for (const Tensor& p : params) sgd_update_({&p, 1}, gradient, {}, rate, one, {.count = 1});
  for (const Tensor& p : params) expect_same(p, counted() * 0.5);
}

// Operands on two cards are an error that names both, and change nothing.
TEST_F(CudaWaits, OperandsOfTwoCardsAreRefused) {
  if (device_count() < 2) GTEST_SKIP() << "one card";
  const Tensor x = there(), y = counted().to(device_of(1));
  for (const auto& f :
       {std::function<void()>([&] { x + y; }), std::function<void()>([&] { x.add_(y); })}) {
    const std::string error = error_of(f);
    EXPECT_NE(error.find("operands are on cuda:0 and cuda:1; move them to one device with to()"),
              std::string::npos)
        << error;
  }
  expect_same(x, counted());
  expect_same(y, counted());
  expect_same(x + y.to(card_), counted() * 2.0);
}

}  // namespace
}  // namespace tessera::cuda
