// Kernel texts to cubins: packs, what was compiled before, the run-time compiler. No card is
// needed; the compiler is the real one or the virtual GPU's.
#include "core/backend/cuda/cubins.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <thread>

#include "core/backend/cuda/library.h"
#include "core/base/error.h"
#include "core/io/hash.h"
#include "tests/cuda/card.h"
#include "tests/cuda/made_library.h"

namespace tessera::cuda {
namespace {

namespace fs = std::filesystem;

class CudaPack : public testing::Test {
 protected:
  void write_three() {
    write_pack(path_, "sm_90", 13020,
               {{{3, 1}, "three"}, {{1, 7}, std::string(100000, 'x')}, {{1, 2}, ""}});
  }
  void change_byte(std::streamoff at, bool from_end = false) {
    std::fstream file(path_, std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(at, from_end ? std::ios::end : std::ios::beg);
    const auto place = file.tellg();
    const char c = char(file.get() ^ 0x20);
    file.seekp(place);
    file.put(c);
  }
  std::string open_error(std::string_view architecture = "sm_90") {
    return error_of([&] { Pack::open(path_, architecture); });
  }
  TempFolder folder_;
  const fs::path path_ = folder_ / "sm_90.pack";
};

TEST_F(CudaPack, GivesBackWhatWasWritten) {
  write_three();
  const auto pack = Pack::open(path_, "sm_90");
  ASSERT_TRUE(pack);
  EXPECT_EQ(pack->size(), 3u);
  EXPECT_EQ(pack->version(), 13020);
  EXPECT_EQ(pack->find({1, 7}), std::string(100000, 'x'));
  EXPECT_EQ(pack->find({1, 2}), "");
  EXPECT_EQ(pack->find({3, 1}), "three");
  EXPECT_EQ(pack->find({1, 3}), std::nullopt);
  EXPECT_EQ(pack->find({0, 0}), std::nullopt);
  EXPECT_EQ(pack->find({9, 9}), std::nullopt);
}
TEST_F(CudaPack, IsReplacedAsAWhole) {
  write_three();
  const auto before = Pack::open(path_, "sm_90");
  write_pack(path_, "sm_90", 13000, {{{5, 5}, "five"}});
  EXPECT_EQ(before->find({3, 1}), "three");
  EXPECT_EQ(Pack::open(path_, "sm_90")->find({5, 5}), "five");
  EXPECT_EQ(folder_.count(), 1u);
}
TEST_F(CudaPack, IsAbsentWhereThereIsNoFile) { EXPECT_FALSE(Pack::open(path_, "sm_90")); }
TEST_F(CudaPack, RefusesTwoCubinsWithOneKey) {
  EXPECT_THROW(write_pack(path_, "sm_90", 13000, {{{1, 1}, "a"}, {{1, 1}, "b"}}), BugError);
}
TEST_F(CudaPack, RefusesAFolderThatIsNotThere) {
  EXPECT_THROW(write_pack(folder_ / "none/sm_90.pack", "sm_90", 13000, {}), UserError);
}
TEST_F(CudaPack, RefusesDamage) {
  write_three();
  EXPECT_NE(open_error("sm_80").find("is for sm_90, not for sm_80"), std::string::npos);
  change_byte(2);
  EXPECT_NE(open_error().find("is not a pack of cubins"), std::string::npos);
  write_three();
  change_byte(40);
  EXPECT_NE(open_error().find("has a damaged index"), std::string::npos);
  write_three();
  change_byte(-1, true);
  const auto pack = Pack::open(path_, "sm_90");
  EXPECT_NE(error_of([&] { pack->find({3, 1}); }).find("damaged cubin"), std::string::npos);
  EXPECT_EQ(pack->find({1, 2}), "");
  for (const size_t bytes : {size_t(0), size_t(10), size_t(39), size_t(fs::file_size(path_) - 1)}) {
    write_three();
    fs::resize_file(path_, bytes);
    EXPECT_NE(open_error().find("is cut off"), std::string::npos) << bytes << open_error();
  }
}

constexpr const char* kText =
    "extern \"C\" __global__ void twice(float* x) { x[threadIdx.x] *= 2.0f; }\n";

/// The key of a text in packs for cards of sm_90, whatever this process runs on.
CubinKey card_key(const std::string& text) {
  std::string all;
  for (const std::string& option : compiler_options("sm_90")) all += option + '\n';
  all += text;
  const io::Digest digest = io::xxh128(all.data(), all.size());
  return {digest.high, digest.low};
}

class CudaCubins : public CudaPack {
 protected:
  void SetUp() override {
    if (!why_no_nvrtc().empty()) GTEST_SKIP() << why_no_nvrtc();
  }
};

TEST_F(CudaCubins, CompilesOnceAndKeeps) {
  Cubins first({folder_.str()}, folder_ / "cache");
  const std::string cubin = first.get("twice", kText, "sm_90");
  EXPECT_FALSE(cubin.empty());
  EXPECT_EQ(first.get("twice", kText, "sm_90"), cubin);
  EXPECT_EQ(first.counts().compiled, 1);
  EXPECT_EQ(first.counts().from_process, 1);
  Cubins second({folder_.str()}, folder_ / "cache");
  EXPECT_EQ(second.get("again", kText, "sm_90"), cubin);
  EXPECT_EQ(second.counts().from_cache, 1);
  EXPECT_EQ(second.counts().compiled, 0);
  second.get("twice", std::string(kText) + "// changed\n", "sm_90");
  second.get("twice", kText, "sm_80");
  EXPECT_EQ(second.counts().compiled, 2);
}
TEST_F(CudaCubins, ThreadsThatAskAtOnceCompileOnce) {
  Cubins cubins({}, "/proc/nowhere");
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i)
    threads.emplace_back([&] { EXPECT_FALSE(cubins.get("twice", kText, "sm_90").empty()); });
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(cubins.counts().compiled, 1);
  EXPECT_EQ(cubins.counts().from_process, 3);
}
TEST_F(CudaCubins, PrefersThePack) {
  const std::string cubin = compile("twice", kText, "sm_90").cubin;
  write_pack(path_, "sm_90", 12000, {{cubin_key(kText, "sm_90"), cubin}});
  Cubins cubins({"/nowhere", folder_.str()}, folder_ / "cache");
  EXPECT_EQ(cubins.get("twice", kText, "sm_90"), cubin);
  EXPECT_EQ(cubins.counts().from_pack, 1);
  EXPECT_FALSE(fs::exists(folder_ / "cache"));
  cubins.get("twice", kText, "sm_80");
  EXPECT_EQ(cubins.counts().compiled, 1);
}
TEST_F(CudaCubins, MakesAPackOfTexts) {
  std::vector<NamedText> texts;
  for (int i = 0; i < 5; ++i)
    texts.push_back({fmt::format("text{}", i % 4), fmt::format("{}// {}\n", kText, i % 4)});
  EXPECT_EQ(make_pack(path_, "sm_90", texts), 4u);  // the first and the last are equal
  EXPECT_EQ(Pack::open(path_, "sm_90")->size(), 4u);
  EXPECT_EQ(Pack::open(path_, "sm_90")->version(), nvrtc().major * 1000 + nvrtc().minor * 10);
  Cubins cubins({folder_.str()}, folder_ / "cache");
  for (const NamedText& t : texts)
    EXPECT_EQ(cubins.get(t.name, t.text, "sm_90"), compile(t.name, t.text, "sm_90").cubin);
  EXPECT_EQ(cubins.counts().from_pack, 5);
  // What a pack has is not compiled again, unless another compiler made it, or it is damaged.
  texts[0].text += "// changed\n";
  EXPECT_EQ(make_pack(path_, "sm_90", texts), 1u);
  EXPECT_EQ(Pack::open(path_, "sm_90")->size(), 5u);
  write_pack(path_, "sm_90", 12000, {{cubin_key(texts[0].text, "sm_90"), "old"}});
  EXPECT_EQ(make_pack(path_, "sm_90", texts), 5u);
  change_byte(50);  // in the index
  EXPECT_EQ(make_pack(path_, "sm_90", texts), 5u);
  change_byte(-1, true);  // in the last cubin
  EXPECT_EQ(make_pack(path_, "sm_90", texts), 1u);
  texts.push_back({"broken", "x"});
  EXPECT_NE(error_of([&] {
              make_pack(folder_ / "sm_80.pack", "sm_80", texts);
            }).find("broken does not compile for sm_80"),
            std::string::npos);
  EXPECT_FALSE(fs::exists(folder_ / "sm_80.pack"));
}
TEST_F(CudaCubins, ShowsTheCompilersLog) {
  const std::string error = error_of([&] { compile("broken", "int f() { return x; }", "sm_90"); });
  EXPECT_NE(error.find("cuda: broken does not compile for sm_90:"), std::string::npos) << error;
  EXPECT_NE(error.find("broken"), std::string::npos) << error;
  EXPECT_NE(error.find('x'), std::string::npos) << error;
  EXPECT_THROW(compile("broken", "int f() { return x; }", "sm_90"), UserError);
}
TEST_F(CudaCubins, RefusesAnArchitectureThatTheCompilerDoesNotKnow) {
  const std::string error = error_of([&] { compile("twice", kText, "sm_11"); });
  EXPECT_NE(error.find("does not compile for sm_11"), std::string::npos) << error;
}
// Not a test by itself: those below run it in other processes, beside an NVRTC that counts its
// calls.
TEST(CudaCubinsChild, DISABLED_GetsThree) {
  const char* packs = std::getenv("PACKS");
  Cubins cubins({packs ? packs : "/nowhere"}, "");
  for (int i = 0; i < 3; ++i)
    std::printf("got %s\n", cubins.get("text", fmt::format("text {}", i), "sm_90").c_str());
}

class CudaCubinsOfProcesses : public testing::Test {
 protected:
  void SetUp() override {
    std::string made = make_library(folder_, "libcuda.so.1", driver_text(13000, 0, "", 1));
    made += make_library(folder_, "libnvrtc.so.13", nvrtc_text(13, 2));
    if (!made.empty()) GTEST_SKIP() << "no compiler: " << made;
  }
  std::string child(const std::string& environment = "") const {
    return child_command(folder_, "CudaCubinsChild.DISABLED_GetsThree",
                         fmt::format("CALLS={} TESSERA_COMPILE_CACHE={} {}", folder_ / "calls",
                                     folder_ / "cache", environment));
  }
  /// Runs a child, which gets the code that this version of NVRTC makes; returns what it says.
  std::string expect_gets(const std::string& version, const std::string& environment = "") const {
    const std::string said = output_of(child(environment));
    for (int i = 0; i < 3; ++i) expect_contains(said, fmt::format("got {}:text {}\n", version, i));
    return said;
  }
  size_t calls() const {
    const std::string text = folder_.read("calls");
    return size_t(std::count(text.begin(), text.end(), '\n'));
  }
  std::vector<fs::path> entries() const {
    std::vector<fs::path> found;
    for (const auto& f : fs::directory_iterator(folder_ / "cache"))
      if (f.path().extension() == ".cubin") found.push_back(f.path());
    return found;
  }
  TempFolder folder_;
};

TEST_F(CudaCubinsOfProcesses, ASecondOneCompilesNothing) {
  expect_gets("13.2");
  EXPECT_EQ(calls(), 3u);
  EXPECT_EQ(entries().size(), 3u);
  expect_gets("13.2");
  EXPECT_EQ(calls(), 3u);
}
TEST_F(CudaCubinsOfProcesses, ThoseThatStartTogetherCompileOnce) {
  std::string all;
  for (int i = 0; i < 4; ++i) all += child() + " & ";
  const std::string said = output_of(all + "wait");
  size_t got = 0;
  for (size_t at = 0; (at = said.find("got 13.2:text ", at)) != said.npos; ++at) ++got;
  EXPECT_EQ(got, 12u) << said;
  EXPECT_EQ(calls(), 3u);
}
TEST_F(CudaCubinsOfProcesses, ADamagedEntryIsMadeAgain) {
  expect_gets("13.2");
  const std::string name = "cache/" + entries().at(0).filename().string();
  const std::string whole = folder_.read(name);
  std::string damaged = whole;
  damaged[5] ^= 1;
  folder_.write(name, damaged);
  expect_contains(expect_gets("13.2"),
                  "cuda: " + (folder_ / name) + " is damaged and is made again");
  EXPECT_EQ(calls(), 4u);
  EXPECT_EQ(folder_.read(name), whole);
  expect_gets("13.2");
  EXPECT_EQ(calls(), 4u);
}
TEST_F(CudaCubinsOfProcesses, ACacheThatCannotBeWrittenIsSaidOnce) {
  for (const char* environment :
       {"TESSERA_COMPILE_CACHE=/proc/cache", "TESSERA_COMPILE_CACHE= HOME="}) {
    const std::string said = expect_gets("13.2", environment);
    const std::string advice = "set TESSERA_COMPILE_CACHE to a folder";
    const size_t at = said.find(advice);
    EXPECT_NE(at, said.npos) << said;
    EXPECT_EQ(said.find(advice, at + 1), said.npos) << said;
    EXPECT_EQ(said.find("(status"), said.npos) << said;
  }
  EXPECT_EQ(calls(), 6u);
}
TEST_F(CudaCubinsOfProcesses, AnotherCompilerMakesOtherEntries) {
  expect_gets("13.2");
  make_library(folder_, "libnvrtc.so.13", nvrtc_text(13, 5));
  expect_gets("13.5");
  EXPECT_EQ(calls(), 6u);
  EXPECT_EQ(entries().size(), 6u);
}

// In one folder and with one pack, as where a virtual and a real card are used in turn.
TEST_F(CudaCubinsOfProcesses, CardsAndVirtualGpusNeverShareCode) {
  write_pack(folder_ / "sm_90.pack", "sm_90", 13000, {{card_key("text 0"), "packed:text 0"}});
  const std::string packs = "PACKS=" + folder_.str();
  const auto run = [&] { return output_of(child(packs)); };
  expect_contains(run(), "got packed:text 0\ngot 13.2:text 1\ngot 13.2:text 2\n");
  EXPECT_EQ(calls(), 2u);
  make_library(folder_, "libcuda.so.1",
               driver_text(13000, 0, "", 1) + "const char* vgpu_emulation() { return \"\"; }\n");
  size_t before = 2;
  for (const char* emulation : {"one", "two"}) {
    make_library(folder_, "libnvrtc.so.13", nvrtc_text(13, 2, emulation));
    expect_gets("13.2", packs);
    EXPECT_EQ(calls(), before += 3) << emulation;
    expect_gets("13.2", packs);
    EXPECT_EQ(calls(), before) << emulation;
  }
  // A compiler for cards is none for a virtual GPU, and the other way round.
  make_library(folder_, "libnvrtc.so.13", nvrtc_text(13, 2));
  expect_contains(run(), "does not compile for the virtual GPU");
  make_library(folder_, "libnvrtc.so.13", nvrtc_text(13, 2, "one"));
  make_library(folder_, "libcuda.so.1", driver_text(13000, 0, "", 1));
  expect_contains(run(), "does not compile for cards");
  EXPECT_EQ(calls(), before);
}
TEST_F(CudaCubinsOfProcesses, APackForNewerDriversIsLeftOut) {
  write_pack(folder_ / "sm_90.pack", "sm_90", 13000, {{card_key("text 0"), "packed:text 0"}});
  make_library(folder_, "libcuda.so.1", driver_text(12080, 0, "", 1));
  make_library(folder_, "libnvrtc.so.12", nvrtc_text(12, 8));
  const std::string said = expect_gets("12.8", "PACKS=" + folder_.str());
  expect_contains(
      said,
      "sm_90.pack is left out: its code is for drivers of CUDA 13 or later, this one is for 12");
}
TEST_F(CudaCubinsOfProcesses, WithoutAPackAndACompilerOneLineSaysWhatToDo) {
  for (const char* soname : {"libnvrtc.so.13", "libnvrtc.so.12"})
    make_library(folder_, soname, "int nothing;");
  const std::string said = output_of(child("TESSERA_CUDA_LIBRARIES="));
  expect_contains(
      said,
      "cuda: text is in no pack for sm_90 beside the program, and there is no run-time compiler: ");
  expect_contains(said, "pip install nvidia-cuda-nvrtc");
}

TEST(CudaCubinKey, IsTheTextAndTheArchitecture) {
  const CubinKey key = cubin_key("a", "sm_90");
  EXPECT_EQ(key, cubin_key("a", "sm_90"));
  EXPECT_NE(key, cubin_key("b", "sm_90"));
  EXPECT_NE(key, cubin_key("a", "sm_80"));
  EXPECT_EQ(to_string(CubinKey{1, 0xab}), "000000000000000100000000000000ab");
}

}  // namespace
}  // namespace tessera::cuda
