// The order in which the virtual GPU was given work while a test recorded it: which ops come before
// others by streams and events, and where the host waited (tests/vgpu/fake/order.h).
#pragma once
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <map>
#include <sstream>
#include <string>
#include <vector>

namespace tessera::test {

/// Null on a real card.
inline int (*order_of_driver())(const char**) {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  return reinterpret_cast<int (*)(const char**)>(library ? dlsym(library, "vgpu_order") : nullptr);
}
inline void begin_order() { order_of_driver()(nullptr); }

/// What one card was given since begin_order(), in the order of submission.
class OrderOnCard {
 public:
  struct Op {
    int number, lane;
    std::vector<int> after;
    std::string name;
  };
  OrderOnCard(const std::string& recorded, int device) {
    std::istringstream lines(recorded);
    for (std::string line; std::getline(lines, line);) {
      std::vector<std::string> f;
      std::istringstream fields(line);
      for (std::string field; std::getline(fields, field, '\t');) f.push_back(field);
      if (f[0] == "wait" && std::stoi(f[1]) == device) waits_.push_back({ops_.size(), f[2]});
      if (f[0] != "op" || std::stoi(f[2]) != device) continue;
      Op op{std::stoi(f[1]), std::stoi(f[3]), {}, f[5]};
      std::istringstream after(f[4]);
      for (std::string a; std::getline(after, a, ',');) op.after.push_back(std::stoi(a));
      at_[op.number] = ops_.size();
      ops_.push_back(std::move(op));
    }
    find_before();
  }

  const std::vector<Op>& ops() const { return ops_; }
  /// The ops of that name.
  std::vector<size_t> named(const std::string& name) const {
    std::vector<size_t> found;
    for (size_t i = 0; i < ops_.size(); ++i)
      if (ops_[i].name == name) found.push_back(i);
    return found;
  }
  /// Whether op a has ended, whatever the order of work, when b begins.
  bool before(size_t a, size_t b) const { return before_[b][a]; }
  /// The stream with most of the work.
  int busiest_lane() const {
    std::map<int, int> count;
    for (const Op& op : ops_) ++count[op.lane];
    int lane = -1;
    for (const auto& [l, n] : count)
      if (lane < 0 || n > count[lane]) lane = l;
    return lane;
  }
  /// Waits of the host between the first and the last op, by what they were for.
  std::vector<std::string> waits_between_ops() const {
    std::vector<std::string> found;
    for (const auto& [at, name] : waits_)
      if (at > 0 && at < ops_.size()) found.push_back(name);
    return found;
  }

 private:
  void find_before() {
    before_.assign(ops_.size(), std::vector<bool>(ops_.size()));
    for (size_t i = 0; i < ops_.size(); ++i)
      for (int number : ops_[i].after)
        if (const auto a = at_.find(number); a != at_.end()) {
          before_[i][a->second] = true;
          for (size_t j = 0; j < a->second; ++j)
            if (before_[a->second][j]) before_[i][j] = true;
        }
  }

  std::vector<Op> ops_;
  std::map<int, size_t> at_;  // by number
  std::vector<std::vector<bool>> before_;
  struct Wait {
    size_t ops;  // that were submitted before
    std::string name;
  };
  std::vector<Wait> waits_;
};

inline std::string end_order() {
  const char* text = "";
  EXPECT_EQ(order_of_driver()(&text), 0);
  return text;
}

}  // namespace tessera::test
