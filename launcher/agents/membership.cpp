#include "launcher/agents/membership.h"

#include <fmt/core.h>

#include <algorithm>
#include <utility>

#include "collectives/store/wire.h"

namespace tessera::launcher {
namespace {

using Time = Membership::Time;

constexpr Time kFirstNote{10000}, kNotes{60000};  // how often those that wait say so
constexpr Time kProbes{500};

std::string name_of(const Node& n) {
  return n.slot < 0 ? n.host : fmt::format("node {} ({})", n.slot, n.host);
}

bool is_member(const Generation& g, NodeId id) { return g.place_of(id) >= 0; }

}  // namespace

Membership::Membership(Settings settings, Node self, const std::string& kept, Outside& outside,
                       Time now)
    : settings_(std::move(settings)), self_(std::move(self)), outside_(outside) {
  apart_since_ = said_ = now;
  if (!kept.empty()) {
    Message m = decode(kept);
    if (m.known.empty()) throw wire::BadFrame("what was kept has no generation");
    promised_ = m.promised;
    committed_ = std::move(m.known.front());
    pending_.assign(m.known.begin() + 1, m.known.end());
  }
  keep();  // its id, under which others may count on it from now on
  seek(now);
}

// ---- Connections ----

void Membership::opened(Link link, Time now) {
  Peer& peer = peers_[link];
  peer.opened = true, peer.heard = now;
  if (peer.probe) {
    Message m{.kind = MessageKind::kLead, .node = self_, .known = known()};
    send(link, m);
  } else if (link == leader_link_) {
    Message m{.kind = MessageKind::kJoin, .node = self_, .known = known()};
    send(link, m);
  }
}

void Membership::send(Link link, const Message& message) { outside_.send(link, encode(message)); }

void Membership::drop(Link link) {
  if (peers_.erase(link)) outside_.close(link);
}

void Membership::lost(Link link, const std::string& why, Time now) {
  const auto found = peers_.find(link);
  if (found == peers_.end() || done_) return;
  const Peer peer = found->second;
  peers_.erase(found);
  if (link == leader_link_) return lose_leader(why, now);
  const auto candidate = candidates_.find(peer.node);
  if (candidate != candidates_.end() && candidate->second.link == link)
    lose_candidate(peer.node, why, now);
}

void Membership::lose_leader(const std::string& why, Time now) {
  const Node lost = std::exchange(leader_, {});
  leader_link_ = 0, leader_leads_ = false;
  last_loss_ = why;
  if (lost.id) suspects_.insert(lost.id);
  if (active_) {
    stop(fmt::format("{}, which leads, is lost: {}", name_of(lost), why), now);
    return seek(now);
  }
  try_again_ = now + settings_.retry;
}

void Membership::lose_candidate(NodeId id, const std::string& why, Time now) {
  const Candidate gone = candidates_[id];
  candidates_.erase(id);
  changed_ = now;
  if (proposal_ && is_member(*proposal_, id)) proposal_.reset();
  if (leading_ && active_ && is_member(committed_, id))
    halt_all(fmt::format("{} is lost: {}", name_of(gone.node), why), now);
  if (leading_) try_form(now);
}

void Membership::stop(const std::string& why, Time now) {
  if (!std::exchange(active_, false)) return;
  apart_since_ = said_ = now;
  outside_.end(why);
}

void Membership::halt_all(const std::string& why, Time now) {
  const Ballot ballot = committed_.ballot;
  stop(why, now);
  changed_ = now;
  for (const auto& [id, candidate] : candidates_)
    if (is_member(committed_, id))
      send(candidate.link, {.kind = MessageKind::kHalt, .ballot = ballot, .text = why});
}

void Membership::renew(const std::string& why, Time now) {
  if (!leading_ || !active_) return;
  halt_all(why, now);
  try_form(now);
}

void Membership::received(Link link, std::string_view message, Time now) {
  const auto found = peers_.find(link);
  if (found == peers_.end() || done_) return;
  found->second.heard = now;
  Message m;
  try {
    m = decode(message);
  } catch (const wire::BadFrame&) {
    outside_.close(link);
    return lost(link, "it sent what is no message of this version", now);
  }
  if (m.kind == MessageKind::kJoin || m.kind == MessageKind::kLead) found->second.node = m.node.id;
  switch (m.kind) {
    case MessageKind::kBeat: return on_beat(link, m, now);
    case MessageKind::kJoin: return on_join(link, m, now);
    case MessageKind::kLead: return on_lead(link, m, now);
    case MessageKind::kRedirect:
      if (link == leader_link_) {
        leader_link_ = 0;
        drop(link);
        stop(fmt::format("{} leads a newer generation", name_of(m.node)), now);
        if (m.node.id == self_.id) return lead(now);
        suspects_.erase(m.node.id);
        join(m.node, now);
      } else if (found->second.probe) {
        drop(link);
        if (leading_ && !active_ && m.node.id != self_.id && m.node.addresses != self_.addresses)
          yield_to(m.node, now);
      }
      return;
    case MessageKind::kRefuse:
      if (link != leader_link_) return;
      done_ = true;
      return outside_.give_up(m.text);
    case MessageKind::kPrepare: return on_prepare(link, m, now);
    case MessageKind::kAccept: return on_accept(link, m, now);
    case MessageKind::kReject: return on_reject(m, now);
    case MessageKind::kCommit: return on_commit(link, m, now);
    case MessageKind::kHalt: return on_halt(link, m, now);
    case MessageKind::kPayload: return on_payload(link, m);
  }
}

// ---- Finding a leader ----

// The order of succession is that of the newest generation that this node accepted: the first of
// its nodes that is not known to be gone gathers the next one.
void Membership::seek(Time now) {
  leading_ = false;
  proposal_.reset();
  for (const Node& node : newest().nodes) {
    if (node.id == self_.id) return lead(now);
    if (!suspects_.count(node.id) && node.addresses != self_.addresses) return join(node, now);
  }
  suspects_.clear();
  if (settings_.first) return lead(now);
  join({.addresses = settings_.rendezvous}, now);
}

void Membership::join(const Node& leader, Time now) {
  leading_ = leader_leads_ = false;
  if (leader.addresses == self_.addresses) {  // whoever listened there before this agent is gone
    suspects_.insert(leader.id);
    try_again_ = now + settings_.retry;
    return;
  }
  leader_link_ = outside_.connect(leader.addresses);
  leader_ = leader;
  asked_ = now;
  peers_[leader_link_] = {.node = leader.id, .heard = now};
}

bool Membership::follows_another(NodeId than) const {
  return !leading_ && leader_link_ && leader_leads_ && leader_.id != than;
}

// Takes whoever is at the other end of `link` for the leader, and sends nodes that wait here there.
void Membership::follow(Link link, const Node& leader) {
  if (leader_link_ && leader_link_ != link) drop(leader_link_);
  leader_link_ = link, leader_ = leader, leader_leads_ = true;
  leading_ = false;
  proposal_.reset();
  peers_[link].node = leader.id, peers_[link].probe = false;
  suspects_.erase(leader.id);
  send_away(leader);
}

void Membership::send_away(const Node& leader) {
  for (const auto& [id, candidate] : std::exchange(candidates_, {})) {
    if (candidate.link == leader_link_) continue;
    send(candidate.link, {.kind = MessageKind::kRedirect, .node = leader});
    drop(candidate.link);
  }
}

// Whoever this node asked to lead may itself follow another one, or even this one.
void Membership::on_beat(Link link, const Message& m, Time now) {
  const Node& followed = m.node;
  if (link != leader_link_ || active_) return;
  if (leader_.id && leader_.id != m.ballot.by) {  // another agent listens there by now
    suspects_.insert(leader_.id);
    leader_ = {};
  }
  peers_[link].node = m.ballot.by;
  if (!followed.id) return;
  if (followed.id == self_.id) return lead(now);
  if (followed.id == m.ballot.by) {
    leader_ = followed, leader_leads_ = true;
    return;
  }
  if (!m.sure || suspects_.count(followed.id)) return;
  drop(std::exchange(leader_link_, 0));
  join(followed, now);
}

void Membership::lead(Time now) {
  if (leader_link_) drop(std::exchange(leader_link_, 0));
  leader_ = {}, leader_leads_ = false;
  leading_ = true;
  proposal_.reset();
  changed_ = now;
  probed_ = now - kProbes;
  try_form(now);
}

void Membership::yield_to(const Node& node, Time now) {
  stop(fmt::format("{} leads a newer generation", name_of(node)), now);
  send_away(node);
  suspects_.erase(node.id);
  join(node, now);
}

void Membership::on_join(Link link, const Message& m, Time now) {
  if (learn(m.known, now)) seek(now);
  if (follows_another(m.node.id)) {
    send(link, {.kind = MessageKind::kRedirect, .node = leader_});
    return drop(link);
  }
  if (const std::string why = reason_to_refuse(m.node, now); !why.empty()) {
    outside_.note(fmt::format("{} was refused: {}", name_of(m.node), why));
    send(link, {.kind = MessageKind::kRefuse, .text = why});
    return drop(link);
  }
  Candidate& candidate = candidates_[m.node.id];
  if (candidate.link && candidate.link != link) drop(candidate.link);
  candidate = {.node = m.node, .link = link, .turn = ++turns_};
  suspects_.erase(m.node.id);
  missed_.erase(m.node.id);
  changed_ = now;
  if (proposal_ && is_member(*proposal_, m.node.id)) proposal_.reset();  // it has begun anew
  // A member that asks to join takes part no more.
  if (leading_ && active_ && is_member(committed_, m.node.id))
    halt_all(fmt::format("{} lost its connection", name_of(m.node)), now);
  if (leading_) try_form(now);
}

// Two nodes that gather meet: the one with the newer generation goes on, and of equal ones the one
// that comes first in it.
void Membership::on_lead(Link link, const Message& m, Time now) {
  if (!leading_ && leader_link_ && leader_link_ != link && leader_.id == m.node.id &&
      peers_[leader_link_].opened)
    return drop(link);  // it has been asked already
  const Ballot theirs = m.known.empty() ? Ballot{} : m.known.front().ballot;
  const Ballot ours = committed_.ballot;
  const bool moved = learn(m.known, now);
  if (!moved && theirs <= ours && follows_another(m.node.id)) {
    send(link, {.kind = MessageKind::kRedirect, .node = leader_});
    return;
  }
  if (leading_ && !moved) {
    const Generation& g = newest();
    const int mine = g.place_of(self_.id), other = g.place_of(m.node.id);
    const bool stays = theirs < ours || active_ ||
                       (theirs == ours && mine >= 0 && (other < 0 || mine < other)) ||
                       (theirs == ours && mine < 0 && other < 0 && settings_.first);
    if (stays) {
      send(link, {.kind = MessageKind::kRedirect, .node = self_});
      return;
    }
  }
  if (active_) return;  // as a node that follows a leader which it can reach
  follow(link, m.node);
  send(link, {.kind = MessageKind::kJoin, .node = self_, .known = known()});
}

std::string Membership::reason_to_refuse(const Node& node, Time now) {
  if (node.job != self_.job)
    return fmt::format("{} was started with {}, {} with {}; start all hosts alike", name_of(node),
                       node.job, name_of(self_), self_.job);
  if (!settings_.fixed() || node.slot < 0) return "";
  if (node.slot >= settings_.max_nodes)
    return fmt::format("--node-rank {}: there are {} nodes, numbered from 0", node.slot,
                       settings_.max_nodes);
  std::vector<Node> others{self_};
  for (const auto& [id, candidate] : candidates_) others.push_back(candidate.node);
  for (const Node& other : others) {
    if (other.slot != node.slot || other.id == node.id) continue;
    // An agent that listens where another did has taken the place of one that is gone.
    if (other.id != self_.id && other.addresses == node.addresses) {
      const Link old = candidates_[other.id].link;
      drop(old);
      lose_candidate(other.id, "it was started again", now);
      continue;
    }
    return fmt::format("--node-rank {} is taken by {}; give each host a number of its own",
                       node.slot, other.host);
  }
  return "";
}

// Tells nodes that may not know it that this one gathers: those of earlier generations, and
// whoever is asked first by agents that have just started.
void Membership::probe(Time now) {
  if (now < probed_ + kProbes) return;
  probed_ = now;
  std::map<NodeId, Node> whom;
  if (!active_) {
    whom = missed_;
    for (const Node& node : newest().nodes) whom[node.id] = node;
    for (const Node& node : committed_.nodes) whom[node.id] = node;
  }
  std::set<NodeId> asked{self_.id};
  for (const auto& [link, peer] : peers_) asked.insert(peer.node);
  // Another agent may listen by now where one did that is gone.
  const auto is_here = [&](const Node& node) {
    return node.addresses == self_.addresses ||
           std::ranges::any_of(candidates_, [&](const auto& candidate) {
             return candidate.second.node.addresses == node.addresses;
           });
  };
  for (const auto& [id, node] : whom) {
    if (asked.count(id) || is_here(node)) continue;
    const Link link = outside_.connect(node.addresses);
    peers_[link] = {.node = id, .heard = now, .probe = true};
  }
  if (settings_.first || settings_.rendezvous.empty() || !committed_.number) return;
  if (is_here({.addresses = settings_.rendezvous})) return;
  const Link link = outside_.connect(settings_.rendezvous);
  peers_[link] = {.heard = now, .probe = true};
}

// ---- Agreeing ----

const Generation& Membership::newest() const {
  return pending_.empty() ? committed_ : pending_.back();
}

std::vector<Generation> Membership::known() const {
  std::vector<Generation> all{committed_};
  all.insert(all.end(), pending_.begin(), pending_.end());
  return all;
}

// Takes over what another node knows. True where the generation in force here has been replaced by
// one that was committed later.
bool Membership::learn(const std::vector<Generation>& known, Time now) {
  if (known.empty()) return false;
  bool replaced = false;
  if (known.front().ballot > committed_.ballot) {
    replaced = active_;
    stop("a newer generation has begun without this node", now);
    for (const Node& node : committed_.nodes) missed_[node.id] = node;
    committed_ = known.front();
    proposal_.reset();
  }
  for (size_t i = 1; i < known.size(); ++i)
    if (std::ranges::find(pending_, known[i]) == pending_.end()) pending_.push_back(known[i]);
  std::erase_if(pending_, [&](const Generation& g) { return g.ballot <= committed_.ballot; });
  std::ranges::sort(pending_, {}, &Generation::ballot);
  return replaced;
}

void Membership::keep() {
  outside_.keep(encode({.kind = MessageKind::kBeat, .promised = promised_, .known = known()}));
}

bool Membership::has_quorum(const Generation& of, const std::vector<Node>& chosen) const {
  if (of.nodes.empty()) return true;
  size_t there = 0;
  bool first = false;
  for (const Node& node : chosen) {
    const int place = of.place_of(node.id);
    there += place >= 0;
    first = first || place == 0;
  }
  return 2 * there > of.nodes.size() || (2 * there == of.nodes.size() && first);
}

// The nodes of the next generation in the order of their ranks; none: not enough are there.
std::vector<Node> Membership::choose() const {
  std::vector<Candidate> there{{.node = self_}};
  for (const auto& [id, candidate] : candidates_) there.push_back(candidate);
  const Generation& before = newest();
  const size_t most = size_t(settings_.max_nodes);
  if (settings_.fixed()) {
    if (there.size() < most) return {};
    std::ranges::sort(there, {}, [](const Candidate& c) { return c.node.slot; });
    std::vector<Node> nodes;
    for (const Candidate& c : there) nodes.push_back(c.node);
    return nodes;
  }
  // Those that were there before go first, then those that came first.
  std::ranges::sort(there, {}, [&](const Candidate& c) {
    const int place = before.place_of(c.node.id);
    return std::pair(place < 0, place < 0 ? c.turn : place);
  });
  if (there.size() > most) there.resize(most);
  if (int(there.size()) < settings_.min_nodes) return {};
  // Those that were there keep their places, new ones take those of nodes that are gone, and the
  // last ones move where places are left.
  std::vector<std::optional<Node>> places(std::max(before.nodes.size(), there.size()));
  std::vector<Node> fresh;
  for (const Candidate& c : there) {
    const int place = before.place_of(c.node.id);
    if (place >= 0)
      places[size_t(place)] = c.node;
    else
      fresh.push_back(c.node);
  }
  size_t next = 0;
  for (auto& place : places)
    if (!place && next < fresh.size()) place = fresh[next++];
  for (size_t i = 0; i < places.size(); ++i) {
    while (!places.empty() && !places.back()) places.pop_back();
    if (i < places.size() && !places[i]) std::swap(places[i], places.back());
  }
  while (!places.empty() && !places.back()) places.pop_back();
  std::vector<Node> nodes;
  for (const auto& place : places) nodes.push_back(*place);
  return nodes;
}

void Membership::try_form(Time now) {
  if (!leading_ || active_ || proposal_ || done_) return;
  std::vector<Node> nodes = choose();
  if (nodes.empty()) return;
  const bool more_may_come = int(nodes.size()) < settings_.max_nodes;
  if (more_may_come && now < changed_ + (committed_.number ? settings_.regroup : settings_.quiet))
    return;
  if (!settings_.fixed())
    for (const Generation& g : known())
      if (!has_quorum(g, nodes)) return;
  Generation p;
  uint64_t round = std::max(promised_.round, committed_.ballot.round);
  for (const Generation& g : pending_) round = std::max(round, g.ballot.round);
  p.ballot = {round + 1, self_.id};
  p.number = committed_.number + 1;
  for (const Generation& g : pending_) p.number = std::max(p.number, g.number + 1);
  p.nodes = std::move(nodes);
  Message m{.kind = MessageKind::kPrepare, .known = known(), .proposal = p};
  for (const Generation& g : known()) m.covers.push_back(g.ballot);
  promised_ = p.ballot;
  pending_.push_back(p);
  keep();
  proposal_ = p;
  for (auto& [id, candidate] : candidates_) {
    candidate.accepted = false;
    if (is_member(p, id)) send(candidate.link, m);
  }
  try_commit(now);
}

void Membership::on_prepare(Link link, const Message& m, Time now) {
  const Generation& p = m.proposal;
  // The leader of a proposal is one of its nodes, and so is whom it asks.
  if (!is_member(p, self_.id) || !is_member(p, p.ballot.by) || p.ballot.by == self_.id) return;
  learn(m.known, now);
  const auto covered = [&](const Generation& g) {
    return !g.number || std::ranges::find(m.covers, g.ballot) != m.covers.end();
  };
  if (p.ballot <= promised_ || !std::ranges::all_of(known(), covered)) {
    send(link, {.kind = MessageKind::kReject,
                .ballot = p.ballot,
                .promised = promised_,
                .known = known()});
    if (leading_) return;
    if (!leader_link_) try_again_ = now;
    return;
  }
  promised_ = p.ballot;
  stop(fmt::format("{} gathers a new generation", name_of(p.leader())), now);
  follow(link, p.leader());
  pending_.push_back(p);
  keep();
  send(link, {.kind = MessageKind::kAccept, .ballot = p.ballot});
}

void Membership::on_accept(Link link, const Message& m, Time now) {
  if (!proposal_ || proposal_->ballot != m.ballot) return;
  const auto candidate = candidates_.find(peers_[link].node);
  if (candidate == candidates_.end() || candidate->second.link != link) return;
  candidate->second.accepted = true;
  try_commit(now);
}

void Membership::on_reject(const Message& m, Time now) {
  if (!leading_ || !proposal_ || proposal_->ballot != m.ballot) return;
  proposal_.reset();
  promised_.round = std::max(promised_.round, m.promised.round);
  learn(m.known, now);
  changed_ = now;  // tick() tries again
}

void Membership::try_commit(Time now) {
  if (!proposal_) return;
  for (const auto& [id, candidate] : candidates_)
    if (is_member(*proposal_, id) && !candidate.accepted) return;
  for (const Node& node : proposal_->nodes)
    if (node.id != self_.id && !candidates_.count(node.id)) return;
  for (const Node& node : committed_.nodes) missed_[node.id] = node;
  committed_ = *std::exchange(proposal_, std::nullopt);
  std::erase_if(pending_, [&](const Generation& g) { return g.ballot <= committed_.ballot; });
  for (const Node& node : committed_.nodes) missed_.erase(node.id);
  suspects_.clear();
  keep();
  active_ = true;
  said_ = now;
  for (const auto& [id, candidate] : candidates_)
    if (is_member(committed_, id))
      send(candidate.link, {.kind = MessageKind::kCommit, .ballot = committed_.ballot});
  outside_.begin(committed_);
}

void Membership::on_commit(Link link, const Message& m, Time now) {
  if (link != leader_link_ || m.ballot != promised_) return;
  const auto found = std::ranges::find(pending_, m.ballot, &Generation::ballot);
  if (found == pending_.end()) return;
  committed_ = *found;
  std::erase_if(pending_, [&](const Generation& g) { return g.ballot <= committed_.ballot; });
  suspects_.clear();
  keep();
  active_ = true;
  said_ = now;
  outside_.begin(committed_);
}

void Membership::on_halt(Link link, const Message& m, Time now) {
  if (link == leader_link_ && active_ && m.ballot == committed_.ballot) stop(m.text, now);
}

// ---- Payloads ----

void Membership::on_payload(Link link, const Message& m) {
  if (active_ && m.ballot == committed_.ballot && is_member(committed_, peers_[link].node))
    outside_.on_payload(peers_[link].node, m.text);
}

void Membership::tell_leader(const std::string& payload) {
  if (active_ && leader_link_)
    send(leader_link_,
         {.kind = MessageKind::kPayload, .ballot = committed_.ballot, .text = payload});
}

void Membership::tell_all(const std::string& payload) {
  for (const auto& [id, candidate] : candidates_)
    if (active_ && is_member(committed_, id))
      send(candidate.link,
           {.kind = MessageKind::kPayload, .ballot = committed_.ballot, .text = payload});
}

// ---- Time ----

void Membership::tick(Time now) {
  if (done_) return;
  std::vector<Link> silent;
  for (const auto& [link, peer] : peers_) {
    if (now > peer.heard + settings_.node_timeout)
      silent.push_back(link);
    else if (peer.opened && !peer.probe)
      send(link, {.kind = MessageKind::kBeat,
                  .ballot = {0, self_.id},
                  .node = leading_ ? self_ : leader_,
                  .sure = leading_ || leader_leads_});
  }
  for (Link link : silent) {
    outside_.close(link);
    lost(link, fmt::format("no word for {:.3g} s", double(settings_.node_timeout.count()) / 1000),
         now);
  }
  if (leading_) {
    try_form(now);
    probe(now);
  } else if (!leader_link_ && now >= try_again_) {
    seek(now);
  } else if (leader_link_ && !leader_leads_ && now > asked_ + settings_.node_timeout) {
    drop(leader_link_);
    lose_leader("it leads nobody, and follows nobody that leads", now);
  }
  if (!active_) wait_on(now);
}

std::string Membership::whom_it_waits_for() const {
  if (!leading_) {
    std::string where;
    for (const Address& a : settings_.rendezvous)
      where += (where.empty() ? "" : ", ") + to_string(a);
    return fmt::format("no leader has been found, asking first at {}{}", where,
                       last_loss_.empty() ? "" : " (" + last_loss_ + ")");
  }
  if (!settings_.fixed())
    return fmt::format("{} nodes are here, at least {} are needed", candidates_.size() + 1,
                       settings_.min_nodes);
  std::set<int> slots{self_.slot};
  for (const auto& [id, candidate] : candidates_) slots.insert(candidate.node.slot);
  std::string absent;
  for (int slot = 0; slot < settings_.max_nodes; ++slot)
    if (!slots.count(slot)) absent += fmt::format("{}{}", absent.empty() ? "" : ", ", slot);
  return fmt::format("{} of {} nodes are here; absent: --node-rank {}", candidates_.size() + 1,
                     settings_.max_nodes, absent);
}

void Membership::dismiss(const std::string& why) {
  for (const auto& [id, candidate] : candidates_)
    send(candidate.link, {.kind = MessageKind::kRefuse, .text = why});
  done_ = true;
}

// Says who is waited for, and gives up in the end.
void Membership::wait_on(Time now) {
  const Time apart = now - apart_since_;
  // A node that has a leader waits for its word.
  if (apart > settings_.join_timeout + (leader_link_ ? settings_.node_timeout : Time{0})) {
    const std::string why = fmt::format("after {:.3g} s (--join-timeout) {}",
                                        double(apart.count()) / 1000, whom_it_waits_for());
    dismiss(why);
    return outside_.give_up(why);
  }
  if (now - said_ < (said_ == apart_since_ ? kFirstNote : kNotes)) return;
  said_ = now;
  outside_.note(fmt::format("waiting: {}", whom_it_waits_for()));
}

}  // namespace tessera::launcher
