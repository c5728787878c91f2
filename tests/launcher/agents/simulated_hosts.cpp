#include "tests/launcher/agents/simulated_hosts.h"

#include <fmt/core.h>

#include <deque>
#include <tuple>

namespace tessera::launcher::test {
namespace {

constexpr int kPorts = 1000;  // a port says which host it is of

}  // namespace

// One direction of a connection. What is pushed into it arrives in order, unless the receiver has
// ended the connection.
struct SimulatedHosts::Pipe {
  int from, to;  // hosts
  std::weak_ptr<Agent> receiver;
  Link link = 0;     // the receiver's name for the connection
  bool open = true;  // at the receiver
  std::deque<std::function<void(Agent&, Link)>> queue;
  Time free{0};
};

struct SimulatedHosts::Agent : Membership::Outside, std::enable_shared_from_this<Agent> {
  Agent(SimulatedHosts& world, int host) : world(world), host(host) {}

  Link connect(const std::vector<Address>& addresses) override {
    const Link link = ++links;
    const int port = addresses.front().port, to = port % kPorts;
    auto there = std::make_shared<Pipe>(Pipe{host, to, {}, 0, true, {}, {}});
    auto back = std::make_shared<Pipe>(Pipe{to, host, weak_from_this(), link, true, {}, {}});
    outgoing[link] = there;
    incoming[link] = back;
    SimulatedHosts& w = world;
    auto me = weak_from_this();
    const auto fail = [&w, me, back](const char* why) {
      w.push(back, [why, back](Agent& a, Link l) { a.end_link(l, why); });
    };
    w.after(w.some_delay(), [&w, me, there, back, fail, to, port] {
      if (w.cut_[size_t(there->from)][size_t(to)] || w.cut_[size_t(to)][size_t(there->from)])
        return w.after(Time{1000}, [&w, me, back] {
          if (auto a = me.lock(); a && a->alive && back->open) a->end_link(back->link, "no answer");
        });
      auto other = w.agents_[size_t(to)];
      auto mine = me.lock();
      if (!mine || !mine->alive) return;
      if (!other || !other->alive || other->port != port) {
        if (other && !other->alive && other->vanished) {
          w.after(Time{1000}, [&w, me, back] {
            if (auto a = me.lock(); a && a->alive && back->open)
              a->end_link(back->link, "no answer");
          });
          return;
        }
        return fail("connection refused");
      }
      const Link theirs = ++other->links;
      there->receiver = other, there->link = theirs;
      other->incoming[theirs] = there;
      other->outgoing[theirs] = back;
      w.push(there, [&w](Agent& a, Link l) { a.membership->opened(l, w.now_); });
      w.push(back, [&w](Agent& a, Link l) { a.membership->opened(l, w.now_); });
    });
    return link;
  }

  void send(Link link, std::string message) override {
    const auto pipe = outgoing.find(link);
    if (pipe == outgoing.end()) return;
    SimulatedHosts& w = world;
    ++w.messages_;
    w.push(pipe->second, [&w, message = std::move(message)](Agent& a, Link l) {
      a.membership->received(l, message, w.now_);
    });
  }

  void close(Link link) override {
    const auto in = incoming.find(link);
    if (in == incoming.end()) return;
    in->second->open = false;
    world.push(outgoing[link], [](Agent& a, Link l) { a.end_link(l, "closed by the other side"); });
    incoming.erase(link), outgoing.erase(link);
  }

  void end_link(Link link, const std::string& why) {
    const auto in = incoming.find(link);
    if (in == incoming.end()) return;
    in->second->open = false;
    incoming.erase(link), outgoing.erase(link);
    membership->lost(link, why, world.now_);
  }

  void begin(const Generation& generation) override {
    if (last_begun >= generation.ballot)
      world.violation_ = fmt::format("host {} began an older generation", host);
    if (running) world.violation_ = fmt::format("host {} began a generation within another", host);
    last_begun = generation.ballot;
    running = true;
  }
  void end(const std::string&) override {
    if (!running) world.violation_ = fmt::format("host {} ended what it had not begun", host);
    running = false;
  }
  void on_payload(NodeId, std::string_view payload) override { payloads.emplace_back(payload); }
  void give_up(const std::string& why) override { gave_up = why; }
  void keep(const std::string& state) override { world.disks_[size_t(host)] = state; }
  void note(const std::string& text) override { notes.push_back(text); }

  SimulatedHosts& world;
  const int host;
  bool alive = true, vanished = false;
  int port = 0;
  std::unique_ptr<Membership> membership;
  Link links = 0;
  std::map<Link, std::shared_ptr<Pipe>> outgoing, incoming;
  Ballot last_begun{};
  bool running = false;
  std::vector<std::string> payloads, notes;
  std::string gave_up;
};

SimulatedHosts::SimulatedHosts(SimulatedSettings settings)
    : settings_(settings),
      random_(settings.seed),
      agents_(size_t(settings.hosts)),
      disks_(size_t(settings.hosts)),
      ids_(size_t(settings.hosts)),
      cut_(size_t(settings.hosts), std::vector<bool>(size_t(settings.hosts))) {}

SimulatedHosts::~SimulatedHosts() = default;

void SimulatedHosts::after(Time delay, std::function<void()> what) {
  events_.push({now_ + delay, ++number_, std::move(what)});
}

Time SimulatedHosts::some_delay() {
  return Time{1 + int(random_() % uint64_t(settings_.max_delay_ms))};
}

void SimulatedHosts::push(const std::shared_ptr<Pipe>& pipe,
                          std::function<void(Agent&, Link)> what) {
  pipe->queue.push_back(std::move(what));
  pipe->free = std::max(pipe->free, now_ + some_delay());
  after(pipe->free - now_, [this, pipe] { deliver(pipe); });
}

void SimulatedHosts::deliver(const std::shared_ptr<Pipe>& pipe) {
  if (pipe->queue.empty()) return;
  if (cut_[size_t(pipe->from)][size_t(pipe->to)])
    return after(Time{20}, [this, pipe] { deliver(pipe); });
  auto what = std::move(pipe->queue.front());
  pipe->queue.pop_front();
  auto receiver = pipe->receiver.lock();
  if (!receiver || !receiver->alive || !pipe->open) return;
  what(*receiver, pipe->link);
}

void SimulatedHosts::start(int host, const std::string& job) {
  auto agent = std::make_shared<Agent>(*this, host);
  agents_[size_t(host)] = agent;
  Membership::Settings s;
  s.min_nodes = settings_.min_nodes, s.max_nodes = settings_.max_nodes;
  s.first = host == 0;
  s.rendezvous = {{"host", 0}};
  s.run = "run";
  // All but the first listen at any port, which is another one at each start.
  agent->port = host + (host ? kPorts * ++starts_ : 0);
  s.heartbeat = Time{100}, s.node_timeout = Time{800};
  const bool kept = settings_.keeps && !disks_[size_t(host)].empty();
  if (!kept) ids_[size_t(host)] = random_() | 1;
  Node self{.id = ids_[size_t(host)],
            .slot = host,
            .nproc = 2,
            .host = fmt::format("host{}", host),
            .addresses = {{"host", agent->port}},
            .job = job};
  agent->membership =
      std::make_unique<Membership>(s, self, kept ? disks_[size_t(host)] : "", *agent, now_);
  after(Time{int(random_() % 100)}, [this, agent] { tick(agent); });
}

void SimulatedHosts::tick(const std::shared_ptr<Agent>& agent) {
  if (!agent->alive) return;
  agent->membership->tick(now_);
  after(Time{100}, [this, agent] { tick(agent); });
}

void SimulatedHosts::kill(int host, bool vanishes) {
  auto agent = agents_[size_t(host)];
  agent->alive = false, agent->vanished = vanishes;
  if (!vanishes)
    for (auto& [link, pipe] : agent->outgoing)
      push(pipe, [](Agent& a, Link l) { a.end_link(l, "reset by the other side"); });
}

bool SimulatedHosts::alive(int host) const {
  return agents_[size_t(host)] && agents_[size_t(host)]->alive;
}

void SimulatedHosts::cut(int from, int to) { cut_[size_t(from)][size_t(to)] = true; }

void SimulatedHosts::heal() {
  for (auto& row : cut_) row.assign(row.size(), false);
}

Membership& SimulatedHosts::agent(int host) { return *agents_[size_t(host)]->membership; }

std::vector<std::string> SimulatedHosts::notes(int host) const {
  return agents_[size_t(host)]->notes;
}

std::string SimulatedHosts::gave_up(int host) const { return agents_[size_t(host)]->gave_up; }

std::vector<std::string> SimulatedHosts::payloads(int host) const {
  return agents_[size_t(host)]->payloads;
}

bool SimulatedHosts::run_until(Time end, const std::function<bool()>& done) {
  while (!events_.empty() && events_.top().at <= end && violation_.empty()) {
    Event event = events_.top();
    events_.pop();
    now_ = event.at;
    event.what();
    look();
    if (done && done()) return true;
  }
  if (violation_.empty()) now_ = end;
  return done && done();
}

const Generation* SimulatedHosts::training() const {
  for (const auto& agent : agents_) {
    const Generation* g = agent && agent->alive ? agent->membership->current() : nullptr;
    if (!g) continue;
    size_t there = 0;
    for (const auto& other : agents_) {
      const Generation* theirs = other && other->alive ? other->membership->current() : nullptr;
      there += theirs && theirs->ballot == g->ballot;
    }
    if (there == g->nodes.size()) return g;
  }
  return nullptr;
}

bool SimulatedHosts::together(const std::vector<int>& hosts) {
  const Generation* g = training();
  if (!g || g->nodes.size() != hosts.size()) return false;
  for (int host : hosts)
    if (!alive(host) || agent(host).current() == nullptr ||
        agent(host).current()->ballot != g->ballot)
      return false;
  return true;
}

// Looks at the invariants: of all generations whose nodes all take part in them there is one at
// most, and its number is higher than those before.
void SimulatedHosts::look() {
  std::map<Ballot, size_t> members;
  std::map<Ballot, const Generation*> generations;
  for (const auto& agent : agents_) {
    const Generation* g = agent && agent->alive ? agent->membership->current() : nullptr;
    if (g) ++members[g->ballot], generations[g->ballot] = g;
  }
  const Generation* whole = nullptr;
  for (const auto& [ballot, count] : members) {
    if (count != generations[ballot]->nodes.size()) continue;
    if (whole)
      violation_ = fmt::format("two generations train: {} and {}", whole->number,
                               generations[ballot]->number);
    whole = generations[ballot];
  }
  if (!whole || whole->ballot == last_ballot_) return;
  ++generations_trained_;
  const bool may_forget = !settings_.keeps;
  if (whole->number <= last_number_ && !may_forget)
    violation_ =
        fmt::format("generation {} trains after generation {}", whole->number, last_number_);
  if (int(whole->nodes.size()) < settings_.min_nodes ||
      int(whole->nodes.size()) > settings_.max_nodes)
    violation_ = fmt::format("a generation of {} nodes", whole->nodes.size());
  last_ballot_ = whole->ballot, last_number_ = whole->number;
}

}  // namespace tessera::launcher::test
