// What a registered device is asked for, and in which order: a device that notes every request, and
// whose memory is the host's, stands for one that works by itself.
#include "core/tensor/device_runtime.h"

#include <gtest/gtest.h>

#include <map>

#include "core/ops/create.h"
#include "core/ops/pointwise.h"
#include "core/tensor/tensor.h"

namespace tessera {
namespace {

std::vector<std::string> notes;
std::vector<std::string> take_notes() { return std::exchange(notes, {}); }
using Notes = std::vector<std::string>;

thread_local char current_stream = 'a';  // its address is the handle
std::map<void*, char>& streams() {
  static std::map<void*, char> names;
  return names;
}
Stream stream_called(Device d, char name) {
  static char handles[26];
  streams()[&handles[name - 'a']] = name;
  return {d, &handles[name - 'a']};
}
char name_of(const Stream& s) { return streams().at(s.handle); }

class NotingEvent final : public Event {
 public:
  explicit NotingEvent(char of) : of_(of) {}
  bool done() const override { return false; }
  void wait() override { notes.push_back(std::string("host waits for ") + of_); }
  void wait_on(const Stream& s) override {
    if (name_of(s) != of_) notes.push_back(fmt::format("{} waits for {}", name_of(s), of_));
  }

 private:
  char of_;
};

class NotingAllocator final : public Allocator {
 public:
  void* allocate(size_t bytes) override { return cpu_allocator().allocate(bytes); }
  void deallocate(void* p, size_t bytes) override {
    notes.push_back("free");
    cpu_allocator().deallocate(p, bytes);
  }
  void deallocate_after(void* p, size_t bytes, std::span<const Ref<Event>> pending) override {
    notes.push_back(fmt::format("free after {}", pending.size()));
    cpu_allocator().deallocate(p, bytes);
  }
};

class Noting final : public DeviceRuntime {
 public:
  std::string_view name() const override { return "noting"; }
  int count() override { return 2; }
  std::string describe(int) override { return "a device of this test"; }
  Allocator& allocator(int) override {
    static NotingAllocator allocator;
    return allocator;
  }
  MemoryStats memory_stats(int) override { return {.live_bytes = 7}; }
  void reset_peak_memory(int) override {}
  void release_cached_memory(int) override {}
  Stream stream(int index) override {
    return stream_called({kind(), int8_t(index)}, current_stream);
  }
  Ref<Event> record(const Stream& s) override { return make_ref<NotingEvent>(name_of(s)); }
  bool copy(void* to, Device, const void* from, Device, size_t bytes, const Stream& s) override {
    notes.push_back(fmt::format("copy of {} bytes on {}", bytes, name_of(s)));
    std::memcpy(to, from, bytes);
    return true;
  }
};
Device noting(int index = 0) {
  static const DeviceKind kind = register_device(std::make_unique<Noting>());
  return {kind, int8_t(index)};
}

Ref<Storage> storage() { return make_ref<Storage>(64, noting(), allocator_of(noting())); }

TEST(DeviceRuntime, IsFoundByItsName) {
  const Device d = noting(1);
  EXPECT_EQ(to_string(d), "noting:1");
  EXPECT_EQ(parse_device("noting:1"), d);
  EXPECT_EQ(parse_device("noting"), noting(0));
  EXPECT_EQ(parse_device("cpu"), kCPU);
  EXPECT_EQ(parse_device("meta"), kMeta);
  EXPECT_EQ(find_device_kind("noting"), d.kind);
  EXPECT_EQ(find_device_kind("nothing"), std::nullopt);
  EXPECT_EQ(memory_stats(d).live_bytes, 7);
  for (const char* text : {"nothing", "cpu:0", "meta:0", "noting:", "noting:-1", "noting:1x", "",
                           "noting:1000", "cpux"})
    EXPECT_THROW(parse_device(text), UserError) << text;
  EXPECT_THROW(register_device(std::make_unique<Noting>()), UserError);
}

TEST(DeviceRuntime, WithoutAClockThereAreNoTimes) {
  DeviceRuntime& runtime = runtime_of(noting());
  EXPECT_FALSE(runtime.record_timed(runtime.stream(0)));
  NotingEvent from('a'), to('a');
  EXPECT_THROW(runtime.elapsed_ms(from, to), BugError);
  EXPECT_EQ(runtime.why_times_mean_nothing(0), "");
}

TEST(DeviceRuntime, FindingsNameEachDevice) {
  EXPECT_EQ(findings_text(runtime_of(noting()).findings()),
            "ok    noting:0: a device of this test\nok    noting:1: a device of this test\n");
  const Finding to_fix{Finding::Level::kFix, "a", "b"};
  EXPECT_EQ(findings_text({&to_fix, 1}), "FIX   a\n      -> b\n");
}

TEST(DeviceRuntime, AnIndexThatIsNotThereIsRefused) {
  try {
    empty({2}, kF32, noting(2));
    ADD_FAILURE() << "accepted";
  } catch (const UserError& e) {
    EXPECT_STREQ(e.what(), "empty: there is no noting:2; noting has devices 0 to 1");
  }
}

TEST(DeviceRuntime, TheHostReadsNoValuesOfADevice) {
  const Tensor t = empty({2}, kF32, noting());
  EXPECT_THROW(t.raw(), UserError);
  EXPECT_THROW(t.raw_values(), UserError);
  EXPECT_THROW(t.data<float>(), UserError);
  EXPECT_NE(t.device_data(), nullptr);
}

TEST(DeviceRuntime, TransfersGoThereAndBackWithoutAWaitOfTheHost) {
  const Tensor x = from_values<float>({1, 2, 3}, {3});
  take_notes();
  Tensor there = x.to(noting());
  EXPECT_EQ(there.device(), noting());
  Tensor back = there.cpu();
  EXPECT_EQ(take_notes(), (Notes{"copy of 12 bytes on a", "copy of 12 bytes on a"}));
  EXPECT_EQ(back.values<float>()[2], 3);
  EXPECT_EQ(take_notes(), (Notes{"host waits for a"}));
  there = {};
  EXPECT_EQ(take_notes(), (Notes{"free"}));  // on its own stream, whose order is enough
  x.fill_(0);                                // the copy has read it
  EXPECT_EQ(take_notes(), (Notes{"host waits for a"}));
}

TEST(DeviceRuntime, WorkOnTheHomeStreamNeedsNoEvent) {
  const Stream home = stream_of(noting());
  const Ref<Storage> s = storage();
  take_notes();
  s->wait_writable(home), s->used_on(home, true);
  s->wait_ready(home), s->used_on(home, false);
  s->wait_writable(home), s->used_on(home, true);
  EXPECT_EQ(take_notes(), Notes{});
}

TEST(DeviceRuntime, AnotherStreamWaitsForTheHomeStreamAndItForTheOther) {
  const Stream home = stream_of(noting()), other = stream_called(noting(), 'b'),
               third = stream_called(noting(), 'c');
  Ref<Storage> s = storage();
  take_notes();
  s->wait_ready(other), s->used_on(other, false);
  EXPECT_EQ(take_notes(), Notes{"b waits for a"});
  s->wait_ready(home), s->used_on(home, false);  // two readers need no order
  EXPECT_EQ(take_notes(), Notes{});
  s->wait_writable(home), s->used_on(home, true);
  EXPECT_EQ(take_notes(), Notes{"a waits for b"});
  s->wait_writable(home), s->used_on(home, true);  // the readers were waited for
  EXPECT_EQ(take_notes(), Notes{});
  s->wait_writable(other), s->used_on(other, true);
  EXPECT_EQ(take_notes(), Notes{"b waits for a"});
  s->wait_ready(third), s->used_on(third, false);
  EXPECT_EQ(take_notes(), (Notes{"c waits for b", "c waits for a"}));
  s->wait_ready(home), s->used_on(home, false);
  EXPECT_EQ(take_notes(), Notes{"a waits for b"});
  s = {};
  EXPECT_EQ(take_notes(), Notes{"free after 2"});
}

TEST(DeviceRuntime, AThreadHasAStreamOfItsOwn) {
  const Ref<Storage> s = storage();  // home stream a
  take_notes();
  current_stream = 'd';
  s->wait_ready(stream_of(noting()));
  current_stream = 'a';
  EXPECT_EQ(take_notes(), Notes{"d waits for a"});
}

TEST(DeviceRuntime, OperandsOnTwoDevicesAreRefused) {
  const Tensor here = ones({2}), there = ones({2}).to(noting()), other = ones({2}).to(noting(1));
  for (const Tensor& t : {here, other}) {
    try {
      there + t;
      ADD_FAILURE() << "accepted";
    } catch (const UserError& e) {
      EXPECT_EQ(
          std::string(e.what()),
          fmt::format("add: operands are on noting:0 and {}; move them to one device with to()",
                      to_string(t.device())));
    }
  }
}

}  // namespace
}  // namespace tessera
