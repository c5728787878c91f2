// Draws a bar chart as SVG: groups of bars beside each other, values from 0 to a little over 1. It
// has no script and no style sheet, and text is text, so that it can be read in a browser and in a
// page of markdown.
#pragma once
#include <string>
#include <vector>

namespace tessera::bench {

struct BarChart {
  struct Bar {
    double value = 0, low = 0, high = 0;  // the interval is drawn as a whisker where low < high
  };
  struct Group {
    std::string name;
    std::vector<Bar> bars;  // one for each series
  };
  std::string title, note;
  std::vector<std::string> series;
  std::vector<Group> groups;
  double target = 0;  // a dashed line; 0: none
};

/// Returns the text of an SVG file.
std::string to_svg(const BarChart& chart);

}  // namespace tessera::bench
