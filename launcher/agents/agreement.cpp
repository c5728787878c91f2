// How a generation comes about: what a node knows of earlier ones, whom a leader chooses, and the
// three messages by which a proposal becomes a generation. Finding a leader is in membership.cpp.
#include <fmt/core.h>

#include <algorithm>
#include <utility>

#include "launcher/agents/membership.h"

namespace tessera::launcher {

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
  std::ranges::sort(there, {},
                    [&](const Candidate& c) { return std::pair(!before.has(c.node.id), c.turn); });
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
  p.run = committed_.number ? committed_.run : settings_.run;
  p.restarts = committed_.number ? committed_.restarts + 1 : 0;
  p.nodes = std::move(nodes);
  for (Node& node : p.nodes) node.job.clear();
  Message m{.kind = MessageKind::kPrepare, .known = known(), .proposal = p};
  for (const Generation& g : known()) m.covers.push_back(g.ballot);
  promised_ = p.ballot;
  pending_.push_back(p);
  keep();
  proposal_ = p;
  for (auto& [id, candidate] : candidates_) {
    candidate.accepted = false;
    if (p.has(id)) send(candidate.link, m);
  }
  try_commit(now);
}

void Membership::on_prepare(Link link, const Message& m, Time now) {
  const Generation& p = m.proposal;
  // The leader of a proposal is one of its nodes, and so is whom it asks.
  if (!p.has(self_.id) || !p.has(p.ballot.by) || p.ballot.by == self_.id) return;
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
    if (proposal_->has(id) && !candidate.accepted) return;
  for (const Node& node : proposal_->nodes)
    if (node.id != self_.id && !candidates_.count(node.id)) return;
  const Generation generation = *std::exchange(proposal_, std::nullopt);
  for (const auto& [id, candidate] : candidates_)
    if (generation.has(id))
      send(candidate.link, {.kind = MessageKind::kCommit, .ballot = generation.ballot});
  take_force(generation, now);
}

void Membership::on_commit(Link link, const Message& m, Time now) {
  if (link != leader_link_ || m.ballot != promised_) return;
  const auto found = std::ranges::find(pending_, m.ballot, &Generation::ballot);
  if (found == pending_.end()) return;
  take_force(*found, now);
}

void Membership::take_force(Generation generation, Time now) {
  for (const Node& node : committed_.nodes) missed_[node.id] = node;
  committed_ = std::move(generation);
  for (const Node& node : committed_.nodes) missed_.erase(node.id);
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

}  // namespace tessera::launcher
