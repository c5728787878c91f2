// The programs that ranks of the process tests run; processes.cpp starts them.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <random>
#include <thread>

#include "collectives/loopback/run_ranks.h"
#include "collectives/store/environment.h"
#include "core/base/parallel.h"
#include "core/dispatch/copy.h"
#include "core/dispatch/default_device.h"
#include "core/ops/create.h"
#include "core/ops/views.h"
#include "core/tensor/device_runtime.h"
#include "tests/collectives/verbs.h"

namespace tessera {
namespace {

using Clock = std::chrono::steady_clock;

void verbs() {
  ProcessGroup& g = *init_process_group();
  fmt::print("backend {}\n", g.backend());
  test::check_all_verbs(g, 5);
  for (DType t : {kF32, kBF16, kU8}) test::check_verbs(g, t, 150'001);
  test::check_all_verbs(g, 5, test::Memory::kGroup);
  test::check_verbs(g, kF32, 150'001, test::Memory::kGroup);
  Ref<ProcessGroup> part = g.split(g.rank() % 2);
  test::check_verbs(*part, kI32, 9);
  part.reset();
  destroy_process_group();
}

/// Rank 1 makes another call than the others, of every kind and with every difference, each in a
/// group of its own: every rank gets an error, without a deadline, that says what differs and names
/// both call sites.
void mismatches() {
  ProcessGroup& g = *init_process_group();
  const char* differ[] = {"", "kind", "operator", "dtype", "count", "root"};
  int cases = 0;
  for (int k = 0; k < kNumCollKinds; ++k)
    for (int variant = 1; variant <= 5; ++variant) {
      const auto kind = CollKind(k);
      const bool p2p = kind >= CollKind::kSend;
      const bool reduces = kind == CollKind::kAllReduce || kind == CollKind::kReduce ||
                           kind == CollKind::kReduceScatter;
      const bool rooted = kind == CollKind::kReduce || kind == CollKind::kBroadcast ||
                          kind == CollKind::kGather || kind == CollKind::kScatter;
      if ((variant == 2 && !reduces) || (variant == 5 && !rooted)) continue;
      if (kind == CollKind::kBarrier && variant > 1) continue;
      if (p2p && g.backend() == "mpi") continue;  // which ends the process; see mpi/transport.h
      Ref<ProcessGroup> part = g.split(0);
      part->barrier();
      const auto start = Clock::now();
      const std::string what = fmt::format("{} {}", name_of(kind), differ[variant]);
      try {
        test::call_variant(*part, kind, variant, kind == CollKind::kSend ? 0 : 1);
        part->barrier();
        ADD_FAILURE() << what << ": no error on rank " << g.rank();
      } catch (const CommError& e) {
        const std::string text = e.what();
        const size_t site = text.find("verbs.cpp:");
        EXPECT_NE(text.find(p2p && variant > 1 ? "make both equal" : differ[variant]),
                  std::string::npos)
            << what << ": " << text;
        EXPECT_NE(site, std::string::npos) << text;
        EXPECT_NE(text.find("verbs.cpp:", site + 1), std::string::npos) << text;
        EXPECT_EQ(text.find("not seen for"), std::string::npos) << what << ": " << text;
        ++cases;
      }
      EXPECT_LT(std::chrono::duration<double>(Clock::now() - start).count(), 30.0) << what;
      part.reset();
      g.barrier();
    }
  fmt::print("{} mismatches\n", cases);
}

/// Rank 1 makes another call than the others.
void mismatch() {
  ProcessGroup& g = *init_process_group();
  g.barrier();
  try {
    test::call_variant(g, CollKind::kAllReduce, 2, 1);
    ADD_FAILURE() << "no error";
  } catch (const CommError& e) {
    fmt::print("rank {}: {}\n", g.rank(), e.what());
  }
}

void ways() {
  ProcessGroup& g = *init_process_group();
  test::check_ways(g);
  destroy_process_group();
}

/// One rank gets no address space for its own pool, or for those of the others.
void cramped() {
  ProcessGroup& g = *init_process_group();
  bool late = std::getenv("TEST_LATE");
  if (late) g.allocate(4);
  if (g.rank() == 1) {
    rlimit r{};
    getrlimit(RLIMIT_AS, &r);
    std::ifstream statm("/proc/self/statm");
    rlim_t pages = 0;
    statm >> pages;
    r.rlim_cur = pages * 4096 + (rlim_t{256} << 20);
    setrlimit(RLIMIT_AS, &r);
  }
  test::check_ways(g);
  test::check_verbs(g, kF32, 150'001, test::Memory::kGroup);
  destroy_process_group();
}

/// Lets a waiting test continue. It runs beside the program, so that no peer waits for it.
void tell_started() {
  if (!std::getenv("TEST_AWAITED")) return;
  std::thread([] { connect_store(job_environment())->set("test/started", ""); }).detach();
}

/// Calls all_reduce until it fails, and says how long the failure took to arrive.
void loop() {
  ProcessGroup& g = *init_process_group();
  const char* count = std::getenv("TEST_COUNT");
  const int64_t n = count ? std::atoll(count) : 1000;
  Tensor t = empty({n});
  auto last = Clock::now();
  try {
    for (int call = 1;; ++call) {
      std::fill_n(t.data<float>(), n, 1.0f);
      g.all_reduce(t);
      TESSERA_CHECK(t.data<float>()[n - 1] == float(g.size()), "wrong sum");
      if (call == 1 && g.rank() == 0) tell_started();
      last = Clock::now();
    }
  } catch (const CommError& e) {
    double s = std::chrono::duration<double>(Clock::now() - last).count();
    fmt::print("after {:.3f} s: {}\nblamed:", s, e.what());
    for (int r : e.ranks()) fmt::print(" {}", r);
    fmt::print("\n");
  }
}

/// The card of this process, by its local rank.
Device own_card() {
  const DeviceKind kind = find_device_kind("cuda").value();
  return {kind, int8_t(job_environment().local_rank % runtime_of(kind).count())};
}

void verbs_on_cards() {
  ProcessGroup& g = *init_process_group();
  const DeviceScope scope(own_card());
  test::check_all_verbs(g, 5);
  test::check_verbs(g, kF32, 600'001);
  fmt::print("backend {}\n", g.backend(default_device()));
  Ref<ProcessGroup> part = g.split(0, -g.rank());
  test::check_verbs(*part, kI32, 9);
  part.reset();
  destroy_process_group();
}

/// Two ranks of this process allocate memory of their group's, which NCCL refuses one of them:
/// rank 0 comes to it first.
void memory_on_two_cards() {
  run_ranks(2, [](ProcessGroup& g) {
    const DeviceScope scope({find_device_kind("cuda").value(), int8_t(g.rank())});
    const Device card = default_device();
    g.all_reduce(full({4}, 1.0, {kF32, card}));
    const bool before = g.has_own_memory(card);
    if (g.rank() == 1) std::this_thread::sleep_for(Millis(300));
    for (int i = 0; i < 2; ++i) {
      const Tensor t(Meta::contiguous({4}, kF32, card), g.allocate(16, card));
      copy_values(t, full({4}, 1.0, {kF32, card}));
      g.all_reduce(t);
      TESSERA_CHECK(t.cpu().data<float>()[3] == 2, "a sum is wrong");
    }
    if (g.rank() == 0) fmt::print("{} {}\n", before, g.has_own_memory(card));
  });
}

/// Calls all_reduce on cards until it fails. One rank kills itself in a call.
void loop_on_cards() {
  ProcessGroup& g = *init_process_group();
  const DeviceScope scope(own_card());
  const Tensor t = transferred(zeros({1000}, {kF32, kCPU}), default_device());
  auto last = Clock::now();
  try {
    for (int call = 1;; ++call) {
      g.all_reduce(t);
      if (call == 20 && g.rank() == std::atoi(std::getenv("TEST_KILLED"))) kill(getpid(), SIGKILL);
      if (call % 5 == 0) transferred(t, kCPU).raw();
      last = Clock::now();
    }
  } catch (const CommError& e) {
    fmt::print("after {:.3f} s: {}\n", std::chrono::duration<double>(Clock::now() - last).count(),
               e.what());
  }
}

int64_t number_in(const char* variable) { return std::atoll(std::getenv(variable)); }

/// Makes calls of all kinds and sizes, from the same seed on every rank, until one fails. One rank
/// kills itself at some moment.
void storm() {
  ProcessGroup& g = *init_process_group();
  std::mt19937_64 random(uint64_t(number_in("TEST_SEED")));
  constexpr int64_t kLargest = 1 << 22;
  Tensor t = empty({kLargest}), all = empty({kLargest * g.size()}), got = empty({kLargest});
  auto part = [](const Tensor& whole, int64_t n) { return slice(whole, 0, 0, n); };
  try {
    g.barrier();
    if (g.rank() == number_in("TEST_VICTIM"))
      std::thread([] {
        std::this_thread::sleep_for(std::chrono::microseconds(number_in("TEST_MICROSECONDS")));
        kill(getpid(), SIGKILL);
      }).detach();
    for (;;) {
      const int64_t n = random() % 2 ? int64_t(random() % 3000) : int64_t(random() % kLargest);
      const int root = int(random() % uint64_t(g.size()));
      switch (random() % 7) {
        case 0: g.barrier(); break;
        case 1: g.all_reduce(part(t, n)); break;
        case 2: g.broadcast(part(t, n), root); break;
        case 3: g.all_gather(part(all, n * g.size()), part(t, n)); break;
        case 4: g.reduce_scatter(part(t, n), part(all, n * g.size())); break;
        case 5: {
          Ref<Work> first = g.all_reduce_async(part(t, n));
          g.all_reduce(part(got, n / 2));
          first->wait();
          break;
        }
        default: {
          Ref<Work> sent = g.send_async(part(t, n), (g.rank() + 1) % g.size());
          g.recv(part(got, n), (g.rank() + g.size() - 1) % g.size());
          sent->wait();
        }
      }
    }
  } catch (const CommError& e) {
    fmt::print("error: {}\nblamed:", e.what());
    for (int r : e.ranks()) fmt::print(" {}", r);
    fmt::print("\n");
  }
}

/// Makes calls of all kinds and dtypes on cards, from the same seed on every rank, until one fails:
/// by TESSERA_FAULT, by VGPU_NCCL, or as rank TEST_ODD makes call TEST_ODD_CALL in another way.
void storm_on_cards() {
  ProcessGroup& g = *init_process_group();
  const DeviceScope scope(own_card());
  constexpr std::pair<CollKind, int> kOdd[] = {
      {CollKind::kAllReduce, 1},     {CollKind::kAllReduce, 2}, {CollKind::kAllReduce, 3},
      {CollKind::kReduceScatter, 4}, {CollKind::kAllGather, 4}, {CollKind::kBroadcast, 5}};
  const char* odd_call = std::getenv("TEST_ODD_CALL");
  const int64_t odd_at = odd_call ? std::atoll(odd_call) : 0;
  std::mt19937_64 random(uint64_t(number_in("TEST_SEED")));
  const auto draw = [&](uint64_t below) { return int64_t(random() % below); };
  const int next = (g.rank() + 1) % g.size(), previous = (g.rank() + g.size() - 1) % g.size();
  auto last = Clock::now();
  try {
    for (int64_t call = 1;; ++call) {
      const DType dtype = kComputedDTypes[size_t(draw(std::size(kComputedDTypes)))];
      const int64_t n = draw(8) ? 1 + draw(3000) : 1 + draw(200'000);
      const int root = int(draw(uint64_t(g.size())));
      const auto here = [&](int64_t of) { return zeros({of}, {dtype, default_device()}); };
      Tensor t = here(n), all = here(n * g.size()), got = here(n);
      const int64_t verb = call == 1 ? 0 : draw(9), host = draw(4);
      const auto [kind, differs] = kOdd[size_t(draw(std::size(kOdd)))];
      if (call == odd_at) test::call_variant(g, kind, differs, int(number_in("TEST_ODD")));
      switch (verb) {
        case 0: g.all_reduce(t); break;
        case 1: g.reduce(t, root, ReduceOp::kMax); break;
        case 2: g.broadcast(t, root); break;
        case 3: g.all_gather(all, t); break;
        case 4: g.reduce_scatter(t, all); break;
        case 5: g.all_to_all(all, here(n * g.size())); break;
        case 6:
          g.gather(g.rank() == root ? std::span(&all, 1) : std::span<Tensor>(), t, root);
          break;
        case 7: g.all_reduce_async(t), g.all_reduce(got); break;
        default: g.send_async(t, next), g.recv(got, previous);
      }
      if (host == 0) transferred(got, kCPU).raw();
      if (host == 1) g.barrier();
      last = Clock::now();
    }
  } catch (const CommError& e) {
    fmt::print("after {:.3f} s: {}\n", std::chrono::duration<double>(Clock::now() - last).count(),
               e.what());
  }
}

/// Four ranks in a mesh of two by two make calls on the world, a row or a column, from the same
/// seed, until one call fails. A rank then gives up as programs do: by aborting the world.
void mesh() {
  Ref<ProcessGroup> world = init_process_group();
  Ref<ProcessGroup> row = world->split(world->rank() / 2), column = world->split(world->rank() % 2);
  std::mt19937_64 random(uint64_t(number_in("TEST_SEED")));
  world->barrier();
  if (world->rank() == 0) tell_started();
  auto last = Clock::now();
  try {
    for (;;) {
      Tensor a = empty({int64_t(random() % 20'000 + 1)}), b = empty({3});
      ProcessGroup& other = random() % 2 ? *row : *column;
      Ref<Work> early = other.all_reduce_async(a);
      if (random() % 4 == 0) world->all_reduce(b);
      ((random() % 2) ? *row : *column).all_reduce(b);
      early->wait();
      last = Clock::now();
    }
  } catch (const CommError& e) {
    world->abort(e.what());
    fmt::print("after {:.3f} s: {}\nculprits:",
               std::chrono::duration<double>(Clock::now() - last).count(), e.what());
    for (int r : e.culprits()) fmt::print(" {}", r);
    fmt::print("\n");
    std::fflush(stdout);
    _exit(1);
  }
}

/// Rank 0 reports progress for 2.5 s, then stops.
void work() {
  ProcessGroup& g = *init_process_group();
  g.barrier();
  const auto start = Clock::now();
  if (g.rank() == 0) {
    while (Clock::now() - start < std::chrono::milliseconds(2500)) {
      g.working("counting sheep");
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
    raise(SIGSTOP);
  }
  try {
    g.barrier();
  } catch (const CommError& e) {
    fmt::print("after {:.3f} s: {}\n", std::chrono::duration<double>(Clock::now() - start).count(),
               e.what());
  }
}

/// Rank 0 sends four numbers where rank 1 expects eight.
void send_that_does_not_fit() {
  ProcessGroup& g = *init_process_group();
  g.barrier();
  Tensor t = empty({g.rank() == 0 ? 4 : 8});
  if (g.rank() == 0)
    g.send(t, 1);
  else
    g.recv(t, 0);
}

/// Rank 1 stops between its last collective and its end.
void stops_at_the_end() {
  ProcessGroup& g = *init_process_group();
  g.barrier();
  if (g.rank() == 1) raise(SIGSTOP);
}

/// Rank 1 has something to do after its last collective.
void works_on_alone() {
  ProcessGroup& g = *init_process_group();
  g.barrier();
  if (g.rank() == 1) std::this_thread::sleep_for(std::chrono::seconds(6));
}

int64_t count_entries(const char* folder) {
  int64_t n = 0;
  for ([[maybe_unused]] const auto& e : std::filesystem::directory_iterator(folder)) ++n;
  return n;
}

int64_t resident_kib() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);)
    if (line.starts_with("VmRSS:")) return std::atoll(line.c_str() + 6);
  return 0;
}

/// Many groups made and destroyed leave no descriptor, thread or memory behind.
void cycle() {
  int64_t fds = 0, threads = 0, kib = 0;
  const char* text = std::getenv("TEST_CYCLES");
  int cycles = text ? std::atoi(text) : 100;
  for (int i = 0; i < cycles; ++i) {
    Ref<ProcessGroup> g = init_process_group();
    Tensor t = empty({100});
    g->all_reduce_async(t)->wait();
    Ref<ProcessGroup> part = g->split(0);
    part->barrier();
    part.reset();
    destroy_process_group();
    g.reset();
    if (i != cycles / 3) continue;
    fds = count_entries("/proc/self/fd");
    threads = count_entries("/proc/self/task");
    kib = resident_kib();
  }
  int64_t now_fds = count_entries("/proc/self/fd"), now_threads = count_entries("/proc/self/task");
  fmt::print("fds {} -> {}, threads {} -> {}, RSS {} -> {} KiB\n", fds, now_fds, threads,
             now_threads, kib, resident_kib());
  EXPECT_LE(now_fds, fds + 3);  // idle connections of the store
  EXPECT_LE(now_threads, threads);
  EXPECT_LE(resident_kib(), kib + 4096);
}

void forked() {
  ProcessGroup& g = *init_process_group();
  pid_t child = fork();
  if (child == 0) {
    try {
      g.barrier();
    } catch (const UserError& e) {
      _exit(std::string(e.what()).find("forked after init") != std::string::npos ? 7 : 1);
    }
    _exit(1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_EQ(WEXITSTATUS(status), 7);
  g.barrier();  // the parent is unaffected
}

/// The last rank looks for the others only when strangers have connected, so that the others have
/// to wait for it meanwhile.
void meet() {
  class Slow final : public PrefixStore {
   public:
    using PrefixStore::PrefixStore;
    void multi_set(std::span<const std::string> keys,
                   std::span<const std::string> values) override {
      dawdle(keys);
      PrefixStore::multi_set(keys, values);
    }
    std::vector<std::string> multi_get(std::span<const std::string> keys, Millis timeout) override {
      dawdle(keys);
      return PrefixStore::multi_get(keys, timeout);
    }

   private:
    void dawdle(std::span<const std::string> keys) {
      const std::string visited = "test/visited";
      if (keys[0].find("/gloo/") == std::string::npos) return;
      PrefixStore::wait({&visited, 1}, std::chrono::seconds(20));
    }
  };
  const JobEnvironment job = job_environment();
  GroupOptions o;
  o.store = connect_store(job);
  if (job.rank == job.world_size - 1) o.store = std::make_shared<Slow>("", o.store);
  ProcessGroup& g = *init_process_group(o);
  test::check_verbs(g, kF32, 5);
  destroy_process_group();
}

TEST(Rank, DISABLED_Program) {
  const char* text = std::getenv("TEST_PROGRAM");
  std::string program = text ? text : "";
  set_num_threads(1);
  if (program == "verbs") return verbs();
  if (program == "verbs_on_cards") return verbs_on_cards();
  if (program == "loop_on_cards") return loop_on_cards();
  if (program == "memory_on_two_cards") return memory_on_two_cards();
  if (program == "storm_on_cards") return storm_on_cards();
  if (program == "mismatch") return mismatch();
  if (program == "mismatches") return mismatches();
  if (program == "ways") return ways();
  if (program == "cramped") return cramped();
  if (program == "loop") return loop();
  if (program == "storm") return storm();
  if (program == "mesh") return mesh();
  if (program == "stops_at_the_end") return stops_at_the_end();
  if (program == "works_on_alone") return works_on_alone();
  if (program == "send_that_does_not_fit") return send_that_does_not_fit();
  if (program == "work") return work();
  if (program == "cycle") return cycle();
  if (program == "forked") return forked();
  if (program == "meet") return meet();
  FAIL() << "unknown program " << program;
}

}  // namespace
}  // namespace tessera
