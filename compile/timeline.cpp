#include "compile/timeline.h"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>

#include "collectives/process_group.h"
#include "compile/codegen/fused.h"

namespace tessera::compiler {
namespace {

// The name of a collective's group.
class GroupName final : public AttributeVisitor {
 public:
  void integer(std::string_view, int64_t) override {}
  void real(std::string_view, double) override {}
  void text(std::string_view name, std::string_view v) override {
    if (name == "group") value = v;
  }
  void dims(std::string_view, std::span<const int64_t>) override {}
  std::string value = "communication";
};

std::string group_of(const Primitive& prim) {
  GroupName visitor;
  prim.attributes(visitor);
  return visitor.value;
}

std::string megabytes(size_t bytes) { return fmt::format("{:.2f} MB", double(bytes) / 1e6); }

}  // namespace

TimelineRecorder::TimelineRecorder(std::vector<CallRecord>& calls) : calls_(calls) {
  calls_.clear();
}

void TimelineRecorder::end(const Primitive* prim, int32_t node) {
  const Fused* fused = as_fused(*prim);
  calls_.push_back({.name = fused ? fused->name : std::string(prim->name()),
                    .node = node,
                    .begin_us = waited_,
                    .end_us = now(),
                    .waited_us = waited_ - begin_});
  last_ = prim;
}

void TimelineRecorder::submitted(const Ref<Event>& work) {
  collectives_.push_back({calls_.size() - 1, group_of(*last_), work});
}

void TimelineRecorder::finish() {
  if (collectives_.empty()) return;
  begin();
  for (const Submitted& s : collectives_)
    if (s.work) s.work->wait();
  waited();
  calls_.push_back({.name = "end",
                    .node = -1,
                    .begin_us = waited_,
                    .end_us = waited_,
                    .waited_us = waited_ - begin_});
  std::map<std::string, double> free_at;  // when a group was done with the last one
  for (const Submitted& s : collectives_) {
    const CallRecord submission = calls_[s.call];
    auto* work = dynamic_cast<const Work*>(s.work.get());
    double begin = std::max(submission.begin_us, free_at[s.group]);
    double took = work ? work->elapsed_ms() * 1e3 : submission.end_us - submission.begin_us;
    free_at[s.group] = begin + took;
    calls_.push_back({.name = submission.name,
                      .node = submission.node,
                      .begin_us = begin,
                      .end_us = begin + took,
                      .lane = s.group});
  }
}

double Overlap::hidden() const {
  return collective_us > 0 ? std::max(0.0, 1 - exposed_us / collective_us) : 1;
}

Overlap overlap_of(const std::vector<CallRecord>& calls) {
  Overlap o;
  for (const CallRecord& c : calls) {
    o.run_us = std::max(o.run_us, c.end_us);
    if (c.lane.empty())
      o.exposed_us += c.waited_us;
    else
      o.collective_us += c.end_us - c.begin_us;
  }
  return o;
}

std::string chrome_trace(const Graph& graph, const std::vector<CallRecord>& calls, int rank) {
  using nlohmann::json;
  std::map<std::string, int> lanes{{"", 0}};
  json events = json::array();
  auto add = [&](const std::string& name, const char* category, int lane, double begin, double took,
                 json args) {
    events.push_back({{"name", name},
                      {"cat", category},
                      {"ph", "X"},
                      {"pid", rank},
                      {"tid", lane},
                      {"ts", begin},
                      {"dur", took},
                      {"args", std::move(args)}});
  };
  for (const CallRecord& c : calls) {
    int lane = lanes.try_emplace(c.lane, int(lanes.size())).first->second;
    json args = json::object();
    if (c.node >= 0) args["node"] = to_string(graph, graph.nodes[size_t(c.node)]);
    if (c.waited_us > 1) add("wait", "wait", lane, c.begin_us - c.waited_us, c.waited_us, args);
    if (c.node >= 0)
      add(c.name, c.lane.empty() ? "kernel" : "collective", lane, c.begin_us, c.end_us - c.begin_us,
          args);
  }
  for (const auto& [name, lane] : lanes)
    events.push_back({{"name", "thread_name"},
                      {"ph", "M"},
                      {"pid", rank},
                      {"tid", lane},
                      {"args", {{"name", name.empty() ? "kernels" : name}}}});
  return json{{"traceEvents", events}, {"displayTimeUnit", "ms"}}.dump();
}

std::string report(const Executor& executor, const std::vector<CallRecord>& calls) {
  const Traffic& t = executor.traffic();
  const MemoryPlan& m = executor.memory();
  std::string text = fmt::format(
      "kernels        {}, {} read and written\n"
      "collectives    {}, {}\n"
      "peak memory    {} (arena {}, outputs {}) beside {} of state; {} without sharing\n",
      t.kernels, megabytes(t.kernel_bytes), t.collectives, megabytes(t.collective_bytes),
      megabytes(m.arena_bytes + m.output_bytes), megabytes(m.arena_bytes),
      megabytes(m.output_bytes), megabytes(m.implicit_bytes), megabytes(m.unplanned_bytes));
  if (m.eager_nodes)
    text += fmt::format("eager          {} ops without a kernel run their decomposition\n",
                        m.eager_nodes);
  if (calls.empty()) return text;
  Overlap o = overlap_of(calls);
  return text +
         fmt::format("time           {:.3f} ms, communication {:.3f} ms of which {:.0f} % hidden\n",
                     o.run_us / 1e3, o.collective_us / 1e3, 100 * o.hidden());
}

}  // namespace tessera::compiler
