#include "core/backend/cuda/cudnn/graph.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>

namespace tessera::cuda::dnn {
namespace {

constexpr int64_t kMostKnobs = 64;  // of an engine; the library has less than 50 kinds

std::string last_error(const CudnnFunctions& f, Status status) {
  char message[512] = {};
  f.last_error(message, sizeof(message));
  std::string text = message;
  while (!text.empty() && (text.back() == '\n' || text.back() == ' ')) text.pop_back();
  return text.empty() ? name_of(status) : fmt::format("{}: {}", name_of(status), text);
}

}  // namespace

Extents dense_strides(const Extents& extents) {
  Extents strides(extents.size(), 1);
  for (size_t i = extents.size(); i-- > 1;) strides[i - 1] = strides[i] * extents[i];
  return strides;
}

Extents last_strides(const Extents& extents) {
  Extents strides(extents.size(), 1);
  int64_t next = extents[1];
  for (size_t i = extents.size(); i-- > 2;) strides[i] = next, next *= extents[i];
  strides[0] = next;
  return strides;
}

Object::Object(const CudnnFunctions& f, int type) : f_(f) {
  if (f_.make_descriptor.result(type, &at_) != Status::kSuccess) at_ = nullptr;
}
Object::~Object() {
  if (at_) f_.destroy_descriptor.result(at_);
}

std::optional<Object> described_device(const CudnnFunctions& f, std::string_view json,
                                       std::string& why) {
  Object device(f, kDeviceProperties);
  Status s = f.set_attribute.result(device.at(), kDeviceJson, kTypeChar, int64_t(json.size()),
                                    json.data());
  if (s == Status::kSuccess) s = f.finalize.result(device.at());
  if (s == Status::kSuccess) return device;
  why = last_error(f, s);
  return {};
}

std::string text_of(const Engine& engine) {
  std::string text = fmt::format("engine {}", engine.index);
  for (const auto& [type, value] : engine.knobs) text += fmt::format(" {}={}", type, value);
  return text;
}

std::optional<Engine> engine_of(std::string_view text) {
  constexpr std::string_view kBegin = "engine ";
  if (!text.starts_with(kBegin)) return {};
  const char *at = text.data() + kBegin.size(), *end = text.data() + text.size();
  const auto number = [&](int64_t& n, char before) {
    if (before && (at == end || *at++ != before)) return false;
    const auto [next, error] = std::from_chars(at, end, n);
    at = next;
    return error == std::errc();
  };
  Engine engine;
  if (!number(engine.index, '\0')) return {};
  while (at != end) {
    std::pair<int64_t, int64_t> knob;
    if (!number(knob.first, ' ') || !number(knob.second, '=')) return {};
    engine.knobs.push_back(knob);
  }
  return engine;
}

Status ExecutionPlan::execute(Handle handle, std::span<const Binding> bindings, void* workspace,
                              std::string& why) const {
  std::vector<int64_t> values;
  std::vector<const void*> addresses;
  for (const Binding& b : bindings) values.push_back(b.value), addresses.push_back(b.at);
  for (const auto& [value, number] : scalars_)
    values.push_back(value), addresses.push_back(&number);
  const Object pack(f_, kVariantPack);
  const auto count = int64_t(values.size());
  Status s = f_.set_attribute.result(pack.at(), kPackUids, kTypeInt64, count, values.data());
  if (s == Status::kSuccess)
    s = f_.set_attribute.result(pack.at(), kPackPointers, kTypePointer, count, addresses.data());
  if (s == Status::kSuccess)
    s = f_.set_attribute.result(pack.at(), kPackWorkspace, kTypePointer, 1, &workspace);
  if (s == Status::kSuccess) s = f_.finalize.result(pack.at());
  if (s == Status::kSuccess) s = f_.execute.result(handle, plan_.at(), pack.at());
  if (s != Status::kSuccess) why = last_error(f_, s);
  return s;
}

std::string ExecutionPlan::text() const {
  if (!compiled_) return {};
  int64_t bytes = 0;
  const auto get = [&](char* to) {
    return f_.get_attribute.result(plan_.at(), kPlanText, kTypeChar, bytes, &bytes, to) ==
           Status::kSuccess;
  };
  if (!get(nullptr) || bytes <= 0) return {};
  std::string text(static_cast<size_t>(bytes), '\0');
  return get(text.data()) ? text : std::string();
}

// ---- building

Descriptor Graph::make(int type) {
  objects_->emplace_back(f_, type);
  if (!objects_->back().at() && why_.empty())
    why_ = fmt::format("{} makes no descriptor of type {}", f_.make_descriptor.symbol(), type);
  return objects_->back().at();
}

bool Graph::check(Status status, const char* what) {
  if (status != Status::kSuccess && why_.empty())
    why_ = fmt::format("{}: {}", what, last_error(f_, status));
  return why_.empty();
}

void Graph::set(Descriptor d, int attribute, int type, int64_t count, const void* values,
                const char* what) {
  if (why_.empty()) check(f_.set_attribute.result(d, attribute, type, count, values), what);
}
void Graph::set(Descriptor d, int attribute, int64_t value, const char* what) {
  set(d, attribute, kTypeInt64, 1, &value, what);
}
void Graph::set(Descriptor d, int attribute, Descriptor value, const char* what) {
  set(d, attribute, kTypeDescriptor, 1, &value, what);
}
void Graph::set_value(Descriptor d, int attribute, Value value, const char* what) {
  set(d, attribute, tensors_[size_t(value - 1)], what);
}
void Graph::set_type(Descriptor d, int attribute, const char* what) {
  const int type = kFloat;
  set(d, attribute, kTypeDataType, 1, &type, what);
}
void Graph::finish(Descriptor d, const char* what) {
  if (why_.empty()) check(f_.finalize.result(d), what);
}
void Graph::finish_op(Descriptor d, const char* what) {
  finish(d, what);
  ops_.push_back(d);
}

Graph::Value Graph::add_tensor(const Extents& extents, const Extents& strides, int type,
                               int64_t alignment, bool inner, bool by_value) {
  constexpr const char* kWhat = "tensor";
  const Descriptor d = make(kTensor);
  tensors_.push_back(d);
  const auto value = Value(tensors_.size());
  set(d, kTensorType, kTypeDataType, 1, &type, kWhat);
  set(d, kTensorDims, kTypeInt64, int64_t(extents.size()), extents.data(), kWhat);
  set(d, kTensorStrides, kTypeInt64, int64_t(strides.size()), strides.data(), kWhat);
  set(d, kTensorUid, value, kWhat);
  set(d, kTensorAlignment, alignment, kWhat);
  const bool yes = true;
  if (inner) set(d, kTensorIsVirtual, kTypeBoolean, 1, &yes, kWhat);
  if (by_value) set(d, kTensorByValue, kTypeBoolean, 1, &yes, kWhat);
  finish(d, kWhat);
  text_ += fmt::format("{}{}: type {} [{}] by [{}] aligned {}\n", inner ? "inner " : "", value,
                       type, fmt::join(extents, " "), fmt::join(strides, " "), alignment);
  return value;
}

Graph::Value Graph::tensor(const Extents& extents, const Extents& strides, int type,
                           int64_t alignment) {
  return add_tensor(extents, strides, type, alignment, false, false);
}
Graph::Value Graph::inner(const Extents& extents, const Extents& strides, int type) {
  return add_tensor(extents, strides, type, 16, true, false);
}
// Its value is no part of what the graph is: engines do not depend on it.
Graph::Value Graph::scalar(float value, size_t dims) {
  const Extents one(dims, 1);
  const Value v = add_tensor(one, one, kFloat, 16, false, true);
  text_ += "by value\n";
  scalars_.emplace_back(v, value);
  return v;
}

void Graph::pointwise(int mode, Value x, Value b, Value t, Value y, int64_t axis) {
  constexpr const char* kWhat = "pointwise operation";
  const Descriptor kind = make(kPointwise), op = make(kPointwiseOp);
  set(kind, kPointwiseMode, kTypePointwiseMode, 1, &mode, kWhat);
  set_type(kind, kPointwisePrecision, kWhat);
  if (axis >= 0) set(kind, kPointwiseAxis, axis, kWhat);
  finish(kind, kWhat);
  set(op, kPointwiseOpKind, kind, kWhat);
  set_value(op, kPointwiseOpX, x, kWhat);
  if (b != kNone) set_value(op, kPointwiseOpB, b, kWhat);
  if (t != kNone) set_value(op, kPointwiseOpT, t, kWhat);
  set_value(op, kPointwiseOpY, y, kWhat);
  finish_op(op, kWhat);
  text_ += fmt::format("{} = pointwise {} {} {} {} {}\n", y, mode, x, b, t, axis);
}

void Graph::matmul(Value a, Value b, Value c) {
  constexpr const char* kWhat = "matrix product";
  const Descriptor kind = make(kMatmul), op = make(kMatmulOp);
  set_type(kind, kMatmulType, kWhat);
  finish(kind, kWhat);
  set_value(op, kMatmulOpA, a, kWhat);
  set_value(op, kMatmulOpB, b, kWhat);
  set_value(op, kMatmulOpC, c, kWhat);
  set(op, kMatmulOpKind, kind, kWhat);
  finish_op(op, kWhat);
  text_ += fmt::format("{} = product {} {}\n", c, a, b);
}

void Graph::reduce(int reduction, Value x, Value y) {
  constexpr const char* kWhat = "reduction";
  const Descriptor kind = make(kReduction), op = make(kReductionOp);
  set(kind, kReductionOperator, kTypeReduction, 1, &reduction, kWhat);
  set_type(kind, kReductionType, kWhat);
  finish(kind, kWhat);
  set_value(op, kReductionOpX, x, kWhat);
  set_value(op, kReductionOpY, y, kWhat);
  set(op, kReductionOpKind, kind, kWhat);
  finish_op(op, kWhat);
  text_ += fmt::format("{} = reduction {} {}\n", y, reduction, x);
}

void Graph::reshape(Value x, Value y) {
  constexpr const char* kWhat = "reshape";
  const Descriptor op = make(kReshapeOp);
  set_value(op, kReshapeOpX, x, kWhat);
  set_value(op, kReshapeOpY, y, kWhat);
  finish_op(op, kWhat);
  text_ += fmt::format("{} = reshape {}\n", y, x);
}

void Graph::statistics(Value x, Value sum, Value squares) {
  constexpr const char* kWhat = "statistics";
  const Descriptor op = make(kStatisticsOp);
  const int mode = kSumAndSquares;
  set(op, kStatisticsMode, kTypeStatisticsMode, 1, &mode, kWhat);
  set_type(op, kStatisticsPrecision, kWhat);
  set_value(op, kStatisticsX, x, kWhat);
  set_value(op, kStatisticsSum, sum, kWhat);
  set_value(op, kStatisticsSquares, squares, kWhat);
  finish_op(op, kWhat);
  text_ += fmt::format("{} {} = statistics {}\n", sum, squares, x);
}

void Graph::convolution(ConvKind kind, Value x, Value w, Value y, const Window& window) {
  constexpr const char* kWhat = "convolution";
  struct Names {
    int op, window, x, w, y, alpha, beta;
  };
  constexpr Names kNames[] = {{kConvForwardOp, kConvForwardWindow, kConvForwardX, kConvForwardW,
                               kConvForwardY, kConvForwardAlpha, kConvForwardBeta},
                              {kConvDataOp, kConvDataWindow, kConvDataX, kConvDataW, kConvDataY,
                               kConvDataAlpha, kConvDataBeta},
                              {kConvFilterOp, kConvFilterWindow, kConvFilterX, kConvFilterW,
                               kConvFilterY, kConvFilterAlpha, kConvFilterBeta}};
  const Names& n = kNames[size_t(kind)];
  const Descriptor c = make(kConvolution), op = make(n.op);
  const int mode = kCrossCorrelation;
  set_type(c, kConvolutionType, kWhat);
  set(c, kConvolutionMode, kTypeConvolutionMode, 1, &mode, kWhat);
  set(c, kConvolutionDims, int64_t(window.stride.size()), kWhat);
  const std::pair<int, const Extents*> numbers[] = {{kConvolutionBegin, &window.begin},
                                                    {kConvolutionEnd, &window.end},
                                                    {kConvolutionStrides, &window.stride},
                                                    {kConvolutionDilations, &window.dilation}};
  for (const auto& [attribute, list] : numbers)
    set(c, attribute, kTypeInt64, int64_t(list->size()), list->data(), kWhat);
  finish(c, kWhat);
  set(op, n.window, c, kWhat);
  set_value(op, n.x, x, kWhat);
  set_value(op, n.w, w, kWhat);
  set_value(op, n.y, y, kWhat);
  const float one = 1, zero = 0;
  set(op, n.alpha, kTypeFloat, 1, &one, kWhat);
  set(op, n.beta, kTypeFloat, 1, &zero, kWhat);
  finish_op(op, kWhat);
  text_ += fmt::format("convolution {} of {} {} {}: from [{}] to [{}] stride [{}] dilation [{}]\n",
                       int(kind), x, w, y, fmt::join(window.begin, " "), fmt::join(window.end, " "),
                       fmt::join(window.stride, " "), fmt::join(window.dilation, " "));
}

// ---- compiling

std::vector<Descriptor> Graph::suggestions(const Target& target, Descriptor graph, int mode) {
  constexpr const char* kWhat = "suggestions";
  const Descriptor ask = make(kHeuristics);
  set(ask, kHeuristicsGraph, graph, kWhat);
  set(ask, kHeuristicsMode, kTypeHeuristicMode, 1, &mode, kWhat);
  if (!target.handle) set(ask, kHeuristicsDevice, target.properties, kWhat);
  finish(ask, kWhat);
  int64_t count = 0;
  if (!why_.empty() ||
      !check(f_.get_attribute.result(ask, kHeuristicsResults, kTypeDescriptor, 0, &count, nullptr),
             kWhat))
    return {};
  std::vector<Descriptor> all(static_cast<size_t>(count));
  for (Descriptor& d : all) d = make(kEngineConfig);
  if (count && !check(f_.get_attribute.result(ask, kHeuristicsResults, kTypeDescriptor, count,
                                              &count, all.data()),
                      kWhat))
    return {};
  all.resize(static_cast<size_t>(count));
  return all;
}

// Fills `engine`. What a library does not tell is no reason against it.
bool Graph::meets(Descriptor config, const Demands& demands, Engine& engine) {
  Descriptor at = make(kEngine);
  int64_t count = 0;
  const auto get = [&](Descriptor d, int attribute, int type, int64_t most, void* to) {
    return f_.get_attribute.result(d, attribute, type, most, &count, to) == Status::kSuccess;
  };
  if (!get(config, kConfigEngine, kTypeDescriptor, 1, &at)) return false;
  if (!get(at, kEngineIndex, kTypeInt64, 1, &engine.index)) return false;
  int notes[32];
  const bool told = get(at, kEngineNotes, kTypeNumericalNote, std::size(notes), notes);
  for (int64_t i = 0; told && i < count; ++i) {
    const int n = notes[i];
    if (n == kNoteReducedPrecision) return false;  // sums are f32's
    if (demands.deterministic && n == kNoteNondeterministic) return false;
    if (demands.full_precision && (n == kNoteTensorCore || n == kNoteDownConvert)) return false;
  }
  Descriptor knobs[kMostKnobs];
  for (Descriptor& k : knobs) k = make(kKnobChoice);
  if (!get(config, kConfigKnobs, kTypeDescriptor, kMostKnobs, knobs)) return false;
  for (Descriptor k : std::span(knobs, static_cast<size_t>(count))) {
    int type = 0;
    int64_t value = 0;
    if (!get(k, kKnobType, kTypeKnob, 1, &type) || !get(k, kKnobValue, kTypeInt64, 1, &value))
      return false;
    engine.knobs.emplace_back(type, value);
  }
  return true;
}

bool Graph::compiles_code(Descriptor config) {
  Descriptor at = make(kEngine);
  int64_t count = 0;
  int notes[32];
  if (f_.get_attribute.result(config, kConfigEngine, kTypeDescriptor, 1, &count, &at) !=
          Status::kSuccess ||
      f_.get_attribute.result(at, kEngineBehavior, kTypeBehaviorNote, std::size(notes), &count,
                              notes) != Status::kSuccess)
    return false;
  const std::span known(notes, static_cast<size_t>(count));
  return std::find(known.begin(), known.end(), kNoteRuntimeCompilation) != known.end();
}

Descriptor Graph::config_of(const Target& target, Descriptor graph, const Engine& engine) {
  constexpr const char* kWhat = "engine";
  const Descriptor at = make(kEngine), config = make(kEngineConfig);
  set(at, kEngineGraph, graph, kWhat);
  set(at, kEngineIndex, engine.index, kWhat);
  if (!target.handle) set(at, kEngineDevice, target.properties, kWhat);
  finish(at, kWhat);
  std::vector<Descriptor> knobs;
  for (const auto& [type, value] : engine.knobs) {
    const int t = int(type);
    knobs.push_back(make(kKnobChoice));
    set(knobs.back(), kKnobType, kTypeKnob, 1, &t, kWhat);
    set(knobs.back(), kKnobValue, value, kWhat);
    finish(knobs.back(), kWhat);
  }
  set(config, kConfigEngine, at, kWhat);
  if (!knobs.empty())
    set(config, kConfigKnobs, kTypeDescriptor, int64_t(knobs.size()), knobs.data(), kWhat);
  finish(config, kWhat);
  return config;
}

std::unique_ptr<ExecutionPlan> Graph::plan(const Target& target, Descriptor config,
                                           const Engine& engine) {
  constexpr const char* kWhat = "plan";
  std::unique_ptr<ExecutionPlan> made(new ExecutionPlan(f_, objects_));
  const Descriptor d = made->plan_.at();
  if (target.handle)
    set(d, kPlanHandle, kTypeHandle, 1, &target.handle, kWhat);
  else
    set(d, kPlanDevice, target.properties, kWhat);
  set(d, kPlanConfig, config, kWhat);
  finish(d, kWhat);
  int64_t bytes = 0, count = 0;
  if (!why_.empty() ||
      !check(f_.get_attribute.result(d, kPlanWorkspace, kTypeInt64, 1, &count, &bytes), kWhat))
    return nullptr;
  made->scalars_ = scalars_;
  made->engine_ = engine;
  made->workspace_bytes_ = size_t(bytes);
  made->compiled_ = compiles_code(config);
  return made;
}

std::unique_ptr<ExecutionPlan> Graph::reload(const Target& target, const Engine& engine,
                                             std::string_view text, std::string& why) const {
  std::unique_ptr<ExecutionPlan> made(new ExecutionPlan(f_, objects_));
  const Descriptor d = made->plan_.at();
  int64_t bytes = 0, count = 0;
  Status s = f_.set_attribute.result(d, kPlanText, kTypeChar, int64_t(text.size()), text.data());
  if (s == Status::kSuccess)
    s = target.handle
            ? f_.set_attribute.result(d, kPlanHandle, kTypeHandle, 1, &target.handle)
            : f_.set_attribute.result(d, kPlanDevice, kTypeDescriptor, 1, &target.properties);
  if (s == Status::kSuccess) s = f_.finalize.result(d);
  if (s == Status::kSuccess)
    s = f_.get_attribute.result(d, kPlanWorkspace, kTypeInt64, 1, &count, &bytes);
  if (s != Status::kSuccess) {
    why = last_error(f_, s);
    return nullptr;
  }
  made->scalars_ = scalars_;
  made->engine_ = engine;
  made->workspace_bytes_ = size_t(bytes);
  made->compiled_ = true;
  return made;
}

Plans Graph::compile(const Target& target, const Demands& demands, const Engine* kept, size_t most,
                     std::string& why) {
  Plans all;
  const Descriptor graph = make(kOperationGraph);
  if (target.handle) set(graph, kGraphHandle, kTypeHandle, 1, &target.handle, "graph");
  set(graph, kGraphOps, kTypeDescriptor, int64_t(ops_.size()), ops_.data(), "graph");
  finish(graph, "graph");
  if (!why_.empty()) {
    why = why_;
    return all;
  }
  if (kept) {
    if (auto made = plan(target, config_of(target, graph, *kept), *kept)) {
      all.push_back(std::move(made));
      return all;
    }
    why_.clear();
  }
  std::string first;  // why the best suggestion is none
  for (int mode : {kHeuristicA, kHeuristicFallback}) {
    why_.clear();
    for (Descriptor config : suggestions(target, graph, mode)) {
      Engine engine;
      if (!meets(config, demands, engine)) continue;
      if (auto made = plan(target, config, engine)) {
        all.push_back(std::move(made));
        if (all.size() == most) return all;
        continue;
      }
      if (first.empty()) first = why_;
      why_.clear();
    }
    if (!all.empty()) return all;
    if (first.empty()) first = why_;
  }
  why = !first.empty() ? first
                       : fmt::format("cuDNN has no engine for it{}{}",
                                     demands.deterministic ? " that is deterministic" : "",
                                     demands.full_precision ? " without TF32" : "");
  return all;
}

}  // namespace tessera::cuda::dnn
