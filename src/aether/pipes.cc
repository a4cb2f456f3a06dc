// SPDX-License-Identifier: Apache-2.0
#include "aether/pipes.h"

#include <sys/mman.h>
#include <termios.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

namespace dsec::aether {
namespace {

constexpr size_t kReadBytes = 64 << 10;
constexpr int kReadsPerTurn = 4;
// Up to pipe-max-size of pipe(7) for an unprivileged process.
constexpr size_t kMaxPipeBytes = 1 << 20;

alignas(4096) char read_buffer[kReadBytes];

}  // namespace

void ReleaseReadBuffer() { ::madvise(read_buffer, sizeof(read_buffer), MADV_DONTNEED); }

bool FloodGate::Take(MonoTime now, uint64_t bytes) {
  if (now >= next_tick()) {
    tick_ = now;
    left_ = kBytesPerSecond * static_cast<uint64_t>(kTick.count()) / 1000;
  }
  if (left_ == 0) return false;
  left_ -= std::min(left_, bytes);
  return true;
}

StreamReader::StreamReader(Loop& loop, FloodGate& gate, os::UniqueFd fd, OutputStream* store,
                           std::function<void()> on_data, std::function<void()> on_end)
    : loop_(loop),
      gate_(gate),
      fd_(std::move(fd)),
      store_(store),
      on_data_(std::move(on_data)),
      on_end_(std::move(on_end)),
      watch_(loop, fd_.get(), EPOLLIN, [this](uint32_t) { OnReadable(); }) {}

StreamReader::Outcome StreamReader::ReadOnce(size_t& size) {
  ssize_t got = ::read(fd_.get(), read_buffer, sizeof(read_buffer));
  if (got < 0) {
    if (errno == EINTR) return Outcome::kMore;
    return errno == EAGAIN ? Outcome::kEmpty : Outcome::kEnd;  // EIO: the terminal's last user left
  }
  if (got == 0) return Outcome::kEnd;
  size += static_cast<size_t>(got);
  if (store_ != nullptr) store_->Append({read_buffer, static_cast<size_t>(got)});
  return Outcome::kMore;
}

void StreamReader::OnReadable() {
  size_t size = 0;
  Outcome outcome = Outcome::kMore;
  for (int i = 0; i < kReadsPerTurn && outcome == Outcome::kMore; ++i) {
    if (store_ == nullptr || store_->overflowing()) {
      MonoTime now = loop_.now();
      if (!gate_.Take(now, kReadBytes)) {
        watch_.Set(0);
        resume_ = Timer(loop_, gate_.next_tick(), [this] { watch_.Set(EPOLLIN); });
        break;
      }
    }
    size_t before = size;
    outcome = ReadOnce(size);
    // A pipe that gave less than was asked for is empty now; the next event tells of more, or of
    // the end.
    if (outcome == Outcome::kMore && size - before < sizeof(read_buffer)) outcome = Outcome::kEmpty;
  }
  // A callback may destroy this object, so each is the last thing done or is called on a copy.
  if (outcome == Outcome::kEnd) return End();
  if (size > 0 && on_data_) {
    auto call = on_data_;
    call();
  }
}

void StreamReader::ReadWhatIsThere() {
  size_t size = 0;
  while (fd_.valid() && size < kMaxPipeBytes) {
    Outcome outcome = ReadOnce(size);
    if (outcome == Outcome::kEmpty) return;
    if (outcome == Outcome::kEnd) {
      watch_.Reset();
      resume_.Reset();
      fd_.Reset();
    }
  }
}

void StreamReader::Discard(std::function<void()> on_end) {
  store_ = nullptr;
  on_data_ = nullptr;
  on_end_ = std::move(on_end);
}

void StreamReader::End() {
  watch_.Reset();
  resume_.Reset();
  fd_.Reset();
  auto call = on_end_;
  if (call) call();
}

StdinWriter::StdinWriter(Loop& loop, os::UniqueFd fd, bool terminal, std::function<void()> on_room)
    : fd_(std::move(fd)),
      terminal_(terminal),
      on_room_(std::move(on_room)),
      watch_(loop, fd_.get(), EPOLLERR, [this](uint32_t events) {
        if ((events & (EPOLLERR | EPOLLHUP)) != 0) {
          Close();
        } else {
          Flush();
        }
        auto call = on_room_;
        call();
      }) {}

size_t StdinWriter::Write(std::string_view data) {
  if (closed_ || ending_) return 0;
  size_t waiting = buffer_.size() - sent_;
  data = data.substr(0, waiting < kBufferBytes ? kBufferBytes - waiting : 0);
  if (data.empty()) return 0;
  if (sent_ > 0) {
    buffer_.erase(0, sent_);
    sent_ = 0;
  }
  buffer_.append(data);
  accepted_ += data.size();
  Flush();
  return data.size();
}

void StdinWriter::Prime(std::string data) {
  accepted_ = data.size();
  buffer_ = std::move(data);
  Flush();
}

void StdinWriter::End() {
  if (closed_ || ending_) return;
  ending_ = true;
  if (terminal_) {
    termios settings = {};
    char end_of_file = 4;  // ^D
    if (::tcgetattr(fd_.get(), &settings) == 0) {
      end_of_file = static_cast<char>(settings.c_cc[VEOF]);
    }
    buffer_.push_back(end_of_file);
  }
  Flush();
}

void StdinWriter::Flush() {
  while (sent_ < buffer_.size()) {
    ssize_t written = ::write(fd_.get(), buffer_.data() + sent_, buffer_.size() - sent_);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0 && errno == EAGAIN) break;
    if (written < 0) return Close();
    sent_ += static_cast<size_t>(written);
  }
  if (sent_ < buffer_.size()) return watch_.Set(EPOLLOUT);
  buffer_ = std::string();
  sent_ = 0;
  if (ending_) return Close();
  watch_.Set(EPOLLERR);
}

void StdinWriter::Close() {
  closed_ = true;
  buffer_ = std::string();
  sent_ = 0;
  watch_.Reset();
  fd_.Reset();
}

}  // namespace dsec::aether
