#include "examples/bench/plot.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>

namespace tessera::bench {
namespace {

// All of these are in pixels.
constexpr double kLeft = 48, kTop = 64, kHeight = 220, kBar = 26, kGap = 30, kBottom = 64;
constexpr const char* kColours[] = {"#4c78a8", "#9ecae9", "#f58518", "#54a24b"};

std::string escaped(const std::string& text) {
  std::string out;
  for (char c : text)
    out += c == '<' ? "&lt;" : c == '>' ? "&gt;" : c == '&' ? "&amp;" : std::string(1, c);
  return out;
}

class Drawing {
 public:
  explicit Drawing(const BarChart& chart) : chart_(chart) {
    for (const BarChart::Group& g : chart.groups)
      for (const BarChart::Bar& b : g.bars) most_ = std::max({most_, b.value, b.high});
    group_width_ = kBar * double(chart.series.size()) + kGap;
    width_ = std::max(kLeft + group_width_ * double(chart.groups.size()) + kGap, 480.0);
  }

  std::string text() {
    for (int tenth = 0; tenth <= int(most_ * 10); tenth += 2) scale_line(tenth / 10.0);
    for (size_t g = 0; g < chart_.groups.size(); ++g) group(g);
    if (chart_.target > 0) {
      line(kLeft, y(chart_.target), width_, y(chart_.target), "#d62728",
           "stroke-dasharray=\"5 4\"");
      label(width_, y(chart_.target) - 4, "end", fmt::format("{:.2f}", chart_.target), "#d62728");
    }
    legend();
    label(kLeft, 20, "start", chart_.title, "#000000", 14);
    label(kLeft, kTop + kHeight + kBottom - 10, "start", chart_.note, "#666666");
    return fmt::format(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{:.0f}\" height=\"{:.0f}\" "
        "font-family=\"sans-serif\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n{}"
        "</svg>\n",
        width_ + 12, kTop + kHeight + kBottom, body_);
  }

 private:
  double y(double value) const { return kTop + kHeight * (1 - value / most_); }

  void line(double x1, double y1, double x2, double y2, const char* colour, const char* more = "") {
    fmt::format_to(std::back_inserter(body_),
                   "<line x1=\"{:.1f}\" y1=\"{:.1f}\" x2=\"{:.1f}\" y2=\"{:.1f}\" stroke=\"{}\" "
                   "{}/>\n",
                   x1, y1, x2, y2, colour, more);
  }
  void label(double x, double y, const char* anchor, const std::string& text,
             const char* colour = "#000000", int points = 11) {
    fmt::format_to(std::back_inserter(body_),
                   "<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"{}\" fill=\"{}\" "
                   "font-size=\"{}\">{}</text>\n",
                   x, y, anchor, colour, points, escaped(text));
  }
  void box(double x, double y, double width, double height, size_t series) {
    fmt::format_to(std::back_inserter(body_),
                   "<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\" "
                   "fill=\"{}\"/>\n",
                   x, y, width, height, kColours[series % std::size(kColours)]);
  }

  void scale_line(double value) {
    line(kLeft, y(value), width_, y(value), "#dddddd");
    label(kLeft - 6, y(value) + 4, "end", fmt::format("{:.1f}", value));
  }
  void group(size_t g) {
    const BarChart::Group& group = chart_.groups[g];
    double x = kLeft + kGap + group_width_ * double(g);
    label(x + (group_width_ - kGap) / 2, kTop + kHeight + 18, "middle", group.name);
    for (size_t s = 0; s < group.bars.size(); ++s, x += kBar) {
      const BarChart::Bar& bar = group.bars[s];
      box(x, y(bar.value), kBar - 3, y(0) - y(bar.value), s);
      double middle = x + (kBar - 3) / 2, top = bar.value;
      if (bar.low < bar.high) {
        line(middle, y(bar.low), middle, y(bar.high), "#333333");
        top = std::max(top, bar.high);
      }
      label(middle, y(top) - 3, "middle", fmt::format("{:.2f}", bar.value), "#000000", 9);
    }
  }
  void legend() {
    double x = kLeft;
    for (size_t s = 0; s < chart_.series.size(); ++s) {
      box(x, 34, 10, 10, s);
      label(x + 14, 43, "start", chart_.series[s]);
      x += 34 + 6.2 * double(chart_.series[s].size());
    }
  }

  const BarChart& chart_;
  std::string body_;
  double most_ = 1, group_width_ = 0, width_ = 0;
};

}  // namespace

std::string to_svg(const BarChart& chart) { return Drawing(chart).text(); }

}  // namespace tessera::bench
