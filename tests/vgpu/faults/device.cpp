// Faults of kernels and streams that the virtual GPU has to find, each by name, whatever the order
// in which work runs. And what is right, of which nothing is said.
#include <numeric>

#include "tests/vgpu/faults/programs.h"

namespace vgpu_test {
namespace {

// ---- order ----

// Stream `a` makes what `b` reads; afterwards `a` overwrites it. Both orders need an event.
int two_streams(const Kernels& k, bool first, bool second) {
  const StreamHandle a = new_stream(), b = new_stream();
  const EventHandle made = new_event(), used = new_event();
  const DevicePtr x = written(kCount, a), y = floats(kCount), z = floats(kCount);
  run(k["scale"], 4, 256, 0, a, x, y, 2.0f, kCount);
  record(made, a);
  if (first) wait_for(b, made);
  run(k["scale"], 4, 256, 0, b, y, z, 3.0f, kCount);
  record(used, b);
  if (second) wait_for(a, used);
  check(cuda().fill_8(y, 0, kCount * 4, a), "fill");
  check(cuda().stream_synchronize(a), "wait");
  const std::vector<float> got = download<float>(z, kCount, b);
  return got == std::vector<float>(kCount, 6.0f) ? 0 : 1;
}
TEST(Order, BothEventsAreRight) {
  expect_right([](const Kernels& k) { return two_streams(k, true, true); });
}
TEST(Order, ReadBeforeItIsWritten) {
  // Where the reader runs first, it finds what nobody has written.
  expect_found(true, "scale: ", [](const Kernels& k) { return two_streams(k, false, true); });
}
TEST(Order, OverwrittenWhileItIsRead) {
  expect_found(true, "and no event orders the two",
               [](const Kernels& k) { return two_streams(k, true, false); });
}
// Two streams read; the writer waits for one of them.
TEST(Order, OneOfTwoReadersIsForgotten) {
  for (const int forgotten : {0, 1})
    expect_found(true, "and no event orders the two", [forgotten](const Kernels& k) {
      const std::vector<StreamHandle> s{new_stream(), new_stream(), new_stream()};
      const DevicePtr x = written(kCount, s[2]);
      std::vector<EventHandle> read{new_event(), new_event()};
      for (const size_t i : {size_t{0}, size_t{1}}) {
        run(k["scale"], 4, 256, 0, s[i], x, floats(kCount), 2.0f, kCount);
        record(read[i], s[i]);
      }
      wait_for(s[2], read[static_cast<size_t>(1 - forgotten)]);
      check(cuda().fill_8(x, 0, 4 * kCount, s[2]), "fill");
      return wait(s[2]) + wait(s[0]) + wait(s[1]);
    });
}
TEST(Order, BlocksOfOneLaunch) {
  expect_found(true, "of the same launch", [](const Kernels& k) {
    const StreamHandle s = new_stream();
    run(k["blocks_race"], 2, 32, 0, s, floats(32));
    return wait(s);
  });
}
TEST(Order, ThreadsOfOneBlock) {
  expect_found(true, "of the same launch", [](const Kernels& k) {
    const StreamHandle s = new_stream();
    run(k["threads_race"], 1, 128, 0, s, floats(192));
    return wait(s);
  });
}
int last_block(const Kernels& k, int fence) {
  const StreamHandle s = new_stream();
  const DevicePtr count = upload(std::vector<int>{0}, s), out = floats(1);
  run(k["last_block"], 10, 32, 0, s, floats(10), count, out, fence);
  return wait(s) == 0 && download<float>(out, 1, s)[0] == 45 ? 0 : 1;
}
TEST(Order, TheLastBlockSeesAll) {
  expect_right([](const Kernels& k) { return last_block(k, 1); });
}
TEST(Order, TheLastBlockWithoutAFence) {
  expect_found(true, "of the same launch", [](const Kernels& k) { return last_block(k, 0); });
}

// ---- bounds and lives ----

int one_too_many(const Kernels& k) {
  const StreamHandle s = new_stream();
  run(k["write_one_too_many"], 4, 256, 0, s, floats(kCount), kCount);
  return wait(s);
}
TEST(Bounds, WriteBehindTheEndNamesTheThread) {
  expect_found(true, "(block (3,0,0) thread (232,0,0))", one_too_many);
}
TEST(Bounds, WriteBehindTheEndMeetsTheRedZone) {
  expect_found(false,
               "write_one_too_many: wrote out of bounds: 0 bytes behind the end of an allocation "
               "of 4000 bytes",
               one_too_many);
}
TEST(Bounds, ReadBehindTheEnd) {
  expect_found(true, "read_one_too_many: reads out of bounds", [](const Kernels& k) {
    const StreamHandle s = new_stream();
    run(k["read_one_too_many"], 4, 256, 0, s, written(kCount, s), floats(kCount), kCount);
    return wait(s);
  });
}
TEST(Bounds, Copy) {
  expect_found(false, "copy to the host: out of bounds", [](const Kernels&) {
    std::vector<float> to(2 * kCount);
    const StreamHandle s = new_stream();
    cuda().copy_to_host(to.data(), written(kCount, s), 8 * kCount, s);
    return wait(s);
  });
}
TEST(Bounds, NullPointer) {
  expect_found(false, "scale: touches a null pointer", [](const Kernels& k) {
    const StreamHandle s = new_stream();
    run(k["scale"], 1, 32, 0, s, DevicePtr{0}, floats(32), 1.0f, 32);
    return wait(s);
  });
}
TEST(Bounds, MemoryOfTheHost) {
  expect_found(true, "scale: touches memory that is none of the device's", [](const Kernels& k) {
    const StreamHandle s = new_stream();
    std::vector<float> x(32);
    run(k["scale"], 1, 32, 0, s, x.data(), floats(32), 1.0f, 32);
    return wait(s);
  });
}
TEST(Bounds, MisalignedVector) {
  expect_found(true, "misaligned: misaligned address", [](const Kernels& k) {
    const StreamHandle s = new_stream();
    run(k["misaligned"], 1, 1, 0, s, written(8, s), floats(8));
    return wait(s);
  });
}
TEST(Lives, UseAfterFree) {
  expect_found(true, "use after free", [](const Kernels& k) {
    const StreamHandle s = new_stream();
    const DevicePtr x = written(32, s);
    check(cuda().memory_free(x), "free");
    run(k["scale"], 1, 32, 0, s, x, floats(32), 1.0f, 32);
    return wait(s);
  });
}
TEST(Lives, UseAfterUnmap) {
  for (const bool checked : {false, true})
    expect_found(checked, "use after free", [](const Kernels& k) {
      const StreamHandle s = new_stream();
      AllocationProperties p = {};
      p.type = kAllocationPinned, p.location = {kLocationDevice, 0};
      const AccessDescription access = {{kLocationDevice, 0}, kAccessReadWrite};
      DevicePtr at;
      MemoryHandle m;
      check(cuda().address_reserve(&at, 2 * kMiB, 0, 0, 0), "reserve");
      check(cuda().physical_create(&m, 2 * kMiB, &p, 0), "create");
      check(cuda().memory_map(at, 2 * kMiB, 0, m, 0), "map");
      check(cuda().memory_set_access(at, 2 * kMiB, &access, 1), "access");
      check(cuda().fill_8(at, 0, 128, s), "fill");
      check(cuda().stream_synchronize(s), "wait");
      check(cuda().memory_unmap(at, 2 * kMiB), "unmap");
      run(k["scale"], 1, 32, 0, s, at, floats(32), 1.0f, 32);
      return wait(s);
    });
}
TEST(Lives, DoubleFree) {
  expect_found(false, "cuMemFree: a double free", [](const Kernels&) {
    const DevicePtr x = floats(32);
    check(cuda().memory_free(x), "free");
    return cuda().memory_free(x) == Result::kInvalidValue ? 0 : 1;
  });
}
TEST(Lives, UnwrittenMemory) {
  expect_found(true, "scale: uninitialised: reads byte 0 of an allocation of 128 bytes",
               [](const Kernels& k) {
                 const StreamHandle s = new_stream();
                 run(k["scale"], 1, 32, 0, s, floats(32), floats(32), 1.0f, 32);
                 return wait(s);
               });
}
TEST(Lives, DestroyedStreamAndEvent) {
  expect_found(false, "the stream was destroyed", [](const Kernels&) {
    const StreamHandle s = new_stream();
    check(cuda().stream_destroy(s), "destroy");
    return wait(s);
  });
  expect_found(false, "no event, or one that was destroyed", [](const Kernels&) {
    const EventHandle e = new_event();
    check(cuda().event_destroy(e), "destroy");
    return cuda().event_record(e, new_stream()) == Result::kInvalidHandle ? 0 : 1;
  });
}

// ---- parts of a block, of which an allocator tells ----

struct Parts {
  using Allocated = Result (*)(DevicePtr, size_t, const char*);
  using Freed = Result (*)(DevicePtr);
  Allocated allocated = reinterpret_cast<Allocated>(virtual_symbol("vgpu_memory_allocated"));
  Freed freed = reinterpret_cast<Freed>(virtual_symbol("vgpu_memory_freed"));
  DevicePtr block = vgpu_test::allocate(kMiB);
  DevicePtr make(size_t at, size_t bytes) const {
    check(allocated(block + at, bytes, "made by the test"), "part");
    return block + at;
  }
};
TEST(Parts, AreUsed) {
  expect_right([](const Kernels& k) {
    const StreamHandle a = new_stream(), b = new_stream();
    const Parts parts;
    const DevicePtr out = floats(kCount);
    for (int i = 0; i < 4; ++i) {  // the same bytes for both streams in turn
      const StreamHandle s = i % 2 ? b : a;
      const DevicePtr x = parts.make(0, kCount * 4);
      check(cuda().fill_32(x, 0x3f800000, kCount, s), "fill");
      run(k["scale"], 4, 256, 0, s, x, out, static_cast<float>(i), kCount);
      check(parts.freed(x), "free");
      const EventHandle last = new_event();
      record(last, s), wait_for(i % 2 ? a : b, last);
    }
    return download<float>(out, kCount, a) == std::vector<float>(kCount, 3.0f) ? 0 : 1;
  });
}
TEST(Parts, ManyLivesWhileAnOpWaitsForItsTurn) {
  expect_right([](const Kernels&) {
    const StreamHandle s = new_stream();
    const Parts parts;
    auto live = [&](size_t at) {
      const DevicePtr x = parts.make(at, 128);
      check(cuda().fill_8(x, 0, 128, s), "fill");
      check(parts.freed(x), "free");
    };
    for (size_t i = 0; i < 15000; ++i) live(4096 + i % 512 * 256);
    if (wait(s) != 0) return 1;
    live(0);
    parts.make(0, 128);
    for (size_t i = 0; i < 3000; ++i) live(4096 + i % 512 * 256);
    return wait(s);
  });
}
TEST(Parts, HaveBounds) {
  expect_found(true, "behind the end of an allocation of 4000 bytes, made by the test",
               [](const Kernels& k) {
                 const StreamHandle s = new_stream();
                 const Parts parts;
                 const DevicePtr x = parts.make(4096, kCount * 4);
                 run(k["write_one_too_many"], 4, 256, 0, s, x, kCount);
                 return wait(s);
               });
}
TEST(Parts, UseAfterFree) {
  expect_found(true, "use after free", [](const Kernels& k) {
    const StreamHandle s = new_stream();
    const Parts parts;
    const DevicePtr x = parts.make(0, 128);
    check(cuda().fill_8(x, 0, 128, s), "fill");
    check(parts.freed(x), "free");
    run(k["scale"], 1, 32, 0, s, x, floats(32), 1.0f, 32);
    return wait(s);
  });
}
TEST(Parts, ReusedWithoutWaiting) {
  expect_found(true, "and no event orders the two", [](const Kernels& k) {
    const StreamHandle a = new_stream(), b = new_stream();
    const Parts parts;
    const DevicePtr x = parts.make(0, 128);
    check(cuda().fill_8(x, 0, 128, a), "fill");
    run(k["scale"], 1, 32, 0, a, x, floats(32), 1.0f, 32);
    check(parts.freed(x), "free");
    check(cuda().fill_8(parts.make(0, 128), 1, 128, b), "fill");
    return wait(a) + wait(b);
  });
}
TEST(Parts, OfThePreviousOwnerAreUnwritten) {
  expect_found(true, "which nobody has written", [](const Kernels& k) {
    const StreamHandle s = new_stream();
    const Parts parts;
    const DevicePtr x = parts.make(0, 128);
    check(cuda().fill_8(x, 0, 128, s), "fill");
    check(parts.freed(x), "free");
    run(k["scale"], 1, 32, 0, s, parts.make(0, 128), floats(32), 1.0f, 32);
    return wait(s);
  });
}
TEST(Parts, DoubleFree) {
  expect_found(false, "vgpu_memory_freed: a double free", [](const Kernels&) {
    const Parts parts;
    const DevicePtr x = parts.make(0, 128);
    check(parts.freed(x), "free");
    return parts.freed(x) == Result::kInvalidValue ? 0 : 1;
  });
}

// ---- within a block of threads ----

template <class... A>
std::function<int(const Kernels&)> launched(const char* name, unsigned threads, unsigned shared,
                                            A... rest) {
  return [=](const Kernels& k) {
    const StreamHandle s = new_stream();
    run(k[name], 1, threads, shared, s, floats(1024), rest...);
    return wait(s);
  };
}
TEST(Threads, SharedMemoryWithTheBarrier) {
  expect_right([](const Kernels& k) {
    const StreamHandle s = new_stream();
    std::vector<float> x(256);
    std::iota(x.begin(), x.end(), 0.0f);
    const DevicePtr a = upload(x, s), b = floats(256);
    run(k["reverse"], 1, 256, 0, s, a, b, 1);
    return download<float>(b, 256, s) == std::vector<float>(x.rbegin(), x.rend()) ? 0 : 1;
  });
}
TEST(Threads, SharedMemoryWithoutABarrier) {
  expect_found(true, "reverse: ", [](const Kernels& k) {  // a race, or what is not yet written
    const StreamHandle s = new_stream();
    run(k["reverse"], 1, 256, 0, s, written(256, s), floats(256), 0);
    return wait(s);
  });
}
TEST(Threads, ABarrierBetweenRoundsIsMissing) {
  expect_found(true, "race in shared memory", launched("second_round", 64, 0));
}
TEST(Threads, UnwrittenSharedMemory) {
  expect_found(true, "of shared memory, which the block has not written",
               launched("unwritten_shared", 64, 0));
}
TEST(Threads, DynamicSharedMemoryHasBounds) {
  expect_found(true, "out of bounds: byte 512 of 512 bytes of dynamic shared memory",
               launched("dynamic_shared", 128, 512, 129));
}
TEST(Threads, StaticSharedMemoryHasBounds) {
  expect_found(true, "out of bounds: an index behind the end of an array",
               launched("index_too_large", 32, 0, 1));
}
TEST(Threads, TwoBarriersMeet) {
  expect_found(false, "a barrier stands in a branch", launched("two_barriers", 256, 0));
}
TEST(Threads, ABarrierThatSomeDoNotReach) {
  expect_found(false, "stands in a branch that not all threads take",
               launched("barrier_of_some", 256, 0));
}
TEST(Threads, AShuffleThatSomeDoNotReach) {
  expect_found(false, "shuffle_of_some: deadlock", launched("shuffle_of_some", 32, 0));
}
TEST(Threads, AMaskThatLeavesOutTheCaller) {
  expect_found(false, "leaves out lane", launched("mask_of_others", 32, 0));
}
TEST(Threads, ALaneThatTheMaskLeavesOut) {
  expect_found(false, "reads from lane 20", launched("lane_of_others", 32, 0));
}
TEST(Threads, Assertions) {
  expect_found(false, "asserts: assertion `y == nullptr' failed", launched("asserts", 1, 0));
}
TEST(Threads, TooMany) {
  expect_found(false, "1025 threads in a block", launched("blocks_race", 1025, 0));
  expect_found(false, "__launch_bounds__ allows 64", launched("at_most_64", 128, 0));
}
TEST(Threads, TooMuchSharedMemory) {
  expect_found(false, "bytes of dynamic shared memory; cuFuncSetAttribute allows",
               launched("dynamic_shared", 128, 50000, 1));
}

}  // namespace
}  // namespace vgpu_test
