// Contexts, streams, events, copies and fills on any card, real or virtual.
#include <barrier>
#include <numeric>
#include <thread>

#include "core/backend/cuda/exact_allocator.h"
#include "core/backend/cuda/pinned.h"
#include "core/base/error.h"
#include "tests/cuda/card.h"

namespace tessera::cuda {
namespace {

class CudaStreams : public OnCard {};

TEST_F(CudaStreams, DescribesItsCards) {
  for (int i = 0; i < device_count(); ++i) {
    const Properties& p = properties(i);
    EXPECT_FALSE(p.name.empty());
    EXPECT_EQ(p.uuid.size(), 40u) << p.uuid;
    EXPECT_EQ(p.uuid.substr(0, 4), "GPU-");
    EXPECT_FALSE(p.pci_bus_id.empty());
    EXPECT_GE(p.total_bytes, size_t(1) << 24);
    EXPECT_GE(p.major, 5);
    EXPECT_EQ(p.warp_size, 32);
    EXPECT_GE(p.multiprocessors, 1);
    EXPECT_GE(p.shared_bytes_per_block, size_t(48) << 10);
    EXPECT_EQ(p.architecture(), fmt::format("sm_{}{}", p.major, p.minor));
  }
  EXPECT_NE(runtime_of(register_cuda()).describe(0).find(properties(0).name), std::string::npos);
}

TEST_F(CudaStreams, NamesACardThatIsNotThere) {
  const int n = device_count();
  EXPECT_NE(error_of([&] { properties(n); }).find(fmt::format("there is no card {}", n)),
            std::string::npos);
  EXPECT_THROW(compute_stream(n), UserError);
  EXPECT_THROW(context_of(-1), UserError);
}

TEST_F(CudaStreams, PutsBackTheContextOfAThread) {
  ContextHandle before = nullptr, within = nullptr, after = nullptr;
  driver().set_current(context_of(0));
  driver().get_current(&before);
  for (int i = 0; i < device_count(); ++i) {
    {
      CurrentDevice current(i);
      driver().get_current(&within);
      EXPECT_EQ(within, context_of(i));
    }
    driver().get_current(&after);
    EXPECT_EQ(after, before);
  }
}

TEST_F(CudaStreams, AThreadHasTheCardOfItsContextAtHand) {
  std::thread([] { EXPECT_EQ(device_at_hand(), 0); }).join();  // stream_ made a context there
  for (int i = 0; i < device_count(); ++i) {
    CurrentDevice current(i);
    EXPECT_EQ(device_at_hand(), i);
  }
}

TEST_F(CudaStreams, GivesEachThreadOneComputeStream) {
  EXPECT_EQ(compute_stream(0), stream_);
  Stream one, other;
  std::barrier both(2);
  std::thread a([&] {
    one = compute_stream(0);
    both.arrive_and_wait();
    EXPECT_EQ(compute_stream(0), one);
  });
  std::thread b([&] {
    other = compute_stream(0);
    both.arrive_and_wait();
  });
  a.join();
  b.join();
  EXPECT_FALSE(one == other);
  EXPECT_FALSE(one == stream_);
  Stream later;
  std::thread([&] { later = compute_stream(0); }).join();
  EXPECT_TRUE(later == one || later == other);  // streams are recycled
}

TEST_F(CudaStreams, RecyclesSideStreams) {
  void* first = nullptr;
  {
    SideStream side(0, SideStream::Priority::kHigh), second(0, SideStream::Priority::kHigh);
    EXPECT_FALSE(side.stream() == second.stream());
    EXPECT_FALSE(side.stream() == stream_);
    first = second.stream().handle;
  }
  SideStream again(0, SideStream::Priority::kHigh), more(0, SideStream::Priority::kHigh);
  EXPECT_TRUE(again.stream().handle == first || more.stream().handle == first);
}

TEST_F(CudaStreams, EventsHappenWhenTheirWorkHasEnded) {
  ExactAllocator memory(0, 0);
  Array<uint32_t> a(memory, 1 << 16);
  fill(a.data(), 7, 4, a.size(), stream_);
  auto event = make_ref<StreamEvent>(stream_);
  event->wait();
  EXPECT_TRUE(event->done());
  EXPECT_EQ(a.read(stream_), std::vector<uint32_t>(a.size(), 7));
  event->wait_on(stream_);
}

TEST_F(CudaStreams, EventsAreMadeAhead) {
  std::vector<Ref<StreamEvent>> held;
  const auto hold = [&](int64_t n) {
    while (n-- > 0) held.push_back(make_ref<StreamEvent>(stream_));
  };
  hold(1);
  const int64_t made = events_made(0);
  EXPECT_GE(made, 100);  // those of a step, and more
  hold(99);
  EXPECT_EQ(events_made(0), made);
  while (events_made(0) == made) hold(1);
  const int64_t more = events_made(0);
  EXPECT_GE(more - made, 256);  // as many as there are, or so many
  const auto most = int64_t(held.size());
  held.clear();
  hold(most);
  EXPECT_EQ(events_made(0), more) << "they are used again";
}

// Each round writes on one stream what the other reads, so a missing wait gives a wrong sum.
TEST_F(CudaStreams, AStreamWaitsForAnothersEvent) {
  ExactAllocator memory(0, 0);
  SideStream side(0);
  constexpr size_t kN = 1 << 14;
  Array<uint32_t> a(memory, kN), b(memory, kN);
  for (uint32_t round = 1; round <= 20; ++round) {
    fill(a.data(), round, 4, kN, stream_);
    make_ref<StreamEvent>(stream_)->wait_on(side.stream());
    copy(b.data(), side.stream().device, a.data(), side.stream().device, kN * 4, side.stream());
    make_ref<StreamEvent>(side.stream())->wait_on(stream_);
    fill(a.data(), 0, 4, kN, stream_);
    EXPECT_EQ(b.read(stream_), std::vector<uint32_t>(kN, round));
  }
}

TEST_F(CudaStreams, ATimedEventTellsMilliseconds) {
  ExactAllocator memory(0, 0);
  Array<uint8_t> a(memory, 1 << 20);
  auto from = make_ref<StreamEvent>(stream_, StreamEvent::Timing::kOn);
  for (int i = 0; i < 10; ++i) fill(a.data(), 1, 1, a.size(), stream_);
  auto to = make_ref<StreamEvent>(stream_, StreamEvent::Timing::kOn);
  const double ms = elapsed_ms(*from, *to);
  EXPECT_GE(ms, 0);
  EXPECT_LT(ms, 1e4);
  // Each is waited for: neither stream is behind the other.
  SideStream side(0);
  fill(a.data(), 2, 1, a.size(), side.stream());
  auto late = make_ref<StreamEvent>(side.stream(), StreamEvent::Timing::kOn);
  EXPECT_LT(elapsed_ms(*late, *to), 1e4);
  late = make_ref<StreamEvent>(side.stream(), StreamEvent::Timing::kOn);
  EXPECT_LT(elapsed_ms(*to, *late), 1e4);
  auto untimed = make_ref<StreamEvent>(stream_);
  EXPECT_THROW(elapsed_ms(*from, *untimed), BugError);
}

TEST_F(CudaStreams, CopiesAndFills) {
  ExactAllocator memory(0, 0);
  std::vector<uint16_t> values(1000);
  std::iota(values.begin(), values.end(), uint16_t(3));
  Array<uint16_t> a(memory, 1000), b(memory, 1000);
  a.write(values, stream_);
  copy(b.data(), stream_.device, a.data(), stream_.device, 2000, stream_);
  copy(nullptr, stream_.device, nullptr, stream_.device, 0, stream_);
  EXPECT_EQ(b.read(stream_), values);
  fill(b.data(), 0xabcd, 2, 999, stream_);
  values.assign(1000, 0xabcd);
  values[999] = 1002;
  EXPECT_EQ(b.read(stream_), values);
  fill(b.data(), 0x11, 1, 3, stream_);
  values[0] = 0x1111;
  values[1] = 0xab11;
  EXPECT_EQ(b.read(stream_), values);
  EXPECT_THROW(fill(b.data(), 0, 8, 1, stream_), BugError);
}

TEST_F(CudaStreams, CopiesRows) {
  ExactAllocator memory(0, 0);
  std::vector<uint32_t> values(6 * 8);
  std::iota(values.begin(), values.end(), 0u);
  Array<uint32_t> a(memory, 6 * 8), b(memory, 6 * 5);
  a.write(values, stream_);
  fill(b.data(), 99, 4, b.size(), stream_);
  const Device card = stream_.device;
  copy_rows({b.data(), card, 5 * 4}, {a.data() + 2, card, 8 * 4}, 3 * 4, 6, stream_);
  std::vector<uint32_t> expected(6 * 5, 99);
  for (uint32_t row = 0; row < 6; ++row)
    for (uint32_t i = 0; i < 3; ++i) expected[row * 5 + i] = row * 8 + 2 + i;
  EXPECT_EQ(b.read(stream_), expected);
  std::vector<uint32_t> host(6 * 2, 1);
  copy_rows({host.data(), kCPU, 8}, {a.data(), card, 32}, 4, 6, stream_);
  synchronize(stream_);
  for (uint32_t row = 0; row < 6; ++row) EXPECT_EQ(host[2 * row], row * 8);
  EXPECT_EQ(host[1], 1u);
}

TEST_F(CudaStreams, CopiesBetweenCards) {
  if (device_count() < 2) GTEST_SKIP() << "one card";
  ExactAllocator memory(0, 0), far(1, 0);
  Array<uint32_t> a(memory, 4096), b(far, 4096);
  fill(a.data(), 5, 4, a.size(), stream_);
  copy(b.data(), device_of(1), a.data(), device_of(0), 4096 * 4, stream_);
  const Stream other = compute_stream(1);
  make_ref<StreamEvent>(stream_)->wait_on(other);
  EXPECT_EQ(b.read(other), std::vector<uint32_t>(4096, 5));
}

TEST_F(CudaStreams, TheRuntimeSaysWhetherTheHostsSideIsInUse) {
  DeviceRuntime& runtime = runtime_of(register_cuda());
  Allocator& memory = runtime.allocator(0);
  Array<uint32_t> a(memory, 256);
  std::vector<uint32_t> ordinary(256, 4);
  auto* pinned = static_cast<uint32_t*>(pinned_allocator().allocate(1024));
  EXPECT_FALSE(runtime.copy(a.data(), stream_.device, ordinary.data(), kCPU, 1024, stream_));
  EXPECT_TRUE(runtime.copy(pinned, kCPU, a.data(), stream_.device, 1024, stream_));
  EXPECT_TRUE(runtime.copy(pinned + 1, kCPU, a.data(), stream_.device, 4, stream_));
  runtime.synchronize(stream_);
  EXPECT_EQ(std::vector<uint32_t>(pinned, pinned + 256), ordinary);
  pinned_allocator().deallocate(pinned, 1024);
}

}  // namespace
}  // namespace tessera::cuda
