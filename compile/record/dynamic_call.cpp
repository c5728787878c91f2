#include "compile/record/dynamic_call.h"

#include "compile/ir/rewrite.h"

namespace tessera::compiler {
namespace {

bool same_or_linear(const Source& a, const Source& b) {
  if (a.kind != b.kind || a.index != b.index) return false;
  if (a.kind == Source::kNone) return true;
  if (!a.like.defined() || !b.like.defined()) return false;
  if (a.kind == Source::kExisting) return local_of(a.like).storage() == local_of(b.like).storage();
  if (shard_data(a.like) || shard_data(b.like))
    return a.offset == b.offset && same_layout(local_of(a.like).meta(), local_of(b.like).meta()) &&
           a.like.shape() == b.like.shape();
  return a.like.ndim() == b.like.ndim() && a.like.dtype() == b.like.dtype();
}

std::string differ(const CachedCall& a, const CachedCall& b) {
  if (a.settings != b.settings || a.handles != b.handles) return "other settings at each size";
  if (!(a.returned == b.returned)) return "a number that it returns depends on the size";
  if (a.slots.size() != b.slots.size() || a.results.size() != b.results.size())
    return "other results at each size";
  for (size_t i = 0; i < a.results.size(); ++i)
    if (!same_or_linear(a.results[i], b.results[i]))
      return fmt::format("result {} comes from elsewhere at each size", i);
  for (size_t i = 0; i < a.slots.size(); ++i) {
    const CachedSlot &s = a.slots[i], &t = b.slots[i];
    if (s.owner != t.owner || s.changed != t.changed || !same_or_linear(s.after, t.after))
      return "gradients go elsewhere at each size";
  }
  return "";
}

}  // namespace

std::unique_ptr<DynamicCall> DynamicCall::unify(const RecordedCall& a, const RecordedCall& b,
                                                std::string* why) {
  why->clear();
  const auto &x = a.entry.key.extents(), &y = b.entry.key.extents();
  if (!a.entry.key.same_kind(b.entry.key) || x.size() != y.size()) return nullptr;
  Line line{0, 0};
  for (size_t i = 0; i < x.size(); ++i) {
    if (x[i] == y[i]) continue;
    if (line.size_a != 0 && (line.size_a != x[i] || line.size_b != y[i])) return nullptr;
    line = {x[i], y[i]};
  }
  if (line.size_a < 2 || line.size_b < 2) return nullptr;
  *why = differ(a.entry, b.entry);
  if (!why->empty()) return nullptr;
  auto graph = DynamicGraph::unify(*a.graph, line.size_a, *b.graph, line.size_b, why);
  if (!graph) return nullptr;
  std::unique_ptr<DynamicCall> dynamic(new DynamicCall(a, b, std::move(*graph), line));
  dynamic->confirmed = dynamic->graph_.certain();
  return dynamic;
}

std::optional<int64_t> DynamicCall::size_of(const CallKey& key) const {
  if (!key.same_kind(a_.entry.key)) return std::nullopt;
  const auto &x = a_.entry.key.extents(), &y = b_.entry.key.extents(), &now = key.extents();
  std::optional<int64_t> size;
  for (size_t i = 0; i < x.size(); ++i) {
    if (x[i] == y[i] ? now[i] != x[i] : size && *size != now[i]) return std::nullopt;
    if (x[i] != y[i]) size = now[i];
  }
  return size && *size >= 2 ? size : std::nullopt;
}

Source DynamicCall::source_at(const Source& a, const Source& b, int64_t size) const {
  if (a.kind == Source::kNone || a.kind == Source::kExisting || shard_data(a.like)) return a;
  Source s = a;
  s.offset = line_.at(a.offset, b.offset, size);
  Meta m = a.like.meta();
  const Meta& other = b.like.meta();
  for (int d = 0; d < m.shape.size(); ++d) m.shape[d] = line_.at(m.shape[d], other.shape[d], size);
  if (a.like.is_contiguous() && b.like.is_contiguous()) {
    m.strides = contiguous_strides(m.shape);
  } else {
    for (int d = 0; d < m.shape.size(); ++d)
      m.strides[d] = line_.at(m.strides[d], other.strides[d], size);
  }
  s.like = Tensor(m, nullptr, a.like.offset());
  return s;
}

RecordedCall DynamicCall::at(int64_t size, const CallKey& key) const {
  RecordedCall call{a_.entry, std::make_shared<const Graph>(graph_.at(size))};
  CachedCall& e = call.entry;
  e.key = key;
  for (size_t i = 0; i < e.any.size(); ++i)
    e.any[i] = a_.entry.any[i] || b_.entry.any[i] || a_.entry.inputs[i] != b_.entry.inputs[i];
  for (size_t i = 0; i < e.results.size(); ++i)
    e.results[i] = source_at(a_.entry.results[i], b_.entry.results[i], size);
  for (size_t i = 0; i < e.slots.size(); ++i)
    e.slots[i].after = source_at(a_.entry.slots[i].after, b_.entry.slots[i].after, size);
  return call;
}

std::string DynamicCall::compare(int64_t size, const RecordedCall& call) const {
  try {
    RecordedCall foretold = at(size, call.entry.key);
    if (!same_guards(foretold.entry, call.entry)) return "other results than foretold";
    std::string why;
    auto same = DynamicGraph::unify(*foretold.graph, size, *call.graph, size + 1, &why);
    if (!same) return why;
    if (to_string(*foretold.graph) != to_string(*call.graph))
      return fmt::format("at size {} it is another graph than sizes {} and {} foretell", size,
                         line_.size_a, line_.size_b);
  } catch (const Error& e) {  // a number is not linear in the size
    return e.what();
  }
  return "";
}

}  // namespace tessera::compiler
