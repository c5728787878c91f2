// Unexpected connections to every port on which a rank listens while it joins: they stay silent,
// send something wrong, or are reset, and must not disturb any rank.
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <atomic>
#include <deque>
#include <filesystem>
#include <fstream>
#include <optional>
#include <set>
#include <sstream>
#include <thread>

#include "collectives/gloo/acceptor.h"
#include "tests/collectives/processes.h"
#include "tests/collectives/verbs.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using detail::Acceptor;
using detail::Caller;
using detail::Digest;
using detail::Socket;
using test::RankProcesses;
using test::RankResult;

sockaddr_in here(int port) {
  sockaddr_in a{};
  a.sin_family = AF_INET, a.sin_addr.s_addr = htonl(INADDR_LOOPBACK),
  a.sin_port = htons(uint16_t(port));
  return a;
}

Socket connect_to(const sockaddr_in& address) {
  Socket s(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (::connect(s.fd(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0)
    return {};
  return s;
}

void say(const Socket& s, std::string_view text) {
  EXPECT_GE(::send(s.fd(), text.data(), text.size(), MSG_NOSIGNAL), -1);
}

void reset(Socket s) {
  const linger now{1, 0};
  ::setsockopt(s.fd(), SOL_SOCKET, SO_LINGER, &now, sizeof now);
}

/// Reads until the other end closes, at most `seconds`; nullopt if it does not.
std::optional<std::string> rest_of(const Socket& s, double seconds) {
  std::string text;
  for (;;) {
    pollfd ready{s.fd(), POLLIN, 0};
    if (::poll(&ready, 1, int(seconds * 1000)) == 0) return std::nullopt;
    char bytes[64];
    const ssize_t n = ::recv(s.fd(), bytes, sizeof bytes, 0);
    if (n <= 0) return text;
    text.append(bytes, size_t(n));
  }
}

Digest digest(const std::string& text) { return detail::sha256(text); }
std::string text_of(const Digest& d) { return {d.begin(), d.end()}; }

std::vector<Caller> two_callers() {
  std::vector<Caller> callers;
  for (const char* name : {"a", "b"})
    callers.push_back(
        {digest(std::string("token ") + name), digest(std::string("answer ") + name)});
  return callers;
}

TEST(Acceptor, LetsInWhoShowsATokenAndAnswers) {
  Acceptor acceptor("127.0.0.1", two_callers(), std::chrono::hours(1));
  EXPECT_EQ(acceptor.wait(Millis(0)), 0);
  const Socket a = connect_to(here(acceptor.port())), b = connect_to(here(acceptor.port()));
  const std::string token = text_of(digest("token b"));
  say(b, token.substr(0, 10));
  say(a, text_of(digest("token a")) + "and what follows");
  std::array<char, 32> answer;
  ASSERT_EQ(::recv(a.fd(), answer.data(), 32, MSG_WAITALL), 32);
  EXPECT_EQ(std::string(answer.data(), 32), text_of(digest("answer a")));
  EXPECT_EQ(acceptor.wait(Millis(0)), 1);
  say(b, token.substr(10) + "and more than what was missing of it");
  ASSERT_EQ(acceptor.wait(Millis(30'000)), -1);
  std::vector<Caller> callers = acceptor.take();
  char next[64];
  for (const auto& [caller, follows] :
       {std::pair{0, "and what follows"}, {1, "and more than what was missing of it"}}) {
    const ssize_t n = ::recv(callers[size_t(caller)].socket.fd(), next, sizeof next, 0);
    EXPECT_EQ(std::string(next, size_t(std::max<ssize_t>(n, 0))), follows);
  }
  say(callers[1].socket, "x");
  EXPECT_EQ(::recv(b.fd(), answer.data(), 32, MSG_WAITALL), 32);
  EXPECT_EQ(::recv(b.fd(), answer.data(), 1, 0), 1);
}

// A connection that sends something wrong is dropped at once; one that sends too little has an
// hour.
TEST(Acceptor, DropsWhatHasNoToken) {
  Acceptor acceptor("127.0.0.1", two_callers(), std::chrono::hours(1));
  auto connect = [&] { return connect_to(here(acceptor.port())); };
  const Socket silent = connect(), half = connect();
  say(half, text_of(digest("token a")).substr(0, 16));
  for (const std::string& text :
       {text_of(digest("another token")), text_of(digest("answer a")), std::string(32, '\0'),
        std::string("GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"), std::string(1 << 16, 'x')}) {
    const Socket s = connect();
    say(s, text);
    EXPECT_EQ(rest_of(s, 30), "") << text.substr(0, 40);
  }
  for (int i = 0; i < 20; ++i) reset(connect());
  const Socket a = connect(), b = connect(), again = connect();
  say(a, text_of(digest("token a")));
  EXPECT_EQ(rest_of(a, 0.2), std::nullopt);
  say(again, text_of(digest("token a")));  // it has come already
  EXPECT_EQ(rest_of(again, 30), "");
  EXPECT_EQ(rest_of(silent, 0), std::nullopt);
  EXPECT_EQ(rest_of(half, 0), std::nullopt);
  say(b, text_of(digest("token b")));
  EXPECT_EQ(acceptor.wait(Millis(30'000)), -1);
}

TEST(Acceptor, DropsWhoShowsNoTokenInTime) {
  constexpr Millis kTime{300};
  Acceptor acceptor("127.0.0.1", two_callers(), kTime);
  const auto start = std::chrono::steady_clock::now();
  const Socket silent = connect_to(here(acceptor.port())), half = connect_to(here(acceptor.port()));
  say(half, text_of(digest("token a")).substr(0, 16));
  EXPECT_EQ(rest_of(silent, 30), "");
  EXPECT_EQ(rest_of(half, 30), "");
  EXPECT_GE(std::chrono::steady_clock::now() - start, kTime);
}

TEST(Acceptor, TheOldestStrangerMakesRoom) {
  Acceptor acceptor("127.0.0.1", two_callers(), std::chrono::hours(1));
  std::vector<Socket> strangers;
  for (size_t i = 0; i < Acceptor::kPlaces + 1; ++i) {
    strangers.push_back(connect_to(here(acceptor.port())));
    ASSERT_TRUE(strangers.back()) << i;
  }
  EXPECT_EQ(rest_of(strangers[0], 30), "");
  for (const char* name : {"token a", "token b"}) {
    strangers.push_back(connect_to(here(acceptor.port())));
    say(strangers.back(), text_of(digest(name)));
  }
  EXPECT_EQ(acceptor.wait(Millis(30'000)), -1);
}

/// Returns the addresses on which a process listens.
std::vector<sockaddr_in> listening(int pid) {
  std::set<std::string> sockets;
  std::error_code gone;
  for (const auto& fd : fs::directory_iterator(fmt::format("/proc/{}/fd", pid), gone))
    sockets.insert(fs::read_symlink(fd.path(), gone).string());
  std::vector<sockaddr_in> found;
  std::ifstream table("/proc/net/tcp");
  std::string line;
  while (std::getline(table, line)) {
    std::istringstream fields(line);
    std::string slot, local, remote, state, skip, inode;
    fields >> slot >> local >> remote >> state >> skip >> skip >> skip >> skip >> skip >> inode;
    if (state != "0A" || !sockets.contains("socket:[" + inode + "]")) continue;
    sockaddr_in a = here(std::stoi(local.substr(local.find(':') + 1), nullptr, 16));
    a.sin_addr.s_addr = uint32_t(std::stoul(local, nullptr, 16));
    found.push_back(a);
  }
  return found;
}

/// Strangers that connect to every such address of the ranks until the end of the scope.
class Strangers {
 public:
  /// Sets "test/visited" in `store` after the first connections; `first`: what the first one does.
  Strangers(std::vector<int> pids, std::shared_ptr<Store> store, int first)
      : first_(first), thread_([this, pids = std::move(pids), store = std::move(store)] {
          while (!stop_) {
            for (int pid : pids)
              for (const sockaddr_in& address : listening(pid)) visit(address);
            if (count_ >= 4) store->set("test/visited", "");
          }
        }) {}
  ~Strangers() {
    stop_ = true;
    thread_.join();
  }

 private:
  void visit(const sockaddr_in& address) {
    Socket s = connect_to(address);
    if (!s) return;
    switch ((first_ + count_++) % 5) {
      case 0: break;
      case 1: say(s, std::string(16, 'x')); break;
      case 2: say(s, std::string(32, 'x')); break;
      case 3: say(s, std::string(4096, '\0')); break;
      case 4: return reset(std::move(s));
    }
    open_.push_back(std::move(s));
    if (open_.size() > 64) open_.pop_front();
  }

  std::deque<Socket> open_;
  std::atomic<bool> stop_ = false;
  const int first_;
  int count_ = 0;  // that the system let in
  std::thread thread_;
};

TEST(Strangers, DisturbNoRankThatJoins) {
  if (!test::kHaveGloo) GTEST_SKIP() << "Gloo is left out of this build";
  constexpr int kRanks = 3;
  for (int job = 0; job < 8; ++job) {
    RankProcesses ranks(kRanks, "meet", {{"TESSERA_BACKEND", "gloo"}});
    Strangers strangers({ranks.pid(0), ranks.pid(1), ranks.pid(2)}, ranks.store(), job);
    for (int r = 0; r < kRanks; ++r) {
      const RankResult result = ranks.wait(r, 60);
      EXPECT_EQ(result.status, 0) << "job " << job << ", rank " << r << ":\n" << result.output;
    }
  }
}

}  // namespace
}  // namespace tessera
