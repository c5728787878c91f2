#include "compile/ir/attributes.h"

#include "core/primitive/attributes.h"

namespace tessera::compiler {
namespace {

class Collector final : public AttributeVisitor {
 public:
  void integer(std::string_view name, int64_t v) override { add(name, v); }
  void real(std::string_view name, double v) override { add(name, v); }
  void text(std::string_view name, std::string_view v) override { add(name, std::string(v)); }
  void dims(std::string_view name, std::span<const int64_t> v) override {
    add(name, std::vector<int64_t>(v.begin(), v.end()));
  }
  Attributes list;

 private:
  void add(std::string_view name, AttributeValue v) {
    list.push_back({std::string(name), std::move(v)});
  }
};

class Reader final : public AttributeReader {
 public:
  explicit Reader(const Attributes& list) : list_(list) {}

  bool has(std::string_view name) const override { return find(name) != nullptr; }
  bool is_integer(std::string_view name) const override {
    const Attribute* a = find(name);
    return a && std::holds_alternative<int64_t>(a->value);
  }
  int64_t integer(std::string_view name) override { return get<int64_t>(name, "an integer"); }
  double real(std::string_view name) override { return get<double>(name, "a real number"); }
  std::string text(std::string_view name) override { return get<std::string>(name, "a text"); }
  std::vector<int64_t> dims(std::string_view name) override {
    return get<std::vector<int64_t>>(name, "a list of integers");
  }
  void check_all_read(std::string_view op) const {
    for (const Attribute& a : list_)
      TESSERA_CHECK(read_.contains(a.name), "{}: it has no attribute {}", op, a.name);
  }

 private:
  const Attribute* find(std::string_view name) const {
    for (const Attribute& a : list_)
      if (a.name == name) return &a;
    return nullptr;
  }
  template <class T>
  T get(std::string_view name, const char* what) {
    const Attribute* a = find(name);
    TESSERA_CHECK(a, "attribute {} is missing", name);
    const T* value = std::get_if<T>(&a->value);
    TESSERA_CHECK(value, "attribute {} is not {}", name, what);
    read_.emplace(name);
    return *value;
  }

  const Attributes& list_;
  std::set<std::string, std::less<>> read_;
};

}  // namespace

Attributes attributes_of(const Primitive& prim) {
  Collector c;
  prim.attributes(c);
  return std::move(c.list);
}

PrimRef remake(const Primitive& like, const Attributes& attributes) {
  Reader reader(attributes);
  PrimRef made = like.with_attributes(reader);
  reader.check_all_read(like.name());
  return made;
}

}  // namespace tessera::compiler
