// What one op of the virtual NCCL does: rounds of collectives, pieces of messages.
#include <algorithm>
#include <cstring>

#include "tests/vgpu/nccl/comm.h"

namespace vgpu::nccl {

namespace {

char* bytes_at(const void* p) { return static_cast<char*>(const_cast<void*>(p)); }
void use(const void* p, size_t bytes, VgpuAccess kind, int device) {
  if (bytes) use_range(reinterpret_cast<DevicePtr>(p), bytes, kind, device);
}
void report(const Communicator& comm, const std::string& what) {
  if (requests().report)
    std::fprintf(stderr, "vgpu: nccl: rank %d of %d: %s; it hangs, as a card would\n", comm.rank,
                 comm.size, what.c_str());
}

class Collective final : public Task {
 public:
  Collective(CommRef comm, const CollectiveCall& call)
      : comm_(std::move(comm)), call_(call), element_(size_of(call.type)) {
    const size_t n = static_cast<size_t>(comm_->size), bytes = call.count * element_;
    const bool root = comm_->rank == call.root;
    given_ = taken_ = bytes;
    switch (call.verb) {
      case Verb::kReduce: takes_ = root; break;
      case Verb::kBroadcast: one_giver_ = true, takes_ = !root || call.in != call.out; break;
      case Verb::kAllGather: taken_ = n * bytes; break;
      case Verb::kReduceScatter: given_ = n * bytes; break;
      case Verb::kAllToAll: given_ = taken_ = n * bytes; break;
      case Verb::kGather: takes_ = root, taken_ = n * bytes; break;
      case Verb::kScatter: one_giver_ = true, given_ = n * bytes; break;
      case Verb::kAllReduce: break;
    }
    gives_ = !one_giver_ || root;
    if (auto made = comm_->operators.find(static_cast<int>(call.op));
        made != comm_->operators.end())
      how_ = made->second;
    else
      how_.op = call.op;
    facts_ = {0,
              static_cast<int32_t>(call.verb),
              static_cast<int32_t>(call.type),
              static_cast<int32_t>(how_.op) + (how_.scaled ? 100 : 0),
              call.root,
              0,
              call.count,
              {}};
    find_places();
  }

  std::unique_ptr<Task> again(int32_t captured) const override {
    auto task = std::make_unique<Collective>(comm_, call_);
    task->facts_.captured = captured;
    return task;
  }
  void begin() override {
    facts_.number = comm_->calls++;
    if (gives_) use(call_.in, given_, kVgpuRead, comm_->device);
    if (takes_) use(call_.out, taken_, kVgpuWrite, comm_->device);
    const bool in_windows = facts_.places[0] && facts_.places[2];
    ++gpu().counters[name + (in_windows ? " in windows" : " outside of windows")].runs;
  }

  bool step() override {
    const size_t rounds = (given_ + kStageBytes - 1) / kStageBytes;
    while (round_ < rounds) {
      if (!shown_) show();
      if (!all_came() || differs_) return false;
      if (!agree()) return false;
      take();
      ++comm_->rounds, ++round_, shown_ = false;
    }
    return true;
  }

 private:
  size_t place() const { return comm_->rounds % 2; }
  size_t first_byte() const { return round_ * kStageBytes; }
  size_t length() const { return std::min(kStageBytes, given_ - first_byte()); }
  const char* stage(int r) const { return comm_->segment->rank(r).stage[place()]; }

  void show() {
    RankArea& mine = comm_->segment->rank(comm_->rank);
    mine.facts[place()] = facts_;
    if (gives_) std::memcpy(mine.stage[place()], bytes_at(call_.in) + first_byte(), length());
    mine.rounds.store(comm_->rounds + 1, std::memory_order_release);
    shown_ = true;
  }
  bool all_came() const {
    for (int r = 0; r < comm_->size; ++r)
      if (comm_->segment->rank(r).rounds.load(std::memory_order_acquire) <= comm_->rounds)
        return false;
    return true;
  }
  // Notes the places for the verbs that make use of windows. In place, a rank's piece is where the
  // whole is.
  void find_places() {
    const bool gathers = call_.verb == Verb::kAllGather;
    const bool scatters = call_.verb == Verb::kReduceScatter;
    if (!gathers && !scatters && call_.verb != Verb::kAllReduce) return;
    const size_t own = static_cast<size_t>(comm_->rank) * call_.count * element_;
    const char *in = bytes_at(call_.in), *out = bytes_at(call_.out);
    note_place(0, gathers && in == out + own ? out : in, given_);
    note_place(2, scatters && out == in + own ? in : out, taken_);
  }
  void note_place(size_t i, const char* at, size_t bytes) {
    const WindowObject* window = comm_->window_with(at, bytes, /*all=*/true);
    if (!window) return;
    facts_.places[i] = window->number;
    facts_.places[i + 1] = static_cast<uint64_t>(at - bytes_at(window->at));
  }
  void check_places(int r, CallFacts theirs) const {
    std::ranges::copy(facts_.places, theirs.places);
    if (theirs != facts_) return;
    throw OpError(tessera::cuda::Result::kIllegalAddress,
                  name + ": rank " + std::to_string(r) + " has its memory in another place of a " +
                      "window than rank " + std::to_string(comm_->rank) + ", or in none");
  }
  bool agree() {
    for (int r = 0; r < comm_->size; ++r)
      if (const CallFacts& theirs = comm_->segment->rank(r).facts[place()]; theirs != facts_) {
        check_places(r, theirs);
        differs_ = true;
        report(*comm_, name + ": rank " + std::to_string(r) + " made another call");
        return false;
      }
    return true;
  }

  // Copies the part of giver r's round that lies in [begin, end) of what it gives to `to` + where
  // it lies there.
  void copy_part(int r, size_t begin, size_t end, char* to) const {
    const size_t from = std::max(begin, first_byte());
    const size_t until = std::min(end, first_byte() + length());
    if (from < until)
      std::memcpy(to + (from - begin), stage(r) + (from - first_byte()), until - from);
  }
  void reduce_part(size_t begin, size_t end) const {
    const size_t from = std::max(begin, first_byte());
    const size_t until = std::min(end, first_byte() + length());
    if (from >= until) return;
    std::vector<const char*> in;
    for (int r = 0; r < comm_->size; ++r) in.push_back(stage(r) + (from - first_byte()));
    reduce(how_, call_.type, in, bytes_at(call_.out) + (from - begin), (until - from) / element_,
           from / element_, given_ / element_);
  }
  void take() const {
    if (!takes_) return;
    char* out = bytes_at(call_.out);
    const size_t bytes = call_.count * element_, own = static_cast<size_t>(comm_->rank) * bytes;
    for (int r = 0; r < comm_->size; ++r) {
      const size_t theirs = static_cast<size_t>(r) * bytes;
      switch (call_.verb) {
        case Verb::kAllReduce:
        case Verb::kReduce:
          if (r == 0) reduce_part(0, bytes);
          break;
        case Verb::kReduceScatter:
          if (r == 0) reduce_part(own, own + bytes);
          break;
        case Verb::kBroadcast:
          if (r == call_.root) copy_part(r, 0, bytes, out);
          break;
        case Verb::kScatter:
          if (r == call_.root) copy_part(r, own, own + bytes, out);
          break;
        case Verb::kAllGather:
        case Verb::kGather: copy_part(r, 0, bytes, out + theirs); break;
        case Verb::kAllToAll: copy_part(r, own, own + bytes, out + theirs); break;
      }
    }
  }

  const CommRef comm_;
  const CollectiveCall call_;
  const size_t element_;
  Reduction how_;
  CallFacts facts_;
  size_t given_, taken_;  // bytes of what a giver gives, and of what a taker gets
  bool gives_ = true, takes_ = true, one_giver_ = false;
  size_t round_ = 0;
  bool shown_ = false, differs_ = false;
};

// A sender is done when the receiver has taken all: nobody may rely on buffers in between.
class Message final : public Task {
 public:
  Message(CommRef comm, bool sends, void* at, size_t bytes, int peer)
      : comm_(std::move(comm)),
        sends_(sends),
        at_(bytes_at(at)),
        bytes_(bytes),
        peer_(peer),
        channel_(sends ? comm_->segment->channel(comm_->rank, peer)
                       : comm_->segment->channel(peer, comm_->rank)) {}

  std::unique_ptr<Task> again(int32_t) const override {
    return std::make_unique<Message>(comm_, sends_, at_, bytes_, peer_);
  }
  const Channel* channel() const override { return &channel_; }
  void begin() override { use(at_, bytes_, sends_ ? kVgpuRead : kVgpuWrite, comm_->device); }
  bool step() override { return sends_ ? send() : receive(); }

 private:
  size_t length() const { return std::min(kMessageBytes, bytes_ - moved_); }
  bool send() {
    const uint64_t written = channel_.written.load(std::memory_order_relaxed);
    if (channel_.taken.load(std::memory_order_acquire) < written) return false;
    if (moved_ == bytes_) return true;
    channel_.message_bytes = bytes_;
    std::memcpy(channel_.piece, at_ + moved_, length());
    moved_ += length();
    channel_.written.store(written + 1, std::memory_order_release);
    return false;
  }
  bool receive() {
    const uint64_t taken = channel_.taken.load(std::memory_order_relaxed);
    if (differs_ || channel_.written.load(std::memory_order_acquire) == taken) return false;
    if (channel_.message_bytes != bytes_) {
      differs_ = true;
      report(*comm_, "ncclRecv: the sender sends " + std::to_string(channel_.message_bytes) +
                         " bytes, expected are " + std::to_string(bytes_));
      return false;
    }
    std::memcpy(at_ + moved_, channel_.piece, length());
    moved_ += length();
    channel_.taken.store(taken + 1, std::memory_order_release);
    return moved_ == bytes_;
  }

  const CommRef comm_;
  const bool sends_;
  char* const at_;
  const size_t bytes_;
  const int peer_;
  Channel& channel_;
  size_t moved_ = 0;
  bool differs_ = false;
};

// The tasks of a group: collectives one after the other, then all messages together.
class Launch {
 public:
  Launch(CommRef comm, Tasks tasks)
      : comm_(std::move(comm)), tasks_(std::move(tasks)), number_(comm_->launches++) {
    std::stable_partition(tasks_.begin(), tasks_.end(),
                          [](const auto& task) { return !task->channel(); });
    for (const auto& task : tasks_)
      if (task->channel()) channels_.push_back(task->channel());
  }

  uint64_t news() const {
    uint64_t sum = comm_->finished + comm_->aborted;
    for (int r = 0; r < comm_->size; ++r)
      sum += comm_->segment->rank(r).rounds.load(std::memory_order_acquire);
    for (const Channel* c : channels_)
      sum += c->written.load(std::memory_order_acquire) + c->taken.load(std::memory_order_acquire);
    return sum;
  }
  bool poll() {
    if (comm_->aborted) return end();
    if (number_ != comm_->finished) return false;
    if (held_up()) return false;
    if (!begun_) begin();
    begun_ = true;
    while (!tasks_.empty() && !tasks_.front()->channel()) {
      if (!tasks_.front()->step()) return false;
      tasks_.erase(tasks_.begin());
    }
    // Messages with one peer are in order.
    std::set<const Channel*> busy;
    std::erase_if(tasks_, [&](const auto& task) {
      if (busy.contains(task->channel())) return false;
      const bool done = task->step();
      if (!done) busy.insert(task->channel());
      return done;
    });
    return tasks_.empty() && end();
  }

 private:
  void begin() {
    const Op& op = *gpu().running();
    if (op.clock[comm_->last_lane] < comm_->last_time)
      throw OpError(tessera::cuda::Result::kIllegalAddress,
                    op.name + ": no event orders it behind the call before it on its communicator");
    comm_->last_lane = op.lane, comm_->last_time = op.clock[op.lane];
    for (const auto& task : tasks_) task->begin();
  }
  bool end() {
    comm_->finished = number_ + 1;
    return true;
  }
  bool held_up() {
    const Requests& r = requests();
    if (r.hang_rank == comm_->rank && r.hang_nth == number_ + 1) return true;
    if (r.error_rank != comm_->rank || r.error_nth != number_ + 1) return false;
    comm_->broken = r.error_code;
    return true;
  }

  const CommRef comm_;
  Tasks tasks_;
  std::vector<const Channel*> channels_;  // of all tasks, those that are done too
  const uint64_t number_;
  bool begun_ = false;
};

}  // namespace

std::unique_ptr<Task> make_collective(const CommRef& comm, const CollectiveCall& call) {
  return std::make_unique<Collective>(comm, call);
}
std::unique_ptr<Task> make_message(const CommRef& comm, bool sends, void* at, size_t bytes,
                                   int peer) {
  return std::make_unique<Message>(comm, sends, at, bytes, peer);
}

// The node keeps the tasks, and each launch of the graph makes them anew.
static void record(const CommRef& comm, StreamObject& stream, const std::string& name,
                   Tasks tasks) {
  struct Node {
    explicit Node(CommRef c, Tasks t) : comm(std::move(c)), tasks(std::move(t)) { ++comm->graphs; }
    ~Node() { --comm->graphs; }
    Node(const Node&) = delete;
    Node& operator=(const Node&) = delete;
    const CommRef comm;
    const Tasks tasks;
    int32_t number = 0;  // among the nodes of the communicator, by their first launches
  };
  const auto node = std::make_shared<Node>(comm, std::move(tasks));
  const OpRef op = gpu().submit(stream, OpKind::kKernel, name, nullptr);
  op->owned = node;
  op->launched = [weak = std::weak_ptr(node)](const OpRef& of_launch) {
    const auto node = weak.lock();
    if (node->number == 0) node->number = ++node->comm->captured;
    Tasks again;
    for (const auto& task : node->tasks) {
      again.push_back(task->again(node->number));
      again.back()->name = task->name;
    }
    auto work = std::make_shared<Launch>(node->comm, std::move(again));
    of_launch->poll = [work] { return work->poll(); };
    of_launch->news = [work] { return work->news(); };
    node->comm->last = of_launch;
  };
  stream.capture->nodes.push_back(op);
}

void launch(const CommRef& comm, StreamObject& stream, Tasks tasks) {
  if (tasks.empty()) return;
  const std::string name = tasks.size() == 1 ? tasks[0]->name : "ncclGroup";
  if (stream.capture) return record(comm, stream, name, std::move(tasks));
  auto work = std::make_shared<Launch>(comm, std::move(tasks));
  comm->last = gpu().submit_polled(
      stream, name, [work] { return work->poll(); }, [work] { return work->news(); });
  gpu().run_some();
}

}  // namespace vgpu::nccl
