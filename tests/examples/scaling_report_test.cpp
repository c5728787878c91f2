// The table, JSON and SVG of bench scaling, from rounds with known ratios.
#include <gtest/gtest.h>

#include <regex>

#include "core/base/error.h"
#include "examples/bench/efficiency.h"

namespace tessera::bench {
namespace {

using Json = nlohmann::ordered_json;

// Seven rounds of a machine that gets slower, and once is much slower in one phase: ratios within a
// round are 0.9, 0.95, .. except for that one.
Json seven_rounds() {
  Json job{{"scaling", "weak"}, {"ranks", 2}, {"batch_size", 4}, {"steps", 3}, {"cores", {2, 3}}};
  for (int r = 0; r < 7; ++r) {
    double pace = 1 + 0.1 * r;
    job["solo_ms"].push_back(9 * pace);
    job["unconnected_ms"].push_back(9.5 * pace);
    job["lockstep_ms"].push_back(9.5 / 0.97 * pace);
    job["ddp_ms"].push_back(r == 3 ? 100 : 10 * pace);
    job["fsdp_ms"].push_back(12.5 * pace);
    job["unconnected_processor_ms"].push_back(9 * pace);
    job["ddp_processor_ms"].push_back(9.25 * pace);
  }
  return job;
}

int count(const std::string& text, const std::string& pattern) {
  std::regex expression(pattern);
  return int(std::distance(std::sregex_iterator(text.begin(), text.end(), expression),
                           std::sregex_iterator()));
}

TEST(ScalingReport, RatiosAreTakenWithinARound) {
  Efficiency e = efficiency_of("toy fp32 x2", seven_rounds());
  EXPECT_DOUBLE_EQ(e.scaling.median, 0.9);
  EXPECT_DOUBLE_EQ(e.scaling.low, 0.117);  // the slow round is in the interval, not in the median
  EXPECT_DOUBLE_EQ(e.scaling.high, 0.9);
  EXPECT_DOUBLE_EQ(e.bound.median, 9 / 9.5);
  EXPECT_DOUBLE_EQ(e.communication.median, 0.95);
  EXPECT_DOUBLE_EQ(e.lockstep.median, 0.97);
  EXPECT_DOUBLE_EQ(e.processor.median, 9 / 9.25);
  EXPECT_DOUBLE_EQ(e.sharded.median, 0.8);
  EXPECT_DOUBLE_EQ(e.sharded.low, 0.8);
}

TEST(ScalingReport, JsonHasWhatTheRowHas) {
  Json json = Json::parse(to_json(efficiency_of("toy", seven_rounds())).dump());
  for (const char* key : {"weak_scaling", "bound", "communication", "lockstep", "processor"})
    for (const char* part : {"median", "low", "high"})
      EXPECT_TRUE(json.at(key).at(part).is_number()) << key << " " << part;
  EXPECT_DOUBLE_EQ(json["communication"]["median"], 0.95);
}

TEST(ScalingReport, RanksThatShareTheBatchOfOneAreMeasuredByItsPart) {
  Json job = seven_rounds();
  job["scaling"] = "strong";
  for (Json& ms : job["solo_ms"]) ms = ms.get<double>() * 2;
  Efficiency e = efficiency_of("toy", job), weak = efficiency_of("toy", seven_rounds());
  EXPECT_DOUBLE_EQ(e.scaling.median, weak.scaling.median);
  EXPECT_DOUBLE_EQ(e.bound.median, weak.bound.median);
  EXPECT_DOUBLE_EQ(e.communication.median, weak.communication.median);
  Json json = to_json(e);
  EXPECT_EQ(json.at("strong_scaling").at("median"), e.scaling.median);
  EXPECT_FALSE(json.contains("weak_scaling"));
  EXPECT_NE(efficiency_head(true).find("strong scaling"), std::string::npos);
  EXPECT_NE(efficiency_legend(true).find("solo / ranks / ddp"), std::string::npos);
  EXPECT_NE(to_svg(chart_of({e}, "")).find(">strong scaling<"), std::string::npos);
}

TEST(ScalingReport, EveryColumnOfTheLineStandsUnderItsHead) {
  Json job = seven_rounds();
  std::string head = efficiency_head(false), line = line_of(efficiency_of("toy fp32 x2", job), job);
  auto under = [&](const char* title, const std::string& value) {
    EXPECT_EQ(line.substr(head.find(title), value.size()), value) << head << "\n" << line;
  };
  under("weak scaling", "0.900 [0.117, 0.900]");
  under("its bound", "0.947 [0.947, 0.947]");
  under("communication", "0.950 [0.123, 0.950]");
  under("in lockstep", "0.970 [0.970, 0.970]");
  under("processor time", "0.973 [0.973, 0.973]");
  under("fsdp to ddp", "0.800 [0.800, 6.154]");
  EXPECT_EQ(line.substr(head.find("cores") - 1), "   2,3");
  EXPECT_NE(line.find("    4     11.70"), std::string::npos) << line;  // batch, median of solo
}

TEST(ScalingReport, TheDrawingHasABarForEachRatio) {
  Efficiency one = efficiency_of("a <b> & c", seven_rounds()), two = one;
  two.name = "second";
  std::string svg = to_svg(chart_of({one, two}, "a note"));
  EXPECT_TRUE(svg.starts_with("<svg xmlns=") && svg.ends_with("</svg>\n"));
  // Every element is closed: in itself, or by its own end.
  EXPECT_EQ(count(svg, "<(line|rect)[^>]*/>"), count(svg, "<(line|rect)"));
  EXPECT_EQ(count(svg, "<text [^>]*>[^<>]*</text>"), count(svg, "<text"));
  EXPECT_EQ(count(svg, "<rect x="), 2 * 3 + 3);  // bars, and the legend
  EXPECT_EQ(count(svg, ">0\\.90<"), 2);          // weak scaling of both rows
  EXPECT_EQ(count(svg, ">0\\.95<"), 4);          // bound and communication
  EXPECT_EQ(count(svg, "stroke-dasharray"), 1);  // the target
  EXPECT_NE(svg.find(">a &lt;b&gt; &amp; c<"), std::string::npos);
  EXPECT_NE(svg.find(">a note<"), std::string::npos);
}

TEST(ScalingReport, AListThatIsNotThereIsNamed) {
  Json job = seven_rounds();
  job.erase("lockstep_ms");
  try {
    efficiency_of("toy", job);
    ADD_FAILURE() << "a missing list went unnoticed";
  } catch (const UserError& e) {
    EXPECT_NE(std::string(e.what()).find("lockstep_ms"), std::string::npos) << e.what();
  }
  job = seven_rounds();
  job["ddp_ms"].erase(0);
  EXPECT_THROW(efficiency_of("toy", job), UserError);
}

}  // namespace
}  // namespace tessera::bench
