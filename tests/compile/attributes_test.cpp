// Every op of the registry is made again from its attributes, and so is one of a program's own.
#include "compile/ir/attributes.h"

#include <gtest/gtest.h>

#include "core/primitive/primitive_of.h"
#include "tests/compile/samples.h"

namespace tessera::compiler {
namespace {

struct TaperAttributes {
  struct Window {
    Dims size, offset = {};
    static void fields(auto& a, auto& f) { f("size", a.size), f.any("offset", a.offset); }
  };
  bool rising = true;  // which op it is
  int dim = 0;
  Window window = {};
  double slope = 1;
  std::string label = {};
  DType dtype = kF32;
  Device device = kCPU;
  int64_t skip = 0;
  static void fields(auto& a, auto& f) {
    f.dim("dim", a.dim), f.within(a.window), f("slope", a.slope), f("label", a.label);
    f("dtype", a.dtype), f("device", a.device), f.optional("skip", a.skip);
  }
};
class Taper final : public PrimitiveOf<Taper, TaperAttributes> {
 public:
  static inline const OpInfo kUp{"taper_up", {OpKind::kOther, Precision::kAsGiven, 1}},
      kDown{"taper_down", {OpKind::kOther, Precision::kAsGiven, 1}};
  explicit Taper(const TaperAttributes& a) : PrimitiveOf(a.rising ? kUp : kDown, a) {}
  static void check_attributes(const TaperAttributes& a) {
    TESSERA_CHECK(a.slope != 0, "taper: slope {}", a.slope);
  }
  Metas infer(MetaSpan in) const override { return {*in[0]}; }
};
PrimRef taper(const TaperAttributes& a) { return PrimRef(new Taper(a)); }

TEST(Attributes, OfOnesOwnFollowFromTheListOfFields) {
  const TaperAttributes a{.dim = 1, .window = {.size = {4}, .offset = {-2}}, .label = "x"};
  const PrimRef prim = taper(a);
  EXPECT_EQ(to_string(*prim),
            "taper_up(dim=1, size=[4], offset=[-2], slope=1, label=\"x\", dtype=\"f32\", "
            "device=\"cpu\")");
  EXPECT_EQ(attributes_of<TaperAttributes>(*prim).window.offset, Dims{-2});
  for (auto change : std::initializer_list<void (*)(TaperAttributes&)>{
           [](auto& t) { t.rising = false; }, [](auto& t) { t.dim = 2; },
           [](auto& t) { t.window.offset = {3}; }, [](auto& t) { t.slope = 2; },
           [](auto& t) { t.label = "y"; }, [](auto& t) { t.dtype = kF64; },
           [](auto& t) { t.device = kMeta; }, [](auto& t) { t.skip = 5; }}) {
    TaperAttributes b = a;
    change(b);
    const PrimRef other = taper(b);
    EXPECT_FALSE(same_primitive(*prim, *other)) << to_string(*other);
    EXPECT_NE(hash_primitive(*prim), hash_primitive(*other)) << to_string(*other);
    const PrimRef again = remake(*other, attributes_of(*other));
    EXPECT_NE(again.get(), other.get());
    EXPECT_TRUE(same_primitive(*again, *other)) << to_string(*again);
    // Which op of the family it is stays the op's own.
    EXPECT_EQ(same_primitive(*prim, *remake(*prim, attributes_of(*other))), !b.rising);
  }
}

TEST(Attributes, OfOnesOwnAreChecked) {
  const PrimRef prim = taper({.window = {.size = {4}}, .label = "x", .skip = 5});
  const auto with = [&](const std::string& name, AttributeValue value) {
    Attributes list = attributes_of(*prim);
    for (Attribute& a : list)
      if (a.name == name) a.value = value;
    return remake(*prim, list);
  };
  using List = std::vector<int64_t>;
  EXPECT_EQ(attributes_of<TaperAttributes>(*with("offset", List{-1, 7})).window.offset,
            (Dims{-1, 7}));
  for (auto& [name, value] : std::vector<Attribute>{{"dim", int64_t(kMaxDims)},
                                                    {"dim", int64_t(-1)},
                                                    {"size", List{-1}},
                                                    {"size", List(kMaxDims + 1, 1)},
                                                    {"offset", List(kMaxDims + 1, 1)},
                                                    {"slope", 0.0},
                                                    {"slope", int64_t(1)},
                                                    {"label", 1.0},
                                                    {"dtype", "f31"},
                                                    {"device", "attic"},
                                                    {"skip", int64_t(-1)}})
    EXPECT_THROW(with(name, value), UserError) << name;
  Attributes fewer = attributes_of(*prim);
  ASSERT_EQ(fewer.back().name, "skip");
  fewer.pop_back();
  EXPECT_EQ(attributes_of<TaperAttributes>(*remake(*prim, fewer)).skip, 0);
}

TEST(Attributes, EveryOpIsMadeAgainFromThem) {
  test::for_each_sample([](const Sample& s, const std::string&) {
    Attributes a = attributes_of(*s.prim);
    PrimRef again = remake(*s.prim, a);
    EXPECT_TRUE(same_primitive(*again, *s.prim)) << to_string(*again);
    EXPECT_EQ(again.get() == s.prim.get(), a.empty()) << "attributes are not read";
  });
}

TEST(Attributes, BadOnesAreNamed) {
  for (const OpEntry& e : op_registry().entries()) {
    const Sample s = e.samples()[0];
    SCOPED_TRACE(to_string(*s.prim));
    Attributes a = attributes_of(*s.prim), more = a;
    more.push_back({"unheard_of", int64_t(1)});
    EXPECT_THROW(remake(*s.prim, more), UserError);
    for (size_t i = 0; i < a.size(); ++i) {
      if (a[i].name == "leaves") continue;  // may be absent
      Attributes fewer = a, other = a;
      fewer.erase(fewer.begin() + int64_t(i));
      bool is_text = std::holds_alternative<std::string>(a[i].value);
      other[i].value = is_text ? AttributeValue(2.5) : AttributeValue("no such thing");
      EXPECT_THROW(remake(*s.prim, fewer), UserError) << a[i].name;
      EXPECT_THROW(remake(*s.prim, other), UserError) << a[i].name;
    }
  }
}

}  // namespace
}  // namespace tessera::compiler
