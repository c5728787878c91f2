#include "compile/debug/op_names.h"

#include <map>

#include "collectives/ops.h"
#include "compile/ir/as_strided.h"
#include "compile/passes/passes.h"
#include "core/autograd/custom_op.h"
#include "core/primitive/registry.h"

namespace tessera::compiler {
namespace {

using Json = nlohmann::json;

// One op of each name, taken from the samples of the registry.
const std::map<std::string, PrimRef, std::less<>>& known_ops() {
  static const auto* ops = [] {
    auto* m = new std::map<std::string, PrimRef, std::less<>>;
    for (const OpEntry& e : op_registry().entries()) m->emplace(e.name, e.samples().back().prim);
    m->emplace("as_strided", as_strided({1}, {1}, 0));
    m->emplace("add_embedding_grad", add_embedding_grad_op(1, -1));
    return m;
  }();
  return *ops;
}

// Makes the op of `like` with other attributes, adapted to operands of types `in`.
PrimRef remake_for(const Primitive& like, const Attributes& attributes, std::span<const Meta> in) {
  const int dims = in.empty() ? 0 : in[0].shape.size();
  for (const Attribute& a : attributes) {
    const auto* v = std::get_if<int64_t>(&a.value);
    if (v && a.name == "dim")
      TESSERA_CHECK(*v >= 0 && *v < dims, "{}: dim {} of a tensor of {} dims", like.name(), *v,
                    dims);
    if (v && a.name == "mask")
      TESSERA_CHECK(*v >= 0 && *v >> dims == 0, "{}: mask {} for {} dims", like.name(), *v, dims);
  }
  PrimRef made = remake(like, attributes);
  const int64_t count = made->operand_count();
  TESSERA_CHECK(count == Primitive::kAnyNumber ? !in.empty() : int64_t(in.size()) == count,
                "{} of {} operands", like.name(), in.size());
  return made;
}

Json json_of(const Access& a) {
  return {std::string(name_of(a.dtype)), std::vector<int64_t>(a.strides.begin(), a.strides.end())};
}
Access read_access(const Json& j) {
  Access a{read_dtype(j.at(0)), {}};
  for (int64_t s : read_dims(j.at(1))) a.strides.push_back(s);
  return a;
}

Json json_of(const Instr& i) {
  Json j = {{"kind", int(i.kind)},
            {"dtype", std::string(name_of(i.dtype))},
            {"in", std::vector<InstrId>(i.in.begin(), i.in.end())},
            {"loops", i.loops}};
  if (i.kind == InstrKind::kPointwise) j["op"] = i.op;
  if (i.kind == InstrKind::kReduce) j["reduce"] = int(i.reduce), j["reduced"] = i.reduced;
  if (i.kind == InstrKind::kLoad) j["operand"] = i.operand;
  if (i.kind == InstrKind::kIndex) j["loop"] = i.loop;
  if (i.kind == InstrKind::kConstant)
    j["value"] =
        json_of_attributes({{"", i.value.kind() == kF64 ? AttributeValue(i.value.real())
                                                        : AttributeValue(i.value.integer())}})[""];
  return j;
}

int64_t between(const Json& j, int64_t low, int64_t high, const char* what) {
  int64_t v = read_integer(j);
  TESSERA_CHECK(v >= low && v <= high, "fused: {} is {}", what, v);
  return v;
}

Instr read_instr(const Json& j) {
  Instr i;
  i.kind = InstrKind(between(j.at("kind"), 0, int64_t(InstrKind::kReduce), "the kind of a value"));
  i.dtype = read_dtype(j.at("dtype"));
  for (const Json& id : j.at("in")) i.in.push_back(InstrId(between(id, 0, 1 << 20, "a value")));
  bool leaf =
      i.kind == InstrKind::kLoad || i.kind == InstrKind::kConstant || i.kind == InstrKind::kIndex;
  TESSERA_CHECK(!leaf || i.in.empty(), "fused: a value of kind {} with operands", int(i.kind));
  i.loops = LoopMask(between(j.at("loops"), 0, 255, "a set of loops"));
  if (i.kind == InstrKind::kPointwise) i.op = j.at("op").get<std::string>();
  if (i.kind == InstrKind::kReduce) {
    i.reduce = ReduceKind(between(j.at("reduce"), 0, int64_t(ReduceKind::kAll), "a reduction"));
    i.reduced = LoopMask(between(j.at("reduced"), 0, 255, "a set of loops"));
  }
  if (i.kind == InstrKind::kLoad) i.operand = int(between(j.at("operand"), 0, 1 << 20, "operand"));
  if (i.kind == InstrKind::kIndex) i.loop = int(between(j.at("loop"), 0, 7, "a loop"));
  if (i.kind == InstrKind::kConstant) {
    AttributeValue v = read_attributes({{"value", j.at("value")}})[0].value;
    TESSERA_CHECK(std::holds_alternative<int64_t>(v) || std::holds_alternative<double>(v),
                  "fused: a constant is no number");
    i.value = std::holds_alternative<double>(v) ? Scalar(std::get<double>(v))
                                                : Scalar(std::get<int64_t>(v));
  }
  return i;
}

// Checks that numbers of elements fit into an integer. Extents of zero count as 1, since strides
// are products of extents, too.
void check_elements(std::span<const int64_t> extents, std::span<const int64_t> strides) {
  TESSERA_CHECK(extents.size() == strides.size(), "{} strides for {} dims", strides.size(),
                extents.size());
  __int128 elements = 1, reach = 1;
  for (size_t d = 0; d < extents.size(); ++d) {
    elements *= std::max<int64_t>(extents[d], 1);
    reach += __int128(extents[d]) * strides[d];
    TESSERA_CHECK(elements <= kMaxElements && reach <= kMaxElements, "{} has too many elements",
                  tessera::to_string(extents));
  }
}

// Checks how many elements the loops of a body reach from the first one.
void check_reach(const Body& body, const Access& a, const Meta& m, const char* what) {
  __int128 last = 0;
  for (size_t l = 0; l < a.strides.size(); ++l)
    last += __int128(body.extents[l] - 1) * a.strides[l];
  TESSERA_CHECK(a.dtype == m.dtype && last < extent_of(m, 0).size,
                "fused: {} is {}{}, the body reaches beyond it", what, name_of(m.dtype),
                tessera::to_string(m.shape));
}

}  // namespace

Meta read_meta(const Json& j) {
  Meta m{read_dims(j.at(1)), read_dims(j.at(2)), read_dtype(j.at(0)), kCPU};
  check_elements(m.shape, m.strides);
  return m;
}
int64_t read_integer(const Json& j) {
  TESSERA_CHECK(j.is_number_integer() &&
                    (!j.is_number_unsigned() || j.get<uint64_t>() <= uint64_t(INT64_MAX)),
                "{} where an integer is expected", j.dump().substr(0, 40));
  return j.get<int64_t>();
}
Dims read_dims(const Json& j) {
  TESSERA_CHECK(j.is_array() && j.size() <= size_t(kMaxDims), "{} where dims are expected",
                j.dump().substr(0, 40));
  Dims d;
  for (const Json& x : j) {
    d.push_back(read_integer(x));
    TESSERA_CHECK(d.back() >= 0 && d.back() <= int64_t(1) << 40, "{} among dims", d.back());
  }
  return d;
}
DType read_dtype(const Json& j) {
  for (DType t : kAllDTypes)
    if (j.is_string() && name_of(t) == j.get_ref<const std::string&>()) return t;
  throw UserError(fmt::format("{} where a dtype is expected", j.dump().substr(0, 40)));
}

Json json_of_attributes(const Attributes& attributes) {
  Json j = Json::object();
  for (const Attribute& a : attributes) {
    if (auto* v = std::get_if<double>(&a.value); v && !std::isfinite(*v))
      j[a.name] = {{"real", fmt::format("{}", *v)}};  // JSON has no such numbers
    else
      std::visit([&](auto& x) { j[a.name] = x; }, a.value);
  }
  return j;
}

Attributes read_attributes(const Json& j) {
  TESSERA_CHECK(j.is_object() && j.size() < 64, "attributes are no object, or too many");
  Attributes list;
  for (auto& [name, v] : j.items()) {
    if (v.is_number_float())
      list.push_back({name, v.get<double>()});
    else if (v.is_string())
      list.push_back({name, v.get<std::string>()});
    else if (v.is_object())
      list.push_back({name, std::stod(v.at("real").get<std::string>())});
    else if (v.is_array()) {
      std::vector<int64_t> numbers;
      for (const Json& x : v) numbers.push_back(read_integer(x));
      list.push_back({name, std::move(numbers)});
    } else {
      list.push_back({name, read_integer(v)});
    }
  }
  return list;
}

PrimRef read_op(const std::string& name, const Attributes& attributes, std::span<const Meta> in,
                std::span<const Ref<ProcessGroup>> groups) {
  for (const Attribute& a : attributes) {
    if (a.name != "group") continue;
    const auto* wanted = std::get_if<std::string>(&a.value);
    for (const Ref<ProcessGroup>& g : groups)
      if (wanted && g->name() == *wanted) {
        TESSERA_CHECK(in.size() == 1, "{} of {} operands", name, in.size());
        return remake(*collective_op(name, g), attributes);
      }
    throw UserError(
        fmt::format("{} talks to group {}, which was not given", name, wanted ? *wanted : "?"));
  }
  auto known = known_ops().find(name);
  const PrimRef like = known != known_ops().end() ? known->second : find_custom_op(name);
  TESSERA_CHECK(like, "there is no op {}", name);
  return remake_for(*like, attributes, in);
}

Json json_of_fused(const Fused& f) {
  Json j = {{"name", f.name},
            {"extents", std::vector<int64_t>(f.body.extents.begin(), f.body.extents.end())},
            {"operands", Json::array()},
            {"values", Json::array()},
            {"stores", Json::array()},
            {"results", Json::array()}};
  for (const Access& a : f.body.operands) j["operands"].push_back(json_of(a));
  for (const Instr& i : f.body.instrs) j["values"].push_back(json_of(i));
  for (const Store& s : f.body.stores) j["stores"].push_back({s.value, json_of(s.to)});
  for (const Meta& m : f.results)
    j["results"].push_back({std::string(name_of(m.dtype)),
                            std::vector<int64_t>(m.shape.begin(), m.shape.end()),
                            std::vector<int64_t>(m.strides.begin(), m.strides.end())});
  return j;
}

PrimRef read_fused(const Json& j, std::span<const Meta> in) {
  Body body;
  for (int64_t n : read_dims(j.at("extents"))) body.extents.push_back(n);
  for (const Json& a : j.at("operands")) body.operands.push_back(read_access(a));
  for (const Json& i : j.at("values")) body.instrs.push_back(read_instr(i));
  for (const Json& s : j.at("stores"))
    body.stores.push_back(
        {InstrId(between(s.at(0), 0, 1 << 20, "a stored value")), read_access(s.at(1))});
  Metas results;
  for (const Json& m : j.at("results")) results.push_back(read_meta(m));
  TESSERA_CHECK(results.size() == body.stores.size() && in.size() == body.operands.size(),
                "fused: {} operands and {} results for a body of {} and {}", in.size(),
                results.size(), body.operands.size(), body.stores.size());
  for (const Access& a : body.operands) check_elements(body.extents, a.strides);
  for (const Store& s : body.stores) check_elements(body.extents, s.to.strides);
  check(body);
  for (size_t i = 0; i < in.size(); ++i) check_reach(body, body.operands[i], in[i], "an operand");
  for (size_t i = 0; i < results.size(); ++i)
    check_reach(body, body.stores[i].to, results[i], "a result");
  return PrimRef(new Fused(j.at("name").get<std::string>(), std::move(body), std::move(results)));
}

}  // namespace tessera::compiler
