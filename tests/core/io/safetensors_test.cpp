// Safetensors: what is written comes back, in the format's own bytes; hashes; folders of shards.
#include "core/io/safetensors.h"

#include <cmath>
#include <cstring>

#include "core/tensor/element.h"
#include "tests/support/temp_folder.h"

namespace tessera::io {
namespace {

std::vector<NamedTensor> samples() {
  std::vector<NamedTensor> out;
  for (DType t : kAllDTypes) {
    Tensor x = empty({2, 3}, t);
    for (int i = 0; i < 6; ++i)
      write_real(static_cast<char*>(x.raw()) + size_t(i) * size_of(t), t, i);
    out.push_back({"w." + std::string(name_of(t)), x});
  }
  out.push_back({"scalar", from_values<float>({2.5f}, {})});
  out.push_back({"nothing", empty({0, 4}, kF32)});
  out.push_back({"odd", from_values<uint8_t>({1, 2, 3}, {3})});
  return out;
}

void expect_equal(const Tensor& a, const Tensor& b) {
  ASSERT_EQ(a.shape(), b.shape());
  ASSERT_EQ(a.dtype(), b.dtype());
  EXPECT_EQ(std::memcmp(a.raw(), b.raw(), a.nbytes()), 0);
}

TEST(Safetensors, RoundTripOfEveryDType) {
  TempFolder dir;
  for (bool sorted : {true, false}) {
    save_safetensors(dir / "m.safetensors", samples(), {{"key", "välue \"x\"\n"}},
                     {.sort_by_name = sorted});
    SafetensorsFile f = SafetensorsFile::open(dir / "m.safetensors");
    EXPECT_EQ(f.metadata().at("key"), "välue \"x\"\n");
    EXPECT_EQ(f.tensors().size(), samples().size());
    for (const NamedTensor& t : samples()) {
      expect_equal(f.load(t.name), t.tensor);
      expect_equal(f.view(t.name), t.tensor);
    }
    EXPECT_EQ(f.metadata().at(kHashKey), params_xxh128(samples()));
    EXPECT_EQ(f.metadata().at(kHashKey), f.compute_hash());
  }
}

TEST(Safetensors, BytesAreTheFormats) {
  TempFolder dir;
  std::vector<NamedTensor> t{{"b", from_values<uint8_t>({7}, {1})},
                             {"a", from_values<int32_t>({1, -1}, {2})}};
  save_safetensors(dir / "f", t, {}, {.store_hash = false});
  std::string header =
      R"({"a":{"dtype":"I32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"U8","shape":[1],"data_offsets":[8,9]}})";
  header.resize((header.size() + 7) / 8 * 8, ' ');
  std::string want(8, '\0');
  want[0] = char(header.size());
  want += header + std::string("\1\0\0\0\xff\xff\xff\xff\7", 9);
  EXPECT_EQ(dir.read("f"), want);
}

TEST(Safetensors, EmptyFileOfNoTensors) {
  TempFolder dir;
  save_safetensors(dir / "f", {}, {{"a", "b"}});
  EXPECT_TRUE(SafetensorsFile::open(dir / "f").tensors().empty());
  dir.write("minimal", std::string("\2\0\0\0\0\0\0\0{}", 10));
  EXPECT_TRUE(SafetensorsFile::open(dir / "minimal").tensors().empty());
}

TEST(Safetensors, StridedTensorsAreWrittenDense) {
  TempFolder dir;
  Tensor x = from_values<float>({0, 1, 2, 3, 4, 5}, {2, 3});
  Tensor row(Meta{{3}, {1}, kF32, kCPU}, x.storage(), 3);  // a view with an offset
  save_safetensors(dir / "f", std::vector<NamedTensor>{{"row", row}});
  expect_equal(SafetensorsFile::open(dir / "f").load("row"), from_values<float>({3, 4, 5}, {3}));
  Tensor t(Meta{{3, 2}, {1, 3}, kF32, kCPU}, x.storage());
  save_safetensors(dir / "f", std::vector<NamedTensor>{{"t", t}});
  expect_equal(SafetensorsFile::open(dir / "f").load("t"),
               from_values<float>({0, 3, 1, 4, 2, 5}, {3, 2}));
}

TEST(Safetensors, ViewOutlivesFileAndDoesNotWriteToIt) {
  TempFolder dir;
  save_safetensors(dir / "f", std::vector<NamedTensor>{{"w", from_values<float>({1, 2}, {2})}});
  Tensor w = SafetensorsFile::open(dir / "f").view("w");
  w.data<float>()[0] = 9;
  EXPECT_EQ(w.data<float>()[1], 2);
  EXPECT_EQ(SafetensorsFile::open(dir / "f").load("w").data<float>()[0], 1);
}

TEST(Safetensors, SaveRefuses) {
  TempFolder dir;
  Tensor x = from_values<float>({1}, {1});
  auto save = [&](std::vector<NamedTensor> t, Metadata m = {}) {
    std::string text = error_of([&] { save_safetensors(dir / "f", t, m); });
    EXPECT_EQ(dir.count(), 0u);
    return text;
  };
  expect_contains(save({{"w", x}, {"w", x}}), "'w'");
  expect_contains(save({{"__metadata__", x}}), "__metadata__");
  expect_contains(save({{"w", Tensor()}}), "no value");
  expect_contains(save({{"\xff", x}}), "not UTF-8");
  expect_contains(save({{"w", empty({2}, kF32, kMeta)}}), "has no values");
  expect_contains(save({{std::string(5000, 'n'), x}}), "longer than 4096");
  expect_contains(save({{"w", x}}, {{"k", std::string(2 << 20, 'v')}}),
                  "keep it in a file of its own");
}

TEST(Safetensors, MissingTensorNamesANeighbour) {
  TempFolder dir;
  save_safetensors(dir / "f", samples());
  SafetensorsFile f = SafetensorsFile::open(dir / "f");
  std::string text = error_of([&] { f.load("w.f33"); });
  expect_contains(text, "'w.f33'");
  expect_contains(text, "'w.f64'");
}

TEST(Hash, DependsOnNameDTypeShapeAndBytesButNotOnOrder) {
  auto hash = [](const char* name, const Tensor& t) {
    std::vector<NamedTensor> v{{name, t}};
    return params_xxh128(v);
  };
  Tensor x = from_values<float>({1, 2}, {2});
  std::string base = hash("w", x);
  EXPECT_EQ(base.size(), 32u);
  EXPECT_EQ(base, hash("w", from_values<float>({1, 2}, {2})));
  EXPECT_NE(base, hash("v", x));
  EXPECT_NE(base, hash("w", from_values<float>({1, 2}, {1, 2})));
  EXPECT_NE(base, hash("w", from_values<float>({1, std::nextafter(2.0f, 3.0f)}, {2})));
  Tensor as_int = empty({2}, kI32);
  std::memcpy(as_int.raw(), x.raw(), 8);
  EXPECT_NE(base, hash("w", as_int));
  std::vector<NamedTensor> ab{{"a", x}, {"b", as_int}}, ba{{"b", as_int}, {"a", x}};
  EXPECT_EQ(params_xxh128(ab), params_xxh128(ba));
  ParamsHasher h;
  h.add("b", x);
  expect_contains(error_of([&] { h.add("a", x); }), "by name");
  // Computed by hand from the layout in hash.h with xxh128sum: the hash is a format, too.
  EXPECT_EQ(base, "d070965e042ecdb6f439eb02b1d33501");
}

TEST(Folder, SingleFileAndShards) {
  TempFolder dir;
  Tensor x = from_values<float>({1}, {1}), y = from_values<float>({2}, {1});
  std::filesystem::create_directories(dir / "one");
  save_safetensors(dir / "one/model.safetensors", std::vector<NamedTensor>{{"x", x}});
  EXPECT_EQ(load_safetensors(dir / "one").at(0).name, "x");

  std::filesystem::create_directories(dir / "two");
  save_safetensors(dir / "two/p1.safetensors", std::vector<NamedTensor>{{"x", x}});
  save_safetensors(dir / "two/p2.safetensors", std::vector<NamedTensor>{{"y", y}, {"unlisted", y}});
  dir.write(
      "two/model.safetensors.index.json",
      R"({"metadata":{"total_size":8,"more":[1,{"a":null}]},"weight_map":{"y":"p2.safetensors","x":"p1.safetensors"}})");
  SafetensorsSet set = SafetensorsSet::open(dir / "two");
  EXPECT_EQ(set.names(), (std::vector<std::string>{"x", "y"}));
  EXPECT_EQ(set.load("y").data<float>()[0], 2);
  EXPECT_EQ(set.files().size(), 2u);
  EXPECT_FALSE(set.contains("unlisted"));
  expect_contains(error_of([&] { set.load("unlisted"); }), "no tensor 'unlisted'");
}

TEST(Folder, BadIndexes) {
  TempFolder dir;
  save_safetensors(dir / "p1.safetensors",
                   std::vector<NamedTensor>{{"x", from_values<float>({1}, {1})}});
  auto with = [&](const std::string& index) {
    dir.write("model.safetensors.index.json", index);
    return error_of([&] { SafetensorsSet::open(dir.str()); });
  };
  expect_contains(error_of([&] { SafetensorsSet::open(dir.str()); }),
                  "neither model.safetensors nor");
  expect_contains(with(R"({"weight_map":{"y":"p1.safetensors"}})"),
                  "holds tensor 'y', but it does not");
  expect_contains(with(R"({"weight_map":{"x":"../p1.safetensors"}})"), "same folder");
  expect_contains(with(R"({"weight_map":{"x":"/etc/passwd"}})"), "same folder");
  expect_contains(with(R"({"weight_map":{"x":"p9.safetensors"}})"), "No such file");
  expect_contains(with(R"({"weight_map":{"x":7}})"), "something else");
  expect_contains(with(R"({"weight_map":{"x":"p1.safetensors","x":"p1.safetensors"}})"), "twice");
  expect_contains(with(R"({"weight)"), "not JSON");
  expect_contains(with("{}"), "missing or empty");
  expect_contains(with(std::string(1000, '[')), "nested deeper");
}

}  // namespace
}  // namespace tessera::io
