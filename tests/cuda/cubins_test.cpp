// Kernel texts to cubins: packs, what was compiled before, the run-time compiler. No card is
// needed; the compiler is the real one or the virtual GPU's.
#include "core/backend/cuda/cubins.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <map>

#include "core/backend/cuda/library.h"
#include "core/base/error.h"
#include "tests/cuda/card.h"

namespace tessera::cuda {
namespace {

namespace fs = std::filesystem;

class CudaPack : public testing::Test {
 protected:
  CudaPack() {
    std::string name = fs::temp_directory_path() / "tessera-pack-XXXXXX";
    EXPECT_TRUE(mkdtemp(name.data()));
    folder_ = name;
    path_ = folder_ / "sm_90.pack";
  }
  ~CudaPack() override { fs::remove_all(folder_); }
  void write_three() {
    write_pack(path_, "sm_90",
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
  fs::path folder_, path_;
};

TEST_F(CudaPack, GivesBackWhatWasWritten) {
  write_three();
  const auto pack = Pack::open(path_, "sm_90");
  ASSERT_TRUE(pack);
  EXPECT_EQ(pack->size(), 3u);
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
  write_pack(path_, "sm_90", {{{5, 5}, "five"}});
  EXPECT_EQ(before->find({3, 1}), "three");
  EXPECT_EQ(Pack::open(path_, "sm_90")->find({5, 5}), "five");
  EXPECT_EQ(std::distance(fs::directory_iterator(folder_), {}), 1);
}
TEST_F(CudaPack, IsAbsentWhereThereIsNoFile) { EXPECT_FALSE(Pack::open(path_, "sm_90")); }
TEST_F(CudaPack, RefusesTwoCubinsWithOneKey) {
  EXPECT_THROW(write_pack(path_, "sm_90", {{{1, 1}, "a"}, {{1, 1}, "b"}}), BugError);
}
TEST_F(CudaPack, RefusesAFolderThatIsNotThere) {
  EXPECT_THROW(write_pack(folder_ / "none/sm_90.pack", "sm_90", {}), UserError);
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
  for (const size_t bytes : {size_t(0), size_t(10), size_t(40), size_t(fs::file_size(path_) - 1)}) {
    write_three();
    fs::resize_file(path_, bytes);
    EXPECT_NE(open_error().find("is cut off"), std::string::npos) << bytes << open_error();
  }
}

/// Keeps entries in memory.
class MapStore final : public CubinStore {
 public:
  explicit MapStore(std::map<std::string, std::string>& entries) : entries_(entries) {}
  std::string find_or_make(const std::string& key, FunctionRef<std::string()> make) override {
    const auto found = entries_.find(key);
    return found != entries_.end() ? found->second : entries_[key] = make();
  }

 private:
  std::map<std::string, std::string>& entries_;
};

constexpr const char* kText =
    "extern \"C\" __global__ void twice(float* x) { x[threadIdx.x] *= 2.0f; }\n";

class CudaCubins : public CudaPack {
 protected:
  void SetUp() override {
    if (!why_no_nvrtc().empty()) GTEST_SKIP() << why_no_nvrtc();
  }
};

TEST_F(CudaCubins, CompilesOnceAndKeeps) {
  std::map<std::string, std::string> kept;
  Cubins first({folder_}, std::make_unique<MapStore>(kept));
  const std::string cubin = first.get("twice", kText, "sm_90");
  EXPECT_FALSE(cubin.empty());
  EXPECT_EQ(first.get("twice", kText, "sm_90"), cubin);
  EXPECT_EQ(first.counts().compiled, 1);
  EXPECT_EQ(first.counts().from_store, 1);
  EXPECT_EQ(kept.size(), 1u);
  Cubins second({folder_}, std::make_unique<MapStore>(kept));
  EXPECT_EQ(second.get("again", kText, "sm_90"), cubin);
  EXPECT_EQ(second.counts().compiled, 0);
  second.get("twice", std::string(kText) + "// changed\n", "sm_90");
  second.get("twice", kText, "sm_80");
  EXPECT_EQ(second.counts().compiled, 2);
}
TEST_F(CudaCubins, PrefersThePack) {
  const std::string cubin = compile("twice", kText, "sm_90").cubin;
  write_pack(path_, "sm_90", {{cubin_key(kText, "sm_90"), cubin}});
  std::map<std::string, std::string> kept;
  Cubins cubins({"/nowhere", folder_}, std::make_unique<MapStore>(kept));
  EXPECT_EQ(cubins.get("twice", kText, "sm_90"), cubin);
  EXPECT_EQ(cubins.counts().from_pack, 1);
  EXPECT_TRUE(kept.empty());
  cubins.get("twice", kText, "sm_80");
  EXPECT_EQ(cubins.counts().compiled, 1);
}
TEST_F(CudaCubins, MakesAPackOfTexts) {
  std::vector<NamedText> texts;
  for (int i = 0; i < 5; ++i)
    texts.push_back({fmt::format("text{}", i % 4), fmt::format("{}// {}\n", kText, i % 4)});
  make_pack(path_, "sm_90", texts);  // the first and the last are equal
  EXPECT_EQ(Pack::open(path_, "sm_90")->size(), 4u);
  Cubins cubins({folder_}, nullptr);
  for (const NamedText& t : texts)
    EXPECT_EQ(cubins.get(t.name, t.text, "sm_90"), compile(t.name, t.text, "sm_90").cubin);
  EXPECT_EQ(cubins.counts().from_pack, 5);
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
TEST(CudaCubinKey, IsTheTextAndTheArchitecture) {
  const CubinKey key = cubin_key("a", "sm_90");
  EXPECT_EQ(key, cubin_key("a", "sm_90"));
  EXPECT_NE(key, cubin_key("b", "sm_90"));
  EXPECT_NE(key, cubin_key("a", "sm_80"));
  EXPECT_EQ(to_string(CubinKey{1, 0xab}), "000000000000000100000000000000ab");
}

}  // namespace
}  // namespace tessera::cuda
