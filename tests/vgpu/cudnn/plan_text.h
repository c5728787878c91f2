// Plans of the virtual cuDNN as texts of JSON, with the real library's keys where a caller might
// look for them. Invariant: a text is refused for the same reasons and with the same statuses as
// the real library's (tests/vgpu/conformance/cudnn_plans.cpp), which does not notice all damage.
#pragma once
#include <string>
#include <string_view>

#include "tests/vgpu/cudnn/graph.h"

namespace vgpu::dnn {

/// What a plan's device has in common with those that take its text.
struct DeviceProfile {
  int64_t capability = 0;  // 900
  int64_t multiprocessors = 0, driver = 0;
  bool operator==(const DeviceProfile&) const = default;
};
/// Reads the profile of a device from its description; false where `json` is none.
bool read_profile(std::string_view json, DeviceProfile& profile);

/// Whether the engine compiles code when a plan of this graph is made, as the real library's do
/// for several operations; its note says so.
inline bool compiles_code(const GraphInfo& graph) { return graph.operations.size() > 1; }

struct PlanInfo {
  GraphInfo graph;
  EngineInfo engine;
  DeviceProfile device;
};
std::string write_plan(const PlanInfo& plan);
/// Fills `plan` for `device`; says in `why` what is wrong with the text.
Status read_plan(std::string_view text, const DeviceProfile& device, PlanInfo& plan,
                 std::string& why);

}  // namespace vgpu::dnn
