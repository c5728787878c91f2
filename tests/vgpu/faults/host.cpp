// Faults of the host that the virtual GPU has to find, wrong devices, captures, and failures that a
// test asks for.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <thread>

#include "tests/vgpu/faults/programs.h"

namespace vgpu_test {
namespace {

// ---- the host ----

constexpr size_t kPage = 1024;  // floats

TEST(Host, ReadsDeviceMemory) {
  expect_found(false, "the host touches device memory: byte 40 of an allocation of 4000 bytes",
               [](const Kernels&) {
                 return static_cast<int>(*reinterpret_cast<volatile float*>(floats(kCount) + 40));
               });
}
TEST(Host, WritesDeviceMemory) {
  expect_found(false, "the host touches device memory", [](const Kernels&) {
    *reinterpret_cast<volatile float*>(floats(kCount)) = 1;
    return 0;
  });
}
TEST(Host, ReadsAPinnedBufferTooEarly) {
  expect_found(false, "the host touches a pinned buffer that 'copy to the host' still uses",
               [](const Kernels&) {
                 const StreamHandle s = new_stream();
                 float* to = pinned(kCount);
                 check(cuda().copy_to_host(to, written(kCount, s), 4 * kCount, s), "copy");
                 return static_cast<int>(*const_cast<volatile float*>(to));
               });
}
TEST(Host, OverwritesAPinnedBufferTooEarly) {
  expect_found(false, "the host touches a pinned buffer that 'copy to the device' still uses",
               [](const Kernels&) {
                 const StreamHandle s = new_stream();
                 float* from = pinned(kCount);
                 from[0] = 1;
                 check(cuda().copy_to_device(floats(kCount), from, 4 * kCount, s), "copy");
                 *const_cast<volatile float*>(from) = 2;
                 return 0;
               });
}
TEST(Host, ReadsAPinnedBufferInTime) {
  expect_right([](const Kernels&) {
    const StreamHandle s = new_stream();
    float* to = pinned(kCount);
    check(cuda().copy_to_host(to, written(kCount, s), 4 * kCount, s), "copy");
    const EventHandle e = new_event();
    record(e, s);
    check(cuda().event_synchronize(e), "wait");
    return to[kCount - 1] == 1 ? 0 : 1;
  });
}
// A card that failed runs nothing any more, so its copies use no buffer.
TEST(Host, TouchesAPinnedBufferAfterAFailure) {
  const auto program = [](const Kernels& k) {
    const StreamHandle s = new_stream(), other = new_stream();
    float* from = pinned(kCount);
    from[0] = 1;
    check(cuda().copy_to_device(floats(kCount), from, 4 * kCount, s), "copy");
    run(k["asserts"], 1, 1, 0, other, floats(kCount));
    cuda().stream_synchronize(other);
    *const_cast<volatile float*>(from) = 2;
    return 7;
  };
  const Outcome o = in_child(false, {{"VGPU_SEED", "late"}}, program);
  EXPECT_EQ(o.status, 7) << o.said;
}
// Parts of one buffer, a page each: what is waited for opens, and the rest stays closed.
TEST(Host, ReadsAPartOfAPinnedBufferInTime) {
  expect_right([](const Kernels&) {
    const StreamHandle a = new_stream(), b = new_stream();
    float* to = pinned(2 * kPage);
    check(cuda().copy_to_host(to, written(kPage, a), 4 * kPage, a), "copy");
    check(cuda().copy_to_host(to + kPage, written(kPage, b), 4 * kPage, b), "copy");
    check(cuda().stream_synchronize(b), "wait");
    const bool right = to[kPage] == 1 && to[2 * kPage - 1] == 1;
    return right ? wait(a) : 1;
  });
}
TEST(Host, ReadsAPartOfAPinnedBufferTooEarly) {
  expect_found(false, "the host touches a pinned buffer that 'copy to the host' still uses",
               [](const Kernels&) {
                 const StreamHandle a = new_stream(), b = new_stream();
                 float* to = pinned(2 * kPage);
                 check(cuda().copy_to_host(to, written(kPage, a), 4 * kPage, a), "copy");
                 check(cuda().copy_to_host(to + kPage, written(kPage, b), 4 * kPage, b), "copy");
                 check(cuda().stream_synchronize(b), "wait");
                 return static_cast<int>(*const_cast<volatile float*>(to + kPage - 1));
               });
}
TEST(Host, FreesAPinnedBufferTooEarly) {
  expect_found(false, "cuMemFreeHost: 'copy to the host' still uses it", [](const Kernels&) {
    const StreamHandle s = new_stream();
    float* to = pinned(kCount);
    check(cuda().copy_to_host(to, written(kCount, s), 4 * kCount, s), "copy");
    cuda().host_free(to);
    return wait(s);
  });
}
TEST(Host, TwoStreamsShareAPinnedBuffer) {
  expect_found(true, "race: uses a pinned buffer", [](const Kernels&) {
    const StreamHandle a = new_stream(), b = new_stream();
    float* p = pinned(kCount);
    check(cuda().copy_to_host(p, written(kCount, a), 4 * kCount, a), "copy");
    check(cuda().copy_to_device(floats(kCount), p, 4 * kCount, b), "copy");
    return wait(a) + wait(b);
  });
}
TEST(Host, CallsFromAHostFunction) {
  expect_found(false, "a function of the host in a stream calls nothing", [](const Kernels&) {
    const StreamHandle s = new_stream();
    check(cuda().launch_host_function(
              s, [](void*) { cuda().synchronize(); }, nullptr),
          "host");
    return wait(s);
  });
}
TEST(Host, NamesNoStream) {
  expect_found(false, "the legacy stream orders itself with all others", [](const Kernels&) {
    return cuda().fill_8(floats(1), 0, 4, nullptr) == Result::kInvalidHandle ? 0 : 1;
  });
}
TEST(Host, HasNoContext) {
  expect_found(false, "cuMemAlloc_v2: this thread has no current context", [](const Kernels&) {
    DevicePtr p;
    std::thread([&] { cuda().memory_allocate(&p, 4); }).join();
    return 0;
  });
}

// ---- devices ----

const std::map<std::string, std::string> kTwo{{"VGPU_DEVICES", "2"}};

TEST(WrongDevice, PointerOfAnotherInAKernel) {
  for (const bool checked : {false, true})
    expect_found(
        checked, "scale: wrong device: memory of device 1 is given to a kernel on device 0",
        [](const Kernels& k) {
          const StreamHandle s = new_stream();
          check(cuda().set_current(context_of(1)), "current");
          const DevicePtr there = floats(32);
          check(cuda().set_current(context_of(0)), "current");
          run(k["scale"], 1, 32, 0, s, written(32, s), there, 1.0f, 32);
          return wait(s);
        },
        kTwo);
}
TEST(WrongDevice, StreamOfAnother) {
  expect_found(
      false, "wrong device: a stream of device 0 while device 1 is current",
      [](const Kernels&) {
        const StreamHandle s = new_stream();
        check(cuda().set_current(context_of(1)), "current");
        return cuda().fill_8(floats(1), 0, 4, s) == Result::kInvalidHandle ? 0 : 1;
      },
      kTwo);
}
TEST(WrongDevice, CopyOnOneDevice) {
  expect_found(
      false, "wrong device: memory of device 1 is used by device 0",
      [](const Kernels&) {
        const StreamHandle s = new_stream();
        const DevicePtr here = written(32, s);
        check(cuda().set_current(context_of(1)), "current");
        const DevicePtr there = floats(32);
        check(cuda().set_current(context_of(0)), "current");
        check(cuda().copy_on_device(there, here, 128, s), "copy");
        return wait(s);
      },
      kTwo);
}
TEST(WrongDevice, EventOfAnother) {
  expect_found(
      false, "wrong device: an event of device 0 in a stream of device 1",
      [](const Kernels&) {
        const EventHandle e = new_event();
        check(cuda().set_current(context_of(1)), "current");
        return cuda().event_record(e, new_stream()) == Result::kInvalidHandle ? 0 : 1;
      },
      kTwo);
}

// ---- captures and requests ----

TEST(Captures, PageableMemory) {
  expect_found(false, "pageable memory in a captured copy", [](const Kernels&) {
    const StreamHandle s = new_stream();
    float x = 0;
    check(cuda().begin_capture(s, kCaptureRelaxed), "capture");
    return cuda().copy_to_device(floats(1), &x, 4, s) == Result::kSuccess ? 1 : 0;
  });
}
TEST(Captures, WhatIsNotJoined) {
  expect_found(false, "nothing waits for 'fill' of another stream", [](const Kernels&) {
    const StreamHandle a = new_stream(), b = new_stream();
    const DevicePtr p = floats(1);
    const EventHandle fork = new_event();
    check(cuda().begin_capture(a, kCaptureRelaxed), "capture");
    record(fork, a), wait_for(b, fork);
    check(cuda().fill_8(p, 0, 4, b), "fill");
    GraphHandle graph;
    return cuda().end_capture(a, &graph) == Result::kStreamCaptureUnjoined ? 0 : 1;
  });
}
// Two branches of a graph that both write.
TEST(Captures, BranchesRace) {
  expect_found(true, "and no event orders the two", [](const Kernels&) {
    const StreamHandle a = new_stream(), b = new_stream();
    const DevicePtr p = floats(1);
    const EventHandle fork = new_event(), join = new_event();
    check(cuda().begin_capture(a, kCaptureRelaxed), "capture");
    record(fork, a), wait_for(b, fork);
    check(cuda().fill_8(p, 0, 4, a), "fill"), check(cuda().fill_8(p, 1, 4, b), "fill");
    record(join, b), wait_for(a, join);
    GraphHandle graph;
    GraphExecHandle exec;
    check(cuda().end_capture(a, &graph), "end");
    check(cuda().graph_instantiate(&exec, graph, 0), "instantiate");
    check(cuda().graph_launch(exec, a), "launch");
    return wait(a);
  });
}
TEST(Requests, AKernelFails) {
  expect_found(false, "scale: fails, as VGPU_FAIL asks\nCUDA_ERROR_LAUNCH_FAILED on round 2\n",
               [](const Kernels& k) {
                 const StreamHandle s = new_stream();
                 const DevicePtr x = written(32, s);
                 for (int round = 1; round < 4; ++round) {
                   run(k["scale"], 1, 32, 0, s, x, x, 1.0f, 32);
                   const Result r = cuda().stream_synchronize(s);
                   if (r == Result::kSuccess) continue;
                   std::fprintf(stderr, "%s on round %d\n", testing::PrintToString(r).c_str(),
                                round);
                   break;
                 }
                 return 0;
               },
               {{"VGPU_FAIL", "scale:2:719"}});
}
TEST(Requests, MemoryRunsOut) {
  const Outcome o = in_child(false, {{"VGPU_MEMORY", "10000000"}}, [](const Kernels&) {
    DevicePtr p, q;
    if (cuda().memory_allocate(&p, 9000000) != Result::kSuccess) return 1;
    if (cuda().memory_allocate(&q, 2000000) != Result::kOutOfMemory) return 2;
    check(cuda().memory_free(p), "free");
    return cuda().memory_allocate(&q, 2000000) == Result::kSuccess ? 0 : 3;
  });
  EXPECT_EQ(o.status, 0) << o.said;
}
TEST(Requests, BytesOfKernelsAreCounted) {
  const Outcome o = in_child(true, {}, [](const Kernels& k) {
    const StreamHandle s = new_stream();
    const DevicePtr x = written(kCount, s), y = floats(kCount);
    run(k["scale"], 4, 256, 0, s, x, y, 1.0f, kCount);
    check(cuda().stream_synchronize(s), "wait");
    unsigned long long counters[3] = {};
    reinterpret_cast<Result (*)(const char*, unsigned long long*)>(virtual_symbol("vgpu_counters"))(
        "scale", counters);
    return counters[0] == 1 && counters[1] == 4 * kCount && counters[2] == 4 * kCount ? 0 : 1;
  });
  EXPECT_EQ(o.status, 0) << o.said;
}
// Two threads whose streams wait for each other's host functions: work goes on by itself.
TEST(Requests, WorkGoesOnWhileHostsWaitForEachOther) {
  expect_right([](const Kernels&) {
    static std::atomic<int> arrived = 0;
    const auto rank = [] {
      check(cuda().set_current(context_of(0)), "current");
      const StreamHandle s = new_stream();
      check(cuda().launch_host_function(
                s, [](void*) { ++arrived; }, nullptr),
            "host");
      for (int i = 0; i < 10000 && arrived < 2; ++i)
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    };
    std::thread a(rank), b(rank);
    a.join(), b.join();
    return arrived == 2 ? 0 : 1;
  });
}

}  // namespace
}  // namespace vgpu_test
