#include "launcher/agents/slurm.h"

#include <algorithm>
#include <charconv>

#include "collectives/store/sha256.h"
#include "core/base/env.h"
#include "core/base/error.h"

namespace tessera::launcher {
namespace {

constexpr size_t kMostHosts = 1 << 16;
constexpr int kFirstPort = 20000, kPorts = 10000;  // below what Linux gives to clients

[[noreturn]] void bad_list(const std::string& list) {
  detail::raise<UserError>(fmt::format(
      "SLURM_STEP_NODELIST={}: is no list of hosts such as node[0-1,3]", list.substr(0, 200)));
}

// Adds `before` + each number of "0-1,3" + `after`.
void expand(const std::string& list, const std::string& before, std::string_view numbers,
            const std::string& after, std::vector<std::string>& hosts) {
  for (size_t begin = 0; begin <= numbers.size();) {
    const size_t end = std::min(numbers.find(',', begin), numbers.size());
    const std::string_view part = numbers.substr(begin, end - begin);
    const size_t dash = part.find('-');
    const std::string_view first = part.substr(0, dash),
                           last = dash == part.npos ? first : part.substr(dash + 1);
    unsigned long low = 0, high = 0;
    const auto number = [&](std::string_view text, unsigned long& value) {
      const auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), value);
      if (error != std::errc() || stop != text.data() + text.size()) bad_list(list);
    };
    number(first, low), number(last, high);
    if (high < low || hosts.size() + (high - low) >= kMostHosts) bad_list(list);
    for (unsigned long i = low; i <= high; ++i)
      hosts.push_back(before + fmt::format("{:0{}}", i, first.size()) + after);
    begin = end + 1;
  }
}

}  // namespace

std::vector<std::string> slurm_hosts(const std::string& list) {
  std::vector<std::string> hosts;
  for (size_t begin = 0; begin < list.size();) {
    // A comma within brackets does not end a name.
    size_t end = begin;
    bool inside = false;
    for (; end < list.size() && (inside || list[end] != ','); ++end)
      inside = list[end] == '[' || (inside && list[end] != ']');
    const std::string name = list.substr(begin, end - begin);
    const size_t open = name.find('['), close = name.find(']');
    if (name.empty() || inside || (open == name.npos) != (close == name.npos) ||
        name.find('[', open + 1) != name.npos)
      bad_list(list);
    if (open == name.npos)
      hosts.push_back(name);
    else
      expand(list, name.substr(0, open), std::string_view(name).substr(open + 1, close - open - 1),
             name.substr(close + 1), hosts);
    begin = end + 1;
  }
  if (hosts.empty()) bad_list(list);
  return hosts;
}

std::optional<SlurmStep> slurm_step() {
  for (const char* name : {"SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"})
    if (env::get(name).empty()) return std::nullopt;
  SlurmStep s;
  s.tasks = int(env::get_int("SLURM_STEP_NUM_TASKS", 1, 1, 1 << 20));
  s.nodes = int(env::get_int("SLURM_STEP_NUM_NODES", 1, 1, 1 << 20));
  s.node = int(env::get_int("SLURM_NODEID", 0, 0, 1 << 20));
  s.hosts = slurm_hosts(env::get("SLURM_STEP_NODELIST", "localhost"));
  s.id = env::get("SLURM_JOB_ID") + "." + env::get("SLURM_STEP_ID");
  // Variables of a step that an outer process was part of say nothing of this one.
  const std::string here = env::get("SLURMD_NODENAME");
  if (!here.empty() && std::ranges::find(s.hosts, here) == s.hosts.end()) return std::nullopt;
  TESSERA_CHECK(s.hosts.size() == size_t(s.nodes) && s.node < s.nodes,
                "SLURM_STEP_NUM_NODES={}, but SLURM_STEP_NODELIST={} and SLURM_NODEID={}; use what "
                "srun sets",
                s.nodes, env::get("SLURM_STEP_NODELIST").substr(0, 200), s.node);
  return s;
}

int slurm_port(const SlurmStep& step) {
  const detail::Digest digest = detail::sha256("port of step " + step.id);
  return kFirstPort + (digest[0] * 256 + digest[1]) % kPorts;
}

}  // namespace tessera::launcher
