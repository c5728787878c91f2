// Attributes of descriptors, and what finalizing them makes and refuses. Statuses are the real
// library's (tests/vgpu/conformance/cudnn.cpp). Invariant: an attribute that is not emulated is an
// error by name.
#include "tests/vgpu/cudnn/objects.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "tests/vgpu/cuda/virtual_driver.h"

namespace vgpu::dnn {

namespace {

struct Row {
  int descriptor, attribute, type;
  int64_t most;  // elements
  bool required;
};
#define ONE(d, a, t) \
  { d, a, t, 1, true }
#define MAY(d, a, t) \
  { d, a, t, 1, false }
constexpr int64_t kMostDims = 12, kMany = 1 << 20, kMostText = 1 << 28;
constexpr Row kRows[] = {
    MAY(kTensor, kTensorType, kTypeDataType),
    {kTensor, kTensorDims, kTypeInt64, kMostDims, true},
    {kTensor, kTensorStrides, kTypeInt64, kMostDims, true},
    MAY(kTensor, kTensorUid, kTypeInt64),
    ONE(kTensor, kTensorAlignment, kTypeInt64),
    MAY(kTensor, kTensorIsVirtual, kTypeBoolean),
    MAY(kTensor, kTensorByValue, kTypeBoolean),

    MAY(kPointwise, kPointwiseMode, kTypePointwiseMode),
    MAY(kPointwise, kPointwisePrecision, kTypeDataType),
    MAY(kPointwise, kPointwiseAxis, kTypeInt64),
    ONE(kPointwiseOp, kPointwiseOpKind, kTypeDescriptor),
    ONE(kPointwiseOp, kPointwiseOpX, kTypeDescriptor),
    MAY(kPointwiseOp, kPointwiseOpB, kTypeDescriptor),
    MAY(kPointwiseOp, kPointwiseOpT, kTypeDescriptor),
    ONE(kPointwiseOp, kPointwiseOpY, kTypeDescriptor),

    ONE(kMatmul, kMatmulType, kTypeDataType),
    ONE(kMatmulOp, kMatmulOpKind, kTypeDescriptor),
    ONE(kMatmulOp, kMatmulOpA, kTypeDescriptor),
    ONE(kMatmulOp, kMatmulOpB, kTypeDescriptor),
    ONE(kMatmulOp, kMatmulOpC, kTypeDescriptor),

    ONE(kReduction, kReductionOperator, kTypeReduction),
    ONE(kReduction, kReductionType, kTypeDataType),
    ONE(kReductionOp, kReductionOpKind, kTypeDescriptor),
    ONE(kReductionOp, kReductionOpX, kTypeDescriptor),
    ONE(kReductionOp, kReductionOpY, kTypeDescriptor),

    ONE(kReshapeOp, kReshapeOpX, kTypeDescriptor),
    ONE(kReshapeOp, kReshapeOpY, kTypeDescriptor),

    ONE(kStatisticsOp, kStatisticsMode, kTypeStatisticsMode),
    ONE(kStatisticsOp, kStatisticsPrecision, kTypeDataType),
    ONE(kStatisticsOp, kStatisticsX, kTypeDescriptor),
    ONE(kStatisticsOp, kStatisticsSum, kTypeDescriptor),
    ONE(kStatisticsOp, kStatisticsSquares, kTypeDescriptor),

    ONE(kConvolution, kConvolutionType, kTypeDataType),
    ONE(kConvolution, kConvolutionMode, kTypeConvolutionMode),
    ONE(kConvolution, kConvolutionDims, kTypeInt64),
    {kConvolution, kConvolutionBegin, kTypeInt64, 3, true},
    {kConvolution, kConvolutionEnd, kTypeInt64, 3, true},
    {kConvolution, kConvolutionStrides, kTypeInt64, 3, true},
    {kConvolution, kConvolutionDilations, kTypeInt64, 3, true},
    ONE(kConvForwardOp, kConvForwardWindow, kTypeDescriptor),
    ONE(kConvForwardOp, kConvForwardX, kTypeDescriptor),
    ONE(kConvForwardOp, kConvForwardW, kTypeDescriptor),
    ONE(kConvForwardOp, kConvForwardY, kTypeDescriptor),
    ONE(kConvForwardOp, kConvForwardAlpha, kTypeFloat),
    ONE(kConvForwardOp, kConvForwardBeta, kTypeFloat),
    ONE(kConvDataOp, kConvDataWindow, kTypeDescriptor),
    ONE(kConvDataOp, kConvDataX, kTypeDescriptor),
    ONE(kConvDataOp, kConvDataW, kTypeDescriptor),
    ONE(kConvDataOp, kConvDataY, kTypeDescriptor),
    ONE(kConvDataOp, kConvDataAlpha, kTypeFloat),
    ONE(kConvDataOp, kConvDataBeta, kTypeFloat),
    ONE(kConvFilterOp, kConvFilterWindow, kTypeDescriptor),
    ONE(kConvFilterOp, kConvFilterX, kTypeDescriptor),
    ONE(kConvFilterOp, kConvFilterW, kTypeDescriptor),
    ONE(kConvFilterOp, kConvFilterY, kTypeDescriptor),
    ONE(kConvFilterOp, kConvFilterAlpha, kTypeFloat),
    ONE(kConvFilterOp, kConvFilterBeta, kTypeFloat),

    MAY(kOperationGraph, kGraphHandle, kTypeHandle),
    {kOperationGraph, kGraphOps, kTypeDescriptor, kMany, true},
    ONE(kHeuristics, kHeuristicsGraph, kTypeDescriptor),
    ONE(kHeuristics, kHeuristicsMode, kTypeHeuristicMode),
    MAY(kHeuristics, kHeuristicsDevice, kTypeDescriptor),
    {kHeuristics, kHeuristicsResults, kTypeDescriptor, kMany, false},
    ONE(kEngine, kEngineGraph, kTypeDescriptor),
    ONE(kEngine, kEngineIndex, kTypeInt64),
    MAY(kEngine, kEngineDevice, kTypeDescriptor),
    {kEngine, kEngineNotes, kTypeNumericalNote, kMany, false},
    {kEngine, kEngineBehavior, kTypeBehaviorNote, kMany, false},
    ONE(kKnobChoice, kKnobType, kTypeKnob),
    ONE(kKnobChoice, kKnobValue, kTypeInt64),
    ONE(kEngineConfig, kConfigEngine, kTypeDescriptor),
    {kEngineConfig, kConfigKnobs, kTypeDescriptor, kMany, false},
    MAY(kPlan, kPlanHandle, kTypeHandle),
    MAY(kPlan, kPlanConfig, kTypeDescriptor),
    MAY(kPlan, kPlanDevice, kTypeDescriptor),
    {kPlan, kPlanText, kTypeChar, kMostText, false},
    MAY(kPlan, kPlanWorkspace, kTypeInt64),
    {kVariantPack, kPackUids, kTypeInt64, kMany, true},
    {kVariantPack, kPackPointers, kTypePointer, kMany, true},
    MAY(kVariantPack, kPackWorkspace, kTypePointer),
    {kDeviceProperties, kDeviceJson, kTypeChar, kMany, false},
};
#undef ONE
#undef MAY

const Row* row_of(int descriptor, int attribute) {
  for (const Row& r : kRows)
    if (r.descriptor == descriptor && r.attribute == attribute) return &r;
  return nullptr;
}

size_t element_bytes(int type) {
  switch (type) {
    case kTypeBoolean:
    case kTypeChar: return 1;
    case kTypeInt64:
    case kTypePointer:
    case kTypeDescriptor:
    case kTypeHandle: return 8;
    default: return 4;
  }
}

std::string number(int64_t n) { return std::to_string(n); }

/// A refusal as a value; "" is none.
using Why = std::string;

Why finish_tensor(DescriptorObject& d) {
  TensorInfo& t = d.tensor;
  t.uid = d.value<int64_t>(kTensorUid), t.type = d.value<int>(kTensorType, kFloat);
  t.dims = d.list<int64_t>(kTensorDims), t.strides = d.list<int64_t>(kTensorStrides);
  t.alignment = d.value<int64_t>(kTensorAlignment);
  t.is_virtual = d.value<bool>(kTensorIsVirtual), t.by_value = d.value<bool>(kTensorByValue);
  if (!bytes_of(t.type)) return "type " + number(t.type) + " is not emulated";
  if (t.dims.size() != t.strides.size() || t.dims.size() > 8)
    return number(static_cast<int64_t>(t.dims.size())) + " dims and " +
           number(static_cast<int64_t>(t.strides.size())) + " strides";
  for (size_t i = 0; i < t.dims.size(); ++i)
    if (t.dims[i] < 0 || t.strides[i] < 0) return "a dim or a stride is less than 0";
  if (t.alignment <= 0 || t.alignment % bytes_of(t.type))
    return "an alignment of " + number(t.alignment) + " bytes";
  if (t.by_value && (t.count() != 1 || t.type != kFloat)) return "no single float by value";
  return "";
}

Why finish_window(const DescriptorObject& d) {
  const auto dims = static_cast<size_t>(d.value<int64_t>(kConvolutionDims));
  if (d.value<int>(kConvolutionType) != kFloat) return "sums of another type than float";
  if (d.value<int>(kConvolutionMode) != kCrossCorrelation) return "mode is no cross-correlation";
  struct List {
    int attribute;
    int64_t least;
  };
  for (const List& l : {List{kConvolutionBegin, 0}, List{kConvolutionEnd, 0},
                        List{kConvolutionStrides, 1}, List{kConvolutionDilations, 1}}) {
    const auto all = d.list<int64_t>(l.attribute);
    if (all.size() != dims) return "attribute " + number(l.attribute) + " has other dims";
    for (int64_t x : all)
      if (x < l.least) return "attribute " + number(l.attribute) + " has " + number(x);
  }
  return "";
}

// An object that an attribute names: alive, of this type, finalized.
Why take(const DescriptorObject& d, int attribute, int type, const DescriptorObject** to) {
  *to = d.object(attribute);
  if (!is_descriptor(*to) || (*to)->type != type)
    return "attribute " + number(attribute) + " names no descriptor of type " + number(type);
  return (*to)->finished ? "" : "attribute " + number(attribute) + " is not finalized";
}
Why add(const DescriptorObject& d, int attribute, std::vector<TensorInfo>& to) {
  const DescriptorObject* t = nullptr;
  const Why why = take(d, attribute, kTensor, &t);
  if (why.empty()) to.push_back(t->tensor);
  return why;
}

Why finish_operation(DescriptorObject& d) {
  Operation& op = d.operation;
  op = {}, op.kind = d.type;
  struct Names {
    int type, kind, of_kind;
    std::vector<int> in;
    int out;
  };
  static const Names kNames[] = {
      {kPointwiseOp,
       kPointwiseOpKind,
       kPointwise,
       {kPointwiseOpX, kPointwiseOpB, kPointwiseOpT},
       kPointwiseOpY},
      {kMatmulOp, kMatmulOpKind, kMatmul, {kMatmulOpA, kMatmulOpB}, kMatmulOpC},
      {kReductionOp, kReductionOpKind, kReduction, {kReductionOpX}, kReductionOpY},
      {kReshapeOp, 0, 0, {kReshapeOpX}, kReshapeOpY},
      {kStatisticsOp, 0, 0, {kStatisticsX}, kStatisticsSum},
      {kConvForwardOp,
       kConvForwardWindow,
       kConvolution,
       {kConvForwardX, kConvForwardW},
       kConvForwardY},
      {kConvDataOp, kConvDataWindow, kConvolution, {kConvDataW, kConvDataY}, kConvDataX},
      {kConvFilterOp, kConvFilterWindow, kConvolution, {kConvFilterX, kConvFilterY}, kConvFilterW}};
  for (const Names& n : kNames) {
    if (n.type != d.type) continue;
    for (int attribute : n.in)
      if (d.has(attribute))
        if (const Why why = add(d, attribute, op.in); !why.empty()) return why;
    std::vector<TensorInfo> out;
    if (const Why why = add(d, n.out, out); !why.empty()) return why;
    op.out = out[0];
    if (d.type == kStatisticsOp) {
      std::vector<TensorInfo> squares;
      if (const Why why = add(d, kStatisticsSquares, squares); !why.empty()) return why;
      op.squares = squares[0];
    }
    if (!n.kind) return wrong(op);
    const DescriptorObject* kind = nullptr;
    if (const Why why = take(d, n.kind, n.of_kind, &kind); !why.empty()) return why;
    op.mode = kind->value<int>(d.type == kReductionOp ? kReductionOperator : kPointwiseMode);
    op.axis = kind->value<int64_t>(kPointwiseAxis, -1);
    op.begin = kind->list<int64_t>(kConvolutionBegin),
    op.end = kind->list<int64_t>(kConvolutionEnd);
    op.stride = kind->list<int64_t>(kConvolutionStrides);
    op.dilation = kind->list<int64_t>(kConvolutionDilations);
  }
  if (op.is_conv()) {
    const int alpha = d.type == kConvForwardOp ? kConvForwardAlpha
                      : d.type == kConvDataOp  ? kConvDataAlpha
                                               : kConvFilterAlpha;
    if (d.value<float>(alpha) != 1 || d.value<float>(alpha + 1) != 0)
      return "alpha and beta other than 1 and 0 are not emulated";
  }
  return wrong(op);
}

Why finish_graph(DescriptorObject& d) {
  auto graph = std::make_shared<GraphInfo>();
  for (const Descriptor at : d.list<Descriptor>(kGraphOps)) {
    const auto* op = static_cast<const DescriptorObject*>(at);
    if (!is_descriptor(op) || !op->finished || !op->operation.kind)
      return "an operation is none, or not finalized";
    graph->operations.push_back(op->operation);
    if (op->operation.kind != kStatisticsOp) continue;
    Operation& squares = graph->operations.emplace_back(op->operation);
    squares.mode = 1, squares.out = squares.squares;
  }
  const Why why = join(*graph);
  d.graph = graph;
  return why;
}

DeviceProfile profile_of(Handle handle) {
  const VirtualDriver& driver = *virtual_driver();
  const auto number = [&](DeviceAttribute a) {
    int n = 0;
    driver.device_attribute(&n, a, handle->device);
    return int64_t{n};
  };
  int version = 0;
  driver.driver_version(&version);
  return {100 * number(DeviceAttribute::kCapabilityMajor) +
              10 * number(DeviceAttribute::kCapabilityMinor),
          number(DeviceAttribute::kMultiprocessors), version};
}

// Only graphs of one card or of a described device are compiled.
Why check_device(const DescriptorObject& d, int handle, int properties, DescriptorObject* plan) {
  const Handle h = d.value<Handle>(handle);
  if (h && !is_handle(h)) return "no handle, or one that was destroyed";
  const DescriptorObject* p = nullptr;
  if (!h && take(d, properties, kDeviceProperties, &p) != "")
    return "neither a handle nor a device";
  if (plan) plan->device = h ? h->device : -1, plan->profile = h ? profile_of(h) : p->profile;
  return "";
}

void put(DescriptorObject& to, int attribute, int type, int64_t count, const void* values) {
  AttributeValue& v = to.attributes[attribute];
  v.type = type, v.count = count;
  const char* first = static_cast<const char*>(values);
  v.bytes.assign(first, first + static_cast<size_t>(count) * element_bytes(type));
}

// A plan that was made says of its own how it is made again.
void describe(DescriptorObject& plan) {
  const auto workspace = static_cast<int64_t>(engine_kind(plan.engine.index)->workspace);
  put(plan, kPlanWorkspace, kTypeInt64, 1, &workspace);
  if (plan.has(kPlanText)) return;
  const std::string text = write_plan({*plan.graph, plan.engine, plan.profile});
  put(plan, kPlanText, kTypeChar, static_cast<int64_t>(text.size()), text.data());
}

bool traces_plans() { return std::getenv("VGPU_TRACE_PLANS"); }

Status finish_plan_of_text(DescriptorObject& d) {
  const auto text = d.list<char>(kPlanText);
  PlanInfo plan;
  Why why;
  const Status s = read_plan({text.data(), text.size()}, d.profile, plan, why);
  if (s == Status::kNotSupported || s == Status::kOtherDevice) return unsupported(why, s);
  if (s != Status::kSuccess) return refuse(s, "cudnnBackendFinalize", why);
  if (traces_plans())
    std::fprintf(stderr, "vgpu: plan by its text, engine %d\n",
                 static_cast<int>(plan.engine.index));
  d.graph = std::make_shared<GraphInfo>(std::move(plan.graph)), d.engine = plan.engine;
  describe(d);
  return Status::kSuccess;
}

Status finish_plan(DescriptorObject& d) {
  const DescriptorObject* config = nullptr;
  constexpr const char* kCall = "cudnnBackendFinalize";
  if (!d.has(kPlanText)) {
    if (const Why why = take(d, kPlanConfig, kEngineConfig, &config); !why.empty())
      return refuse(Status::kNotFinalized, kCall, why);
  } else if (d.has(kPlanConfig)) {
    return refuse(Status::kBadParam, kCall, "a plan has a configuration or a text, not both");
  }
  if (const Why why = check_device(d, kPlanHandle, kPlanDevice, &d); !why.empty())
    return refuse(Status::kBadParam, kCall, why);
  if (!config) return finish_plan_of_text(d);
  const EngineKind* kind = engine_kind(config->engine.index);
  if (traces_plans())
    std::fprintf(stderr, "vgpu: plan by engine %d\n", static_cast<int>(kind->index));
  if (!kind->compiles)
    return unsupported("engine " + number(kind->index) + " does not compile anything");
  if (const Why why = unsupported_by_all(*config->graph); !why.empty()) return unsupported(why);
  d.graph = config->graph, d.engine = config->engine;
  describe(d);
  return Status::kSuccess;
}

Why finish_engine(DescriptorObject& d) {
  const DescriptorObject* graph = nullptr;
  if (const Why why = take(d, kEngineGraph, kOperationGraph, &graph); !why.empty()) return why;
  d.graph = graph->graph, d.engine.index = d.value<int64_t>(kEngineIndex);
  return engine_kind(d.engine.index) ? "" : "no engine " + number(d.engine.index);
}
Why finish_config(DescriptorObject& d) {
  const DescriptorObject* engine = nullptr;
  if (const Why why = take(d, kConfigEngine, kEngine, &engine); !why.empty()) return why;
  d.graph = engine->graph, d.engine = engine->engine;
  for (const Descriptor at : d.list<Descriptor>(kConfigKnobs)) {
    const auto* knob = static_cast<const DescriptorObject*>(at);
    if (!is_descriptor(knob) || knob->type != kKnobChoice || !knob->finished) return "no knob";
    if (knob->value<int>(kKnobType) != 2)
      return "no engine has knob " + number(knob->value<int>(kKnobType));
    d.engine.knob = knob->value<int64_t>(kKnobValue);
  }
  return "";
}
Why finish_pack(const DescriptorObject& d) {
  auto uids = d.list<int64_t>(kPackUids);
  if (uids.size() != d.list<void*>(kPackPointers).size()) return "not as many pointers as numbers";
  std::sort(uids.begin(), uids.end());
  const bool twice = std::adjacent_find(uids.begin(), uids.end()) != uids.end();
  return twice ? "a number twice" : "";
}

}  // namespace

Status finish(DescriptorObject& d) {
  constexpr const char* kCall = "cudnnBackendFinalize";
  if (d.finished) return refuse(Status::kBadParam, kCall, "it is finalized");
  for (const Row& r : kRows)
    if (r.descriptor == d.type && r.required && !d.has(r.attribute))
      return refuse(d.type == kPlan     ? Status::kNotFinalized
                    : d.type == kEngine ? Status::kNullPointer
                                        : Status::kBadParam,
                    kCall,
                    "attribute " + number(r.attribute) + " is not set, which descriptors of type " +
                        number(d.type) + " need");
  Why why;
  switch (d.type) {
    case kTensor: why = finish_tensor(d); break;
    case kConvolution: why = finish_window(d); break;
    case kPointwise:
    case kMatmul:
    case kReduction:
    case kKnobChoice: break;
    case kOperationGraph: why = finish_graph(d); break;
    case kHeuristics: {
      const DescriptorObject* graph = nullptr;
      why = take(d, kHeuristicsGraph, kOperationGraph, &graph);
      if (why.empty() && !graph->has(kGraphHandle))
        why = check_device(d, kGraphHandle, kHeuristicsDevice, nullptr);
      if (why.empty()) d.graph = graph->graph;
      break;
    }
    case kEngine: why = finish_engine(d); break;
    case kEngineConfig: why = finish_config(d); break;
    case kPlan:
      if (const Status s = finish_plan(d); s != Status::kSuccess) return s;
      break;
    case kVariantPack: why = finish_pack(d); break;
    case kDeviceProperties: {
      const auto text = d.list<char>(kDeviceJson);
      if (!read_profile({text.data(), text.size()}, d.profile)) why = "no description of a device";
      break;
    }
    default: why = finish_operation(d);
  }
  if (!why.empty()) return refuse(Status::kBadParam, kCall, why);
  d.finished = true;
  return Status::kSuccess;
}

Status suggest(const DescriptorObject& h, int64_t most, int64_t* count, void* places) {
  std::vector<EngineKind> all = engines(h.value<int>(kHeuristicsMode) == kHeuristicFallback);
  std::erase_if(all, [&](const EngineKind& e) { return e.only_f32 && !is_f32(*h.graph); });
  *count = static_cast<int64_t>(all.size());
  if (!places || most == 0) return Status::kSuccess;
  *count = std::min(*count, most);
  for (int64_t i = 0; i < *count; ++i) {
    auto* to = static_cast<DescriptorObject**>(places)[i];
    if (!is_descriptor(to) || to->type != kEngineConfig || to->finished)
      return refuse(Status::kBadParam, "cudnnBackendGetAttribute", "no place for a configuration");
    to->graph = h.graph, to->engine = {all[static_cast<size_t>(i)].index, 1}, to->finished = true;
  }
  return Status::kSuccess;
}

}  // namespace vgpu::dnn

namespace tessera::cuda {

using namespace vgpu::dnn;

extern "C" {

Status cudnnBackendSetAttribute(Descriptor descriptor, int attribute, int type, int64_t count,
                                const void* values) {
  auto* d = static_cast<DescriptorObject*>(descriptor);
  if (!is_descriptor(d)) return refuse(Status::kBadParam, __func__, "no descriptor");
  const Row* row = row_of(d->type, attribute);
  if (!row)
    return refuse(Status::kBadParam, __func__,
                  "attribute " + number(attribute) + " of descriptors of type " + number(d->type) +
                      " is not emulated");
  if (d->finished) return refuse(Status::kBadParam, __func__, "the descriptor is finalized");
  if (type != row->type)
    return refuse(Status::kAttributeType, __func__,
                  "attribute " + number(attribute) + " is of type " + number(row->type) + ", not " +
                      number(type));
  if (count < 1 || count > row->most || !values)
    return refuse(Status::kBadParam, __func__,
                  "attribute " + number(attribute) + " takes up to " + number(row->most) +
                      " values, not " + number(count) + ", which are somewhere");
  AttributeValue& v = d->attributes[attribute];
  v.type = type, v.count = count;
  const char* first = static_cast<const char*>(values);
  v.bytes.assign(first, first + static_cast<size_t>(count) * element_bytes(type));
  return Status::kSuccess;
}

Status cudnnBackendGetAttribute(Descriptor descriptor, int attribute, int type, int64_t most,
                                int64_t* count, void* values) {
  auto* d = static_cast<DescriptorObject*>(descriptor);
  if (!is_descriptor(d) || !count)
    return refuse(Status::kBadParam, __func__, "no descriptor, or no place for the count");
  if (!d->finished) return refuse(Status::kNotInitialized, __func__, "it is not finalized");
  const Row* row = row_of(d->type, attribute);
  if (!row)
    return refuse(Status::kBadParam, __func__,
                  "attribute " + number(attribute) + " is not emulated");
  if (type != row->type)
    return refuse(Status::kAttributeType, __func__,
                  "attribute " + number(attribute) + " is of type " + number(row->type));
  const auto object = [&](int of_type) {
    auto* to = values && most ? *static_cast<DescriptorObject**>(values) : nullptr;
    return is_descriptor(to) && to->type == of_type && !to->finished ? to : nullptr;
  };
  if (attribute == kHeuristicsResults) return suggest(*d, most, count, values);
  if (attribute == kPlanConfig) {
    DescriptorObject* to = object(kEngineConfig);
    if (!to) return refuse(Status::kBadParam, __func__, "no place for a configuration");
    to->graph = d->graph, to->engine = d->engine, to->finished = true, *count = 1;
    return Status::kSuccess;
  }
  if (attribute == kConfigEngine) {
    DescriptorObject* to = object(kEngine);
    if (!to) return refuse(Status::kBadParam, __func__, "no place for an engine");
    to->graph = d->graph, to->engine = d->engine, to->finished = true, *count = 1;
    put(*to, kEngineIndex, kTypeInt64, 1, &d->engine.index);
    return Status::kSuccess;
  }
  if (attribute == kConfigKnobs) {
    *count = 0;
    DescriptorObject* to = object(kKnobChoice);
    if (!to) return refuse(Status::kBadParam, __func__, "no place for a knob");
    const int knob = 2;
    put(*to, kKnobType, kTypeKnob, 1, &knob);
    put(*to, kKnobValue, kTypeInt64, 1, &d->engine.knob);
    to->finished = true, *count = 1;
    return Status::kSuccess;
  }
  if (attribute == kEngineNotes) {
    const int note = engine_kind(d->engine.index)->note;
    *count = note >= 0;
    if (note >= 0 && values && most) *static_cast<int*>(values) = note;
    return Status::kSuccess;
  }
  if (attribute == kEngineBehavior) {
    *count = compiles_code(*d->graph);
    if (*count && values && most) *static_cast<int*>(values) = kNoteRuntimeCompilation;
    return Status::kSuccess;
  }
  const auto it = d->attributes.find(attribute);
  if (attribute == kPlanText && values && most < it->second.count)
    return refuse(Status::kSizeInsufficient, __func__,
                  "the text has " + number(it->second.count) + " bytes, not " + number(most));
  *count = it == d->attributes.end() ? 0 : it->second.count;
  if (values && most) {
    *count = std::min(*count, most);
    if (*count)
      std::memcpy(values, it->second.bytes.data(),
                  static_cast<size_t>(*count) * element_bytes(type));
  }
  return Status::kSuccess;
}
}

}  // namespace tessera::cuda
