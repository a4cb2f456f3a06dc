// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "aether/loop.h"
#include "aether/output_store.h"
#include "os/unique_fd.h"

namespace dsec::aether {

// Bounds the work on output that is thrown away: a flood is always read on, but only at this rate
// for the whole sandbox, so that it costs the node a few per cent of a core while the pipe slows
// its writer down. Output that is kept is not bounded by it.
class FloodGate {
 public:
  static constexpr uint64_t kBytesPerSecond = 256u << 20;
  static constexpr std::chrono::milliseconds kTick{8};

  // False when nothing is left until the next tick.
  bool Take(MonoTime now, uint64_t bytes);
  MonoTime next_tick() const { return tick_ + kTick; }

 private:
  MonoTime tick_;
  uint64_t left_ = 0;
};

// Reads one pipe or terminal to its end into a store, or to nowhere.
class StreamReader {
 public:
  // `fd` is non-blocking. `store` may be null; `on_data` and `on_end` may destroy the reader.
  StreamReader(Loop& loop, FloodGate& gate, os::UniqueFd fd, OutputStream* store,
               std::function<void()> on_data, std::function<void()> on_end);

  // Reads what is there now, bounded by what a pipe holds, without regard to the gate.
  void ReadWhatIsThere();
  bool ended() const { return !fd_.valid(); }
  // What arrives from now on is dropped; only the end is told.
  void Discard(std::function<void()> on_end);

 private:
  enum class Outcome { kMore, kEmpty, kEnd };
  Outcome ReadOnce(size_t& size);
  void OnReadable();
  void End();

  Loop& loop_;
  FloodGate& gate_;
  os::UniqueFd fd_;
  OutputStream* store_;
  std::function<void()> on_data_;
  std::function<void()> on_end_;
  FdWatch watch_;
  Timer resume_;
};

// Gives the pages of the buffer that all readers share back to the kernel.
void ReleaseReadBuffer();

// A bounded buffer in front of the standard input of a program.
class StdinWriter {
 public:
  static constexpr size_t kBufferBytes = 1 << 20;

  // `on_room` is called when bytes have left the buffer or nobody reads any more. A terminal gets
  // its end-of-file character at the end instead of a close.
  StdinWriter(Loop& loop, os::UniqueFd fd, bool terminal, std::function<void()> on_room);

  // Takes as much of `data` as there is room for; returns how much.
  size_t Write(std::string_view data);
  // The first bytes, whatever their number.
  void Prime(std::string data);
  void End();
  bool closed() const { return closed_; }
  bool ending() const { return ending_; }
  uint64_t accepted() const { return accepted_; }

 private:
  void Flush();
  void Close();

  os::UniqueFd fd_;
  bool terminal_;
  std::function<void()> on_room_;
  FdWatch watch_;
  std::string buffer_;
  size_t sent_ = 0;  // of buffer_
  uint64_t accepted_ = 0;
  bool ending_ = false;
  bool closed_ = false;
};

}  // namespace dsec::aether
