// Kills a training program at every system call that changes the disk, one run for each call, until
// a run survives. After each kill the old or the new step must load, and the resumed program must
// end with exactly the lines (step, loss, norm of the gradient) of an undisturbed one.
#include <algorithm>
#include <cinttypes>
#include <filesystem>
#include <map>
#include <set>

#include "collectives/loopback/run_ranks.h"
#include "core/base/parallel.h"
#include "core/core.h"
#include "parallel/checkpoint/checkpointer.h"
#include "parallel/checkpoint/load.h"
#include "parallel/checkpoint/verify.h"
#include "parallel/ddp.h"
#include "tests/support/disk_tracer.h"
#include "tests/support/temp_folder.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kSteps = 8, kEvery = 2;

State state_of(nn::Module& model, optim::Optimizer& optimizer, int64_t step) {
  State s{{}, {{"cursor", std::to_string(step)}}};
  for (auto& t : model.state()) s.pieces.push_back(whole("model." + t.name, t.tensor));
  for (auto& t : optimizer.named_state())
    s.pieces.push_back(whole("optimizer." + t.name, t.tensor));
  s.pieces.push_back(whole("random", default_generator().state()));
  // So much that the file of each of two ranks goes past the page cache, all but its end.
  for (const char* name : {"ballast.0", "ballast.1"})
    s.pieces.push_back(whole(name, full({(1 << 18) + 3}, double(step))));
  return s;
}

// Runs one rank: resumes if there is a save, then trains to the end. Writes the bits of losses and
// norms to `lines`.
void train_rank(const std::string& folder, ProcessGroup& group, const std::string& lines) {
  manual_seed(5);
  auto model = nn::sequential(nn::linear(3, 4), nn::gelu(), nn::linear(4, 2));
  auto ddp = parallel::ddp(model, {.group = world_group()});
  optim::AdamW optimizer(model->named_parameters(), {.lr = 0.05});
  Checkpointer saver(folder, &group, {.keep = 1, .block_bytes = 64 << 10});
  int64_t done = 0;
  if (auto found = newest(folder, group)) {
    Loaded l = load(found->folder, state_of(*model, optimizer, 0).pieces, &group);
    done = std::stoll(l.extra.at("cursor"));
  }
  std::FILE* out = group.rank() == 0 ? std::fopen(lines.c_str(), "a") : nullptr;
  for (int64_t step = done + 1; step <= kSteps; ++step) {
    // Draws from the generator, whose state is part of what is saved; ranks see different data.
    Tensor x = randn({4, 3}) + double(group.rank()), y = randint(0, 2, {4});
    Tensor loss = nn::cross_entropy((*model)(x), y);
    optimizer.zero_grad();
    loss.backward();
    auto clip = optim::clip_grad_norm(model->parameters(), 0.5);
    optimizer.step(clip.scale);
    if (out)
      std::fprintf(out, "%" PRId64 " %a %a\n", step, loss.item<double>(), clip.norm.item<double>()),
          std::fflush(out);
    if (step % kEvery == 0) saver.save(step, state_of(*model, optimizer, step));
  }
  saver.wait();
  if (out) std::fclose(out);
}

int train(const std::string& folder, int ranks) {
  try {
    run_ranks(ranks, [&](ProcessGroup& g) { train_rank(folder + "/c", g, folder + "/lines"); });
    return 0;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
  }
}

// Returns the last line of each step; a torn line is ignored.
std::map<int64_t, std::string> read_lines(const std::string& folder) {
  std::map<int64_t, std::string> out;
  std::ifstream in(folder + "/lines");
  for (std::string line; std::getline(in, line);)
    if (std::count(line.begin(), line.end(), ' ') == 2) out[std::stoll(line)] = line;
  return out;
}

std::string number_text(size_t n) { return "n" + std::to_string(n); }

class Kill : public testing::Test {
 protected:
  // Beginning with a copy of `from` (empty: nothing), kills at call 0, 1, ... until a run survives.
  // Returns the number of kills. The first `mends` swaps of `latest` name no new step.
  size_t kill_everywhere(int ranks, const std::string& from,
                         const std::map<int64_t, std::string>& undisturbed, int64_t mends = 0) {
    for (size_t n = 0;; ++n) {
      std::string folder = dir_ / number_text(n);
      fs::create_directories(folder);
      if (!from.empty()) fs::copy(from, folder, fs::copy_options::recursive);
      int64_t before = 0;
      if (auto found = newest(folder + "/c")) before = found->step;
      TracedRun run = run_traced([&] { return train(folder, ranks); }, n);
      if (!run.killed) {
        EXPECT_EQ(run.exit_status, 0);
        EXPECT_EQ(read_lines(folder), undisturbed);
        fs::remove_all(folder);
        return n;
      }
      bool all_saved = expect_old_or_new(folder, run, before, mends) == kSteps;
      TracedRun resumed = run_traced([&] { return train(folder, ranks); }, {});
      EXPECT_EQ(resumed.exit_status, 0) << "after a kill at " << where(run);
      EXPECT_EQ(read_lines(folder), undisturbed) << "after a kill at " << where(run);
      Verified v = verify(folder + "/c");
      EXPECT_TRUE(v.findings.empty()) << to_string(v.findings[0]);
      // The next save cleans up, so nothing of the crash is left: `latest` and one step. Where
      // there was no next save, the step that was about to be pruned may be there yet.
      auto entries = std::distance(fs::directory_iterator(folder + "/c"), {});
      EXPECT_TRUE(entries == 2 || (all_saved && entries == 3)) << entries << " " << where(run);
      fs::remove_all(folder);
      if (HasFailure()) return n;
    }
  }
  static std::string where(const TracedRun& run) {
    return run.calls.back().name + " " + run.calls.back().path;
  }
  static int64_t expect_old_or_new(const std::string& folder, const TracedRun& run, int64_t before,
                                   int64_t mends) {
    auto swaps = std::ranges::count_if(run.calls, [](const DiskCall& c) {
      return c.reached && c.name.starts_with("rename") && c.path.ends_with("/latest");
    });
    int64_t old = before + std::max<int64_t>(0, swaps - mends) * kEvery;
    auto found = newest(folder + "/c");
    int64_t now = found ? found->step : 0;
    EXPECT_TRUE(now == old || now == old + kEvery)
        << "step " << now << " after " << old << ", killed at " << where(run);
    EXPECT_TRUE(!found || verify(found->folder).findings.empty());
    return now;
  }
  // A folder that a crash left between the commit of the second step and the swap of `latest`.
  // Returns the lines of a run without one.
  std::map<int64_t, std::string> crash(const std::string& folder) {
    std::string calm = dir_ / "calm";
    fs::create_directories(calm);
    TracedRun run = run_traced([&] { return train(calm, 1); }, {});
    auto swap = [seen = 0](const DiskCall& c) mutable {
      return c.name.starts_with("rename") && c.path.ends_with("/latest") && ++seen == 2;
    };
    auto at = std::ranges::find_if(run.calls, swap);
    EXPECT_NE(at, run.calls.end());
    // The lines of the training thread come in between: the number of the call may vary a little.
    for (auto n = size_t(at - run.calls.begin()); n < run.calls.size(); ++n) {
      fs::remove_all(folder);
      fs::create_directories(folder);
      TracedRun killed = run_traced([&] { return train(folder, 1); }, n);
      EXPECT_TRUE(killed.killed);
      if (saved_steps(folder + "/c").size() == 2 && read_latest(folder + "/c").step == kEvery)
        return read_lines(calm);
    }
    ADD_FAILURE() << "no kill came between commit and swap";
    return {};
  }
  TempFolder dir_{"/dev/shm"};
};

TEST_F(Kill, EveryCallOfASaveOnOneRankAndOnTwo) {
  for (int ranks : {1, 2}) {
    std::string calm = dir_ / "calm";
    fs::create_directories(calm);
    TracedRun run = run_traced([&] { return train(calm, ranks); }, {});
    ASSERT_EQ(run.exit_status, 0);
    auto undisturbed = read_lines(calm);
    ASSERT_EQ(undisturbed.size(), size_t(kSteps));
    size_t kills = kill_everywhere(ranks, "", undisturbed);
    EXPECT_GE(kills, 60u);
    RecordProperty("kills_with_" + std::to_string(ranks), int(kills));
    std::printf("%d ranks: %zu kills\n", ranks, kills);
    fs::remove_all(calm);
  }
}

// This begins where a crash came between the commit of a step and the swap of `latest`.
TEST_F(Kill, EveryCallOfTheSavesAfterACrash) {
  std::string crashed = dir_ / "crashed";
  auto undisturbed = crash(crashed);
  size_t kills = kill_everywhere(1, crashed, undisturbed);
  EXPECT_GE(kills, 40u);
  std::printf("after a crash: %zu kills\n", kills);
}

// This begins where the step that `latest` names was removed; that step had another hash than the
// one that will be saved again under its name.
TEST_F(Kill, EveryCallOfTheSavesAfterGoingBack) {
  std::string back = dir_ / "back";
  auto undisturbed = crash(back);
  write_latest(back + "/c", {2 * kEvery, Digest{1, 2}});
  fs::remove_all(back + "/c/" + step_name(2 * kEvery));
  size_t kills = kill_everywhere(1, back, undisturbed, 1);
  EXPECT_GE(kills, 40u);
  std::printf("after going back: %zu kills\n", kills);
}

// Killing the process cannot show what a loss of power would do: no file may be renamed into place
// before it was synced, and each rename needs a sync of its folder.
TEST_F(Kill, SyncsComeBeforeRenames) {
  TracedRun run = run_traced([&] { return train(dir_.str(), 2); }, {});
  ASSERT_EQ(run.exit_status, 0);
  std::set<std::string> dirty;     // files written and not yet synced
  std::set<std::string> unsynced;  // folders with entries that are not on disk
  int commits = 0, swaps = 0, pruned = 0;
  bool committed_synced = false, swap_synced = true;
  std::string root = dir_ / "c";
  auto parent = [](const std::string& path) { return fs::path(path).parent_path().string(); };
  for (const DiskCall& c : run.calls) {
    if (!c.path.starts_with(root)) continue;
    bool temporary = c.path.ends_with(".tmp") || c.path.find(".tmp/") != std::string::npos;
    if (c.name == "openat" || c.name == "open" || c.name == "mkdir")
      unsynced.insert(parent(c.path));
    if (c.name == "write") dirty.insert(c.path);
    if (c.name == "fsync" && c.path == root) committed_synced = swap_synced = true;
    if (c.name.starts_with("rename") && c.path.ends_with(".old.tmp")) {
      ++pruned;
      EXPECT_TRUE(swap_synced) << "after power loss `latest` may name " << c.path
                               << ", a removed step";
    }
    if (c.name == "fsync") dirty.erase(c.path), unsynced.erase(c.path);
    if (!c.name.starts_with("rename") || temporary) continue;
    if (c.path.ends_with("/latest")) {
      ++swaps;
      swap_synced = false;
      EXPECT_EQ(swaps, commits);
      EXPECT_FALSE(
          std::ranges::any_of(dirty, [](auto& f) { return f.find("latest.tmp") != f.npos; }));
      EXPECT_TRUE(committed_synced) << "`latest` would name a step that power loss may take";
    } else {
      ++commits;
      committed_synced = false;
      for (const std::string& f : dirty) EXPECT_EQ(f.find(".tmp/"), f.npos) << f;
      for (const std::string& f : unsynced) EXPECT_FALSE(f.ends_with(".tmp")) << f;
    }
  }
  EXPECT_EQ(commits, kSteps / kEvery);
  EXPECT_EQ(swaps, kSteps / kEvery);
  EXPECT_EQ(pruned, kSteps / kEvery - 1);
  EXPECT_TRUE(swap_synced);
  EXPECT_TRUE(dirty.empty());
}

// Bytes change on their way to the disk, after they were written and before the step is published:
// the save fails, and the step before it is still there and still the newest.
TEST_F(Kill, ASaveThatReadsBackWrongLeavesTheOneBefore) {
  std::string folder = dir_ / "c", out = dir_ / "error";
  auto save = [&](int64_t step) {
    State s{{whole("w", full({64}, double(step)))}, {}};
    Checkpointer saver(folder, nullptr, {.keep = 1});
    saver.save(step, s);
    saver.wait();
  };
  auto body = [&] {
    try {
      run_ranks(1, [&](ProcessGroup&) { save(1), save(2); });
    } catch (const UserError& e) {
      std::ofstream(out) << e.what();
      return 3;
    }
    return 0;
  };
  bool renamed = false, damaged = false;
  auto damage = [&](const DiskCall& c) {
    const std::string step = folder + "/" + step_name(2);
    if (c.name.starts_with("rename") && c.path == step) renamed = true;
    // Its folder is about to be synced: all of it is written, nothing of it is read back.
    if (!renamed || damaged || c.name != "fsync" || c.path != folder) return;
    damaged = true;
    std::fstream file(step + "/" + rank_file_name(0, 1),
                      std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(-1, std::ios::end);
    file.put('\x55');
  };
  TracedRun run = run_traced(body, {}, damage);
  ASSERT_TRUE(damaged);
  EXPECT_EQ(run.exit_status, 3);
  std::stringstream error;
  error << std::ifstream(out).rdbuf();
  EXPECT_NE(error.str().find("step 2 reads back wrong"), std::string::npos) << error.str();
  EXPECT_EQ(saved_steps(folder), std::vector<int64_t>{1});
  EXPECT_EQ(read_latest(folder).step, 1);
  EXPECT_TRUE(verify(folder).findings.empty());
}

}  // namespace
}  // namespace tessera::checkpoint
