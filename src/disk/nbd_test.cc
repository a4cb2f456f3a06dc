// SPDX-License-Identifier: Apache-2.0
// The NBD server against a client by hand with bad manners, and against qemu-img and qemu-io.
#include "disk/nbd.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstdio>

#include "disk/image_io.h"
#include "disk/testing/model.h"
#include "os/file.h"

namespace dsec::disk {
namespace {

using testing::Content;
using testing::kBootA;
using testing::OptionsOf;
using testing::RandomBytes;

class NbdTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_TRUE(Disk::Create(dir_.path() + "/disk", kBytes, {}, OptionsOf(kBootA)).ok());
    disk_ = Disk::Open(dir_.path() + "/disk", OptionsOf(kBootA)).value();
    server_ = NbdServer::Start(socket_, NbdTargetOf(disk_)).value();
  }
  os::UniqueFd Connect() const {
    os::UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    socket_.copy(address.sun_path, socket_.size());
    EXPECT_EQ(::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
    return fd;
  }
  static void Send(int fd, const std::string& bytes) {
    ASSERT_EQ(::send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(bytes.size()));
  }
  static std::string Receive(int fd, size_t size) {
    std::string bytes(size, '\0');
    const ssize_t got = ::recv(fd, bytes.data(), size, MSG_WAITALL);
    bytes.resize(got < 0 ? 0 : static_cast<size_t>(got));
    return bytes;
  }
  template <typename T>
  static std::string Big(T value) {
    std::string bytes(reinterpret_cast<const char*>(&value), sizeof value);
    std::ranges::reverse(bytes);
    return bytes;
  }
  static std::string Option(uint32_t option, const std::string& data) {
    return "IHAVEOPT" + Big(option) + Big(static_cast<uint32_t>(data.size())) + data;
  }
  static std::string Request(uint16_t flags, uint16_t type, uint64_t offset, uint32_t length) {
    return Big(uint32_t{0x25609513}) + Big(flags) + Big(type) + Big(uint64_t{7}) + Big(offset) +
           Big(length);
  }
  // In transmission.
  os::UniqueFd Begin() const {
    auto fd = Connect();
    EXPECT_EQ(Receive(fd.get(), 18).substr(0, 16), "NBDMAGICIHAVEOPT");
    Send(fd.get(), Big(uint32_t{3}) + Option(1, "any"));
    EXPECT_EQ(Receive(fd.get(), 10).substr(0, 8), Big(uint64_t{kBytes}));
    return fd;
  }
  uint32_t Answer(int fd) {
    const std::string reply = Receive(fd, 16);
    EXPECT_EQ(reply.size(), 16u);
    EXPECT_EQ(reply.substr(0, 4), Big(uint32_t{0x67446698}));
    return reply.size() < 16 ? UINT32_MAX : static_cast<uint8_t>(reply[7]);
  }
  int Run(const std::string& command) const {
    return std::system((command + " > " + dir_.path() + "/said 2>&1").c_str());
  }
  std::string Said() const { return os::ReadFile(dir_.fd(), "said", 1 << 20).value(); }
  std::string Url() const { return "nbd+unix:///?socket=" + socket_; }

  static constexpr uint64_t kBytes = 64 << 20;
  os::TempDir dir_ = os::TempDir::Create("dsec-disk-").value();
  const std::string socket_ = dir_.path() + "/nbd.sock";
  std::shared_ptr<Disk> disk_;
  std::unique_ptr<NbdServer> server_;
};

TEST_F(NbdTest, Requests_AreAnsweredWithinTheirBounds) {
  const auto fd = Begin();
  Send(fd.get(), Request(1, 1, 4096, 512) + std::string(512, 'w'));
  EXPECT_EQ(Answer(fd.get()), 0u);
  Send(fd.get(), Request(0, 0, 4095, 3));
  EXPECT_EQ(Answer(fd.get()), 0u);
  EXPECT_EQ(Receive(fd.get(), 3), std::string("\0ww", 3));
  struct Bad {
    std::string request;
    uint32_t error;
  };
  for (const Bad& bad :
       {Bad{Request(0, 0, kBytes, 512), 22}, Bad{Request(0, 0, kBytes - 511, 512), 22},
        Bad{Request(0, 0, UINT64_MAX, 512), 22}, Bad{Request(0, 0, 0, (32 << 20) + 1), 22},
        Bad{Request(0, 0, 0, UINT32_MAX), 22}, Bad{Request(0, 4, 1, UINT32_MAX), 22},
        Bad{Request(0, 6, kBytes, 1), 28}, Bad{Request(0, 1, kBytes, 4) + "abcd", 28},
        Bad{Request(0, 5, 0, 512), 22}, Bad{Request(0, 99, 0, 512), 22},
        Bad{Request(0x8000, 0, 0, 512), 22}, Bad{Request(2, 0, 0, 512), 22},
        Bad{Request(0, 0, 0, 0), 22}}) {
    Send(fd.get(), bad.request);
    EXPECT_EQ(Answer(fd.get()), bad.error) << ::testing::PrintToString(bad.request.substr(0, 28));
  }
  // All of the disk by one trim and zeroes, as the protocol allows.
  Send(fd.get(), Request(0, 6, 0, kBytes) + Request(0, 3, 0, 0) + Request(0, 0, 4096, 1));
  EXPECT_EQ(Answer(fd.get()), 0u);
  EXPECT_EQ(Answer(fd.get()), 0u);
  EXPECT_EQ(Answer(fd.get()), 0u);
  EXPECT_EQ(Receive(fd.get(), 1), std::string(1, '\0'));
  Send(fd.get(), Request(0, 2, 0, 0));
  EXPECT_EQ(Receive(fd.get(), 1), "");
}

TEST_F(NbdTest, BadManners_EndTheConnectionAndNothingElse) {
  const auto good = Begin();
  for (const std::string& hello :
       {Big(uint32_t{0}), Big(uint32_t{0xffff}), Big(uint32_t{3}) + std::string(16, 'x'),
        Big(uint32_t{3}) + "IHAVEOPT" + Big(uint32_t{7}) + Big(UINT32_MAX)}) {
    const auto fd = Connect();
    Receive(fd.get(), 18);
    Send(fd.get(), hello);
    ::shutdown(fd.get(), SHUT_WR);
    EXPECT_LT(Receive(fd.get(), 1000).size(), 100u);  // a refusal at most, then the end
  }
  {
    const auto fd = Begin();
    Send(fd.get(), Request(0, 1, 0, UINT32_MAX));  // its data cannot be skipped
    EXPECT_EQ(Receive(fd.get(), 1), "");
  }
  {
    const auto fd = Begin();
    Send(fd.get(), std::string(28, 'm'));
    EXPECT_EQ(Receive(fd.get(), 1), "");
  }
  {  // options for ever
    const auto fd = Connect();
    Receive(fd.get(), 18);
    Send(fd.get(), Big(uint32_t{3}));
    for (int i = 0; i < kNbdMaxOptions; ++i) {
      Send(fd.get(), Option(77, "x"));
      EXPECT_EQ(Receive(fd.get(), 20).substr(12, 4), Big(uint32_t{0x80000001}));
    }
    EXPECT_EQ(Receive(fd.get(), 1), "");
  }
  Send(good.get(), Request(0, 3, 0, 0));
  EXPECT_EQ(Answer(good.get()), 0u);
}

TEST_F(NbdTest, ManyConnections_AreBounded) {
  std::vector<os::UniqueFd> all;
  for (size_t i = 0; i < NbdServer::kMaxConnections; ++i) all.push_back(Begin());
  const auto more = Connect();
  EXPECT_EQ(Receive(more.get(), 1), "");
  Send(all.back().get(), Request(0, 3, 0, 0));
  EXPECT_EQ(Answer(all.back().get()), 0u);
}

TEST_F(NbdTest, QemuTools_WriteCompareAndAgree) {
  Rng rng(3);
  const auto content = RandomBytes(rng, 3 << 20);
  ASSERT_TRUE(os::CreateFile(dir_.fd(), "image",
                             {reinterpret_cast<const char*>(content.data()), content.size()}, 0600)
                  .ok());
  ASSERT_EQ(::truncate((dir_.path() + "/image").c_str(), kBytes), 0);
  const std::string image = dir_.path() + "/image";
  ASSERT_EQ(Run("qemu-img convert -n -f raw -O raw " + image + " '" + Url() + "'"), 0) << Said();
  EXPECT_EQ(Run("qemu-img compare -f raw -F raw " + image + " '" + Url() + "'"), 0) << Said();
  auto now = Content(*disk_);
  now.resize(content.size());
  EXPECT_EQ(now, content);
  const std::string io =
      "-c 'write -P 0xab 1000448 3000320' -c 'write -f -P 0xcd 512 512' "
      "-c 'discard 0 65536' -c 'write -z 2M 1M' -c 'aio_write -P 1 8M 4M' -c 'aio_write -P 2 16M "
      "4M' "
      "-c aio_flush -c flush -c 'read -P 0xab 1000448 1000' ";
  ASSERT_EQ(Run("qemu-io -f raw " + io + "'" + Url() + "'"), 0) << Said();
  EXPECT_EQ(Said().find("failed"), std::string::npos) << Said();
  ASSERT_EQ(Run("qemu-io -f raw " + io + image), 0) << Said();
  // A discard of a file may leave what was there; ours reads as zero.
  ASSERT_EQ(Run("qemu-io -f raw -c 'write -z 0 65536' " + image), 0) << Said();
  EXPECT_EQ(Run("qemu-img compare -f raw -F raw " + image + " '" + Url() + "'"), 0) << Said();
  // A snapshot under it, then the layer as a qcow2 image and back.
  const auto sealed = disk_->Seal().value();
  EXPECT_EQ(Run("qemu-img compare -f raw -F raw " + image + " '" + Url() + "'"), 0) << Said();
  ASSERT_EQ(Run("qemu-img convert -f raw -O qcow2 " + image + " " + image + ".qcow2"), 0) << Said();
  const auto imported = ImportQcow2(image + ".qcow2", dir_.path() + "/q.lsmt", {}, {});
  ASSERT_TRUE(imported.ok()) << imported.error().ToString();
  const std::vector<std::shared_ptr<const Layer>> chain = {
      OpenLayerAt(dir_.fd(), "q.lsmt").value()};
  ASSERT_TRUE(ExportRaw(chain, dir_.path() + "/back", {}).ok());
  EXPECT_EQ(Run("qemu-img compare -f raw -F raw " + image + " " + dir_.path() + "/back"), 0)
      << Said();
  const std::vector<std::shared_ptr<const Layer>> same = {
      OpenLayerAt(AT_FDCWD, sealed.path).value()};
  ASSERT_TRUE(ExportRaw(same, dir_.path() + "/sealed", {}).ok());
  EXPECT_EQ(Run("qemu-img compare -f raw -F raw " + image + " " + dir_.path() + "/sealed"), 0)
      << Said();
}

TEST_F(NbdTest, ImageThatNamesAnotherFile_IsRefused) {
  const std::string image = dir_.path() + "/x.qcow2";
  ASSERT_EQ(Run("qemu-img create -f qcow2 -b /etc/passwd -F raw " + image), 0) << Said();
  EXPECT_EQ(ImportQcow2(image, dir_.path() + "/x.lsmt", {}, {}).error().reason(),
            "disk.image_refers");
  ASSERT_EQ(Run("qemu-img create -f qcow2 -o data_file=" + dir_.path() + "/data " + image + " 1M"),
            0)
      << Said();
  EXPECT_EQ(ImportQcow2(image, dir_.path() + "/x.lsmt", {}, {}).error().reason(),
            "disk.image_refers");
  EXPECT_EQ(ImportQcow2("/etc/passwd", dir_.path() + "/x.lsmt", {}, {}).error().reason(),
            "disk.bad_image");
  EXPECT_NE(::access((dir_.path() + "/x.lsmt").c_str(), F_OK), 0);
}

}  // namespace
}  // namespace dsec::disk
