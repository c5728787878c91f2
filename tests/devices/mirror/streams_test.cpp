// Two threads and two devices on one memory, errors of kernels, and what is seen where streams do
// not wait.
#include <unistd.h>

#include <atomic>
#include <thread>

#include "core/core.h"
#include "core/dispatch/copy.h"
#include "testing.h"

using namespace tessera;

namespace {

// Two threads add to one tensor in turn, each with temporaries whose memory the other one gets.
// Which thread is next is told outside of the device, so only events order what the streams do.
bool turns_add_up() {
  const Device d = mirror::device();
  Tensor shared = zeros({64}, {kF64, d});
  std::atomic<int> turn = 0;
  constexpr int kTurns = 40;
  auto work = [&](int mine) {
    NoGrad off;
    for (int t = mine; t < kTurns; t += 2) {
      while (turn != t) std::this_thread::yield();
      Tensor twice = shared * 2.0;
      shared.add_(twice - shared + 1.0);  // 2 x + 1
      if (t % 8 == 6) shared.assign_(shared - shared.mean() + 1.0);
      turn = t + 1;
    }
  };
  std::thread other(work, 1);
  work(0);
  other.join();
  double want = 0;
  for (int t = 0; t < kTurns; ++t) want = t % 8 == 6 ? 1 : 2 * want + 1;
  return equal(shared.cpu(), full({64}, want, {kF64}));
}

TEST(MirrorStreams, TwoThreadsWriteOneTensor) {
  mirror::for_each_seed([] { EXPECT_TRUE(turns_add_up()); });
}

// Neither reader is on the home stream, so each leaves an event for the writer.
TEST(MirrorStreams, AWriterWaitsForTheReadersOfTwoThreads) {
  mirror::for_each_seed([] {
    const Tensor numbers = arange(0, 64, 1, {kF64}), shared = numbers.to(mirror::device());
    Tensor sums[2];
    auto read = [&](int mine) {
      sums[mine] = zeros({64}, {kF64, mirror::device()});
      for (int i = 0; i < 300; ++i) sums[mine].add_(shared);
    };
    std::thread one(read, 0), other(read, 1);
    one.join(), other.join();
    shared.zero_();
    for (const Tensor& s : sums) EXPECT_TRUE(equal(s.cpu(), numbers * 300.0));
  });
}

TEST(MirrorStreams, AMissingWaitIsSeen) {
  mirror::lose_stream_waits(true);
  int seen = 0;
  for (uint64_t seed = 1; seed <= 5; ++seed) {
    mirror::set_seed(seed);
    seen += !turns_add_up();
  }
  mirror::set_seed({});
  mirror::lose_stream_waits(false);
  EXPECT_GT(seen, 0);
}

// Lets a thread with a stream of its own enqueue what `f` does, while nothing has run yet.
void elsewhere(const std::function<void()>& f) { std::thread(f).join(); }

void on_host_now(const Tensor& t) { t.cpu().raw_values(); }
Tensor counted() { return arange(0, 64, 1, {kF64}); }

TEST(MirrorStreams, MemoryIsReusedAfterTheOpsOfOtherStreams) {
  mirror::for_each_seed([] {
    const Device d = mirror::device();
    Tensor read = counted().to(d), written = counted().to(d), taken = counted().to(d), out, last;
    elsewhere([&] { out = read * 2.0; });
    read = {};
    const Tensor a = full({64}, 7.0, {kF64, d});  // where `read` was
    on_host_now(a);
    EXPECT_TRUE(equal(out.cpu(), counted() * 2.0));

    elsewhere([&] { written.add_(1.0), last = zeros({1}, {kF32, d}); });
    written = {};
    const Tensor b = full({64}, 8.0, {kF64, d});
    on_host_now(b), on_host_now(last);
    EXPECT_TRUE(equal(b.cpu(), full({64}, 8.0, {kF64})));

    elsewhere([&] { out = taken * 2.0; });
    const Tensor c = square(std::move(taken));  // in the memory of its operand
    on_host_now(c);
    EXPECT_TRUE(equal(out.cpu(), counted() * 2.0));
  });
}

// The functions that copy below the backend. What waits in vain for one of two events is seen,
// since the other one is of an earlier op.
TEST(MirrorStreams, CopiesWaitForOtherStreamsAndTheyForCopies) {
  mirror::for_each_seed([] {
    const Device d = mirror::device();
    auto make = [&] { return std::pair(counted().to(d), zeros({64}, {kF64, d})); };
    auto [from, to] = make();
    auto [from_other, to_other] = make();
    const Tensor sent = counted().to(d);
    Tensor last;
    elsewhere([&] {
      from.add_(1.0), to_other.fill_(5.0), sent.add_(1.0);
      last = zeros({1}, {kF32, d});
    });
    copy_values(to, from);
    copy_values(to_other, from_other);
    on_host_now(to), on_host_now(to_other);
    EXPECT_TRUE(equal(on_host(sent), counted() + 1.0));
    on_host_now(last);
    EXPECT_TRUE(equal(to.cpu(), counted() + 1.0));
    EXPECT_TRUE(equal(to_other.cpu(), counted()));

    elsewhere([&] { std::tie(from, to) = make(), std::tie(from_other, to_other) = make(); });
    copy_values(to, from);
    copy_values(to_other, from_other);
    elsewhere([&] {
      from.zero_();
      EXPECT_TRUE(equal((to_other * 1.0).cpu(), counted()));
    });
    EXPECT_TRUE(equal(to.cpu(), counted()));
  });
}

// A layer on each device and the loss on the CPU: backward goes the way back.
TEST(MirrorStreams, AModelLiesOnTwoDevices) {
  const Tensor x = randn({4, 8}), first = randn({8, 16}), second = randn({16, 3});
  auto gradients = [&](Device a, Device b) {
    Tensor w = first.clone().requires_grad_(), v = second.to(b).detach().requires_grad_();
    const Tensor h = tanh(matmul(x.to(a), w.to(a)));
    sum(square(matmul(h.to(b), v).cpu())).backward();
    EXPECT_EQ(v.grad().device(), b);
    return std::pair(w.grad(), v.grad());
  };
  const auto [dw, dv] = gradients(kCPU, kCPU);
  mirror::for_each_seed([&] {
    const auto [got_dw, got_dv] = gradients(mirror::device(0), mirror::device(1));
    EXPECT_TRUE(mirror::same_bits(got_dw, dw) && mirror::same_bits(got_dv, dv));
  });
}

// A copy to the host is pending until it is read, and later changes of its source wait for it.
TEST(MirrorStreams, ACopyHasTheValuesOfItsTime) {
  mirror::for_each_seed([] {
    const Tensor here = ones({8}), there = here.to(mirror::device());
    here.fill_(2.0);  // the copy to the device has been read from it
    const Tensor back = there.cpu();
    there.fill_(3.0);
    Tensor dropped = there.cpu();
    dropped = {};  // its memory is not reused before the copy has ended
    EXPECT_TRUE(equal(back, ones({8})));
    EXPECT_TRUE(equal(there.cpu(), full({8}, 3.0)));
  });
}

TEST(MirrorStreams, AnOpOfAProgramRunsWhereItsForwardIsOps) {
  static const auto twice = custom_op(
      "mirror::twice", [](const Meta& x) { return x; },
      [](const Tensor& x, Tensor& y) { y = x + x; });
  static const auto host = custom_op(
      "mirror::host", [](const Meta& x) { return x; },
      [](const Tensor& x, Tensor& y) { y.data<float>()[0] = x.values<float>()[0]; });
  mirror::for_each_seed([] {
    const Tensor x = full({4}, 1.5).to(mirror::device());
    EXPECT_TRUE(equal((twice(x) * 2.0).cpu(), full({4}, 6.0)));
    EXPECT_THROW(host(x), UserError);
  });
}

TEST(MirrorStreams, AKernelThatFailsIsReportedWhereItsStreamIsWaitedFor) {
  mirror::for_each_seed([] {
    const Device d = mirror::device();
    const Tensor x = ones({4}, {kF32, d}), at = from_values<int64_t>({7}, {1}).to(d);
    const Tensor bad = x.index_select(0, at) + 1.0, good = x * 3.0;
    EXPECT_THROW(bad.cpu().values<float>(), UserError);
    EXPECT_TRUE(equal(good.cpu(), full({4}, 3.0)));  // reported once
  });
}

TEST(MirrorStreams, TheHostCannotTouchTheMemory) {
  const Tensor x = ones({4}, {kF32, mirror::device()});
  EXPECT_THROW(x.values<float>(), UserError);
  int pipe_ends[2];
  ASSERT_EQ(pipe(pipe_ends), 0);
  EXPECT_EQ(write(pipe_ends[1], x.device_data(), 1), -1);  // the system asks as the host does
  EXPECT_EQ(errno, EFAULT);
  close(pipe_ends[0]), close(pipe_ends[1]);
}

}  // namespace
