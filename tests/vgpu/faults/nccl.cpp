// What programs do wrong with communicators, and what a test asks the virtual NCCL to do.
#include <chrono>
#include <thread>

#include "tests/vgpu/faults/programs.h"

namespace vgpu_test {
namespace {

using tessera::nccl::Comm;
using tessera::nccl::DataType;
using tessera::nccl::RedOp;
using tessera::nccl::UniqueId;
using tessera::nccl::Window;
using Error = tessera::nccl::Result;

/// Runs `body(rank, communicator, stream)` on two ranks; returns 1 where one of them returned 0.
template <class Body>
int on_ranks(const Body& body, int blocking = 1) {
  start();
  UniqueId id{};
  nccl().get_unique_id(&id);
  context_of(1);
  int failed = 0;
  std::vector<std::thread> threads;
  for (int r = 0; r < 2; ++r)
    threads.emplace_back([&, r] {
      check(cuda().set_current(context_of(r)), "set current");
      Comm comm = nullptr;
      tessera::nccl::Config config;
      config.blocking = blocking;
      Error met = nccl().comm_init(&comm, 2, id, r, &config);
      while (met == Error::kInProgress) nccl().comm_async_error(comm, &met);
      if (met != Error::kSuccess || !body(r, comm, new_stream())) failed = 1;
    });
  for (std::thread& t : threads) t.join();
  return failed;
}
DevicePtr zeros(size_t n, StreamHandle s) { return upload(std::vector<float>(n), s); }
Error sum(DevicePtr p, size_t n, Comm comm, StreamHandle s) {
  void* at = reinterpret_cast<void*>(p);
  return nccl().all_reduce(at, at, n, DataType::kFloat32, RedOp::kSum, comm, s);
}
bool ends_soon(StreamHandle s) {
  for (int i = 0; i < 200; ++i) {
    if (cuda().stream_query(s) == Result::kSuccess) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return false;
}

TEST(NcclFaults, ReductionThatNoEventOrdersBehindWhatItReads) {
  expect_found(true, "of another stream writes, and no event orders the two", [](const Kernels&) {
    return on_ranks([](int, Comm comm, StreamHandle s) {
      const StreamHandle other = new_stream();
      const DevicePtr p = zeros(8, s);
      check(cuda().fill_32(p, 0, 8, other), "fill");
      sum(p, 8, comm, s);
      return cuda().stream_synchronize(s) == Result::kSuccess;
    });
  });
}

TEST(NcclFaults, OutputThatIsTooSmall) {
  expect_found(false, "ncclAllGather: ", [](const Kernels&) {
    return on_ranks([](int, Comm comm, StreamHandle s) {
      void* in = reinterpret_cast<void*>(zeros(8, s));
      void* out = reinterpret_cast<void*>(zeros(8, s));
      nccl().all_gather(in, out, 8, DataType::kFloat32, comm, s);
      return cuda().stream_synchronize(s) == Result::kSuccess;
    });
  });
}

TEST(NcclFaults, CallsThatDifferHangAndAreReported) {
  expect_found(false, "made another call; it hangs, as a card would",
               [](const Kernels&) {
                 return on_ranks([](int r, Comm comm, StreamHandle s) {
                   sum(zeros(8, s), r ? 8 : 4, comm, s);
                   const bool ended = ends_soon(s);
                   nccl().comm_abort(comm);
                   return ended || !ends_soon(s);
                 });
               },
               {{"VGPU_NCCL", "report"}});
}

TEST(NcclFaults, WindowsInDifferentOrders) {
  expect_found(false, "all ranks register in one order", [](const Kernels&) {
    return on_ranks([](int r, Comm comm, StreamHandle) {
      void* memory = nullptr;
      nccl().mem_alloc(&memory, 4 * kMiB);
      Window window = nullptr;
      return nccl().window_register(comm, memory, r ? kMiB : 2 * kMiB, &window,
                                    tessera::nccl::kWindowSymmetric) == Error::kSuccess;
    });
  });
}

TEST(NcclFaults, CollectivesWhoseMemoryLiesElsewhereInAWindow) {
  for (const bool outside : {false, true})
    expect_found(false, "in another place of a window than rank", [&](const Kernels&) {
      return on_ranks([&](int r, Comm comm, StreamHandle s) {
        void *memory = nullptr, *ordinary = reinterpret_cast<void*>(zeros(8, s));
        nccl().mem_alloc(&memory, kMiB);
        Window window = nullptr;
        nccl().window_register(comm, memory, kMiB, &window, tessera::nccl::kWindowSymmetric);
        cuda().fill_32(reinterpret_cast<DevicePtr>(memory), 0, 64, s);
        void* at = static_cast<float*>(memory) + 32 * r;
        if (outside && r) at = ordinary;
        nccl().all_reduce(at, at, 8, DataType::kFloat32, RedOp::kSum, comm, s);
        return cuda().stream_synchronize(s) == Result::kSuccess;
      });
    });
}

TEST(NcclFaults, MemoryThatIsFreedWhileItIsRegistered) {
  expect_found(false, "ncclMemFree: a communicator has it registered", [](const Kernels&) {
    return on_ranks([](int, Comm comm, StreamHandle) {
      void *memory = nullptr, *handle = nullptr;
      nccl().mem_alloc(&memory, kMiB);
      nccl().comm_register(comm, memory, kMiB, &handle);
      return nccl().mem_free(memory) == Error::kSuccess;
    });
  });
}

TEST(NcclFaults, StreamOfAnotherDevice) {
  expect_found(false, "a stream of device 0, but the communicator is on device 1",
               [](const Kernels&) {
                 const StreamHandle first = new_stream();
                 return on_ranks([&](int r, Comm comm, StreamHandle s) {
                   return sum(zeros(8, s), 8, comm, r ? first : s) == Error::kSuccess;
                 });
               });
}

TEST(NcclFaults, CallOnWhatWasDestroyed) {
  expect_found(false, "ncclAllReduce: no communicator, or one that is gone", [](const Kernels&) {
    return on_ranks([](int, Comm comm, StreamHandle s) {
      nccl().comm_destroy(comm);
      return sum(zeros(8, s), 8, comm, s) == Error::kSuccess;
    });
  });
}

TEST(NcclFaults, DestroyedWithRegisteredMemory) {
  expect_found(false, "ncclCommDestroy: 1 buffers are registered", [](const Kernels&) {
    return on_ranks([](int, Comm comm, StreamHandle) {
      void *memory = nullptr, *handle = nullptr;
      nccl().mem_alloc(&memory, kMiB);
      nccl().comm_register(comm, memory, kMiB, &handle);
      return nccl().comm_destroy(comm) == Error::kSuccess;
    });
  });
}

TEST(NcclFaults, CallsOnStreamsThatNoEventOrders) {
  expect_found(false, "no event orders it behind the call before it on its communicator",
               [](const Kernels&) {
                 return on_ranks([](int, Comm comm, StreamHandle s) {
                   const StreamHandle other = new_stream();
                   const DevicePtr p = zeros(8, s), q = zeros(8, other);
                   sum(p, 8, comm, s), sum(q, 8, comm, other);
                   return cuda().stream_synchronize(s) == Result::kSuccess &&
                          cuda().stream_synchronize(other) == Result::kSuccess;
                 });
               });
}

TEST(NcclFaults, CaptureThatEndsWhileACallIsInProgress) {
  expect_found(false, "the capture ended while the call was in progress", [](const Kernels&) {
    return on_ranks(
        [](int, Comm comm, StreamHandle s) {
          const DevicePtr p = zeros(8, s);
          tessera::cuda::GraphHandle graph = nullptr;
          check(cuda().begin_capture(s, tessera::cuda::kCaptureRelaxed), "capture");
          sum(p, 8, comm, s);
          cuda().end_capture(s, &graph);
          Error error = Error::kInProgress;
          while (error == Error::kInProgress) nccl().comm_async_error(comm, &error);
          return error == Error::kSuccess;
        },
        /*blocking=*/0);
  });
}

TEST(NcclRequests, HangUntilTheyAreAborted) {
  const Outcome o = in_child(false, {{"VGPU_NCCL", "hang:1:2"}}, [](const Kernels&) {
    return on_ranks([](int, Comm comm, StreamHandle s) {
      const DevicePtr p = zeros(8, s);
      sum(p, 8, comm, s);
      if (!ends_soon(s)) return false;
      sum(p, 8, comm, s);
      if (ends_soon(s)) return false;
      nccl().comm_abort(comm);
      return ends_soon(s);
    });
  });
  EXPECT_EQ(o.status, 0) << o.said;
}

TEST(NcclRequests, AsynchronousErrorsStay) {
  const Outcome o = in_child(false, {{"VGPU_NCCL", "error:0:1:6"}}, [](const Kernels&) {
    return on_ranks([](int r, Comm comm, StreamHandle s) {
      const DevicePtr p = zeros(8, s);
      sum(p, 8, comm, s);
      const bool ended = ends_soon(s);
      Error error = Error::kSuccess;
      nccl().comm_async_error(comm, &error);
      const Error next = r == 0 ? sum(p, 8, comm, s) : Error::kSuccess;
      nccl().comm_abort(comm);
      const Error expected = r == 0 ? Error::kRemoteError : Error::kSuccess;
      return !ended && error == expected && next == expected;
    });
  });
  EXPECT_EQ(o.status, 0) << o.said;
}

TEST(NcclRequests, CallsThatAreRefused) {
  const Outcome o =
      in_child(false, {{"VGPU_NCCL", "refuse:ncclAllReduce:1:3"}}, [](const Kernels&) {
        return on_ranks([](int, Comm comm, StreamHandle s) {
          static std::atomic<int> refused{0};
          refused += sum(zeros(8, s), 0, comm, s) == Error::kInternalError;
          std::this_thread::sleep_for(std::chrono::milliseconds(50));
          return refused == 1;
        });
      });
  EXPECT_EQ(o.status, 0) << o.said;
}

}  // namespace
}  // namespace vgpu_test
