// Every op of the registry is made again from its attributes.
#include "compile/ir/attributes.h"

#include <gtest/gtest.h>

#include "tests/compile/samples.h"

namespace tessera::compiler {
namespace {

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
