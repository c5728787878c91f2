// Damage of every kind to every file of a small checkpoint is found, and its place is named.
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <filesystem>

#include "collectives/loopback/run_ranks.h"
#include "core/ops/create.h"
#include "parallel/checkpoint/checkpointer.h"
#include "parallel/checkpoint/folder.h"
#include "parallel/checkpoint/load.h"
#include "parallel/checkpoint/verify.h"
#include "tests/support/small_disk.h"
#include "tests/support/temp_folder.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;

// Two steps of two ranks: one tensor in two boxes of several blocks, one whole.
class Damage : public testing::Test {
 protected:
  void SetUp() override {
    run_ranks(2, [&](ProcessGroup& g) {
      int64_t r = g.rank();
      Checkpointer c(root_, &g, {.block_bytes = 16});
      for (int64_t step : {4, 8}) {
        Tensor rows = from_values<float>({1, 2, 3, 4, 5, float(step)}, {2, 3});
        State s{{{"w", {4, 3}, {2 * r, 0}, rows}}, {{"step", std::to_string(step)}}};
        if (r == 1) s.pieces.push_back(whole("n", from_values<int64_t>({step}, {})));
        c.save(step, s);
      }
      c.wait();
    });
    for (auto& e : fs::recursive_directory_iterator(root_))
      if (e.is_regular_file()) files_.push_back(e.path().string());
  }
  std::vector<Finding> findings() { return verify(root_).findings; }
  static std::string read(const std::string& path) {
    std::ifstream in(path, std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(in), {});
  }
  static void write(const std::string& path, const std::string& bytes) {
    std::ofstream(path, std::ios::binary) << bytes;
  }
  // Expects a finding that names this file, or a file that belongs to it.
  static void expect_found(const std::vector<Finding>& found, const std::string& file,
                           const std::string& what) {
    ASSERT_FALSE(found.empty()) << what << " of " << file << " was not found";
    std::string folder = fs::path(file).parent_path().string();
    EXPECT_TRUE(found[0].file == file || found[0].file.starts_with(folder)) << to_string(found[0]);
  }
  TempFolder dir_{"/dev/shm"};  // verifying asks the disk anew each time, and this is often
  std::string root_ = dir_ / "c";
  std::vector<std::string> files_;
  Pages window_{kWindowBytes};
};

TEST_F(Damage, EveryBitFlipIsFoundWhereItIs) {
  ASSERT_TRUE(findings().empty());
  ASSERT_EQ(files_.size(), 7u);
  int flips = 0;
  for (const std::string& path : files_) {
    bool data = path.ends_with(".safetensors");
    Manifest m;
    size_t index = 0;
    if (data) {
      m = read_manifest(fs::path(path).parent_path().string());
      while (root_ + "/" + step_name(m.step) + "/" + m.files[index].name != path) ++index;
    }
    int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
    std::string bytes = read(path);
    for (size_t i = 0; i < bytes.size(); ++i) {
      for (int bit = 0; bit < 8; ++bit, ++flips) {
        char flipped = char(bytes[i] ^ 1 << bit);
        ASSERT_EQ(pwrite(fd, &flipped, 1, off_t(i)), 1);
        if (!data) {
          expect_found(findings(), path, fmt::format("bit {} of byte {}", bit, i));
        } else {  // the data path alone: the rest was looked at above
          Verified v;
          verify_file(fs::path(path).parent_path().string(), m, index, window_, v);
          ASSERT_EQ(v.findings.size(), 1u) << path << " byte " << i << " bit " << bit;
          const Finding& f = v.findings[0];
          EXPECT_EQ(f.file, path);
          uint64_t header = m.files[index].header_bytes;
          EXPECT_TRUE(f.begin <= i && i < f.end) << to_string(f);
          EXPECT_LE(f.end - f.begin, i < header ? header : 16) << to_string(f);
          EXPECT_EQ(f.tensor.empty(), i < header) << to_string(f);
        }
      }
      ASSERT_EQ(pwrite(fd, &bytes[i], 1, off_t(i)), 1);
    }
    ::close(fd);
  }
  EXPECT_TRUE(findings().empty());
  EXPECT_GT(flips, 10000);
}

TEST_F(Damage, EveryTruncationIsFound) {
  for (const std::string& path : files_) {
    std::string bytes = read(path);
    for (size_t n = 0; n < bytes.size(); ++n) {
      fs::resize_file(path, n);
      expect_found(findings(), path, fmt::format("truncation to {}", n));
      write(path, bytes);
    }
    write(path, bytes + "x");
    expect_found(findings(), path, "a byte too many");
    write(path, bytes);
  }
  EXPECT_TRUE(findings().empty());
}

TEST_F(Damage, TruncationNamesTheTensor) {
  std::string path = root_ + "/step-000000008/rank-0001-of-0002.safetensors";
  fs::resize_file(path, fs::file_size(path) - 1);
  auto found = findings();
  ASSERT_EQ(found.size(), 1u);
  EXPECT_EQ(found[0].end - found[0].begin, 1u);
  EXPECT_EQ(found[0].tensor, "'w'[2:4, 0:3]");
}

TEST_F(Damage, MissingFilesAreNamed) {
  for (const std::string& path : files_) {
    std::string bytes = read(path);
    fs::remove(path);
    auto found = findings();
    ASSERT_FALSE(found.empty()) << path;
    EXPECT_EQ(found[0].file, path);
    expect_contains(found[0].what, "No such file");
    const std::string text = to_string(found[0]), name = fs::path(path).filename();
    expect_contains(text, path);
    EXPECT_EQ(text.find(name), text.rfind(name)) << text;
    write(path, bytes);
  }
  fs::rename(root_ + "/step-000000008", root_ + "/gone");
  auto found = findings();
  ASSERT_EQ(found.size(), 1u);
  expect_contains(found[0].what, "names step-000000008, which is missing");
}

// A step that the system cannot read counts as gone: the step before it is taken.
TEST_F(Damage, ALinkThatLeadsToItselfIsGone) {
  const std::string step = root_ + "/step-000000008";
  fs::remove_all(step);
  fs::create_directory_symlink(step, step);
  const auto found = newest(root_);
  ASSERT_TRUE(found);
  EXPECT_EQ(found->step, 4);
  expect_contains(found->warning, "names step-000000008, which is gone");
}

TEST_F(Damage, SwappedAndForeignFilesAreFound) {
  std::string a = root_ + "/step-000000004/", b = root_ + "/step-000000008/";
  fs::copy_file(a + "rank-0000-of-0002.safetensors", b + "rank-0000-of-0002.safetensors",
                fs::copy_options::overwrite_existing);  // a shard of another step
  auto found = findings();
  ASSERT_FALSE(found.empty());
  EXPECT_EQ(found[0].file, b + "rank-0000-of-0002.safetensors");
  fs::remove_all(b);
  fs::copy(a, b, fs::copy_options::recursive);  // a whole step under another's name
  found = findings();
  ASSERT_EQ(found.size(), 1u);
  expect_contains(found[0].what, "describes step 4");
}

TEST_F(Damage, LoadRefusesDamageAndFallsBackWithoutLatest) {
  Tensor w = empty({4, 3}), n = empty({}, kI64);
  std::vector<Piece> pieces{whole("w", w), whole("n", n)};
  EXPECT_EQ(load(root_, pieces).step, 8);
  EXPECT_EQ(n.item<int64_t>(), 8);
  std::string path = root_ + "/step-000000008/rank-0000-of-0002.safetensors", bytes = read(path);
  std::string bad = bytes;
  bad[bytes.size() - 3] = char(bad[bytes.size() - 3] ^ 4);
  write(path, bad);
  expect_contains(error_of([&] { load(root_, pieces); }), "tensor 'w'[0:2, 0:3]");
  EXPECT_EQ(load(root_ + "/step-000000004", pieces).step, 4);
  EXPECT_EQ(n.item<int64_t>(), 4);
  fs::remove(path);
  std::string error = error_of([&] { load(root_, pieces); });
  expect_contains(error, "rank-0000-of-0002.safetensors' is missing, file 1 of 2 of step 8");
  expect_contains(error, "to go on from an older step, remove the folder of this one");
  write(path, bytes);
  std::string latest = read(root_ + "/latest");
  fs::remove(root_ + "/latest");
  Loaded l = load(root_, pieces);
  EXPECT_EQ(l.step, 8);
  expect_contains(l.warning, "taking step-000000008");
  write(root_ + "/step-000000008/manifest.json", "{}");
  l = load(root_, pieces);
  EXPECT_EQ(l.step, 4);
  EXPECT_EQ(l.warning.find("older step"), std::string::npos) << l.warning;
  write(root_ + "/latest", latest);
  const std::string advice = "; to go on from an older step, remove the folder of this one";
  error = error_of([&] { load(root_, pieces); });
  expect_contains(error, "cannot be a manifest");
  expect_contains(error, advice);
  fs::remove(root_ + "/step-000000008/manifest.json");
  error = error_of([&] { load(root_ + "/step-000000008", pieces); });
  expect_contains(error, "manifest.json': No such file");
  expect_contains(error, advice);
}

// A rank that needs only a part of a block also finds damage in the bytes that it does not need.
TEST_F(Damage, LoadingAPartFindsDamageInItsBlocks) {
  std::string path = root_ + "/step-000000008/rank-0000-of-0002.safetensors", bytes = read(path);
  uint64_t header = read_manifest(root_ + "/step-000000008").files[0].header_bytes;
  ASSERT_EQ(bytes.size(), header + 24);  // blocks of 16 and 8 bytes, rows of 12
  Tensor values[] = {empty({4, 1}), empty({1, 3}), empty({1, 2})};
  const Piece column{"w", {4, 3}, {0, 1}, values[0]}, row{"w", {4, 3}, {0, 0}, values[1]},
      end{"w", {4, 3}, {1, 1}, values[2]};
  for (uint64_t at = header; at < bytes.size(); ++at) {
    std::string bad = bytes;
    bad[at] = char(bad[at] ^ 4);
    write(path, bad);
    for (const Piece& p : {column, row, end}) {
      bool first = at - header < 16;
      bool touched = p.values.shape() == column.values.shape() || first == (p.begin[0] == 0);
      auto attempt = [&] { load(root_, std::vector{p}, nullptr, {.only = "w"}); };
      if (!touched) {
        EXPECT_NO_THROW(attempt());
        continue;
      }
      uint64_t begin = header + (first ? 0 : 16), end = begin + (first ? 16 : 8);
      expect_contains(error_of(attempt), fmt::format("bytes [{}, {}), tensor 'w'", begin, end));
    }
  }
}

// Where the last block, or all of a tensor, is one byte.
TEST_F(Damage, LoadingFindsDamageInABlockOfOneByte) {
  Checkpointer c(dir_ / "bytes", nullptr, {.block_bytes = 16});
  const Tensor mask = ones({17}, {.dtype = kBool}), flag = ones({}, {.dtype = kBool});
  c.save(1, {{whole("mask", mask), whole("flag", flag)}, {}});
  c.wait();
  const std::string step = dir_ / "bytes/step-000000001";
  const Manifest m = read_manifest(step);
  const std::string path = step + "/" + m.files[0].name, bytes = read(path);
  Tensor values[] = {empty({17}, kBool), empty({}, kBool)};
  const std::vector<Piece> pieces{whole("mask", values[0]), whole("flag", values[1])};
  load(step, pieces);
  for (const TensorEntry& t : m.tensors) {
    const uint64_t last = t.chunks[0].offset + (t.name == "mask" ? 16 : 0);
    std::string bad = bytes;
    bad[last] = char(!bad[last]);
    write(path, bad);
    expect_contains(error_of([&] { load(step, pieces); }),
                    fmt::format("bytes [{}, {}), tensor '{}'", last, last + 1, t.name));
  }
}

// Each of the two is sound by itself.
TEST_F(Damage, AStepThatLatestDoesNotMeanIsRefused) {
  Tensor w = empty({4, 3}), n = empty({}, kI64);
  std::vector<Piece> pieces{whole("w", w), whole("n", n)};
  std::string good = read(root_ + "/latest"), bad = good, step = root_ + "/step-000000008";
  char& digit = bad[bad.size() - 2];
  digit = digit == '0' ? '1' : '0';
  auto refused = [&] {
    for (const std::string& path : {root_, step, step + "/"})
      expect_contains(error_of([&] { load(path, pieces); }), "one of them is damaged");
    EXPECT_EQ(load(root_ + "/step-000000004", pieces).step, 4);
    for (const std::string& path : {root_, step}) {
      auto found = verify(path).findings;
      ASSERT_EQ(found.size(), 1u);
      EXPECT_EQ(found[0].file, step + "/manifest.json");
      expect_contains(found[0].what, "one of them is damaged");
    }
  };
  write(root_ + "/latest", bad);
  refused();
  fs::remove(root_ + "/latest");
  Loaded l = load(root_, pieces);
  EXPECT_EQ(l.step, 8);
  expect_contains(l.warning, "taking step-000000008");

  write(root_ + "/latest", good);
  Checkpointer(dir_ / "other").save(8, {{whole("w", w), whole("n", n)}, {}});
  fs::remove_all(step);
  fs::copy(dir_ / "other/step-000000008", step, fs::copy_options::recursive);
  refused();
  // Under another step's name it is not the newest one.
  fs::rename(step, root_ + "/step-000000009");
  EXPECT_EQ(load(root_, pieces).step, 4);
  expect_contains(error_of([&] { load(root_ + "/step-000000009", pieces); }), "describes step 8");
}

// Manifests whose hash is right but whose contents are wrong.
TEST_F(Damage, HostileManifestsAreRefused) {
  std::string folder = root_ + "/step-000000008", path = folder + "/manifest.json";
  std::string good = read(path);
  good.resize(good.rfind("\"xxh128\":"));
  auto attempt = [&](const std::string& from, const std::string& to) {
    std::string text = good;
    size_t at = text.find(from);
    EXPECT_NE(at, std::string::npos) << from;
    text.replace(at, from.size(), to);
    write(path, text + fmt::format("\"xxh128\":\"{}\"}}\n",
                                   io::to_string(io::xxh128(text.data(), text.size()))));
    return error_of([&] { read_manifest(folder); });
  };
  const std::string file = "\"name\":\"rank-0000-of-0002.safetensors\"";
  for (const char* name : {"../x", "/etc/passwd", "", ".hidden", "a/b", "a\\\\b", "a\\u0000b"})
    expect_contains(attempt(file, fmt::format("\"name\":\"{}\"", name)), "is refused");
  expect_contains(attempt("\"shape\":[4,3]", "\"shape\":[4611686018427387904,8]"), "overflows");
  expect_contains(attempt("\"shape\":[4,3]", "\"shape\":[5,3]"), "no box holds [4:5, 0:3]");
  expect_contains(attempt("\"shape\":[4,3]", "\"shape\":[-4,3]"), "negative");
  expect_contains(attempt("\"shape\":[4,3]", "\"shape\":[4,3,1,1,1,1,1,1,1]"), "too many");
  expect_contains(attempt("\"begin\":[2,0]", "\"begin\":[0,0]"), "no box holds [2:4, 0:3]");
  expect_contains(attempt("\"begin\":[2,0]", "\"begin\":[3,0]"), "not inside");
  expect_contains(attempt("\"begin\":[2,0],\"shape\":[2,3]",
                          "\"begin\":[2,0],\"shape\":[9223372036854775807,3]"),
                  "the box [2:9223372036854775809, 0:3] is not inside");
  expect_contains(attempt("\"begin\":[2,0]", "\"begin\":[18446744073709551615,0]"), "too many");
  expect_contains(attempt("\"dtype\":\"F32\"", "\"dtype\":\"F64\""), "which has 144");
  expect_contains(attempt("\"dtype\":\"F32\"", "\"dtype\":\"Q4\""), "not known");
  expect_contains(attempt("\"file\":0", "\"file\":7"), "file number 7 of 2");
  expect_contains(attempt("\"offset\":", "\"offset\":9"), "bytes [9");
  expect_contains(attempt("\"offset\":", "\"offset\":1,\"offset\":"), "twice");
  expect_contains(attempt("\"block_bytes\":16", "\"block_bytes\":8"), "hashes for");
  expect_contains(attempt("\"version\":1", "\"version\":2"), "format version 2");
  expect_contains(attempt("tessera-checkpoint", "other"), "is it a checkpoint");
  expect_contains(attempt("\"step\":8", "\"step\":8.5"), "fraction");
  expect_contains(attempt("\"step\":8", "\"step\":9223372036854775807"),
                  "step 9223372036854775807");
  expect_contains(attempt("\"step\":8,", ""), "missing");
  expect_contains(attempt("\"world_size\":2", "\"world_size\":0"), "of 0 ranks");
  expect_contains(attempt("\"block_bytes\":16", "\"block_bytes\":0"), "blocks of 0 bytes");
  expect_contains(attempt("\"block_bytes\":16", "\"block_bytes\":1073741825"),
                  "blocks of 1073741825 bytes");
  expect_contains(attempt("\"block_bytes\":16", "\"block_bytes\":1073741824"),
                  "2 hashes for 24 bytes in blocks of 1073741824");  // the largest there are
  expect_contains(attempt("\"name\":\"w\"", "\"name\":\"n\""), "twice or out of order");
  expect_contains(attempt("\"extra\":{", "\"extra\":{\"d\":[[[[[[[[[["), "nested deeper");
  expect_contains(attempt("\"extra\":{", "\"extra\":{\"d\":{},"), "not expected");
  expect_contains(attempt("\"extra\"", "\"extras\""), "not expected");

  const std::string one = "{\"name\":\"a\",\"bytes\":8,\"header_bytes\":8,\"xxh128\":\"" +
                          std::string(32, '0') + "\"},";
  std::string most;  // beside the files of the two ranks
  for (uint64_t i = 2; i < kMaxFiles; ++i) most += one;
  const std::string files = "\"files\":[";
  EXPECT_EQ(attempt(files, files + most).find("more than"), std::string::npos);
  expect_contains(attempt(files, files + one + most), "more than 131072 files");
}

// Where standard input was closed, the first file that a program opens has descriptor 0.
TEST_F(Damage, DescriptorZeroIsClosedLikeAnyOther) {
  const int input = ::dup(0);
  ::close(0);
  const auto is_free = [] { return ::fcntl(0, F_GETFD) == -1; };
  EXPECT_TRUE(verify(root_).findings.empty());
  EXPECT_TRUE(is_free()) << "after verify()";
  make_folders(dir_ / "new/folder");
  EXPECT_TRUE(is_free()) << "after make_folders()";
  ::dup2(input, 0);
  ::close(input);
}

TEST_F(Damage, SavesGoForwardAndOneJobAtATime) {
  Checkpointer c(root_);
  State s{{whole("w", empty({3}))}, {}};
  for (int64_t step : {3, 8}) {
    c.save(step, s);
    expect_contains(error_of([&] { c.wait(); }), "holds step 8 already");
  }
  expect_contains(error_of([&] { Checkpointer second(root_); }), "another job saves into");
  EXPECT_TRUE(findings().empty());
  c.save(9, s);
  c.wait();
}

TEST_F(Damage, KeepPrunesAndStrangersStay) {
  dir_.write("c/notes.txt", "mine");
  dir_.write("c/.step-mine/x", "mine");
  dir_.write("c/.step-000000011.tmp/half", "of a crash");
  dir_.write("c/latest.tmp.12.0", "of a crash");
  dir_.write("c/step-12/x", "mine");
  Checkpointer c(root_, nullptr, {.keep = 2});
  for (int64_t step : {12, 13, 14}) c.save(step, {{whole("w", empty({3}))}, {}});
  c.wait();
  EXPECT_EQ(saved_steps(root_), (std::vector<int64_t>{13, 14}));
  for (const char* mine : {"notes.txt", ".step-mine/x", "step-12/x"})
    EXPECT_TRUE(fs::exists(root_ + "/" + mine)) << mine;
  for (const char* left : {".step-000000011.tmp", "latest.tmp.12.0"})
    EXPECT_FALSE(fs::exists(root_ + "/" + left)) << left;
}

// A crashed save that `latest` never named is replaced.
TEST_F(Damage, AnUnnamedStepIsReplaced) {
  std::string latest = read(root_ + "/latest");
  {
    Checkpointer c(root_);
    c.save(9, {{whole("w", empty({3}))}, {}});
  }
  write(root_ + "/latest", latest);  // as if the job had died before the swap
  Checkpointer c(root_);
  c.save(9, {{whole("v", empty({3}))}, {}});
  c.wait();
  EXPECT_TRUE(findings().empty());
  EXPECT_TRUE(read_manifest(root_ + "/step-000000009").find("v"));
}

// One rank has no memory for its staging buffer: all ranks get the error, none waits for another,
// and a smaller save succeeds. The limit counts mapped memory, so nothing large is ever touched.
TEST_F(Damage, NoMemoryOnOneRankIsReportedOnAll) {
  fflush(nullptr);
  pid_t child = fork();
  if (child == 0) {
    std::atomic<int> bad = 0;
    run_ranks(2, [&](ProcessGroup& g) {
      constexpr int64_t kBytes = 1 << 30;
      Checkpointer c(root_, &g, {.timeout = Millis(20'000)});
      Piece small = whole(fmt::format("a{}", g.rank()), empty({3}));
      State large{{small}, {}};
      if (g.rank() == 1) large.pieces.push_back(whole("w", empty({kBytes}, kU8)));
      g.barrier();
      rlimit before{};
      getrlimit(RLIMIT_AS, &before);
      if (g.rank() == 1) {
        rlim_t pages = 0;
        std::ifstream("/proc/self/statm") >> pages;
        rlimit limit{pages * rlim_t(sysconf(_SC_PAGESIZE)) + kBytes / 2, before.rlim_max};
        setrlimit(RLIMIT_AS, &limit);
      }
      g.barrier();
      std::string text = error_of([&] { c.save(20, large); });
      bad += text.find("no memory for a buffer of 1") == std::string::npos;
      c.save(21, {{small}, {}});
      c.wait();
      g.barrier();
      if (g.rank() == 1) setrlimit(RLIMIT_AS, &before);
    });
    bad += !verify(root_).findings.empty() || read_latest(root_).step != 21;
    _exit(bad);
  }
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
}

// A write fails in the middle of a file, through the page cache (small files) and past it.
class FullDisk : public Damage, public testing::WithParamInterface<int64_t> {
 protected:
  // What rank 1 saves has `n` elements.
  static State big(int64_t rank, int64_t n) {
    if (rank == 0) return {{{"w", {2, n}, {0, 0}, empty({1, n})}}, {}};
    return {{{"w", {2, n}, {1, 0}, empty({1, n})}}, {}};
  }
  // Runs `f` in a child, which may get limits and mounts of its own; `f` returns the number of
  // errors.
  template <class F>
  static int in_child(F f) {
    fflush(nullptr);
    pid_t child = fork();
    if (child == 0) _exit(f());
    int status = 0;
    waitpid(child, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }
};
INSTANTIATE_TEST_SUITE_P(Elements, FullDisk, testing::Values(100'000, 600'000));

// Limits the size of files, so that only rank 1 fails: both must get the error. The system sends
// SIGXFSZ.
TEST_P(FullDisk, OfOneRankIsReportedAndChangesNothing) {
  int64_t n = GetParam();
  EXPECT_EQ(in_child([&] {
              std::atomic<int> bad = 0;
              signal(SIGXFSZ, SIG_IGN);
              rlimit limit{64 << 10, 64 << 10}, none{RLIM_INFINITY, RLIM_INFINITY};
              getrlimit(RLIMIT_FSIZE, &none);
              limit.rlim_max = none.rlim_max;
              run_ranks(2, [&](ProcessGroup& g) {
                Checkpointer c(root_, &g);
                g.barrier();
                if (g.rank() == 0) setrlimit(RLIMIT_FSIZE, &limit);
                g.barrier();
                State state = big(g.rank(), n);
                c.save(20, state);
                std::string text = error_of([&] { c.wait(); });
                bad += text.find("File too large") == std::string::npos ||
                       text.find("cannot write '" + root_ + "/.step-000000020.tmp/rank-000") ==
                           std::string::npos;
                g.barrier();
                if (g.rank() == 0) setrlimit(RLIMIT_FSIZE, &none);
                g.barrier();
                bad += !(g.rank() || saved_steps(root_) == std::vector<int64_t>{4, 8});
                bad += fs::exists(root_ + "/.step-000000020.tmp");  // the space is given back
                c.save(21, state);
                c.wait();
              });
              bad += !verify(root_).findings.empty() || read_latest(root_).step != 21;
              return bad.load();
            }),
            0);
}

TEST_P(FullDisk, OfASmallFileSystemIsReportedAndChangesNothing) {
  constexpr int kCannotMount = 77;
  int64_t n = GetParam();
  TempFolder disk;
  int result = in_child([&] {
    // Room for one step of two ranks with half as much again.
    if (!mount_small_disk(disk.str(), 12 * n)) return kCannotMount;
    std::atomic<int> bad = 0;
    run_ranks(2, [&](ProcessGroup& g) {
      Checkpointer c(disk.str(), &g);
      State state = big(g.rank(), n);
      c.save(4, state);
      c.wait();
      c.save(20, state);
      std::string text = error_of([&] { c.wait(); });
      bad +=
          text.find("No space left on device") == std::string::npos ||
          text.find("cannot write '" + disk / ".step-000000020.tmp/rank-000") == std::string::npos;
      g.barrier();
      bad += saved_steps(disk.str()) != std::vector<int64_t>{4};
      bad += fs::exists(disk / ".step-000000020.tmp");
      State small = big(g.rank(), n / 8);
      c.save(21, small);
      c.wait();
    });
    bad += !verify(disk.str()).findings.empty() || read_latest(disk.str()).step != 21;
    return bad.load();
  });
  if (result == kCannotMount) GTEST_SKIP() << "this system lets no test mount a file system";
  EXPECT_EQ(result, 0);
}

}  // namespace
}  // namespace tessera::checkpoint
