#include "tests/vgpu/cudnn/plan_text.h"

#include <nlohmann/json.hpp>

extern "C" size_t cudnnGetVersion();

namespace vgpu::dnn {

namespace {

using Json = nlohmann::ordered_json;

constexpr int64_t kFormat = 4;

Json json_of(const TensorInfo& t) {
  return {{"name", t.uid},
          {"dataType", t.type},
          {"dim", t.dims},
          {"stride", t.strides},
          {"isVirtual", t.is_virtual},
          {"isByValue", t.by_value},
          {"ptrAlignment", t.alignment}};
}
TensorInfo tensor_of(const Json& j) {
  TensorInfo t;
  j.at("name").get_to(t.uid), j.at("dataType").get_to(t.type);
  j.at("dim").get_to(t.dims), j.at("stride").get_to(t.strides);
  j.at("isVirtual").get_to(t.is_virtual), j.at("isByValue").get_to(t.by_value);
  j.at("ptrAlignment").get_to(t.alignment);
  return t;
}

Json json_of(const Operation& op) {
  Json in = Json::array();
  for (const TensorInfo& t : op.in) in.push_back(json_of(t));
  return {{"operation", op.kind},    {"mode", op.mode},
          {"axis", op.axis},         {"pre", op.begin},
          {"post", op.end},          {"stride", op.stride},
          {"dilation", op.dilation}, {"in", std::move(in)},
          {"out", json_of(op.out)},  {"squares", json_of(op.squares)}};
}
Operation operation_of(const Json& j) {
  Operation op;
  j.at("operation").get_to(op.kind), j.at("mode").get_to(op.mode), j.at("axis").get_to(op.axis);
  j.at("pre").get_to(op.begin), j.at("post").get_to(op.end);
  j.at("stride").get_to(op.stride), j.at("dilation").get_to(op.dilation);
  for (const Json& t : j.at("in")) op.in.push_back(tensor_of(t));
  op.out = tensor_of(j.at("out")), op.squares = tensor_of(j.at("squares"));
  return op;
}

Json json_of(const DeviceProfile& d) {
  return {{"multiProcessorCount", d.multiprocessors},
          {"deviceVer", d.capability},
          {"driverVer", d.driver}};
}
DeviceProfile profile_of(const Json& j) {
  return {j.at("deviceVer"), j.at("multiProcessorCount"), j.at("driverVer")};
}

// Throws where something is missing or has another type.
Status read(const Json& j, const DeviceProfile& device, PlanInfo& plan, std::string& why) {
  if (const size_t version = j.at("cudnnVersion"); version != cudnnGetVersion()) {
    why = "the text is of cuDNN " + std::to_string(version);
    return Status::kOtherLibrary;
  }
  if (const int64_t format = j.at("schemaVersion"); format != kFormat) {
    why = "the text has format " + std::to_string(format);
    return Status::kOtherFormat;
  }
  plan.device = profile_of(j.at("GPUProfile"));
  if (!(plan.device == device)) {
    why = "the text is of another kind of device, or of another driver";
    return Status::kOtherDevice;
  }
  const Json& engine = j.at("engine");
  engine.at("engineId").get_to(plan.engine.index);
  engine.at("knobChoices").at("knob").get_to(plan.engine.knob);
  const EngineKind* kind = engine_kind(plan.engine.index);
  if (!kind || !kind->compiles) {
    why = "no engine " + std::to_string(plan.engine.index);
    return Status::kNotSupported;
  }
  for (const Json& op : j.at("operationGraph").at("nodes"))
    plan.graph.operations.push_back(operation_of(op));
  for (const Operation& op : plan.graph.operations)
    if (why = wrong(op); !why.empty()) return Status::kBadParam;
  if (why = join(plan.graph); !why.empty()) return Status::kBadParam;
  if (compiles_code(plan.graph)) engine.at("payload").at("kernels");
  return Status::kSuccess;
}

}  // namespace

bool read_profile(std::string_view json, DeviceProfile& profile) {
  const Json j = Json::parse(json, nullptr, false);
  if (!j.is_object() || !j.contains("maxGridSize")) return false;
  try {
    profile = profile_of(j);
  } catch (const Json::exception&) {
    return false;
  }
  return true;
}

std::string write_plan(const PlanInfo& plan) {
  Json nodes = Json::array();
  for (const Operation& op : plan.graph.operations) nodes.push_back(json_of(op));
  Json engine{{"engineId", plan.engine.index}, {"knobChoices", {{"knob", plan.engine.knob}}}};
  if (compiles_code(plan.graph))
    engine["payload"] = {{"kernels", Json::array({{{"kernelName", plan.graph.name}}})}};
  return Json{{"cudnnVersion", cudnnGetVersion()},
              {"schemaVersion", kFormat},
              {"operationGraph", {{"nodes", std::move(nodes)}}},
              {"GPUProfile", json_of(plan.device)},
              {"engine", std::move(engine)}}
      .dump();
}

Status read_plan(std::string_view text, const DeviceProfile& device, PlanInfo& plan,
                 std::string& why) {
  const Json j = Json::parse(text, nullptr, false);
  if (!j.is_object()) {
    why = "the text is no object of JSON";
    return Status::kBadParam;
  }
  try {
    return read(j, device, plan, why);
  } catch (const Json::exception& e) {
    why = e.what();
    return Status::kBadParam;
  }
}

}  // namespace vgpu::dnn
