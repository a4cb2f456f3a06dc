// SPDX-License-Identifier: Apache-2.0
// disk_bench DIR PROGRAM: random 4 KiB reads of a disk through dsec-diskfs against a plain file of
// the same file system (both from the page cache), the time of a seal, and the bytes that a partial
// read fetches. A JSON line a figure, as bench/README.md has them.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <nlohmann/json.hpp>

#include "base/rng.h"
#include "disk/client.h"
#include "disk/disk.h"
#include "disk/image_io.h"
#include "disk/published.h"
#include "os/file.h"

namespace {

using namespace dsec;
using namespace dsec::disk;
using Millis = std::chrono::duration<double, std::milli>;

constexpr uint64_t kBytes = 256 << 20;
constexpr int kReads = 4000;

void Print(const char* figure, double value, const char* unit, nlohmann::json detail) {
  std::printf(
      "%s\n",
      nlohmann::json{
          {"figure", figure}, {"value", value}, {"unit", unit}, {"detail", std::move(detail)}}
          .dump()
          .c_str());
}

// Microseconds of one read, the median.
double MedianRead(int fd, void* block) {
  Rng rng(1);
  std::vector<double> all;
  for (int i = 0; i < kReads; ++i) {
    const auto at = static_cast<off_t>(rng.Below(kBytes / 4096) * 4096);
    const auto begun = std::chrono::steady_clock::now();
    if (::pread(fd, block, 4096, at) != 4096) std::abort();
    all.push_back(Millis(std::chrono::steady_clock::now() - begun).count() * 1000);
  }
  std::ranges::sort(all);
  return all[all.size() / 2];
}

Result<void> Run(const std::string& dir, const std::string& program) {
  void* block = nullptr;
  if (::posix_memalign(&block, 4096, 1 << 20) != 0) std::abort();
  std::fill_n(static_cast<uint8_t*>(block), 1 << 20, uint8_t{7});
  const std::string plain = dir + "/plain", disk = dir + "/disk";
  DSEC_TRY_VOID(Disk::Create(disk, kBytes, {}, {}));
  ClientOptions options;
  options.settings.dir = dir + "/diskfs";
  options.settings.root = dir + "/root";
  options.settings.cache_dir = dir + "/cache";
  options.settings.cache_bytes = kBytes;
  options.run_dir = dir + "/run";
  options.program = program;
  DSEC_TRY(const auto client, Client::Start(options));
  DSEC_TRY(const auto opened, client->Open(disk));
  DSEC_TRY(const auto file, client->OpenFile(opened.node, O_RDWR | O_DIRECT));
  DSEC_TRY(const auto base, os::OpenAt(AT_FDCWD, plain.c_str(), O_RDWR | O_CREAT | O_DIRECT, 0600));
  for (const int fd : {file.get(), base.get()}) {
    for (uint64_t at = 0; at < kBytes; at += 1 << 20)
      if (::pwrite(fd, block, 1 << 20, static_cast<off_t>(at)) != 1 << 20) std::abort();
    if (::fsync(fd) != 0) std::abort();
  }
  // The daemon reads its files through the page cache, so the fair baseline does, too.
  DSEC_TRY(const auto warm, os::OpenAt(AT_FDCWD, plain.c_str(), O_RDONLY));
  for (uint64_t at = 0; at < kBytes; at += 1 << 20)
    if (::pread(warm.get(), block, 1 << 20, static_cast<off_t>(at)) != 1 << 20) std::abort();
  const double plain_us = MedianRead(warm.get(), block);
  const double device_us = MedianRead(base.get(), block);
  const double fuse_us = MedianRead(file.get(), block);
  Print("disk_fuse_read", fuse_us, "us",
        {{"baseline_us", plain_us}, {"ratio", fuse_us / plain_us}, {"o_direct_us", device_us}});
  std::vector<double> seals;
  for (int i = 0; i < 11; ++i) {
    if (::pwrite(file.get(), block, 1 << 20, static_cast<off_t>(i) << 20) != 1 << 20) std::abort();
    DSEC_TRY(const auto sealed, client->Seal(opened.node));
    seals.push_back(sealed.took_ms);
  }
  std::ranges::sort(seals);
  Print("disk_seal", seals[seals.size() / 2], "ms", {{"written_mib", 1}, {"layers", seals.size()}});
  DSEC_TRY_VOID(ImportRaw(plain, dir + "/plain.lsmt", {}, {}));
  DSEC_TRY(const std::string hex, Publish(dir + "/root", dir + "/plain.lsmt", {}));
  PublishedStore::Options store_options;
  store_options.root = dir + "/root";
  DSEC_TRY(const auto store, PublishedStore::Open(store_options, nullptr));
  DiskOptions over;
  over.find_published = [&](const std::string& id) { return store->Find(id); };
  DSEC_TRY_VOID(Disk::Create(dir + "/cold", kBytes, {{"", hex}}, over));
  DSEC_TRY(const auto cold, Disk::Open(dir + "/cold", over));
  std::vector<uint8_t> some(8 << 20);  // in a row, at four places
  for (uint64_t i = 0; i < 4; ++i)
    DSEC_TRY_VOID(cold->ReadNow(i * (kBytes / 4), std::span(some).first(2 << 20)));
  const auto fetched = static_cast<double>(store->counts().fetched_bytes.load());
  Print("disk_partial_fetch", fetched / kBytes, "of the disk",
        {{"read", some.size()}, {"fetched", fetched}});
  return client->Close(opened.node, true);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "disk_bench DIR PROGRAM\n");
    return 2;
  }
  const auto done = Run(argv[1], argv[2]);
  const auto purged = Client::Purge(std::string(argv[1]) + "/diskfs", std::string(argv[1]) + "/run",
                                    Clock::System().Mono() + std::chrono::seconds(20));
  if (done.ok() && purged.ok()) return 0;
  std::fprintf(stderr, "%s\n", (done.ok() ? purged.error() : done.error()).ToString().c_str());
  return 1;
}
