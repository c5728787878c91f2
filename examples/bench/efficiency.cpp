#include "examples/bench/efficiency.h"

#include <fmt/format.h>

#include "core/base/error.h"

namespace tessera::bench {
namespace {

using Json = nlohmann::ordered_json;

constexpr double kTarget = 0.98;  // of communication efficiency

// A ratio and its column; the list is in the order of the table.
struct Column {
  const char* key;
  const char* title;
  Interval Efficiency::*ratio;
  const char *above, *below;  // names of lists in the job's JSON
};
constexpr Column kColumns[] = {
    {"scaling", "scaling", &Efficiency::scaling, "solo_ms", "ddp_ms"},
    {"bound", "its bound", &Efficiency::bound, "solo_ms", "unconnected_ms"},
    {"communication", "communication", &Efficiency::communication, "unconnected_ms", "ddp_ms"},
    {"lockstep", "in lockstep", &Efficiency::lockstep, "unconnected_ms", "lockstep_ms"},
    {"processor", "processor time", &Efficiency::processor, "unconnected_processor_ms",
     "ddp_processor_ms"},
    {"fsdp", "fsdp to ddp", &Efficiency::sharded, "ddp_ms", "fsdp_ms"},
};

std::vector<double> rounds_of(const Json& job, const char* key) {
  TESSERA_CHECK(
      job.contains(key) && job[key].is_array() && job[key].size() == job.at("solo_ms").size(),
      "bench scaling: {}: expected a number for each of {} rounds", key, job.at("solo_ms").size());
  return job[key].get<std::vector<double>>();
}

std::vector<double> ratios(const std::vector<double>& above, const std::vector<double>& below,
                           double parts) {
  std::vector<double> r;
  for (size_t i = 0; i < above.size(); ++i) r.push_back(above[i] / parts / below[i]);
  return r;
}

/// A key or title of a column; that of scaling says which.
std::string named(const char* name, char separator, bool strong) {
  return std::string_view(name) == "scaling"
             ? fmt::format("{}{}scaling", strong ? "strong" : "weak", separator)
             : name;
}

}  // namespace

Efficiency efficiency_of(const std::string& name, const Json& job) {
  Efficiency e;
  e.name = name;
  e.strong = job.at("scaling") == "strong";
  for (const Column& c : kColumns) {
    const bool shared = e.strong && std::string_view(c.above) == "solo_ms";
    e.*c.ratio = median_interval(ratios(rounds_of(job, c.above), rounds_of(job, c.below),
                                        shared ? job.at("ranks").get<double>() : 1));
  }
  return e;
}

Json to_json(const Efficiency& e) {
  Json json;
  for (const Column& c : kColumns) {
    const Interval& i = e.*c.ratio;
    json[named(c.key, '_', e.strong)] = {{"median", i.median}, {"low", i.low}, {"high", i.high}};
  }
  return json;
}

std::string efficiency_head(bool strong) {
  std::string text = fmt::format("{:<22} {:>5} {:>9} {:>11} {:>9}", "", "batch", "solo ms",
                                 "unconnected", "ddp ms");
  for (const Column& c : kColumns) text += fmt::format("  {:<20}", named(c.title, ' ', strong));
  return text + fmt::format("  {:>6} {:>6}", "cores", "load");
}

std::string line_of(const Efficiency& e, const Json& job) {
  auto median = [&](const char* key) { return stats_of(rounds_of(job, key)).median; };
  std::string text = fmt::format("{:<22} {:>5} {:>9.2f} {:>11.2f} {:>9.2f}", e.name,
                                 job["batch_size"].get<int64_t>(), median("solo_ms"),
                                 median("unconnected_ms"), median("ddp_ms"));
  for (const Column& c : kColumns) {
    const Interval& i = e.*c.ratio;
    text += fmt::format("  {:.3f} [{:.3f}, {:.3f}]", i.median, i.low, i.high);
  }
  std::string cores;
  for (const Json& c : job["cores"])
    cores += fmt::format("{}{}", cores.empty() ? "" : ",", c.get<int64_t>());
  return text + fmt::format("  {:>6}", cores);
}

std::string efficiency_legend(bool strong) {
  const std::string scaling = strong ? "strong scaling: solo / ranks / ddp, since the ranks share "
                                       "its batch; its bound: solo / "
                                       "ranks / unconnected"
                                     : "weak scaling: solo / ddp; its bound: solo / unconnected";
  return scaling +
         "; communication: unconnected / "
         "ddp; in lockstep: unconnected / the same with a barrier after each step, so that ranks "
         "wait for the slowest and use memory at the same moments; processor time: unconnected / "
         "ddp; fsdp to ddp: ddp / fsdp; medians over rounds with their 95 % intervals";
}

BarChart chart_of(const std::vector<Efficiency>& rows, const std::string& note) {
  BarChart chart{.title = "Training on several ranks: efficiency",
                 .note = note,
                 .series = {named("scaling", ' ', !rows.empty() && rows[0].strong),
                            "its bound (unconnected)", "communication"},
                 .groups = {},
                 .target = kTarget};
  for (const Efficiency& e : rows) {
    BarChart::Group group{e.name, {}};
    for (const Interval& i : {e.scaling, e.bound, e.communication})
      group.bars.push_back({i.median, i.low, i.high});
    chart.groups.push_back(std::move(group));
  }
  return chart;
}

}  // namespace tessera::bench
