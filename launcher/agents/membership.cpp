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

// Without what only kJoin says of a node.
Node brief(Node node) {
  node.job.clear();
  return node;
}

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
    Message m{.kind = MessageKind::kLead, .node = brief(self_), .known = known()};
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
  if (proposal_ && proposal_->has(id)) proposal_.reset();
  if (leading_ && active_ && committed_.has(id))
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
    if (committed_.has(id))
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
      stop(m.text, now);
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
  if (settings_.fixed() && is_taken(m.node)) return drop(link);  // it will ask again
  came_first_.erase(m.node.id);
  Candidate& candidate = candidates_[m.node.id];
  if (candidate.link && candidate.link != link) drop(candidate.link);
  candidate = {.node = m.node, .link = link, .turn = ++turns_};
  suspects_.erase(m.node.id);
  missed_.erase(m.node.id);
  changed_ = now;
  if (proposal_ && proposal_->has(m.node.id)) proposal_.reset();  // it has begun anew
  // A member that asks to join takes part no more.
  if (leading_ && active_ && committed_.has(m.node.id))
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
      send(link, {.kind = MessageKind::kRedirect, .node = brief(self_)});
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
  const Time first = came_first_.try_emplace(node.id, now).first->second;
  const auto taken_by = [&](const Node& other) {
    return fmt::format("--node-rank {} is taken by {}; give each host a number of its own",
                       node.slot, other.host);
  };
  if (node.slot == self_.slot) return taken_by(self_);
  // Another agent of the same number is most likely gone, and its end is not known here yet.
  const Time enough = 3 * settings_.heartbeat;
  for (const auto& [id, candidate] : candidates_) {
    if (candidate.node.slot != node.slot || id == node.id) continue;
    const Time heard = peers_[candidate.link].heard;
    if (heard > first + enough) return taken_by(candidate.node);
    if (heard + enough < now) {
      drop(candidate.link);
      lose_candidate(NodeId(id), "another agent of its number has come", now);
      break;
    }
  }
  return "";
}

bool Membership::is_taken(const Node& node) const {
  return std::ranges::any_of(candidates_, [&](const auto& candidate) {
    return candidate.second.node.slot == node.slot && candidate.first != node.id;
  });
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

// ---- Payloads ----

void Membership::on_payload(Link link, const Message& m) {
  if (active_ && m.ballot == committed_.ballot && committed_.has(peers_[link].node))
    outside_.on_payload(peers_[link].node, m.text);
}

void Membership::tell_leader(const std::string& payload) {
  if (active_ && leader_link_)
    send(leader_link_,
         {.kind = MessageKind::kPayload, .ballot = committed_.ballot, .text = payload});
}

void Membership::tell_all(const std::string& payload) {
  for (const auto& [id, candidate] : candidates_)
    if (active_ && committed_.has(id))
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
                  .node = brief(leading_ ? self_ : leader_),
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
    return fmt::format("nobody leads yet; node 0 is asked at {}{}", where,
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

// A node to which nothing happens says whom it waits for, and gives up in the end.
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
