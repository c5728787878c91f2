// bench checkpoint: what a save costs the training thread and how fast it goes to disk and back,
// each beside its bound on this machine: a plain copy of as many bytes, and a plain file of as many
// bytes, written and synced. A save delays the thread inside save() and where it overwrites what is
// not copied yet: both count, in the worst case, where everything is overwritten at once. Then
// blocks of training steps that begin with a save take turns with blocks without.
#include <fcntl.h>
#include <fmt/core.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>

#include "core/base/error.h"
#include "core/base/parallel.h"
#include "core/dispatch/copy.h"
#include "core/ops/create.h"
#include "examples/bench/commands.h"
#include "parallel/checkpoint/checkpointer.h"
#include "parallel/checkpoint/load.h"

namespace tessera::bench {
namespace {

namespace fs = std::filesystem;
using Seconds = std::chrono::duration<double>;

struct CheckpointOptions {
  std::string folder = ".";
  int64_t megabytes = 256;
  int tensors = 64, rounds = kSamples;
  WorkloadOptions workload;
  int steps = 50, pairs = 0;
};

template <class F>
double timed(F f) {
  auto start = std::chrono::steady_clock::now();
  f();
  return Seconds(std::chrono::steady_clock::now() - start).count();
}

void write_plain(const std::string& path, const Tensor& bytes) {
  int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  bool good = fd >= 0;
  for (size_t at = 0; good && at < bytes.nbytes(); at += 4 << 20)
    good = ::write(fd, static_cast<char*>(bytes.raw()) + at, 4 << 20) == 4 << 20;
  good = good && fsync(fd) == 0;
  ::close(fd);
  TESSERA_CHECK(good, "bench checkpoint: cannot write {}", path);
}

void forget_cached(const fs::path& folder) {
  for (const auto& e : fs::recursive_directory_iterator(folder)) {
    int fd = ::open(e.path().c_str(), O_RDONLY | O_CLOEXEC);
    posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    ::close(fd);
  }
}

double process_cpu_seconds() {
  timespec t{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return double(t.tv_sec) + double(t.tv_nsec) * 1e-9;
}

// How much longer steps that begin with an asynchronous save take than steps without. A save that
// outlasts its steps is waited for, and counts.
Json steps_around_a_save(const CheckpointOptions& o, const fs::path& scratch) {
  Workload work(o.workload);
  for (int i = 0; i < o.steps; ++i) work.step();  // warms up, makes the optimizer's state
  auto state = [&] {
    checkpoint::State s;
    for (NamedTensor& t : work.state())
      s.pieces.push_back(checkpoint::whole(t.name, std::move(t.tensor)));
    return s;
  };
  checkpoint::Checkpointer saver(scratch / "steps", nullptr, {.keep = 2});
  saver.prepare(state().pieces);
  int64_t saves = 0;
  auto block = [&](bool with) {
    double cpu = process_cpu_seconds();
    double wall = timed([&] {
      if (with) saver.save(saves++, state());
      for (int i = 0; i < o.steps; ++i) work.step();
      if (with) saver.wait();
    });
    return std::pair{wall, process_cpu_seconds() - cpu};
  };
  block(true);
  std::vector<double> plain, blocked, held_up, wall_ratios, cpu_ratios, writer;
  for (int i = 0; i < o.pairs; ++i) {
    bool first = i % 2;  // the order alternates, so that a drift cancels out
    auto a = block(first), b = block(!first);
    auto [with, without] = first ? std::pair{a, b} : std::pair{b, a};
    plain.push_back(without.first / o.steps);
    wall_ratios.push_back(with.first / without.first);
    cpu_ratios.push_back(with.second / without.second);
    blocked.push_back(saver.last().blocked_seconds);
    held_up.push_back(saver.last().held_up_seconds);
    writer.push_back(saver.last().writer_cpu_seconds);
  }
  Interval wall = median_interval(wall_ratios), cpu = median_interval(cpu_ratios);
  double bytes = double(saver.last().bytes);
  fmt::print(
      "\n{}, {} parameters, a step {:.2f} ms; {} steps with a save of {:.1f} MB against "
      "{} without, {} pairs in turn\n",
      o.workload.model, work.parameters(), stats_of(plain).median * 1e3, o.steps, bytes / 1e6,
      o.steps, o.pairs);
  fmt::print("  wall time         {:.4f} [{:.4f}, {:.4f}]   median of the ratios, 95 % interval\n",
             wall.median, wall.low, wall.high);
  fmt::print("  processor time    {:.4f} [{:.4f}, {:.4f}]   of the process\n", cpu.median, cpu.low,
             cpu.high);
  Interval held = median_interval(blocked);
  fmt::print(
      "  a save holds up training for {:.2f} ms [{:.2f}, {:.2f}], {:.2f} of them at writes in the "
      "steps ({:.2f} at 20 GB/s); its writer takes {:.2f} ms of processor time\n",
      held.median * 1e3, held.low * 1e3, held.high * 1e3, stats_of(held_up).median * 1e3,
      bytes / 20e9 * 1e3, stats_of(writer).median * 1e3);
  auto ratio = [](const Interval& i) {
    return Json{{"median", i.median}, {"low", i.low}, {"high", i.high}};
  };
  return {{"steps", o.steps},
          {"bytes", bytes},
          {"step", to_json(stats_of(plain))},
          {"wall_ratio", ratio(wall)},
          {"cpu_ratio", ratio(cpu)},
          {"blocked", ratio(held)},
          {"held_up", to_json(stats_of(held_up))},
          {"writer_cpu", to_json(stats_of(writer))}};
}

Json speeds(const CheckpointOptions& o, const fs::path& scratch) {
  int64_t each = (o.megabytes << 20) / 4 / o.tensors / 1024;
  TESSERA_CHECK(each > 0, "bench checkpoint: --megabytes {} is too little for {} tensors",
                o.megabytes, o.tensors);
  checkpoint::State state;
  std::vector<checkpoint::Piece> columns;  // of one of eight ranks
  for (int i = 0; i < o.tensors; ++i) {
    const checkpoint::Piece& p =
        state.pieces.emplace_back(checkpoint::whole(fmt::format("w{:03}", i), ones({each, 1024})));
    columns.push_back({p.name, p.global, {0, 512}, ones({each, 128})});
  }
  double bytes = double(o.tensors) * double(each) * 4096;
  Tensor flat = ones({int64_t(bytes)}, {kU8}), other = zeros({int64_t(bytes)}, {kU8});

  std::vector<double> copies, calls, worst, saves, writer, plain, cold, warm, part;
  checkpoint::Checkpointer saver(scratch / "c", nullptr, {.keep = 1});
  double prepare = timed([&] { saver.prepare(state.pieces); });
  for (int64_t round = 0; round <= o.rounds; ++round) {
    double c = timed([&] { copy_values(other, flat); });
    double p = timed([&] { write_plain(scratch / "plain", flat); });
    saver.save(2 * round, state);
    for (const checkpoint::Piece& p : state.pieces)
      p.values.raw();  // waits until it may be written
    saver.wait();
    double overwritten = saver.last().blocked_seconds;
    saver.save(2 * round + 1, state);
    saver.wait();
    forget_cached(scratch / "c");
    auto read = [&] { checkpoint::load(scratch / "c", state.pieces); };
    double from_disk = timed(read), from_cache = timed(read);
    double of_columns = timed([&] { checkpoint::load(scratch / "c", columns); });
    if (round == 0) continue;  // warms up
    copies.push_back(c), plain.push_back(p), worst.push_back(overwritten);
    calls.push_back(saver.last().blocked_seconds), saves.push_back(saver.last().seconds);
    writer.push_back(saver.last().writer_cpu_seconds);
    cold.push_back(from_disk), warm.push_back(from_cache), part.push_back(of_columns);
  }
  Json out{{"bytes", bytes}, {"threads", num_threads()}, {"prepare_seconds", prepare}};
  fmt::print("{:.0f} MB in {} tensors, {} threads, in {}; medians of {} [95 %]\n", bytes / 1e6,
             o.tensors, num_threads(), o.folder, o.rounds);
  auto line = [&](const char* key, const char* text, const std::vector<double>& seconds) {
    Stats s = stats_of(seconds);
    Interval i = median_interval(seconds);
    fmt::print("{:<44} {:9.2f} ms [{:.2f}, {:.2f}]  {:6.2f} GB/s  (fastest {:.2f} ms)\n", text,
               s.median * 1e3, i.low * 1e3, i.high * 1e3, bytes / s.median / 1e9, s.min * 1e3);
    out[key] = to_json(s);
    out[key]["interval"] = {i.low, i.high};
  };
  fmt::print("{:<44} {:9.2f} ms\n", "once: plan and staging buffer", prepare * 1e3);
  line("copy", "plain copy, same threads", copies);
  line("call", "save() returns after", calls);
  line("worst", "save() and waits, all overwritten at once", worst);
  fmt::print("{:<44} {:9.2f} ms\n", "  at 20 GB/s it would be", bytes / 20e9 * 1e3);
  line("plain", "plain file, written and synced", plain);
  line("save", "save until read back and `latest` swapped", saves);
  line("writer_cpu", "  of that, processor time of the writer", writer);
  line("load_cold", "load, verified, cache dropped", cold);
  line("load_warm", "load, verified, from the page cache", warm);
  line("load_part", "  of an eighth of all columns", part);
  return out;
}

Json run(const CheckpointOptions& o) {
  TESSERA_CHECK(o.tensors >= 1 && o.steps >= 1 && o.rounds >= 0 && o.pairs >= 0,
                "bench checkpoint: --tensors {} --steps {} --rounds {} --pairs {}: expected at "
                "least 1, 1, 0 and 0",
                o.tensors, o.steps, o.rounds, o.pairs);
  const fs::path scratch = fs::path(o.folder) / "bench-checkpoint";
  std::error_code error;
  fs::remove_all(scratch, error);
  if (!error) fs::create_directories(scratch, error);
  TESSERA_CHECK(!error, "bench checkpoint: --folder {}: cannot make {} ({})", o.folder,
                scratch.string(), error.message());
  struct Removed {
    const fs::path& folder;
    ~Removed() {
      std::error_code ignored;
      fs::remove_all(folder, ignored);
    }
  } at_the_end{scratch};
  Json out;
  if (o.rounds > 0) out = speeds(o, scratch);
  if (o.pairs > 0) out["around"] = steps_around_a_save(o, scratch);
  return out;
}

}  // namespace

void add_checkpoint(CLI::App& app, Run& chosen) {
  auto o = std::make_shared<CheckpointOptions>();
  Subcommand sub(app, "checkpoint", "save and load beside plain copies and files");
  sub.option("--folder", o->folder, "on the disk to measure");
  sub.option("--megabytes", o->megabytes, "megabytes of tensors to save");
  sub.option("--tensors", o->tensors);
  sub.option("--rounds", o->rounds, "rounds of save and load");
  sub.option("--pairs", o->pairs, "pairs of blocks of steps, with and without a save");
  sub.option("--steps", o->steps, "steps of a block");
  add_workload_options(sub, o->workload);
  sub.runs(chosen, [o] { return run(*o); });
}

}  // namespace tessera::bench
