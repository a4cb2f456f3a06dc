// SPDX-License-Identifier: Apache-2.0
#include "guest/relay.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>

#include "vmm/port_sync.h"

namespace dsec::guest {
namespace {

const std::string kSecret = "0123456789abcdef";

std::pair<os::UniqueFd, os::UniqueFd> Pair() {
  int ends[2];
  EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends), 0);
  return {os::UniqueFd(ends[0]), os::UniqueFd(ends[1])};
}

void Send(int fd, const std::string& text) {
  ASSERT_EQ(::write(fd, text.data(), text.size()), static_cast<ssize_t>(text.size()));
}

std::string Take(int fd) {
  std::array<char, 4096> buffer;
  std::string all;
  while (true) {
    const ssize_t size = ::read(fd, buffer.data(), buffer.size());
    if (size <= 0) return all;
    all.append(buffer.data(), static_cast<size_t>(size));
  }
}

// The port and the agent are sockets here; everything else is the relay's own.
class RelayTest : public ::testing::Test {
 protected:
  RelayTest() {
    std::tie(host_, port_) = Pair();
    relay_ = std::make_unique<Relay>(port_.get(), kSecret, [this]() -> Result<os::UniqueFd> {
      auto [here, there] = Pair();
      agents_.push_back(std::move(there));
      return std::move(here);
    });
  }
  void Sync(const std::string& nonce) { Send(host_.get(), kSecret + nonce); }

  os::UniqueFd host_, port_;
  std::vector<os::UniqueFd> agents_;
  std::unique_ptr<Relay> relay_;
};

const std::string kFirst(vmm::kNonceBytes, '1');
const std::string kSecond(vmm::kNonceBytes, '2');

TEST_F(RelayTest, PassesBytesBothWaysAfterTheSync) {
  Send(host_.get(), "left from before");
  Sync(kFirst);
  Send(host_.get(), "request");
  ASSERT_TRUE(relay_->Pump().ok());
  ASSERT_EQ(agents_.size(), 1u);
  EXPECT_EQ(Take(agents_[0].get()), "request");
  EXPECT_EQ(Take(host_.get()), vmm::SyncAnswer(kSecret, kFirst));
  Send(agents_[0].get(), "reply");
  ASSERT_TRUE(relay_->Pump().ok());
  EXPECT_EQ(Take(host_.get()), "reply");
}

TEST_F(RelayTest, ASecondHostGetsAConnectionOfItsOwn) {
  Sync(kFirst);
  // Cut in the middle of a message, and in the middle of what looks like a secret.
  Send(host_.get(), "half a mess" + kSecret.substr(0, 7));
  ASSERT_TRUE(relay_->Pump().ok());
  Send(agents_[0].get(), "for the first");
  Sync(kSecond);
  Send(host_.get(), "second");
  ASSERT_TRUE(relay_->Pump().ok());
  ASSERT_EQ(agents_.size(), 2u);
  // What might have been a secret was still looked at when the connection ended.
  EXPECT_EQ(Take(agents_[0].get()), "half a mess");
  char byte;
  EXPECT_EQ(::read(agents_[0].get(), &byte, 1), 0);  // closed
  EXPECT_EQ(Take(agents_[1].get()), "second");
  const std::string told = Take(host_.get());
  const std::string answer = vmm::SyncAnswer(kSecret, kSecond);
  ASSERT_GE(told.size(), answer.size());
  EXPECT_EQ(told.substr(told.size() - answer.size()),
            answer);  // and nothing of the first's after it
}

TEST(SyncFinder, FindsASecretInPiecesOfAnySize) {
  const std::string almost = kSecret.substr(0, 15) + "x" + kSecret.substr(0, 3);
  const std::string all = "data" + almost + kSecret + kFirst + "rest";
  for (size_t piece = 1; piece <= all.size(); ++piece) {
    SyncFinder finder(kSecret);
    std::string data, nonce, after;
    for (size_t at = 0; at < all.size(); at += piece) {
      std::string_view bytes = std::string_view(all).substr(at, piece);
      while (!bytes.empty()) {
        auto step = finder.Feed(bytes);
        (nonce.empty() ? data : after) += step.data;
        if (step.synced) nonce = step.nonce;
        bytes = step.rest;
      }
    }
    EXPECT_EQ(data, "data" + almost) << piece;
    EXPECT_EQ(nonce, kFirst) << piece;
    EXPECT_EQ(after, "rest") << piece;
  }
}

}  // namespace
}  // namespace dsec::guest
