#include "core/primitive/primitive.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <deque>
#include <mutex>
#include <unordered_map>

#include "core/base/small_vector.h"
#include "core/primitive/attributes.h"

namespace tessera {
namespace {

struct OpNames {
  std::mutex mutex;
  std::deque<std::string> names;    // references stay valid as it grows
  std::deque<const OpInfo*> infos;  // null where a name is only mentioned
  std::unordered_map<std::string_view, OpId> ids;
};
OpNames& op_names() {
  static auto* names = new OpNames;
  return *names;
}

// Attributes for people.
class AttributeText final : public AttributeVisitor {
 public:
  void integer(std::string_view name, int64_t v) override { add(name, fmt::format("{}", v)); }
  void real(std::string_view name, double v) override { add(name, fmt::format("{}", v)); }
  void text(std::string_view name, std::string_view v) override {
    add(name, fmt::format("\"{}\"", v));
  }
  void dims(std::string_view name, std::span<const int64_t> v) override {
    add(name, tessera::to_string(v));
  }
  std::string result;

 private:
  void add(std::string_view name, const std::string& value) {
    result += fmt::format("{}{}={}", result.empty() ? "" : ", ", name, value);
  }
};

// Attributes as words, names and lengths included: equal words mean equal attributes. Dispatch of
// sharded tensors compares them for each op, hence no text and, for most ops, no heap.
class AttributeWords final : public AttributeVisitor {
 public:
  void integer(std::string_view name, int64_t v) override {
    begin('i', name), words.push_back(uint64_t(v));
  }
  void real(std::string_view name, double v) override {
    begin('r', name), words.push_back(std::bit_cast<uint64_t>(v));
  }
  void text(std::string_view name, std::string_view v) override { begin('t', name), add(v); }
  void dims(std::string_view name, std::span<const int64_t> v) override {
    begin('d', name), words.push_back(v.size());
    for (int64_t x : v) words.push_back(uint64_t(x));
  }
  SmallVector<uint64_t, 48> words;

 private:
  void begin(char kind, std::string_view name) { words.push_back(uint64_t(kind)), add(name); }
  void add(std::string_view v) {
    words.push_back(v.size());
    for (size_t i = 0; i < v.size(); i += sizeof(uint64_t)) {
      uint64_t word = 0;
      std::memcpy(&word, v.data() + i, std::min(sizeof word, v.size() - i));
      words.push_back(word);
    }
  }
};

bool same_attributes(const Primitive& a, const Primitive& b) {
  AttributeWords left, right;
  a.attributes(left), b.attributes(right);
  return left.words == right.words;
}

class AttributeHash final : public AttributeVisitor {
 public:
  void integer(std::string_view, int64_t v) override { mix(uint64_t(v)); }
  void real(std::string_view, double v) override { mix(std::bit_cast<uint64_t>(v)); }
  void text(std::string_view, std::string_view v) override {
    mix(std::hash<std::string_view>()(v));
  }
  void dims(std::string_view, std::span<const int64_t> v) override {
    mix(uint64_t(v.size()));
    for (int64_t x : v) mix(uint64_t(x));
  }
  uint64_t value = 0xcbf29ce484222325ull;

 private:
  void mix(uint64_t x) {  // one round of splitmix64
    value += x + 0x9e3779b97f4a7c15ull;
    value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ull;
    value ^= value >> 27;
  }
};

std::string attribute_text(const Primitive& p) {
  AttributeText v;
  p.attributes(v);
  return std::move(v.result);
}

}  // namespace

OpId intern_op(std::string_view name) {
  OpNames& n = op_names();
  std::lock_guard lock(n.mutex);
  if (auto it = n.ids.find(name); it != n.ids.end()) return it->second;
  n.names.emplace_back(name), n.infos.push_back(nullptr);
  OpId id = OpId(n.names.size() - 1);
  n.ids.emplace(n.names.back(), id);
  return id;
}

std::string_view op_name(OpId id) {
  OpNames& n = op_names();
  std::lock_guard lock(n.mutex);
  return n.names[id];
}

OpInfo::OpInfo(std::string_view op, const OpTraits& traits)
    : id(intern_op(op)), name(op_name(id)), traits(traits) {
  OpNames& n = op_names();
  std::lock_guard lock(n.mutex);
  TESSERA_ASSERT(!n.infos[id], "op {} is defined twice", name);
  n.infos[id] = this;
}

const OpInfo& op_info(std::string_view name) {
  OpNames& n = op_names();
  std::lock_guard lock(n.mutex);
  auto it = n.ids.find(name);
  TESSERA_ASSERT(it != n.ids.end() && n.infos[it->second], "there is no op {}", name);
  return *n.infos[it->second];
}

int op_count() {
  OpNames& n = op_names();
  std::lock_guard lock(n.mutex);
  return int(n.names.size());
}

Tensors Primitive::vjp(const VjpArgs&) const {
  throw NotDifferentiable(fmt::format("{}: not differentiable", name()));
}
Tensors Primitive::decompose(std::span<const Tensor>) const {
  throw BugError(fmt::format("{}: has no decomposition", name()));
}
Tensors Primitive::view(std::span<const Tensor>) const {
  throw BugError(fmt::format("{}: is not a view", name()));
}

bool same_primitive(const Primitive& a, const Primitive& b) {
  return &a == &b || (a.id() == b.id() && same_attributes(a, b));
}

uint64_t hash_primitive(const Primitive& p) {
  AttributeHash h;
  h.integer("", p.id());
  p.attributes(h);
  return h.value;
}

std::string to_string(const Primitive& p) {
  std::string attributes = attribute_text(p);
  return attributes.empty() ? std::string(p.name()) : fmt::format("{}({})", p.name(), attributes);
}

std::string describe(MetaSpan in) {
  std::string text;
  for (const Meta* m : in)
    text += fmt::format("{}{}{}", text.empty() ? "" : ", ", name_of(m->dtype), to_string(m->shape));
  return text;
}

}  // namespace tessera
