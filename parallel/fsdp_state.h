// The state that fully_shard attaches to a model: the parameters in groups, the hooks that gather
// them and the gradient sink that reduces. It is internal to fsdp*.cpp. Each parameter has two
// leaves: the sharded one, which the program sees, and the whole one, which forward uses and whose
// gradient is delivered here. Invariant: what a program does to the sharded leaf (hooks, zero_grad,
// grad(), a write into the whole weight) works as if there were only one leaf, so that programs
// need not know of the other.
#pragma once
#include <deque>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "collectives/process_group.h"
#include "core/autograd/graph.h"
#include "core/nn/fp8.h"
#include "core/tensor/device_runtime.h"
#include "parallel/communication_time.h"
#include "parallel/fsdp.h"
#include "parallel/fsdp_rooms.h"

namespace tessera::parallel::fsdp {

/// What belongs to a weight that is gathered in eight bits.
struct EightBits {
  std::shared_ptr<nn::Fp8Weight> weight;
  Tensor amax, scale;  // of the whole weight
  // These were computed from this piece of this rank, at its version and that of the scale's
  // history.
  Ref<Storage> piece;
  uint32_t version = 0, history = 0;
  Tensor values;  // the whole weight in E4M3 while the group is gathered
};

struct Param {
  std::string name;
  std::vector<Tensor*> slots;  // where modules of the model hold it
  Tensor sharded;              // sharded over all axes, data-parallel ones included
  Device device;               // of the whole weight; with offload `sharded` is on the CPU
  DeviceMesh mesh;             // of `sharded`
  Layout cut;                  // its layout along the data-parallel axes
  Layout whole, term;          // over `mesh`: of the gathered weight, of a rank's gradient
  // Rooms take it: ranks have equal pieces, which follow each other, and it is on the card where
  // the rooms are.
  bool even = false;
  Ref<Storage> home;  // of `sharded`, in the process group's own memory; null: elsewhere
  DeviceMesh rest;    // the other axes (tensor parallel); undefined: none
  Layout rest_layout;
  Tensor leaf;                             // has shape and history of the whole weight
  Tensor full;                             // the whole weight while the group is gathered
  std::optional<EightBits> eight;          // then `full` has no values, but for unshard()
  Ref<Storage> values;                     // of `sharded` when it was gathered
  uint32_t version = 0, full_version = 0;  // of `values` and of `full` at that time
  Tensor gradient;             // whole gradient of this backward, or accumulated while sync is off
  Tensor reduced;              // this rank's piece of the sum over ranks, perhaps pending
  std::vector<Tensor> levels;  // of the accumulation tree
  int64_t micro_batches = 0;   // number of micro-batches in `levels`
  bool delivered = false;      // this backward has delivered its gradient

  bool trainable() const { return grad_meta(leaf) != nullptr; }
  bool gathered_in_eight_bits() const { return eight && eight->values.defined(); }
};

struct Group {
  std::string path;
  std::vector<Param> params;
  bool is_root = false, gathered = false;
  bool recorded = false;        // gathered for a forward that is recorded
  bool has_exit = false;        // its backward ends in an Exit
  bool backward_comes = false;  // the last forward had a result that requires grad
  // Parameters that get gradients; those that got one in this backward.
  size_t trainable = 0, arrived = 0;
  int64_t whole_bytes = 0;
  int64_t gathered_bytes = 0;  // while it is gathered
};

class State final : public Fsdp, public GradSink, public std::enable_shared_from_this<State> {
 public:
  State(nn::Module& model, const FsdpOptions& options);
  ~State() override;
  void attach(nn::Module& model);

  // Fsdp
  void set_sync(bool sync) override;
  bool sync() const override { return sync_.read() != 0; }
  FsdpMemory memory() const override { return memory_; }
  double communication_ms() override { return time_.take_ms(); }
  void unshard() override;
  void reshard() override;

  // GradSink. Whole leaves have slots 0 .. n - 1, the sharded ones n .. 2n - 1.
  void deliver(int slot, Tensor grad) override;
  void backward_finished() override;
  void backward_abandoned(const std::string& why) override;
  void cleared(int slot) override;
  GradMeta* known_as(int slot) override;
  Tensor converted(int slot, Tensor grad) override;
  void grad_finished(const std::string& failure) override;

  /// What a forward used of a weight: this rank's piece of the whole one, and whether that was
  /// gathered in eight bits, then by a scale of which version.
  struct Used {
    Ref<Storage> values;
    uint32_t version = 0;
    bool in_eight_bits = false;
    uint32_t history = 0;
  };
  /// Returns the whole weight for backward, gathering it again if needed.
  Ref<Storage> rebuild(size_t group, size_t param, const Used& used);
  /// Says that backward has left the module of `group`.
  void left(size_t group) { release(groups_[group]); }

 private:
  // fsdp.cpp: making
  void make_groups(nn::Module& model);
  void plan(Param& p) const;
  Tensor offloaded(const Param& p, const Tensor& piece) const;
  void shard(Param& p, nn::Module& model);
  void own_gradient(const Tensor& leaf, size_t slot);
  void allocate_pieces();
  Tensor at_home(Param& p, const Tensor& piece);

  // fsdp_gather.cpp: forward
  void before_forward(size_t group, Inputs in);
  void after_forward(size_t group, Tensor& out);
  void forward_failed(size_t group);
  void add_exit(size_t group, Inputs in);
  void check_unchanged(const Group& g) const;
  void check_model(const char* what) const;
  void gather(Group& g);
  void gather(size_t group, size_t param, const Room* room);
  Tensor gathered_in(const Room& room, const Param& p, size_t param, Tensor piece);
  Room* room_to_gather(size_t group);
  Tensor to_gather(const Param& p) const;
  bool stale(const Group& g) const;
  void release(Group& g);
  void let_go(Group& g);
  bool was_written(const Param& p) const;
  void check_writable(const Param& p) const;
  void keep_written(Group& g);
  void put_into_slots(Group& g, Tensor Param::*which);
  void prefetch(size_t group, int direction);

  // fsdp_fp8.cpp
  void find_eight_bits(Param& p, std::span<const nn::Slot> slots) const;
  bool scales_are_known(const Param& p) const;
  void update_scales();
  void forget_recorded_scales();
  /// This rank's piece in eight bits.
  Tensor quantised(const Param& p) const;
  /// What is in the slot while the weight is gathered in eight bits.
  Tensor stand_in(const Param& p) const;
  static bool in_eight_bits(const Group& g);

  // fsdp_reduce.cpp: gradients
  void complete(Group& g);
  Tensor reduced(const Param& p, Tensor grad) const;
  Tensor reduced_in(const Room& room, Param& p, size_t param);
  Room* room_to_reduce(size_t group);
  Tensor downloaded(const Param& p, const Tensor& piece) const;
  void finish_oldest_reduction();
  void accumulate(Param& p, Tensor piece);
  void accumulate_directly(Param& p, Tensor piece);
  void drop_gradient(Param& p);
  void name_unused(const Group& g);
  void abort(const std::string& why);

  Param& param(int slot) {
    auto [group, index] = places_[size_t(slot) % places_.size()];
    return groups_[group].params[index];
  }
  /// The sizes of the parts of a room for the group: of each parameter a piece and the whole.
  std::vector<size_t> parts_of(const Group& g, bool gathered) const;
  /// Makes them where the process group has memory of its own and a step is not recorded, whose
  /// memory the compiler plans. False: there are none.
  bool make_rooms(std::vector<Room>& rooms, bool gathered);
  /// For copies of `p` beside the kernels of its device.
  Stream copies(const Param& p, int turn) const {
    return runtime_of(p.device).copy_stream(p.device.index, turn);
  }
  ProcessGroup& process_group() const { return *options_.mesh.group(options_.mesh.ndim() - 1); }

  static constexpr int kDown = 2, kUp = 3;  // turns of copy streams; a loader has 0 and 1
  FsdpOptions options_;
  nn::HookHandle root_;  // of the model, which may be destroyed while a program keeps this
  std::vector<Group> groups_;
  std::vector<std::pair<size_t, size_t>> places_;  // by slot number: group, parameter
  std::vector<size_t> order_, last_order_;  // groups in the order of this and of the last forward
  std::deque<Param*> on_their_way_;         // gradients that are being reduced, oldest first
  int64_t most_gradient_bytes_ = 0;         // of whole gradients that may be alive at a time
  CommunicationTime time_;
  FsdpMemory memory_;
  Device card_ = kCPU;  // where rooms and pieces_ are: of the first even parameter that is on one
  std::optional<Parts> pieces_;  // of the parameters, in the process group's own memory
  // The first is of the model's own group. The others use two in turn; where they stay gathered,
  // each has one.
  std::vector<Room> gathered_, reduced_;
  size_t reductions_ = 0;  // of groups that are not the model's own
  TrackedSetting sync_{true};
  bool pinned_ = false;
  bool delivered_ = false;        // this backward has delivered a whole gradient
  bool scales_are_due_ = false;   // whatever versions say
  bool scales_recorded_ = false;  // they are values of a recorded step
};

/// The bytes of `t`, or of this rank's piece where it is sharded.
int64_t bytes_of(const Tensor& t);

}  // namespace tessera::parallel::fsdp
