#include "compile/debug/graph_file.h"

#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>

#include "compile/debug/op_names.h"
#include "compile/ir/as_strided.h"
#include "compile/ir/rewrite.h"
#include "compile/ir/verify.h"
#include "compile/record/dynamic_graph.h"
#include "core/dispatch/copy.h"
#include "core/io/bounded_json.h"
#include "core/io/safetensors.h"

namespace tessera::compiler {
namespace {

using Json = nlohmann::json;

constexpr size_t kMaxTextBytes = 64 << 20;
constexpr int kMaxDepth = 16;
constexpr size_t kMaxItems = 1 << 20;            // values, nodes
constexpr int64_t kMaxZeros = int64_t(1) << 32;  // bytes of implicit inputs without values

// ---- writing

Json json_of(const Meta& m) {
  return {std::string(name_of(m.dtype)), std::vector<int64_t>(m.shape.begin(), m.shape.end()),
          std::vector<int64_t>(m.strides.begin(), m.strides.end())};
}

Json json_of(const ValueIds& ids) { return std::vector<ValueId>(ids.begin(), ids.end()); }

Json json_of(const Node& n) {
  Json j = {{"op", std::string(n.prim->name())},
            {"in", json_of(n.in)},
            {"out", json_of(n.out)},
            {"phase", int(n.phase)},
            {"role", int(n.role)},
            {"scope", n.scope}};
  if (!n.into.empty()) j["into"] = json_of(n.into);
  if (const Fused* f = as_fused(*n.prim))
    j["fused"] = json_of_fused(*f);
  else
    j["attributes"] = json_of_attributes(attributes_of(*n.prim));
  return j;
}

// ---- reading

class GraphReader {
 public:
  GraphReader(const Json& j, std::span<const Ref<ProcessGroup>> groups) : j_(j), groups_(groups) {}

  Graph read() {
    TESSERA_CHECK(j_.is_object() && j_.value("format", "") == "tessera graph",
                  "this is no graph of Tessera");
    TESSERA_CHECK(j_.at("version") == 1, "version {} is not known; this reads version 1",
                  j_.at("version").dump());
    for (const Json& v : list("values")) g_.values.push_back(read_value(v));
    for (const Json& id : list("inputs")) g_.inputs.push_back(read_id(id));
    for (const Json& i : list("implicit")) read_implicit(i);
    for (const Json& id : list("shapes")) g_.shapes.push_back(read_id(id));
    g_.scopes.clear();
    for (const Json& s : list("scopes")) g_.scopes.push_back(s.get<std::string>());
    g_.deterministic = j_.value("deterministic", false);
    for (const Json& n : list("nodes")) {
      try {
        g_.nodes.push_back(read_node(n));
      } catch (const Error& e) {
        throw UserError(fmt::format("node {}: {}", g_.nodes.size(), e.what()));
      }
    }
    for (const Json& id : list("outputs")) g_.outputs.push_back(read_id(id));
    check();
    return std::move(g_);
  }

 private:
  const Json& list(const char* name) const {
    const Json& l = j_.at(name);
    TESSERA_CHECK(l.is_array() && l.size() <= kMaxItems, "\"{}\" is no list, or too long", name);
    return l;
  }
  ValueId read_id(const Json& j) const {
    int64_t id = read_integer(j);
    TESSERA_CHECK(id >= 0 && size_t(id) < g_.values.size(), "%{} is not one of {} values", id,
                  g_.values.size());
    return ValueId(id);
  }
  Value read_value(const Json& j) const {
    Value v{read_meta(j.at(0)), read_integer(j.at(1)), kNoBuffer};
    int64_t buffer = read_integer(j.at(2));
    TESSERA_CHECK(v.offset >= 0 && v.offset <= kMaxElements, "offset {}", v.offset);
    TESSERA_CHECK(buffer >= kNoBuffer && buffer < int64_t(list("values").size()),
                  "a value in the memory of %{}", buffer);
    v.buffer = ValueId(buffer);
    return v;
  }
  void read_implicit(const Json& j) {
    ValueId id = read_id(j.at("id"));
    const Value& v = g_[id];
    size_t bytes = size_t(v.offset + extent_of(v.meta, 0).size) * size_of(v.meta.dtype);
    zeros_ += int64_t(bytes);
    TESSERA_CHECK(zeros_ <= kMaxZeros, "implicit inputs of more than {} bytes", kMaxZeros);
    auto storage = make_ref<Storage>(bytes, kCPU, cpu_allocator());
    if (bytes) std::memset(storage->data(), 0, bytes);
    g_.implicit.push_back({id, Tensor(v.meta, storage, v.offset), j.at("name").get<std::string>()});
  }
  ValueIds read_ids(const Json& j, bool may_be_new) const {
    TESSERA_CHECK(j.is_array() && j.size() <= kMaxItems, "a list of values is none, or too long");
    ValueIds ids;
    for (const Json& id : j)
      ids.push_back(may_be_new && id == int64_t(kNoValue) ? kNoValue : read_id(id));
    return ids;
  }
  Node read_node(const Json& j) {
    Node n;
    n.in = read_ids(j.at("in"), false), n.out = read_ids(j.at("out"), false);
    if (j.contains("into")) {
      n.into = read_ids(j.at("into"), true);
      TESSERA_CHECK(n.into.size() == n.out.size(), "{} places for {} results", n.into.size(),
                    n.out.size());
    }
    int64_t phase = read_integer(j.at("phase")), role = read_integer(j.at("role"));
    TESSERA_CHECK(phase >= 0 && phase < kNumPhases && role >= 0 && role < kNumRoles,
                  "phase {}, role {}", phase, role);
    n.phase = Phase(phase), n.role = Role(role), n.scope = int32_t(read_integer(j.at("scope")));
    std::vector<Meta> in;
    for (ValueId id : n.in) in.push_back(g_[id].meta);
    const std::string op = j.at("op").get<std::string>();
    n.prim = op == "fused" ? read_fused(j.at("fused"), in)
                           : read_op(op, read_attributes(j.at("attributes")), in, groups_);
    TESSERA_CHECK(n.prim->is_view() == (n.role == Role::kView), "{} has role {}", op,
                  name_of(n.role));
    return n;
  }

  // Checks that the graph verifies, and that each value lies where its op would put it.
  void check() {
    verify(g_);
    Graph laid_out = g_;
    lay_out_values(laid_out);
    for (size_t i = 0; i < g_.values.size(); ++i) {
      const Value &given = g_.values[i], &made = laid_out.values[i];
      TESSERA_CHECK(same_layout(given.meta, made.meta) && given.offset == made.offset &&
                        given.buffer == made.buffer,
                    "%{} lies elsewhere than its op puts it", i);
      if (given.buffer == kNoBuffer) continue;
      Range r = extent_of(given.meta, given.offset), all = memory_of(given.buffer);
      TESSERA_CHECK(
          r.size == 0 || (r.begin >= all.begin && r.begin + r.size <= all.begin + all.size),
          "%{} leaves the memory of %{}", i, given.buffer);
    }
  }
  Range memory_of(ValueId buffer) const {
    const Value& v = g_[buffer];
    // Inputs may be parts of larger memories, which exist outside of the graph.
    bool outside = std::ranges::count(g_.inputs, buffer) > 0;
    for (const ImplicitInput& i : g_.implicit) outside |= i.id == buffer;
    return outside ? Range{0, kMaxElements, 0} : extent_of(v.meta, v.offset);
  }

  const Json& j_;
  std::span<const Ref<ProcessGroup>> groups_;
  Graph g_;
  int64_t zeros_ = 0;
};

// ---- values

// All bytes of the memory that `t` sees, as a tensor of bytes.
Tensor bytes_of(const Tensor& t) {
  t.storage()->wait_ready();
  return Tensor(Meta::contiguous({int64_t(t.storage()->bytes())}, kU8, kCPU), t.storage());
}

Tensor with_bytes(const Meta& meta, int64_t offset, const Tensor& bytes, const std::string& name) {
  Range r = extent_of(meta, offset);
  TESSERA_CHECK(bytes.dtype() == kU8 && bytes.ndim() == 1 &&
                    (r.begin + r.size) * int64_t(size_of(meta.dtype)) <= bytes.numel(),
                "\"{}\" is too small for {}", name, tessera::to_string(meta.shape));
  return Tensor(meta, bytes.storage(), offset);
}

template <class F>
auto explained(const std::string& where, F f) {
  try {
    return f();
  } catch (const std::exception& e) {
    throw UserError(fmt::format("{}: {}", where, e.what()));
  }
}

}  // namespace

std::string graph_to_json(const Graph& g) {
  Json j = {{"format", "tessera graph"}, {"version", 1},
            {"scopes", g.scopes},        {"inputs", g.inputs},
            {"shapes", g.shapes},        {"outputs", g.outputs},
            {"values", Json::array()},   {"implicit", Json::array()},
            {"nodes", Json::array()},    {"deterministic", g.deterministic}};
  for (const Value& v : g.values) j["values"].push_back({json_of(v.meta), v.offset, v.buffer});
  for (const ImplicitInput& i : g.implicit)
    j["implicit"].push_back({{"id", i.id}, {"name", i.name}});
  for (const Node& n : g.nodes) j["nodes"].push_back(json_of(n));
  return j.dump();
}

Graph graph_from_json(const std::string& text, std::span<const Ref<ProcessGroup>> groups) {
  return explained("graph", [&] {
    TESSERA_CHECK(text.size() <= kMaxTextBytes, "{} bytes of text, at most {} are read",
                  text.size(), kMaxTextBytes);
    return GraphReader(Json::parse(text, io::nested_at_most(kMaxDepth, "the text")), groups).read();
  });
}

void save_graph(const std::string& path, const Graph& graph, std::span<const Tensor> inputs,
                const std::string& note) {
  TESSERA_CHECK(inputs.empty() || inputs.size() == graph.inputs.size(),
                "save_graph: {} tensors for {} inputs", inputs.size(), graph.inputs.size());
  std::string text = graph_to_json(graph);
  std::vector<NamedTensor> tensors;
  Tensor bytes(Meta::contiguous({int64_t(text.size())}, kU8, kCPU),
               make_ref<Storage>(text.data(), text.size(), kCPU, nullptr));
  tensors.push_back({"graph", bytes});
  Json offsets = Json::array();
  for (size_t i = 0; i < inputs.size(); ++i) {
    tensors.push_back({fmt::format("input.{}", i), bytes_of(inputs[i])});
    offsets.push_back(inputs[i].offset());
  }
  for (size_t i = 0; i < graph.implicit.size(); ++i)
    tensors.push_back({fmt::format("implicit.{}", i), bytes_of(graph.implicit[i].tensor)});
  io::save_safetensors(path, tensors, {{"note", note}, {"input_offsets", offsets.dump()}});
}

Reproducer load_graph(const std::string& path, std::span<const Ref<ProcessGroup>> groups) {
  return explained(path, [&] {
    io::SafetensorsFile file = io::SafetensorsFile::open(path);
    TESSERA_CHECK(file.contains("graph"), "there is no graph in it");
    const io::TensorInfo& info = file.info("graph");
    TESSERA_CHECK(info.dtype == kU8 && info.bytes <= kMaxTextBytes, "\"graph\" is no text");
    Tensor text = file.load("graph");
    Reproducer r;
    r.graph = graph_from_json(
        std::string(static_cast<const char*>(text.raw()), size_t(text.nbytes())), groups);
    auto note = file.metadata().find("note"), at = file.metadata().find("input_offsets");
    if (note != file.metadata().end()) r.failure = note->second;
    for (size_t i = 0; i < r.graph.implicit.size(); ++i) {
      ImplicitInput& in = r.graph.implicit[i];
      std::string name = fmt::format("implicit.{}", i);
      in.tensor = with_bytes(in.tensor.meta(), in.tensor.offset(), file.load(name), name);
    }
    Json offsets = at == file.metadata().end()
                       ? Json::array()
                       : Json::parse(at->second, io::nested_at_most(kMaxDepth, "input_offsets"));
    TESSERA_CHECK(
        offsets.is_array() && (offsets.empty() || offsets.size() == r.graph.inputs.size()),
        "{} inputs have values, the graph takes {}", offsets.size(), r.graph.inputs.size());
    for (size_t i = 0; i < offsets.size(); ++i) {
      std::string name = fmt::format("input.{}", i);
      int64_t offset = read_integer(offsets[i]);
      TESSERA_CHECK(offset >= 0 && offset <= kMaxElements, "input {} has offset {}", i, offset);
      r.inputs.push_back(
          with_bytes(r.graph[r.graph.inputs[i]].meta, offset, file.load(name), name));
    }
    return r;
  });
}

}  // namespace tessera::compiler
